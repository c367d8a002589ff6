"""Consumption of queues, side by side and in order: verdicts, progress, failures, locks, drains."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.client.consumer.handlers import bind_handler
from orbitmq.client.consumer.verdict import BY_ATTEMPTS, DEAD, DeadLetter, Retry, Verdict
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from tests.support.consuming import (
    DEADLINE,
    GROUP,
    Gate,
    LockStub,
    consuming,
    received,
    retried,
    until,
    until_at_least,
)
from tests.support.scarcethreads import refuse_threads
from tests.support.store import HandClock

both = pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])


def messages(count: int, start: int = 0, *, queue: int = 0) -> list[ReceivedMessage]:
    place = Queue("orders", "broker-a", queue)
    return [received(offset, queue=place) for offset in range(start, start + count)]


def answers(what):
    """A handler that raises or returns this."""

    def handle(_):
        if isinstance(what, BaseException):
            raise what
        return what

    return handle


# ---- progress


class Plan:
    """What handlers do with each message, and when, in a random test."""

    def __init__(self, verdicts: Sequence[str]) -> None:
        self.verdicts = verdicts
        self.gates = [asyncio.Event() for _ in verdicts]

    async def __call__(self, message: ReceivedMessage) -> None:
        await self.gates[message.queue_offset].wait()
        if self.verdicts[message.queue_offset] == "fail":
            raise ValueError("planned")
        if self.verdicts[message.queue_offset] == "dead":
            raise DeadLetter("planned")


@pytest.mark.feature("D6")
@settings(max_examples=40)
@given(data=st.data())
def test_whatever_the_order_progress_is_the_smallest_unfinished_offset(data):
    verdicts = data.draw(st.lists(st.sampled_from(["ok", "fail", "dead"]), min_size=1, max_size=12))
    order = data.draw(st.permutations(range(len(verdicts))))

    async def scenario():
        plan = Plan(verdicts)
        async with consuming(plan, workers=len(verdicts)) as bench:
            owned = bench.own(messages(len(verdicts)))
            unfinished = set(range(len(verdicts)))
            for done, offset in enumerate(order, 1):
                plan.gates[offset].set()
                unfinished.discard(offset)
                await until_at_least(lambda: len(verdicts) - len(owned.window), done)
                expected = min(unfinished, default=len(verdicts))
                assert (bench.position(owned) or 0) == expected
            failed = [at for at, verdict in enumerate(verdicts) if verdict != "ok"]
            assert sorted(bench.sent_back.offsets) == failed

    asyncio.run(scenario())


# ---- failures


@pytest.mark.feature("D3")
@pytest.mark.parametrize(
    ("what", "level", "delay"),
    [
        (ValueError("x"), BY_ATTEMPTS, None),
        (False, BY_ATTEMPTS, None),
        (Verdict.RETRY, BY_ATTEMPTS, None),
        (Retry(level=2), 2, None),
        (Retry(delay=30), BY_ATTEMPTS, 30.0),
        (DeadLetter("bad"), DEAD, None),
        ("what?", BY_ATTEMPTS, None),
        (Verdict.COMMIT, BY_ATTEMPTS, None),
    ],
)
async def test_a_failed_message_goes_back_as_the_handler_says(what, level, delay):
    async with consuming(answers(what)) as bench:
        owned = bench.own(messages(1))
        await until(lambda: bench.position(owned) == 1)

    ((message, failure),) = bench.sent_back.back
    assert message.queue_offset == 0
    assert (failure.level, failure.delay) == (level, delay)
    assert failure.reason


@both
@pytest.mark.parametrize("broken", [None, TypeError("a mistake")], ids=["refuses", "broken"])
async def test_a_message_that_nobody_takes_back_is_tried_again_here(ordered, broken, caplog):
    attempts: list[int] = []

    def handle(message):
        attempts.append(message.attempt)
        if message.attempt < 3:
            raise DeadLetter("not yet") if ordered else ValueError("not yet")

    async with consuming(handle, ordered=ordered, suspend=0.01, local_retry=0.02) as bench:
        bench.sent_back.takes, bench.sent_back.raises = False, broken
        owned = bench.own(messages(1))
        await until(lambda: bench.position(owned) == 1)
        assert owned.running == 0
        assert await bench.consumption.drain(owned, DEADLINE)

    assert attempts == [1, 2, 3]
    assert bench.statistics.dead_letters == 0
    assert bench.statistics.kept_back == (0 if ordered else 2)
    assert caplog.text.count("could not be sent back") == (2 if broken else 0)


@pytest.mark.parametrize(
    ("said", "pause"),
    [
        (Retry(delay=0.2), 0.2),
        (Retry(delay=timedelta(hours=1)), 3600),
        (Retry(level=18), 7200),
        (timedelta(days=2), 172800),
    ],
)
async def test_a_handler_says_how_long_its_queue_pauses_and_no_stop_waits(said, pause, monkeypatch):
    pauses: list[float] = []
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def noted(delay, *call):
        pauses.append(delay)
        return later(delay, *call)

    def listen(batch, context):
        if isinstance(said, Retry):
            raise said
        context.suspend = said
        return Verdict.RETRY

    monkeypatch.setattr(loop, "call_later", noted)
    async with consuming(listen, ordered=True, listener=True) as bench:
        owned = bench.own(messages(1))
        await until(lambda: pause in pauses)
        assert await bench.consumption.drain(owned, 0)


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_fails_each_message_is_done_before_the_next_is_begun(data):
    failures = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=15))
    batch_size = data.draw(st.integers(1, 4))
    feeds = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    limit = data.draw(st.sampled_from([None, 1]))
    done: list[int] = []

    def handle(batch):
        offsets = [message.queue_offset for message in batch]
        assert offsets == list(range(offsets[0], offsets[0] + len(offsets)))
        for at, message in enumerate(batch):
            if message.reconsume_times < failures[message.queue_offset]:
                return at - 1
            done.append(message.queue_offset)
        return None

    async def scenario():
        async with consuming(
            handle, ordered=True, batch=True, batch_size=batch_size, suspend=0.01, max_retries=limit
        ) as bench:
            owned = bench.own()
            at = 0
            for count in [*feeds, len(failures)]:
                some = messages(min(count, len(failures) - at), start=at)
                if some:
                    bench.feed(owned, some)
                    at += len(some)
                await asyncio.sleep(0)
            await until(lambda: bench.position(owned) == len(failures))
            given_up = [message.queue_offset for message, _ in bench.sent_back.given_up]
            assert sorted(done + given_up) == list(range(len(failures)))
            assert done == sorted(done)

    asyncio.run(scenario())


# ---- queues that are lost, locks


@pytest.mark.feature("D8")
async def test_messages_of_a_dropped_queue_do_not_reach_the_handler():
    gate = Gate()
    async with consuming(gate, workers=1) as bench:
        owned = bench.own(messages(5))
        await until(lambda: gate.entered == [0])
        owned.drop()
        gate.open()
        await until(lambda: bench.statistics.passed_over == 4)
    assert gate.entered == [0]


@pytest.mark.feature("D9")
@both
@pytest.mark.parametrize("fails", [False, True])
async def test_a_queue_dropped_during_the_call_is_neither_committed_nor_sent_back(ordered, fails):
    gate = Gate(ValueError("late") if fails else None)
    async with consuming(gate, ordered=ordered) as bench:
        owned = bench.own(messages(1))
        await until(lambda: gate.entered == [0])
        owned.drop()
        gate.open()
        await until(lambda: bench.statistics.duplicates == 1)
        assert bench.position(owned) is None
    assert not bench.sent_back.back


@pytest.mark.parametrize("lapses_at", [-1, 4])
async def test_nothing_is_begun_once_the_lock_is_not_held(lapses_at):
    lock = LockStub(held=lapses_at >= 0)
    lapsed: list[OwnedQueue] = []
    seen: list[int] = []

    def handle(message):
        seen.append(message.queue_offset)
        if message.queue_offset == lapses_at:
            lock.held = False

    async with consuming(handle, ordered=True, lapsed=lapsed.append) as bench:
        owned = bench.own(messages(10), lock=lock)
        await until(lambda: lapsed == [owned])
        assert await bench.consumption.drain(owned, DEADLINE)
        assert seen == list(range(lapses_at + 1))
        assert bench.position(owned) == (lapses_at + 1 or None)
        assert len(owned.window) == 9 - lapses_at


@pytest.mark.feature("E7")
async def test_queues_share_a_worker_by_time_slices():
    order: list[int] = []
    clock = HandClock()

    def handle(message):
        order.append(message.queue.id)
        clock.advance(4.0)

    async with consuming(handle, ordered=True, workers=1, time_slice=10.0, clock=clock) as bench:
        owned = [bench.own(messages(30, queue=n)) for n in range(2)]
        await until(lambda: [bench.position(each) for each in owned] == [30, 30])

    changes = sum(before != after for before, after in pairwise(order))
    assert changes >= 6, "one queue kept the worker although its time was over"
    assert changes < 59, "a queue lost the worker after every message"


async def test_a_call_that_blocks_among_quick_ones_keeps_no_other_from_the_threads():
    gate, seen = Gate(), []

    def handle(message):
        seen.append(message.queue_offset)
        if message.queue_offset in (250, 350, 351):
            gate(message)

    async with consuming(handle, workers=4) as bench:
        owned = bench.own(messages(200))
        await until(lambda: bench.position(owned) == 200)
        bench.feed(owned, messages(200, start=200))
        await until(lambda: len(seen) == 400 and len(owned.window) == 3)
        assert bench.position(owned) == 250, "results before the blocked call were not settled"
        assert bench.consumption.in_hand(owned) == 3
        gate.open()
        await until(lambda: bench.position(owned) == 400)

    assert sorted(seen) == list(range(400))


# ---- drains


@both
async def test_a_drain_waits_for_running_calls_and_begins_nothing(ordered):
    gate = Gate()
    async with consuming(gate, ordered=ordered, workers=1) as bench:
        owned = bench.own(messages(6))
        await until(lambda: gate.entered == [0])
        assert not await bench.consumption.drain(owned, 0.02)
        assert bench.consumption.in_hand(owned) == 1
        draining = asyncio.create_task(bench.consumption.drain(owned, DEADLINE))
        gate.open()
        assert await draining
        assert bench.consumption.in_hand(owned) == 0
        bench.feed(owned, messages(3, start=6))
        assert await bench.consumption.drain(owned, 0)
        assert bench.position(owned) == 1
    assert gate.entered == [0]


@both
async def test_a_drain_waits_for_what_is_being_sent_back(ordered):
    async with consuming(answers(DeadLetter("no")), ordered=ordered) as bench:
        bench.sent_back.gate = asyncio.Event()
        owned = bench.own(messages(1))
        await until(lambda: bench.sent_back.given_up or bench.sent_back.back)
        assert not await bench.consumption.drain(owned, 0.02)
        bench.sent_back.gate.set()
        assert await bench.consumption.drain(owned, DEADLINE)
        assert bench.position(owned) == 1


# ---- calls that take too long


async def test_the_result_of_a_late_call_does_not_count():
    gate = Gate(ValueError("late"))
    async with consuming(gate, timeout=0.5) as bench:
        owned = bench.own(messages(1))
        await until(lambda: bench.position(owned) == 1)
        gate.open()
        await until(lambda: owned.running == 0)

    assert bench.sent_back.offsets == [0], "it went back twice"


async def test_calls_that_wait_for_a_worker_are_not_late():
    gate, clock = Gate(), HandClock()
    async with consuming(gate, timeout=0.5, workers=1, clock=clock) as bench:
        bench.own(messages(4))
        await until(lambda: gate.entered)
        clock.advance(0.6)
        await until(lambda: bench.sent_back.offsets == [0])
        gate.open()
        await until(lambda: len(gate.entered) == 4)
        assert bench.sent_back.offsets == [0]


# ---- several topics


async def test_retried_messages_reach_the_handler_of_their_own_topic_in_batches_of_one_topic():
    batches: list[tuple[str, list[int]]] = []

    def noting(topic):
        def handle(batch):
            assert {message.topic for message in batch} == {topic}
            batches.append((topic, [message.queue_offset for message in batch]))

        return bind_handler(handle, group=GROUP, batch=True, batch_size=2)

    async with consuming({topic: noting(topic) for topic in ("orders", "refunds")}) as bench:
        topics = ["orders", "orders", "orders", "refunds", "orders", "invoices"]
        owned = bench.own([retried(at, topic) for at, topic in enumerate(topics)])
        await until(lambda: bench.position(owned) == 6)

    assert sorted(batches) == [
        ("orders", [0, 1]),
        ("orders", [2]),
        ("orders", [4]),
        ("refunds", [3]),
    ]
    ((_, failure),) = bench.sent_back.back
    assert failure.level == BY_ATTEMPTS
    assert "no handler for topic invoices" in str(failure.reason)


@both
async def test_messages_are_handled_once_a_worker_can_be_started(ordered, monkeypatch, caplog):
    refused = refuse_threads(monkeypatch, f"orbitmq-{GROUP}", times=2)
    seen: list[int] = []
    async with consuming(
        lambda message: seen.append(message.queue_offset), ordered=ordered, local_retry=0.01
    ) as bench:
        owned = bench.own(messages(40))
        assert len(refused) == 1
        assert owned.running == owned.window.taken_count == 0
        await until(lambda: bench.position(owned) == 40)
        assert len(refused) == 2
        assert sorted(seen) == list(range(40))
        assert owned.running == 0
        assert "wait for a worker of group billing, which could not be started" in caplog.text


# ---- listeners that commit by themselves

OK, COMMIT, ROLLBACK, RETRY = Verdict.SUCCESS, Verdict.COMMIT, Verdict.ROLLBACK, Verdict.RETRY


@pytest.mark.parametrize(
    ("verdicts", "auto_commit", "calls", "position", "taken"),
    [
        ([OK, OK, OK, COMMIT, OK, OK], False, [0, 1, 2, 3, 4, 5], 4, 2),
        ([OK, COMMIT, OK, ROLLBACK, OK, COMMIT], False, [0, 1, 2, 3, 2, 3], 4, 0),
        ([OK, RETRY, RETRY, OK, COMMIT], False, [0, 1, 1, 1, 2], 3, 0),
        ([COMMIT, ROLLBACK, OK], True, [0, 1, 2], 3, 0),
    ],
    ids=["success moves nothing", "rollback", "retry", "auto-commit"],
)
async def test_a_listener_commits_and_rolls_back(verdicts, auto_commit, calls, position, taken):
    seen: list[int] = []

    def listen(batch, context):
        context.auto_commit, context.suspend = auto_commit, 0.01
        seen.append(batch[0].queue_offset)
        return verdicts[len(seen) - 1]

    async with consuming(listen, ordered=True, listener=True) as bench:
        owned = bench.own(messages(max(calls) + 1))
        await until(lambda: (len(seen), owned.window.taken_count) == (len(verdicts), taken))
        await until(lambda: bench.position(owned) == position)
    assert seen == calls
