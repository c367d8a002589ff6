"""In order, nobody gets a queue while a task of a job that has failed still works on it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from orbitmq.client.message import ReceivedMessage
from orbitmq.spark import BatchSettings
from tests.support.filling import make_topic
from tests.support.sparkconsuming import DEADLINE, idle, progress_of
from tests.support.sparking import until

Handler = Callable[[ReceivedMessage], None]


def dying_beside_a_slow_one(folder: Path) -> Handler:
    """Queue 0 ends its process, once, in the middle of the slow work on queue 1.

    That takes longer than a batch, so that the two meet even if queue 0 is found later, and has
    written something down by then.
    """
    slow_is_at_work, has_died = str(folder / "slow-is-at-work"), str(folder / "has-died")

    def touch(path: str) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))

    def handle(message: ReceivedMessage) -> None:
        if message.queue.id == 1:
            if message.queue_offset > 0:
                touch(slow_is_at_work)
            threading.Event().wait(0.2)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(slow_is_at_work)  # noqa: PTH108  # travels alone
        elif not os.path.exists(has_died):  # noqa: PTH110
            for _ in range(6000):
                if os.path.exists(slow_is_at_work):  # noqa: PTH110
                    break
                threading.Event().wait(0.005)
            touch(has_died)
            os._exit(1)

    return handle


def test_a_queue_is_not_planned_again_before_the_tasks_of_a_failed_job_have_ended(
    pipeline, orbit_cluster, journal, tmp_path
):
    make_topic(orbit_cluster, "orders", 60, queues=2)
    run = pipeline(ordered=True)
    run.on("orders")(journal.writing(dying_beside_a_slow_one(tmp_path)))

    with run:
        idle(run)

    slow = sorted(entry for entry in journal.entries() if entry.queue == 1)
    assert len({entry.process for entry in slow}) > 1, "it was done by two tasks"
    for one, following in pairwise(slow):
        assert one.ended <= following.began
    assert progress_of(orbit_cluster, "billing", "orders") == {0: 30, 1: 30}


def test_a_stop_that_cancels_a_batch_leaves_no_handler_behind(pipeline, orbit_cluster, tmp_path):
    """Else its queues would be given to others while it works on them."""
    make_topic(orbit_cluster, "orders", 1, queues=1)
    started = tmp_path / "started"
    path = str(started)

    def never_ends(message):
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{os.getpid()}\n".encode())
        os.close(file)
        threading.Event().wait(DEADLINE * 5)

    run = pipeline(ordered=True, batch=BatchSettings(idle=0.02, stop=0.2))
    run.on("orders")(never_ends)
    run.start()
    try:
        until(lambda: started.exists() and started.read_text().endswith("\n"), "it is called")
    finally:
        run.stop()

    (worker,) = map(int, started.read_text().split())
    assert not is_alive(worker)
    assert progress_of(orbit_cluster, "billing", "orders").get(0, 0) == 0


def is_alive(process: int) -> bool:
    """Whether a process works; one that is dead may wait to be buried."""
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] not in "ZX"
