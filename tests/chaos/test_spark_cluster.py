"""The pipeline of a laptop on a standalone Spark cluster, against two brokers."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from orbitmq.client.ranges.cluster import RangeCluster
from orbitmq.client.ranges.connections import RangeAccess
from orbitmq.client.routes import Queue
from tests.support.command import ROOT, Started, importing
from tests.support.filling import fill, numbered
from tests.support.sparking import in_files, until
from tests.support.sparkkilling import Job, SparkCluster, python_workers

TOPIC, GROUP = "orders", "archive"
BROKERS = ("broker-a", "broker-b")
QUEUES = 4
COUNT = 2000
#: Six JVMs on a machine that may be small.
DEADLINE = 240.0

UP = ("--brokers", "2", "--namesrv-port", "0", "--broker-port", "0")


def lag(name_server: str) -> int:
    with RangeCluster(RangeAccess(name_servers=(name_server,)), GROUP) as cluster:
        queues = [Queue(TOPIC, broker, number) for broker in BROKERS for number in range(QUEUES)]
        ends, progress = cluster.ends(queues).or_raise(), cluster.progress(queues).or_raise()
    return sum(end - (progress[queue] or 0) for queue, end in ends.items())


@pytest.mark.timeout(600)
def test_a_worker_of_the_cluster_dies_and_every_message_is_there_once(tmp_path):
    with (
        Started("up", "--data", str(tmp_path / "data"), *UP) as up,
        SparkCluster(tmp_path / "spark") as cluster,
    ):
        name_server = up.address("name server")
        addresses = [up.address(broker) for broker in BROKERS]

        def send(first):
            for place, address in enumerate(addresses):
                fill(address, TOPIC, numbered(COUNT, queues=QUEUES, first=first + place * COUNT))

        send(0)
        job = Job("sparkpipeline", name_server, TOPIC, GROUP, str(tmp_path), cluster.master)
        try:
            job.until_batches(2, DEADLINE)
            busy = [bool(python_workers(worker.process.pid)) for worker in cluster.workers]
            cluster.workers[0].kill()
            send(2 * COUNT)
            until(lambda: len(in_files(tmp_path)) >= 4 * COUNT, "all is in the files", DEADLINE)
            until(lambda: lag(name_server) == 0, "the brokers know of it", DEADLINE)
        finally:
            job.kill()

    # Both machines had a part of it, and the one that was left did the rest.
    assert busy == [True, True]
    counts = Counter(in_files(tmp_path))
    assert sorted(counts) == list(range(4 * COUNT))
    assert set(counts.values()) == {1}


def environment_in(folder: Path) -> Path:
    """A Python environment as `venv-pack` makes it, but with links instead of 1 GB of packages."""
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    places = [ROOT / "src", *(path for path in sys.path if path.endswith("site-packages"))]
    (packages / "linked.pth").write_text("".join(f"{place}\n" for place in places))
    home = Path(sys.executable).resolve().parent
    (folder / "pyvenv.cfg").write_text(f"home = {home}\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(home / f"python3.{sys.version_info.minor}")
    return folder


@pytest.mark.timeout(600)
def test_an_environment_travels_with_the_job(tmp_path, orbit_cluster):
    orbit_cluster.create_topic(TOPIC, queues=2)
    fill(orbit_cluster.broker_addresses[0], TOPIC, numbered(100, queues=2))
    driver = tmp_path / "driver"
    unpacked = environment_in(driver / "environment")
    archive = tmp_path / "environment.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(unpacked, arcname=".")

    def run(cwd: Path, master: str) -> subprocess.CompletedProcess[str]:
        words = (orbit_cluster.name_server, TOPIC, master, str(archive))
        return subprocess.run(
            [sys.executable, "-m", "tests.support.sparkenvironment", *words],
            cwd=cwd,
            env=importing() | {"PYSPARK_PYTHON": "./environment/bin/python"},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    with SparkCluster(tmp_path / "spark", workers=1) as cluster:
        beside_it = run(driver, cluster.master)
        elsewhere = run(tmp_path, cluster.master)

    assert beside_it.returncode == 0, beside_it.stderr[-3000:]
    places = json.loads(beside_it.stdout.splitlines()[-1])
    assert len(places) == 100
    for place in set(places):
        prefix, folder = place.split()
        assert Path(prefix) == Path(folder) / "environment"
        assert tmp_path / "spark" in Path(folder).parents
    # The driver looks for sources with the same relative path.
    assert elsewhere.returncode == 1
    assert "DATA_SOURCE_NOT_FOUND" in elsewhere.stderr
