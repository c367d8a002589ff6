"""Jobs whose tasks follow their queues: what they do while they run, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from orbitmq.client.admin.admin import Admin
from orbitmq.client.consumer.settings import ConsumeSettings
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.ranges.connections import QueueRange, RangeAccess
from orbitmq.client.routes import Queue
from orbitmq.spark.consuming.link import DriverLink, LinkOffer, LinkRefused, TaskLink
from orbitmq.spark.consuming.pipeline import Definition, Handled
from orbitmq.spark.consuming.progress import PieceReport
from orbitmq.spark.consuming.queues import Piece
from orbitmq.spark.consuming.worker import Worker
from tests.support.filling import fill, numbered
from tests.support.sparkconsuming import QUICK, idle, progress_of
from tests.support.sparking import until

#: A job that ends only when something makes it end.
ENDLESS = replace(QUICK, follow=3600.0)
QUEUE = Queue("orders", "broker-a", 0)


def jobs(spark) -> set[int]:
    return set(spark.sparkContext.statusTracker().getActiveJobsIds())


@pytest.fixture
def following(spark, pipeline, orbit_cluster, journal):
    """Starts a pipeline and waits until one job follows all queues of a topic; returns both."""

    def start(handler=None, *, queues=2, **options):
        orbit_cluster.create_topic("orders", queues=queues)
        run = pipeline(**{"batch": ENDLESS, **options})
        run.on("orders")(journal.writing(handler))
        run.start()
        for queue in range(queues):
            fill(orbit_cluster.broker_addresses[0], "orders", numbered(1, first=-1 - queue))
        until(lambda: len(set(journal.bodies())) == queues, "it handles messages")
        idle(run)
        until(lambda: len(jobs(spark)) == 1, "a job follows the queues")
        return run

    return start


@pytest.mark.feature("T5")
def test_messages_are_handled_and_committed_while_the_job_runs(
    spark, following, orbit_cluster, journal
):
    run = following(queues=2)
    before = jobs(spark)

    for number in range(20):
        fill(orbit_cluster.broker_addresses[0], "orders", numbered(1, first=number))
        until(lambda number=number: str(number) in journal.bodies(), "it is handled")  # type: ignore[misc]
    until(
        lambda: sum(progress_of(orbit_cluster, "billing", "orders").values()) == 22, "all committed"
    )

    assert jobs(spark) == before
    assert run.progress().done == 22
    assert len(journal.bodies()) == 22


def test_a_stop_ends_the_job_at_once_and_commits_what_was_handled(
    spark, following, orbit_cluster, journal
):
    run = following(lambda _: threading.Event().wait(0.05), workers=2)
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(2000, queues=2))
    until(lambda: len(journal.entries()) > 10, "it is at work")

    began = time.monotonic()
    run.stop()

    # All of them would take 50 s; the job has no end of its own.
    assert time.monotonic() - began < 25
    assert jobs(spark) == set()
    handled = len(journal.entries())
    assert handled < 2000
    assert sum(progress_of(orbit_cluster, "billing", "orders").values()) == handled


def test_a_worker_that_dies_repeats_only_what_it_has_not_reported(
    following, orbit_cluster, journal, tmp_path
):
    path = str(tmp_path / "died")

    def die_once(message):
        if message.text() == "90" and not os.path.exists(path):  # noqa: PTH110  # travels alone
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            os.kill(os.getpid(), signal.SIGKILL)

    run = following(die_once, queues=1)
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(50))
    until(lambda: progress_of(orbit_cluster, "billing", "orders") == {0: 51}, "it is reported")
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(50, first=50))
    idle(run)

    bodies = journal.bodies()
    assert {str(number) for number in range(100)} <= set(bodies)
    assert all(bodies.count(str(number)) == 1 for number in range(50))
    assert progress_of(orbit_cluster, "billing", "orders") == {0: 101}


@pytest.mark.parametrize("ordered", [False, True])
def test_a_reset_is_followed_while_the_job_runs(following, orbit_cluster, journal, ordered):
    run = following(queues=1, ordered=ordered)
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(10))
    idle(run)

    with Admin(name_server=orbit_cluster.name_server) as admin:
        admin.progress.reset("billing", "orders", "first")
    until(lambda: len(journal.entries()) >= 22, "all come again")
    idle(run)

    assert [entry.offset for entry in sorted(journal.entries(), key=lambda each: each.ended)] == (
        [*range(11), *range(11)] if ordered else pytest.approx([0] * 22, abs=11)
    )
    assert progress_of(orbit_cluster, "billing", "orders") == {0: 11}


@pytest.mark.parametrize("follow", [3600.0, 0.5], ids=["one job", "several jobs"])
def test_in_order_a_failing_message_is_tried_again_in_its_place(
    spark, following, orbit_cluster, journal, follow
):
    def fail_twice(message):
        if message.text() == "3" and message.attempt < 3:
            raise ValueError("not yet")

    run = following(fail_twice, queues=1, ordered=True, batch=replace(QUICK, follow=follow))
    before = jobs(spark)
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(6))
    until(lambda: progress_of(orbit_cluster, "billing", "orders") == {0: 7}, "all are done")

    calls = sorted(journal.entries())
    assert [(each.body, each.attempt) for each in calls[1:]] == [
        *(("0", 1), ("1", 1), ("2", 1), ("3", 1), ("3", 2), ("3", 3), ("4", 1), ("5", 1))
    ]
    for one, following_call in pairwise(calls):
        assert one.ended <= following_call.began
    assert (jobs(spark) == before) is (follow > 1)
    assert run.progress().failed_share is not None


@pytest.mark.parametrize("tasks", [2, 3])
def test_other_jobs_of_the_session_get_their_slots(spark, following, orbit_cluster, journal, tasks):
    """Even if the group has been given all of them, or more than there are."""
    run = following(batch=replace(ENDLESS, tasks=tasks), queues=tasks)
    began = time.monotonic()
    assert spark.range(0, 100, 1, 8).count() == 100
    assert time.monotonic() - began < 20

    fill(orbit_cluster.broker_addresses[0], "orders", numbered(5))
    idle(run)

    assert {str(number) for number in range(5)} <= set(journal.bodies())


# ---- a worker and its driver


@pytest.fixture
def loop():
    thread = LoopThread()
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture
def link(loop):
    """A driver's end, on a loop of its own."""
    found = DriverLink()
    loop.run(found.start("127.0.0.1", "127.0.0.1"))
    yield found
    loop.run(found.stop())


