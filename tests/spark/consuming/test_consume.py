"""Consumer groups on a real Spark session and a real broker."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from orbitmq.broker.settings import AccessSettings
from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.consumer.verdict import DeadLetter, Retry
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.ranges.connections import Credentials
from orbitmq.client.routes import Queue
from orbitmq.errors import AccessDenied, SettingError, WrongUse
from orbitmq.spark import BatchSettings
from orbitmq.spark.consuming.progress import BatchReport, PipelineFailed, PipelineState
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import Sent, fill, make_topic, numbered
from tests.support.sparkconsuming import DEADLINE, QUICK, SOON, idle, progress_of
from tests.support.sparking import until
from tests.support.sparkkilling import Job

READER, SECRET = "reader-key", "secret-of-reader"
ACCOUNTS = f"""
[[accounts]]
accessKey = "{READER}"
secretKey = "{SECRET}"
topicPerms = ["orders=SUB"]
groupPerms = ["billing=SUB"]

[[accounts]]
accessKey = "operator"
secretKey = "secret-of-operator"
admin = true
"""


def send(cluster: EmbeddedCluster, topic: str, messages: Sequence[Sent | bytes]) -> None:
    fill(cluster.broker_addresses[0], topic, messages)


def of_orders(queues: frozenset[Queue]) -> int:
    return sum(queue.topic == "orders" for queue in queues)


def test_handlers_of_all_kinds_get_every_message_once(pipeline, orbit_cluster, journal):
    """The kinds that a `Consumer` takes: one message, a batch, `async def`; and a filter."""
    for topic in ("single", "batched", "awaited"):
        make_topic(orbit_cluster, topic, 200, queues=4)
    send(orbit_cluster, "single", [Sent(b"not for us", 0, {"TAGS": "draft"})])
    note = journal.writing()
    reports: list[BatchReport] = []
    run = pipeline(on_batch=reports.append)

    @run.on("single", sql="TAGS IS NULL")
    def single(message: ReceivedMessage) -> None:
        note(message)

    @run.on("batched", batch=True, batch_size=32)
    def batched(messages: list[ReceivedMessage]) -> None:
        for message in messages:
            note(message)

    @run.on("awaited")
    async def awaited(message: ReceivedMessage) -> None:
        note(message)

    with run:
        idle(run)
        progress = run.progress()

    counts = Counter((entry.topic, entry.body) for entry in journal.entries())
    topics = ("single", "batched", "awaited")
    assert set(counts) == {(topic, str(n)) for topic in topics for n in range(200)}
    assert set(counts.values()) == {1}
    assert progress_of(orbit_cluster, "billing", "single") == {0: 51, 1: 50, 2: 50, 3: 50}
    assert progress_of(orbit_cluster, "billing", "awaited") == dict.fromkeys(range(4), 50)
    assert os.getpid() not in {entry.process for entry in journal.entries()}
    assert (progress.done, progress.total_lag, progress.last_error) == (600, 0, None)
    assert sum(report.done for report in reports) == 600
    assert all(report.rows_per_second > 0 for report in reports)
    assert run.progress().state is PipelineState.STOPPED


@pytest.mark.feature("M11")
def test_a_failing_message_comes_again_after_growing_delays_and_ends_as_a_dead_letter(
    pipeline, orbit_cluster, journal
):
    make_topic(orbit_cluster, "orders", 20, queues=2)

    def bill(message):
        if message.text() == "7":
            raise ValueError(f"no account, attempt {message.attempt}")

    def attempts():
        return [entry.attempt for entry in journal.entries() if entry.body == "7"]

    run = pipeline(max_retries=2)
    run.on("orders")(journal.writing(bill))
    with run:
        idle(run)
        assert attempts() == [1]
        # It holds nothing back: its copy at the broker stands for it.
        assert progress_of(orbit_cluster, "billing", "orders") == {0: 10, 1: 10}
        for delay, made in ((10, 2), (30, 3)):
            orbit_cluster.advance(delay - 2)
            idle(run)
            assert len(attempts()) == made - 1
            orbit_cluster.advance(2)
            until(lambda made=made: len(attempts()) == made, f"attempt {made}")  # type: ignore[misc]
            idle(run)  # and it is back at the broker
        progress = run.progress()

    assert attempts() == [1, 2, 3]
    assert Counter(journal.bodies()) == {str(n): 3 if n == 7 else 1 for n in range(20)}
    (letter,) = orbit_cluster.messages("%DLQ%billing")
    assert letter.body == b"7"
    assert letter.properties["DLQ_REASON"] == "ValueError: no account, attempt 3"
    assert letter.properties["DLQ_ORIGIN_TOPIC"] == "orders"
    assert letter.reconsume_times == 3
    assert (progress.done, progress.retried, progress.dead) == (19, 2, 1)
    assert progress.last_error == "ValueError: no account, attempt 3"


def test_handlers_say_what_becomes_of_messages(pipeline, orbit_cluster, journal):
    """A delay of their own, at once a dead letter, and a part of a batch."""
    orbit_cluster.create_topic("orders", queues=1)
    orbit_cluster.create_topic("parts", queues=1)
    send(orbit_cluster, "orders", [b"later", b"never", b"good"])
    send(orbit_cluster, "parts", [b"a", b"b", b"c"])
    note = journal.writing()
    run = pipeline()

    @run.on("orders")
    def bill(message: ReceivedMessage) -> None:
        note(message)
        if message.text() == "never":
            raise DeadLetter("no such customer")
        if message.text() == "later" and message.attempt == 1:
            raise Retry("not open yet", delay=3600)

    @run.on("parts", batch=True)
    def parts(messages: list[ReceivedMessage]) -> int | None:
        for message in messages:
            note(message)
        return 0 if messages[0].attempt == 1 else None

    with run:
        idle(run)
        orbit_cluster.advance(10)
        until(lambda: Counter(journal.bodies())["c"] == 2, "the rest of the batch")
        idle(run)
        orbit_cluster.advance(3500)
        idle(run)
        assert Counter(journal.bodies())["later"] == 1
        orbit_cluster.advance(100)
        until(lambda: Counter(journal.bodies())["later"] == 2, "the delay is over")

    assert Counter(journal.bodies()) == {"later": 2, "never": 1, "good": 1, "a": 1, "b": 2, "c": 2}
    (letter,) = orbit_cluster.messages("%DLQ%billing")
    assert (letter.body, letter.properties["DLQ_REASON"]) == (b"never", "no such customer")


def test_in_order_a_failing_message_holds_its_queue_and_no_other(
    pipeline, orbit_cluster, journal, tmp_path
):
    make_topic(orbit_cluster, "orders", 60, queues=3)
    allowed = tmp_path / "allowed"
    path = str(allowed)

    def bill(message):
        if message.text() == "10" and not os.path.exists(path):  # noqa: PTH110  # travels alone
            raise ValueError("not yet")

    def tries():
        return [entry.attempt for entry in journal.entries() if entry.body == "10"]

    run = pipeline(ordered=True)
    run.on("orders")(journal.writing(bill))
    with run:
        until(lambda: len(tries()) >= 3, "it is tried again and again")
        held = progress_of(orbit_cluster, "billing", "orders")
        allowed.touch()
        idle(run)

    assert held == {0: 20, 1: 3, 2: 20}
    assert tries()[:3] == [1, 2, 3]
    assert progress_of(orbit_cluster, "billing", "orders") == {0: 20, 1: 20, 2: 20}
    calls = defaultdict(list)
    for entry in journal.entries():
        calls[entry.queue].append(entry)
    for entries in calls.values():
        offsets = [entry.offset for entry in entries]
        assert offsets == sorted(offsets)
        assert sorted(set(offsets)) == list(range(20))
        for one, following in pairwise(entries):
            assert one.ended <= following.began


@pytest.mark.parametrize("ordered", [False, True])
def test_a_group_is_shared_with_plain_consumers_that_come_and_go(
    pipeline, orbit_cluster, journal, ordered
):
    """Eight queues; what changes hands is handled by one of the two, and once."""
    orbit_cluster.create_topic("orders", queues=8)
    # No job ends by itself.
    run = pipeline(ordered=ordered, batch=replace(QUICK, follow=3600.0))
    run.on("orders")(journal.writing())
    plain = Consumer(
        "billing",
        name_server=orbit_cluster.name_server,
        consume_from="first",
        rebalance=SOON,
        ordered=ordered,
    )
    plain.on("orders")(journal.writing())

    with run:
        send(orbit_cluster, "orders", numbered(400, queues=8))
        until(lambda: of_orders(run.assignment()) == 8, "alone it has all queues")
        plain.start()
        try:
            send(orbit_cluster, "orders", numbered(400, queues=8, first=400))
            until(
                lambda: of_orders(run.assignment()) == 4 == of_orders(plain.assignment()),
                "each has half",
            )
            send(orbit_cluster, "orders", numbered(400, queues=8, first=800))
            until(lambda: len(set(journal.bodies())) == 1200, "all is handled")
        finally:
            plain.stop()
        send(orbit_cluster, "orders", numbered(400, queues=8, first=1200))
        until(lambda: of_orders(run.assignment()) == 8, "alone again")
        idle(run)

    counts = Counter(journal.bodies())
    assert set(counts) == {str(n) for n in range(1600)}
    assert set(counts.values()) == {1}
    by_process = Counter(entry.process == os.getpid() for entry in journal.entries())
    assert by_process[True] >= 200
    assert by_process[False] >= 800
    assert progress_of(orbit_cluster, "billing", "orders") == dict.fromkeys(range(8), 200)
    if ordered:
        for queue in range(8):
            calls = sorted(entry for entry in journal.entries() if entry.queue == queue)
            assert [entry.offset for entry in calls] == list(range(200))
            assert all(one.ended <= following.began for one, following in pairwise(calls))


def test_a_stop_finishes_what_runs_and_the_next_start_goes_on(pipeline, orbit_cluster, journal):
    make_topic(orbit_cluster, "orders", 2000, queues=2)

    def slow(message):
        threading.Event().wait(0.01)

    first = pipeline(batch=BatchSettings(idle=0.02, seconds=0.5), workers=4)
    first.on("orders")(journal.writing(slow))
    first.start()
    until(lambda: len(journal.entries()) > 20, "it is in the middle of a batch")
    first.stop()
    done = len(journal.entries())
    reported = sum(progress_of(orbit_cluster, "billing", "orders").values())
    second = pipeline()
    second.on("orders")(journal.writing())
    with second:
        idle(second)

    assert 20 < done < 2000
    assert reported == done
    assert Counter(journal.bodies()) == {str(n): 1 for n in range(2000)}


def test_a_worker_that_dies_costs_a_repetition_and_nothing_else(
    pipeline, orbit_cluster, journal, tmp_path
):
    make_topic(orbit_cluster, "orders", 50, queues=1)
    path = str(tmp_path / "died")

    def die_once(message):
        if message.text() == "30" and not os.path.exists(path):  # noqa: PTH110  # travels alone
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            os.kill(os.getpid(), signal.SIGKILL)

    run = pipeline()
    run.on("orders")(journal.writing(die_once))
    with run:
        idle(run)
        progress = run.progress()

    assert set(journal.bodies()) == {str(n) for n in range(50)}
    assert progress_of(orbit_cluster, "billing", "orders") == {0: 50}
    assert progress.last_error is not None


def test_a_broker_that_is_restarted_in_a_batch_loses_nothing(pipeline, orbit_cluster, journal):
    """Failing messages included, which it is asked to take back just then."""
    make_topic(orbit_cluster, "orders", 400, queues=2)

    def slow(message):
        threading.Event().wait(0.02)
        if int(message.text()) % 50 == 0 and message.attempt == 1:
            raise ValueError("try again")

    run = pipeline(workers=4)
    run.on("orders")(journal.writing(slow))
    with run:
        until(lambda: len(journal.entries()) > 20, "it is in the middle of a batch")
        orbit_cluster.restart_broker()
        idle(run)
        orbit_cluster.advance(10)
        again = {str(n) for n in range(0, 400, 50)}
        until(
            lambda: {each.body for each in journal.entries() if each.attempt == 2} == again,
            "failed ones come again",
        )
        idle(run)

    assert set(journal.bodies()) == {str(n) for n in range(400)}
    assert progress_of(orbit_cluster, "billing", "orders") == {0: 200, 1: 200}


@pytest.mark.parametrize(
    ("topic", "group", "secret", "missing"),
    [
        ("invoices", "billing", SECRET, "no SUB permission on topic 'invoices'"),
        ("orders", "others", SECRET, "no SUB permission on group 'others'"),
        ("orders", "billing", "another-secret", "check the access key and the secret key"),
    ],
)
def test_a_pipeline_that_may_read_nothing_ends_with_the_reason(
    pipeline, tmp_path, topic, group, secret, missing
):
    accounts = tmp_path / "accounts.toml"
    accounts.write_text(ACCOUNTS)
    access = AccessSettings(accounts=accounts, check_interval=0.05)
    with EmbeddedCluster(adjust=lambda settings: replace(settings, access=access)) as cluster:
        for name in ("orders", "invoices"):
            cluster.create_topic(name, queues=2)
        credentials = Credentials(access_key=READER, secret_key=secret)
        run = pipeline(group, name_server=cluster.name_server, credentials=credentials)
        run.on(topic)(print)

        with pytest.raises(AccessDenied, match=missing):
            run.run()

    assert missing in (run.progress().last_error or "")
    assert run.state is PipelineState.FAILED


def test_a_pipeline_says_which_module_its_workers_lack(
    pipeline, orbit_cluster, tmp_path, monkeypatch
):
    make_topic(orbit_cluster, "orders", 5, queues=1)
    (tmp_path / "only_here.py").write_text("def bill(message): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    bill = importlib.import_module("only_here").bill
    run = pipeline(batch=BatchSettings(idle=0.02, first_pause=0.01, failures=1))
    run.on("orders")(bill)

    with pytest.raises(PipelineFailed) as raised:
        run.run()

    cause = "ModuleNotFoundError: No module named 'only_here'"
    assert str(raised.value).endswith(f"The last error: {cause}")
    assert run.progress().last_error == cause


def test_a_handler_that_cannot_travel_is_refused_at_the_start(pipeline, orbit_cluster):
    orbit_cluster.create_topic("orders", queues=1)
    lock = threading.Lock()
    run = pipeline()

    @run.on("orders")
    def bill(message: ReceivedMessage) -> None:
        with lock:
            pass

    with pytest.raises(SettingError, match=r"bill.*cannot be sent to Spark's workers"):
        run.start()


def test_wrong_use_is_said_at_once(pipeline, orbit_cluster):
    orbit_cluster.create_topic("orders", queues=1)
    with pytest.raises(SettingError, match="has no handler"):
        pipeline().start()
    with pytest.raises(SettingError, match=r"batch\.seconds must be positive"):
        BatchSettings(seconds=0)
    run = pipeline()
    run.on("orders")(print)
    with pytest.raises(SettingError, match="has a handler already"):
        run.on("orders")(print)
    with run, pytest.raises(WrongUse, match="before the start"):
        run.on("other")(print)


# ---- in order, when jobs fail


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
            os.kill(os.getpid(), signal.SIGKILL)

    return handle


def test_a_queue_is_not_planned_again_before_the_tasks_of_a_failed_job_have_ended(
    pipeline, orbit_cluster, journal, tmp_path
):
    make_topic(orbit_cluster, "orders", 60, queues=2)
    run = pipeline(ordered=True, batch=replace(QUICK, tasks=2))
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


# ---- a driver that is killed


TOPIC = "orders"
GROUP = "billing"
QUEUES = 4
COUNT = 2000
#: What may be under way when everything is killed: a batch.
IN_A_BATCH = 100


@pytest.mark.timeout(420)
def test_nothing_is_lost_when_the_driver_is_killed_in_a_batch(pipeline, orbit_cluster, journal):
    """And little comes twice: what was in the batch that nobody could report."""
    make_topic(orbit_cluster, TOPIC, COUNT, queues=QUEUES)

    first = Job("sparkconsumer", orbit_cluster.name_server, GROUP, TOPIC, str(journal.path))
    try:
        first.until_batches(2)
        handled = len(journal.entries())
        until(lambda: len(journal.entries()) > handled, "it is in the middle of the next")
    finally:
        first.kill()
    before = len(journal.entries())
    reported = sum(progress_of(orbit_cluster, GROUP, TOPIC).values())

    second = pipeline(GROUP, consume_from="last")
    second.on(TOPIC)(journal.writing())
    with second:
        idle(second)

    assert 200 <= reported < COUNT
    assert reported <= before
    counts = Counter(journal.bodies())
    assert set(counts) == {str(n) for n in range(COUNT)}
    assert sum(progress_of(orbit_cluster, GROUP, TOPIC).values()) == COUNT
    assert sum(counts.values()) - COUNT == before - reported <= IN_A_BATCH
