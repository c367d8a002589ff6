"""Celery on the kombu transport: worker processes with forked pools, and a real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from celery import Celery, chain, group

import orbitmq.integrations.kombu  # noqa: F401  # makes the scheme known
from orbitmq import Admin
from tests.support.walkthrough import ROOT, blocks, expected

pytestmark = [pytest.mark.feature("W1"), pytest.mark.timeout(180)]

PATIENCE = 40.0
PAGE = ROOT / "docs" / "integrations" / "celery.md"


class Worker:
    """A worker node."""

    def __init__(self, node: str, url: str, folder: Path, *, app: str, cwd: Path) -> None:
        self.log = folder / f"{node}.log"
        environment = {**os.environ, "TEST_BROKER": url, "TEST_NODE": node}
        words = ["celery", "-A", app, "worker", "-c", "2", "-l", "INFO", "-n", node]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                env=environment,
                cwd=cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until(lambda: " ready." in self.log.read_text(), self.log.read_text)

    def kill(self) -> None:
        """The whole node, as when its machine fails."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE)

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()


def until(condition, why=lambda: "it never came true") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


@pytest.fixture
def url(orbit_shared_cluster):
    return f"orbitmq://{orbit_shared_cluster.name_server}/{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start(url, tmp_path):
    with ExitStack() as running:

        def worker(node: str, *, app: str = "tests.integrations.celeryapp", cwd: Path = ROOT):
            made = Worker(node, url, tmp_path, app=app, cwd=cwd)
            running.callback(made.end)
            return made

        yield worker


@pytest.fixture
def app(url):
    with Celery("tests.integrations.celeryapp", broker=url, backend="rpc://") as made:
        made.set_default()
        yield made
        with suppress(AttributeError):  # nothing was consumed
            made.backend.result_consumer.stop()


def send(app: Celery, task: str, *args: object, **options):
    return app.send_task(f"tests.integrations.celeryapp.{task}", args, **options)


def test_tasks_run_and_their_results_come_back(app, start):
    worker = start("a")

    results = [send(app, "add", number, number) for number in range(50)]

    assert [result.get(timeout=PATIENCE) for result in results] == [2 * n for n in range(50)]
    assert worker.stop() == 0


def test_states_chains_and_groups_of_tasks_are_asked_for_as_they_come(app, start):
    # Celery polls a state on one connection and consumes results on another.
    start("a")
    add = app.signature("tests.integrations.celeryapp.add", (1, 2))
    chained = chain(add, app.signature("tests.integrations.celeryapp.add", (3,)))

    polled = send(app, "add", 20, 22)
    assert polled.state in ("PENDING", "SUCCESS")
    assert polled.get(timeout=PATIENCE) == 42
    later = send(app, "add", 1, 1)
    until(later.ready)
    began = time.monotonic()
    for _ in range(2):
        assert chained.apply_async().get(timeout=PATIENCE) == 6
        assert group(add, add, add).apply_async().get(timeout=PATIENCE) == [3, 3, 3]
    assert time.monotonic() - began < 5  # a member that waits for another's queue takes 10


def test_a_countdown_and_retries_are_kept_at_the_broker(app, start, tmp_path):
    start("a")
    times = tmp_path / "times"
    began = time.time()

    late = send(app, "add", 1, 2, countdown=3)
    retried = send(app, "third_time", str(times))

    assert late.get(timeout=PATIENCE) == 3
    assert time.time() - began >= 3
    assert retried.get(timeout=PATIENCE) == 2
    first, second, third = map(float, times.read_text().split())
    assert second - first > 1.5
    assert third - second > 1.5


def test_a_task_of_a_killed_node_runs_on_another(app, start, tmp_path):
    first = start("first")
    runs, flag = tmp_path / "runs", tmp_path / "flag"
    result = send(app, "until", str(runs), str(flag))
    until(runs.exists)

    second = start("second")
    first.kill()
    until(lambda: runs.read_text().split() == ["first", "second"], second.log.read_text)
    flag.touch()

    assert result.get(timeout=PATIENCE) == "second"


def test_a_warm_shutdown_gives_fetched_tasks_to_another_node(app, start, tmp_path):
    first = start("first")
    runs, flag = tmp_path / "runs", tmp_path / "flag"
    running = [send(app, "until", str(runs), str(flag)) for _ in range(2)]
    until(lambda: runs.exists() and len(runs.read_text().split()) == 2)
    waiting = [send(app, "name_of_node") for _ in range(10)]

    first.process.terminate()
    until(lambda: "Warm shutdown" in first.log.read_text())
    flag.touch()
    assert first.process.wait(PATIENCE) == 0
    start("second")

    assert [result.get(timeout=PATIENCE) for result in running] == ["first"] * 2
    # The first node may have run some of them before its end; none is lost.
    assert {result.get(timeout=PATIENCE) for result in waiting} <= {"first", "second"}


def test_remote_control_reaches_every_node(app, start):
    start("one")
    start("two")

    # With the number of nodes, an inspection ends when all have answered.
    inspect = app.control.inspect(timeout=PATIENCE, limit=2)

    nodes = set(inspect.ping())

    assert {name.split("@")[0] for name in nodes} <= {"celery", "one", "two"}
    assert len(nodes) == 2
    assert set(inspect.active()) == nodes


def test_the_page_shows_what_its_programs_print(start, orbit_shared_cluster, tmp_path, url):
    for block in blocks(PAGE):
        if block.title is not None and block.language == "python":
            text = block.text.replace("orbitmq://localhost:9876//", url)
            (tmp_path / block.title).write_text(text)
    start("a", app="tasks", cwd=tmp_path)

    done = subprocess.run(
        [sys.executable, "shop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    shown = next(block.text for block in blocks(PAGE) if block.title == "shop.py")
    assert done.stdout.splitlines() == expected(shown)
    # A program that closes nothing ends without a word, and its reply queue with it.
    assert done.stderr == ""
    with Admin(name_server=orbit_shared_cluster.name_server) as admin:
        mine = [each.name for each in admin.topics.list() if each.name.startswith(url[-8:])]
    assert f"{url[-8:]}-celery" in mine
    assert not [name for name in mine if name.count("-") > 4]