@pytest.fixture
def worker(orbit_cluster):
    made: list[Worker] = []
    orbit_cluster.create_topic("orders", queues=1)

    def make(handler: Callable[[ReceivedMessage], object], **consume) -> Worker:
        definition = Definition(
            group="billing",
            wire_group="billing",
            namespace=None,
            access=RangeAccess(name_servers=(orbit_cluster.name_server,), timeout=20.0),
            handled=(Handled("orders", handler),),
            middleware=(),
            consume=ConsumeSettings(**consume),
            ordered=False,
            client_id="127.0.0.1@driver",
            bytes_in_task=1 << 20,
            patience=2.0,
        )
        made.append(Worker(definition))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.stop()


async def opened(link: DriverLink, tasks: int = 1) -> LinkOffer:
    return link.open(tasks)


async def arrived(link: DriverLink) -> list[PieceReport]:
    return link.arrived()


def test_a_task_reports_each_result_once_and_ends_when_its_driver_says_so(
    worker, link, loop, orbit_cluster
):
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(5))
    offer = loop.run(opened(link))
    found: list[PieceReport] = []
    busy = worker(lambda message: None)
    piece = Piece(QueueRange(QUEUE, 2, 5))

    def drive() -> None:
        until(lambda: _finished(link, loop, found) == 5, "the piece is done")
        fill(orbit_cluster.broker_addresses[0], "orders", numbered(5))
        until(lambda: _finished(link, loop, found) == 10, "what came later is done")
        loop.loop.call_soon_threadsafe(link.end)

    driver = threading.Thread(target=drive)
    driver.start()
    (last,) = busy.handle([(0, piece)], 5.0, offer)
    driver.join()

    assert sum(report.done for report in [*found, last]) == 8
    assert (last.finished, last.beyond) == (10, ())


def _finished(link: DriverLink, loop: LoopThread, found: list[PieceReport]) -> int:
    found += loop.run(arrived(link))
    return max((report.finished for report in found), default=0)


@pytest.mark.parametrize(("how", "most"), [("silent", 1.0), ("gone", 0.0)])
def test_a_task_begins_no_call_without_its_driver(worker, link, loop, orbit_cluster, how, most):
    """Its time limit is no longer renewed; a connection that ends is noticed at once."""
    began: list[float] = []
    lost: list[float] = []

    def handle(_: ReceivedMessage) -> None:
        began.append(time.monotonic())
        threading.Event().wait(0.02)

    def lose() -> None:
        until(lambda: bool(began), "it follows the queue")
        lost.append(time.monotonic())
        if how == "silent":
            loop.loop.call_soon_threadsafe(time.sleep, 4.0)
        else:
            loop.run(link.stop())

    busy = worker(handle, workers=1)
    offer = loop.run(opened(link))
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(300))
    driver = threading.Thread(target=lose)
    driver.start()
    (report,) = busy.handle([(0, Piece(QueueRange(QUEUE, 0, 0)))], 1.0, offer)
    driver.join()

    assert began[-1] - lost[0] < most + 1.0
    assert report.finished == len(began)


def test_a_task_that_cannot_reach_its_driver_handles_its_piece_alone(worker, orbit_cluster):
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(5))
    busy = worker(lambda message: None)

    (report,) = busy.handle(
        [(0, Piece(QueueRange(QUEUE, 0, 3)))], 5.0, LinkOffer("127.0.0.1", 1, b"secret")
    )

    assert (report.finished, report.done) == (3, 3)


@pytest.mark.parametrize("task", [-1, 1 << 40])
def test_a_stranger_is_refused_without_an_error(link, loop, caplog, task):
    offer = loop.run(opened(link))

    async def call() -> bytes:
        reader, writer = await asyncio.open_connection(offer.host, offer.port)
        hello = msgspec.msgpack.encode({"task": task, "proof": b"a guess"})
        writer.write(len(hello).to_bytes(4, "big") + hello)
        nonce = await reader.read()
        writer.close()
        return nonce

    assert len(loop.run(call())) == 16
    assert not caplog.records


def test_only_the_first_attempt_of_a_task_with_the_secret_is_accepted(link, loop):
    offer = loop.run(opened(link, 2))
    accepted = [loop.run(TaskLink.connected(offer, 0))]

    for other in (offer, replace(offer, secret=b"a guess")):
        with pytest.raises(LinkRefused):
            loop.run(TaskLink.connected(other, 0))
    assert not link.is_complete
    accepted.append(loop.run(TaskLink.connected(offer, 1)))
    assert link.is_complete
    for task in accepted:
        loop.run(task.close())


def test_a_report_of_an_earlier_job_is_not_taken(link: DriverLink, loop):
    async def report_late() -> list[PieceReport]:
        task = await TaskLink.connected(link.open(1), 0)
        link.open(1)
        with contextlib.suppress(OSError):
            task.report([PieceReport(place=0, finished=7)])
        await task.close()
        return link.arrived()

    assert loop.run(report_late()) == []
