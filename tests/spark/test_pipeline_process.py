"""`orbitmq pipeline run` as a process against a broker process: life, failures, what is told."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from orbitmq.client.admin.admin import Admin
from orbitmq.client.producer.producer import Producer
from tests.support.command import Started
from tests.support.pipelineprocess import DEADLINE, PipelineProcess

#: Writes down when each batch begins and ends; fails once when it is told to; and holds every batch
#: as long as a file is there.
PIPELINE = '''
"""Writes the numbers of a topic down."""

import threading
from pathlib import Path
from typing import Annotated

from beside import place


def pipeline(run, *, topic: Annotated[str, "To read."] = "numbers", folder: Path, each: int = 10):
    def write(batch, number):
        held = threading.Event()
        bodies = [int(bytes(row.body)) for row in batch.select("body").collect()]
        if not bodies:
            return  # the first batch of a stream only says where it begins
        with place(folder, "journal").open("a") as journal:
            journal.write(f"begin {number}\\n")
            journal.flush()
            for _ in range(600):
                if not place(folder, "hold").exists():
                    break
                held.wait(0.1)
            if place(folder, "fail").exists():
                place(folder, "fail").unlink()
                raise RuntimeError("the sink is not there")
            journal.write("".join(f"row {body}\\n" for body in bodies) + f"end {number}\\n")

    messages = run.stream(
        topic, group="writing", startingOffsets="earliest", maxOffsetsPerTrigger=str(each)
    )
    return {"numbers": messages.writeStream.foreachBatch(write)}
'''
BESIDE = """
def place(folder, name):
    return folder / name
"""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def cluster(tmp_path):
    """A broker process and a console."""
    words = ("up", "--namesrv-port", "0", "--broker-port", "0", "--console", "--console-port", "0")
    with Started(*words, "--data", str(tmp_path / "data")) as started:
        yield started


def console_says(cluster: Started, path: str) -> Any:
    url = f"{cluster.address('console').rstrip('/')}/api/v1{path}"
    with urllib.request.urlopen(url, timeout=DEADLINE) as answer:  # noqa: S310  # our own
        return json.load(answer)


def journal(folder: Path) -> tuple[list[str], list[str], list[int]]:
    """Batches that began, batches that ended, and rows, as written down."""
    path = folder / "journal"
    lines = [line.split() for line in (path.read_text() if path.exists() else "").splitlines()]
    began, ended, rows = (
        [value for word, value in lines if word == wanted] for wanted in ("begin", "end", "row")
    )
    return began, ended, sorted(map(int, rows))


def test_a_pipeline_stops_between_batches_goes_on_after_it_and_is_started_again_when_it_fails(
    cluster, tmp_path
):
    (tmp_path / "counting.py").write_text(PIPELINE)
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "counting.toml").write_text(
        'pipeline = "counting.py"\nname = "writing down"\ncheckpoint = "ck"\n'
        f'[options]\nfolder = "{tmp_path}"\n'
    )
    name_server = cluster.address("name server")
    with Admin(name_server=name_server) as admin, Producer(name_server=name_server) as producer:
        admin.topics.create("numbers", queues=4)
        for number in range(60):
            producer.send("numbers", b"%d" % number)
        hold = tmp_path / "hold"
        hold.touch()
        env = {"ORBITMQ_NAME_SERVER": name_server}

        with PipelineProcess("counting.toml", cwd=tmp_path, env=env) as first:
            wait_for_batch(first, tmp_path)
            # As `timeout`, a service manager or a terminal do: Spark's Java must not hear it.
            os.killpg(first.process.pid, signal.SIGTERM)
            os.kill(first.process.pid, signal.SIGTERM)
            # It has been told to stop and still has to wait for the batch that runs.
            hold.unlink()
            code = first.wait()

        began, ended, rows = journal(tmp_path)
        assert (code, first.errors) == (0, "")
        assert began == ended
        assert 0 < len(rows) < 60
        (end,) = first.of("ended")
        assert (end["state"], end["is_clean"], end["rows"]) == ("stopped", True, len(rows))
        progress = admin.groups.progress("writing")
        assert sum(queue.consumer_offset for queue in progress.queues) == len(rows)

        (tmp_path / "fail").touch()
        console = cluster.address("console")
        words = ("counting.toml", "--once", "--console", console, "--restart-pause", "100ms")
        with PipelineProcess(*words, cwd=tmp_path, env=env) as second:
            assert second.wait() == 0, second.errors

        assert journal(tmp_path)[2] == list(range(60))
        (restart,) = second.of("restarting")
        assert "the sink is not there" in restart["error"]
        assert (restart["restarts"], restart["pause_seconds"]) == (1, 0.1)
        (end,) = second.of("ended")
        assert (end["state"], end["restarts"], end["rows"]) == ("finished", 1, 60 - len(rows))
        last = second.of("progress")[-1]
        assert (last["query"], last["state"], last["lag_total"]) == ("numbers", "finished", 0)
        assert set(last["lag"]) == {f"numbers@broker-a:{queue}" for queue in range(4)}
        shown = console_says(cluster, "/pipelines/numbers")
        assert shown["state"] in ("stopped", "running", "waiting")
        assert admin.groups.progress("writing").lag == 0


TABLE = """
def pipeline(run, *, rows: int):
    return run.spark.range(rows).selectExpr("id AS number")
"""


def test_the_rows_of_a_pipeline_that_returns_a_table_are_shown(tmp_path):
    (tmp_path / "counting.py").write_text(TABLE)
    env = {"ORBITMQ_NAME_SERVER": "127.0.0.1:1"}

    with PipelineProcess("counting.py", "-o", "rows=2", cwd=tmp_path, env=env) as process:
        assert process.wait() == 0, process.errors

    assert [each["row"] for each in process.of("row")] == [{"number": 0}, {"number": 1}]
    (end,) = process.of("ended")
    assert (end["state"], end["rows"]) == ("finished", 2)


def wait_for_batch(process: PipelineProcess, folder: Path) -> None:
    from tests.support.sparking import until

    until(
        lambda: journal(folder)[0] or process.process.poll() is not None,
        "a batch began",
        deadline=DEADLINE,
    )
    assert process.process.poll() is None, process.errors
