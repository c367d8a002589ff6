"""The images are built and run: `make containers`.

Debian's buildah needs no container engine and no registry. The base image is made of Debian's own
Python, under the name that the Dockerfile asks for.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet
import pytest

from orbitmq import Consumer, Producer, ReceivedMessage, SendSettings
from tests.containers.buildah import Buildah, Failed, Running, missing
from tests.support import deployment

pytestmark = [pytest.mark.feature("P8"), pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = DOCKER / "Dockerfile"
KEPT = ROOT / "build" / "containers"
USER = 10001
DATA = "/var/lib/orbitmq"
#: The ports of the host are those of the containers, so that they take what is free there.
SETTINGS = {
    "ORBITMQ_BROKER_HOST": "127.0.0.1",
    "ORBITMQ_NAMESRV_HOST": "127.0.0.1",
    "ORBITMQ_BROKER_PORT": "0",
    "ORBITMQ_NAMESRV_PORT": "0",
    "ORBITMQ_BROKER_HTTP_PORT": "0",
    # As in the page about containers.
    "ORBITMQ_BROKER_ADVERTISED": "127.0.0.1",
    "ORBITMQ_RUN_INSECURE": "true",
}
PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """What `orbitmq up` runs in a container."""

    running: Running
    addresses: dict[str, str]  #: by role

    @property
    def name_server(self) -> str:
        return self.addresses["name server"]


@pytest.fixture(scope="module")
def buildah():
    """Both images, in a storage that is removed afterwards."""
    if reason := missing():
        pytest.skip(reason)
    KEPT.mkdir(parents=True, exist_ok=True)
    images = Buildah(KEPT)
    images.remove()  # what a run left that was killed
    try:
        build_all(images)
        yield images
    except KeyboardInterrupt:
        pytest.exit("make containers was interrupted; the next one begins anew", returncode=130)
    except Failed as failure:
        raise pytest.fail.Exception(str(failure), pytrace=False) from None
    finally:
        print("\nremoving images and containers ...", flush=True)
        images.remove()


def build_all(images: Buildah) -> None:
    argument = re.search(r"^ARG PYTHON=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert argument is not None
    python = argument[1]
    base = deployment.stages_of(DOCKERFILE)["base"].base.replace("${PYTHON}", python)
    print(flush=True)
    images.make_base(base, python)
    images.build(DOCKERFILE, "broker", "orbitmq", ROOT)
    images.build(DOCKERFILE, "pipeline", "orbitmq-pipeline", ROOT)


@pytest.fixture(scope="module")
def container(buildah):
    """A container of the broker's image."""
    return buildah.ask("from", "--pull=never", "orbitmq")


@pytest.fixture(scope="module")
def volume(buildah, container):
    return buildah.new_volume(container, DATA)


@contextmanager
def up(buildah: Buildah, container: str, volume: Path) -> Iterator[Cluster]:
    config = buildah.config("orbitmq")
    command = [*config["Entrypoint"], *config["Cmd"], "--json"]
    words = buildah.run_words(container, command, SETTINGS, {volume: DATA})
    with Running(words, KEPT / "broker.log", PATIENCE) as running:
        addresses: dict[str, str] = {}
        for line in running.lines():
            said = json.loads(line)
            if said["event"] == "ready":
                break
            addresses[said["role"]] = said["address"]
        assert "broker" in addresses, running.log
        yield Cluster(running, addresses)


def is_healthy(buildah: Buildah, container: str, address: str) -> bool:
    """What the image's own health check says, of the port that is used here."""
    kind, *command = buildah.config("orbitmq")["Healthcheck"]["Test"]
    assert kind == "CMD"
    command[-1] = command[-1].replace("http://127.0.0.1:5557", address)
    words = buildah.run_words(container, command, {}, {})
    return subprocess.run(words, capture_output=True, check=False, timeout=PATIENCE).returncode == 0


def first_message(name_server: str, group: str) -> bytes:
    """What a consumer that begins with the first message is given first."""
    consumer = Consumer(group, name_server=name_server, consume_from="first")
    came = threading.Event()
    bodies: list[bytes] = []

    @consumer.on("orders")
    def take(message: ReceivedMessage) -> None:
        bodies.append(message.body)
        came.set()

    with consumer:
        assert came.wait(PATIENCE)
    return bodies[0]


def users_of(process: int) -> set[int]:
    """The real, effective and saved user and group of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.findall(r"^(?:Uid|Gid):\t(.+)$", status, re.MULTILINE)
    return {int(number) for numbers in found for number in numbers.split()}


def test_the_broker_image_serves_clients_on_the_host_and_stops_when_told(
    buildah, container, volume
):
    at_once = SendSettings(retries=0, timeout=PATIENCE)
    unclean = volume / "broker-a" / "abort"

    with up(buildah, container, volume) as cluster:
        process = cluster.running.process_id()
        assert users_of(process) == {USER}
        assert unclean.exists()
        assert is_healthy(buildah, container, cluster.addresses["metrics"])

        with Producer("shop", name_server=cluster.name_server, sending=at_once) as producer:
            assert producer.send("orders", b"one").is_ok
        assert first_message(cluster.name_server, "billing") == b"one"

        os.kill(process, signal.SIGTERM)
        assert cluster.running.ended() == 0, cluster.running.log

    assert not unclean.exists()
    assert not is_healthy(buildah, container, cluster.addresses["metrics"])
    files = [file.stat() for file in volume.rglob("*")]
    assert {(file.st_uid, file.st_gid) for file in files} == {(USER, USER)}


def test_the_pipeline_image_archives_what_a_broker_that_was_stopped_has_kept(
    buildah, container, volume
):
    spark = buildah.ask("from", "--pull=never", "orbitmq-pipeline")
    archive = buildah.new_volume(spark, DATA)
    config = buildah.config("orbitmq-pipeline")
    place = "/etc/orbitmq/pipeline.toml"

    with up(buildah, container, volume) as cluster:
        words = buildah.run_words(
            spark,
            [*config["Entrypoint"], "pipeline", "run", place, "--once"],
            {"ORBITMQ_NAME_SERVER": cluster.name_server},
            {archive: DATA, DOCKER / "pipeline.toml": place},
        )
        with Running(words, KEPT / "pipeline.log", 5 * PATIENCE) as running:
            assert running.ended() == 0, running.log

        os.kill(cluster.running.process_id(), signal.SIGTERM)
        assert cluster.running.ended() == 0, cluster.running.log

    rows = [
        row
        for file in archive.glob("orders/*/*.parquet")
        for row in pyarrow.parquet.read_table(file).to_pylist()
    ]
    there = sorted(str(file.relative_to(archive)) for file in archive.glob("orders/**/*"))
    assert [bytes(row["body"]) for row in rows] == [b"one"], (there, running.log)
