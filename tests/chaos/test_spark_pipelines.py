"""Every ready pipeline and every example, from the command line, each as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.consumer.verdict import DeadLetter
from orbitmq.client.message import ReceivedMessage
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.pipelineprocess import PipelineProcess
from tests.support.sparking import until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "pipelines"

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def cluster():
    with EmbeddedCluster() as cluster:
        yield cluster


def finish(cluster: EmbeddedCluster, folder: Path, *words: str) -> PipelineProcess:
    """Run a pipeline to its end, which must be a good one."""
    env = {"ORBITMQ_NAME_SERVER": cluster.name_server}
    with PipelineProcess(*words, cwd=folder, env=env) as running:
        assert running.wait() == 0, running.errors
    (end,) = running.of("ended")
    assert (end["state"], end["is_clean"]) == ("finished", True)
    return running


def bodies(cluster: EmbeddedCluster, topic: str) -> list[str]:
    return sorted(each.body.decode() for each in cluster.messages(topic))


def test_archive_and_backfill(cluster, tmp_path):
    for topic in ("archived", "refilled"):
        cluster.create_topic(topic, queues=2)
    sent = sorted(f"m-{number}" for number in range(50))
    cluster.send("archived", *sent)

    finish(cluster, tmp_path, "archive", "--once", "-o", "topic=archived", "-o", "path=lake")
    finish(
        cluster, tmp_path, "backfill", "-o", "path=lake", "-o", "into=refilled", "-o", "rate=1000"
    )

    kept = parquet.read_table(tmp_path / "lake", columns=["body", "day"])
    assert sorted(body.decode() for body in kept.column("body").to_pylist()) == sent
    assert bodies(cluster, "refilled") == sent


def test_transform_and_statistics(cluster, tmp_path):
    for topic in ("sold", "large", "numbers"):
        cluster.create_topic(topic, queues=2)
    cluster.send("sold", *[json.dumps({"cents": cents}) for cents in range(10)])
    options = ("-o", "topic=sold", "-o", "schema=cents BIGINT", "-o", "into=large")

    finish(
        *(cluster, tmp_path, "transform", "--once", *options),
        *("-o", "sql=SELECT body FROM messages WHERE value.cents >= 8"),
    )
    finish(
        *(cluster, tmp_path, "statistics", "--once", "-o", "topic=sold", "-o", "into=numbers"),
        *("-o", "window=1d"),
    )

    assert bodies(cluster, "large") == ['{"cents": 8}', '{"cents": 9}']
    assert max(json.loads(each)["messages"] for each in bodies(cluster, "numbers")) == 10


def test_triage(cluster, tmp_path):
    cluster.create_topic("failing", queues=2)
    cluster.send("failing", *[b"%d" % number for number in range(4)])
    consumer = Consumer("failed", name_server=cluster.name_server, consume_from="first")

    @consumer.on("failing")
    def judge(message: ReceivedMessage) -> None:
        raise DeadLetter("no such account")

    with consumer:
        until(lambda: len(cluster.messages("%DLQ%failed")) == 4, "all are dead letters")

    ran = finish(cluster, tmp_path, "triage", "-o", "group=failed", "-o", "replay=origin")

    (row,) = [each["row"] for each in ran.of("row")]
    assert (row["letters"], row["sent"], row["failed"]) == (4, 4, 0)
    assert len(cluster.messages("failing")) == 8


def test_the_example_bills_retries_and_gives_up(cluster, tmp_path):
    cluster.create_topic("orders", queues=2)
    for number in range(12):
        account = {3: "unknown", 5: "busy"}.get(number, "known")
        cluster.send("orders", json.dumps({"order": number, "cents": 5, "account": account}))
    env = {"ORBITMQ_NAME_SERVER": cluster.name_server}
    words = (str(EXAMPLES / "billing.py"), "-o", "path=billed")

    with PipelineProcess(*words, cwd=tmp_path, env=env) as running:
        running.until(lambda each: each["rows"] == 13, "all orders, and one of them twice")
        assert running.stop() == 0, running.errors

    (end,) = running.of("ended")
    assert (end["state"], end["retried"], end["dead"]) == ("stopped", 1, 1)
    billed = parquet.read_table(tmp_path / "billed", columns=["order"]).column("order").to_pylist()
    assert sorted(billed) == [number for number in range(12) if number != 3]
    (letter,) = cluster.messages("%DLQ%billing")
    assert json.loads(letter.body)["order"] == 3


def test_the_example_in_toml_can_be_run():
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "orbitmq.cli", "pipeline", "run"),
            *(str(EXAMPLES / "archive.toml"), "--dry-run", "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["options"]["zone"] == "Europe/Berlin"
