"""Orderly consumption: one at a time, in order, under a lock; failures hold their queue."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.client.consumer.handlers import bind_handler
from orbitmq.client.consumer.verdict import DeadLetter, Retry, Verdict
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.middleware import Delivery
from orbitmq.client.routes import Queue
from tests.support.consuming import DEADLINE, GROUP, LockStub, consuming, received, retried, until
from tests.support.scarcethreads import refuse_threads


def messages(count: int, start: int = 0, *, queue: int = 0) -> list[ReceivedMessage]:
    place = Queue("orders", "broker-a", queue)
    return [received(offset, queue=place) for offset in range(start, start + count)]


class Gate:
    """A handler that waits, in its thread, until a test lets it go."""

    def __init__(self) -> None:
        self.entered: list[int] = []
        self._opened = threading.Event()

    def __call__(self, message: ReceivedMessage) -> None:
        self.entered.append(message.queue_offset)
        self._opened.wait(DEADLINE)

    def open(self) -> None:
        self._opened.set()


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
@pytest.mark.feature("E3")
async def test_messages_of_a_queue_are_handled_one_at_a_time_in_order(is_async):
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    inside: set[int] = set()
    overlaps: list[int] = []

    def enter(message):
        if message.queue.id in inside:
            overlaps.append(message.queue_offset)
        inside.add(message.queue.id)
        seen[message.queue.id].append(message.queue_offset)

    def handle(message):
        enter(message)
        inside.discard(message.queue.id)

    async def handle_async(message):
        enter(message)
        await asyncio.sleep(0)
        inside.discard(message.queue.id)

    async with consuming(handle_async if is_async else handle, ordered=True) as bench:
        owned = [bench.own(messages(50, queue=n), lock=LockStub()) for n in range(3)]
        for each in owned:
            bench.feed(each, messages(50, start=50, queue=each.queue.id))
        await until(lambda: [bench.position(each) for each in owned] == [100] * 3)

    assert seen == {n: list(range(100)) for n in range(3)}
    assert not overlaps


async def test_batches_keep_the_order():
    batches: list[list[int]] = []

    def handle(batch):
        batches.append([message.queue_offset for message in batch])

    async with consuming(handle, ordered=True, batch_size=4) as bench:
        owned = bench.own(messages(10), lock=LockStub())
        await until(lambda: bench.position(owned) == 10)

    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.feature("E8")
async def test_a_failing_message_holds_its_queue_and_is_retried_in_place():
    calls: list[tuple[int, int]] = []
    times: list[float] = []

    def handle(message):
        calls.append((message.queue_offset, message.attempt))
        if message.queue_offset == 2 and message.attempt < 4:
            times.append(time.monotonic())
            raise ValueError("not yet")

    async with consuming(handle, ordered=True, suspend=0.05) as bench:
        owned = bench.own(messages(5), lock=LockStub())
        await until(lambda: bench.position(owned) == 5)

    assert calls == [(0, 1), (1, 1), (2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (4, 1)]
    assert all(later - earlier >= 0.05 for earlier, later in pairwise(times))
    assert not bench.sent_back.given_up


async def test_what_was_done_before_a_failure_counts():
    def handle(message):
        if message.queue_offset == 3:
            raise ValueError("always")

    async with consuming(handle, ordered=True) as bench:
        owned = bench.own(messages(5), lock=LockStub())
        await until(lambda: bench.position(owned) == 3)

        assert len(owned.window) == 2


@pytest.mark.parametrize(("raised", "least"), [(Retry(delay=0.2), 0.2), (Retry(delay=0), 0.01)])
async def test_a_handler_says_how_long_its_queue_pauses(raised, least):
    times: list[float] = []

    def handle(message):
        times.append(time.monotonic())
        if message.attempt == 1:
            raise raised

    async with consuming(handle, ordered=True, suspend=30) as bench:
        owned = bench.own(messages(1), lock=LockStub())
        await until(lambda: bench.position(owned) == 1)

    assert times[1] - times[0] >= least


async def test_a_listener_says_how_long_its_queue_pauses():
    calls: list[int] = []

    def listen(batch, context):
        calls.append(batch[0].attempt)
        context.suspend = 0.02
        return Verdict.SUCCESS if batch[0].attempt > 1 else None

    async with consuming(listen, ordered=True, listener=True, suspend=30) as bench:
        owned = bench.own(messages(1), lock=LockStub())
        await until(lambda: bench.position(owned) == 1)

    assert calls == [1, 2]


@pytest.mark.parametrize(
    ("said", "pause"),
    [(Retry(delay=timedelta(hours=1)), 3600), (Retry(level=18), 7200), (timedelta(days=2), 172800)],
)
async def test_a_long_pause_is_as_long_as_it_was_asked_for(said, pause):
    def listen(batch, context):
        if isinstance(said, Retry):
            raise said
        context.suspend = said
        return Verdict.RETRY

    async with consuming(listen, ordered=True, listener=True) as bench:
        owned = bench.own(messages(1), lock=LockStub())
        await until(lambda: bench.consumption._lines[owned].timer is not None)
        timer = bench.consumption._lines[owned].timer
        left = timer.when() - asyncio.get_running_loop().time()

        assert pause - DEADLINE < left <= pause
        assert await bench.consumption.drain(owned, DEADLINE), "a pause holds up no stop"


async def test_without_a_limit_attempts_go_on():
    attempts: list[int] = []

    def handle(message):
        attempts.append(message.attempt)
        raise ValueError("always")

    async with consuming(handle, ordered=True, suspend=0.01) as bench:
        bench.own(messages(1), lock=LockStub())
        await until(lambda: len(attempts) > 20)

    assert not bench.sent_back.given_up


async def test_a_message_that_cannot_be_given_up_is_tried_again():
    attempts: list[int] = []

    def handle(message):
        attempts.append(message.attempt)
        if message.attempt < 3:
            raise DeadLetter("bad")

    async with consuming(handle, ordered=True, suspend=0.01) as bench:
        bench.sent_back.takes = False
        owned = bench.own(messages(1), lock=LockStub())
        await until(lambda: bench.position(owned) == 1)

    assert attempts == [1, 2, 3]


async def test_a_message_that_fails_while_it_is_given_up_is_tried_again(caplog):
    attempts: list[int] = []

    def handle(message):
        attempts.append(message.attempt)
        if message.attempt < 3:
            raise DeadLetter("bad")

    async with consuming(handle, ordered=True, suspend=0.01) as bench:
        bench.sent_back.raises = TypeError("a mistake")
        owned = bench.own(messages(1), lock=LockStub())
        await until(lambda: bench.position(owned) == 1)

        assert await bench.consumption.drain(owned, DEADLINE)
    assert attempts == [1, 2, 3]
    assert bench.statistics.dead_letters == 0
    assert caplog.text.count("could not be sent back") == 2


async def test_of_a_batch_only_what_failed_comes_again():
    batches: list[list[int]] = []

    def handle(batch):
        batches.append([message.queue_offset for message in batch])
        return 1 if len(batches) == 1 else None

    async with consuming(handle, ordered=True, batch_size=4, suspend=0.01) as bench:
        owned = bench.own(messages(6), lock=LockStub())
        await until(lambda: bench.position(owned) == 6)

    assert batches == [[0, 1, 2, 3], [2, 3, 4, 5]]


async def test_broadcasting_needs_no_lock_and_drops_what_it_gives_up():
    def handle(message):
        if message.queue_offset == 0:
            raise ValueError("always")

    async with consuming(
        handle, ordered=True, broadcasting=True, suspend=0.01, max_retries=1
    ) as bench:
        owned = bench.own(messages(3))
        await until(lambda: bench.position(owned) == 3)

    assert not bench.sent_back.given_up


class TestLock:
    async def test_nothing_is_begun_without_the_lock(self):
        lapsed: list[OwnedQueue] = []
        seen: list[int] = []
        async with consuming(
            lambda m: seen.append(m.queue_offset), ordered=True, lapsed=lapsed.append
        ) as bench:
            owned = bench.own(messages(3), lock=LockStub(held=False))
            await until(lambda: bool(lapsed))
            await asyncio.sleep(0.02)

        assert lapsed == [owned]
        assert not seen

    async def test_a_lock_that_lapses_ends_consumption_before_the_next_message(self):
        lock = LockStub()
        lapsed: list[OwnedQueue] = []
        seen: list[int] = []

        def handle(message):
            seen.append(message.queue_offset)
            if message.queue_offset == 4:
                lock.held = False

        async with consuming(handle, ordered=True, lapsed=lapsed.append) as bench:
            owned = bench.own(messages(10), lock=lock)
            await until(lambda: bool(lapsed))

            assert seen == [0, 1, 2, 3, 4]
            assert bench.position(owned) == 5
            assert len(owned.window) == 5


class TestDrain:
    async def test_the_running_call_is_waited_for_and_nothing_else_is_begun(self):
        gate = Gate()
        async with consuming(gate, ordered=True) as bench:
            owned = bench.own(messages(10), lock=LockStub())
            await until(lambda: gate.entered == [0])
            draining = asyncio.create_task(bench.consumption.drain(owned, DEADLINE))
            await asyncio.sleep(0.02)
            assert not draining.done()

            gate.open()

            assert await draining
            assert bench.position(owned) == 1
            assert gate.entered == [0]

    async def test_it_gives_up_after_its_time(self):
        gate = Gate()
        async with consuming(gate, ordered=True) as bench:
            owned = bench.own(messages(1), lock=LockStub())
            await until(lambda: gate.entered == [0])

            assert not await bench.consumption.drain(owned, 0.02)
            owned.drop()
            gate.open()
            await until(lambda: bench.statistics.duplicates == 1)

            assert bench.position(owned) is None

    async def test_messages_that_a_handler_is_at_work_on_are_counted_not_calls(self):
        entered: list[int] = []
        gate = threading.Event()

        def handle(batch):
            entered.append(len(batch))
            if len(entered) == 2:
                gate.wait(DEADLINE)

        async with consuming(handle, ordered=True, batch_size=4) as bench:
            owned = bench.own(messages(20), lock=LockStub())
            await until(lambda: entered == [4, 4])

            assert not await bench.consumption.drain(owned, 0.02)
            # One call is done and not settled, the other one is made, and no more are.
            assert bench.consumption.in_hand(owned) == 8
            gate.set()

            assert await bench.consumption.drain(owned, DEADLINE)
            assert bench.consumption.in_hand(owned) == 0

    async def test_a_pause_is_not_waited_for(self):
        calls: list[int] = []

        def handle(message):
            calls.append(1)
            raise ValueError("always")

        async with consuming(handle, ordered=True, suspend=0.5) as bench:
            owned = bench.own(messages(1), lock=LockStub())
            await until(lambda: calls == [1] and not owned.running)

            assert await bench.consumption.drain(owned, 0)

            await asyncio.sleep(0.6)
        assert calls == [1]

    async def test_giving_a_message_up_is_waited_for(self):
        def handle(message):
            raise DeadLetter("bad")

        async with consuming(handle, ordered=True) as bench:
            bench.sent_back.gate = asyncio.Event()
            owned = bench.own(messages(1), lock=LockStub())
            await until(lambda: bool(bench.sent_back.given_up))
            assert not await bench.consumption.drain(owned, 0.02)

            bench.sent_back.gate.set()

            assert await bench.consumption.drain(owned, DEADLINE)
            assert bench.position(owned) == 1


@pytest.mark.feature("E7")
async def test_queues_share_a_worker_by_time_slices():
    order: list[int] = []

    def handle(message):
        order.append(message.queue.id)
        bench.consumption._monotonic.now += 4.0

    async with consuming(handle, ordered=True, workers=1, time_slice=10.0) as bench:
        bench.consumption._monotonic = HandMonotonic()
        first = bench.own(messages(30), lock=LockStub())
        second = bench.own(messages(30, queue=1), lock=LockStub())
        await until(lambda: (bench.position(first), bench.position(second)) == (30, 30))

    changes = sum(1 for before, after in pairwise(order) if before != after)
    assert changes >= 6, "one queue kept the worker although its time was over"
    assert changes < 59, "a queue lost the worker after every message"


class HandMonotonic:
    """A clock that stands still between the steps of a test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TestCommittingListener:
    """A low-level listener that turns auto-commit off."""

    async def test_success_alone_moves_nothing(self):
        def listen(batch, context):
            context.auto_commit = False
            return Verdict.COMMIT if batch[0].queue_offset == 3 else Verdict.SUCCESS

        async with consuming(listen, ordered=True, listener=True) as bench:
            owned = bench.own(messages(6), lock=LockStub())
            # Two are taken on the way to the commit as well.
            await until(lambda: bench.position(owned) == 4 and owned.window.taken_count == 2)

            assert bench.position(owned) == 4

    async def test_rollback_repeats_everything_since_the_last_commit(self):
        seen: list[int] = []

        def listen(batch, context):
            context.auto_commit = False
            context.suspend = 0.01
            seen.append(batch[0].queue_offset)
            if batch[0].queue_offset == 1:
                return Verdict.COMMIT
            if batch[0].queue_offset == 3:
                return Verdict.ROLLBACK if seen.count(3) == 1 else Verdict.COMMIT
            return Verdict.SUCCESS

        async with consuming(listen, ordered=True, listener=True) as bench:
            owned = bench.own(messages(4), lock=LockStub())
            await until(lambda: bench.position(owned) == 4)

        assert seen == [0, 1, 2, 3, 2, 3]

    async def test_with_auto_commit_every_good_verdict_is_success(self):
        verdicts = [Verdict.COMMIT, Verdict.ROLLBACK, Verdict.SUCCESS]

        def listen(batch, context):
            return verdicts[batch[0].queue_offset]

        async with consuming(listen, ordered=True, listener=True) as bench:
            owned = bench.own(messages(3), lock=LockStub())
            await until(lambda: bench.position(owned) == 3)

    async def test_a_failure_repeats_the_call_only(self):
        seen: list[int] = []

        def listen(batch, context):
            context.auto_commit = False
            context.suspend = 0.01
            seen.append(batch[0].queue_offset)
            if batch[0].queue_offset == 1 and seen.count(1) < 3:
                return Verdict.RETRY
            return Verdict.COMMIT if batch[0].queue_offset == 2 else Verdict.SUCCESS

        async with consuming(listen, ordered=True, listener=True) as bench:
            owned = bench.own(messages(3), lock=LockStub())
            await until(lambda: bench.position(owned) == 3)

        assert seen == [0, 1, 1, 1, 2]

    @pytest.mark.parametrize("fails", ["raises", "returns"])
    async def test_a_failure_commits_nothing_of_what_came_before(self, fails):
        seen: list[int] = []

        def listen(batch, context):
            context.suspend = 0.01
            seen.append(batch[0].queue_offset)
            if seen == [0, 1]:
                # Before it has said that it commits by itself.
                if fails == "raises":
                    raise ValueError("once")
                return Verdict.RETRY
            context.auto_commit = False
            if seen == [0, 1, 1]:
                return Verdict.ROLLBACK
            return Verdict.SUCCESS

        async with consuming(listen, ordered=True, listener=True) as bench:
            owned = bench.own(messages(2), lock=LockStub())
            await until(lambda: len(seen) == 5 and owned.window.taken_count == 2)

            assert seen == [0, 1, 1, 0, 1], "the rollback is of both"
            assert bench.position(owned) in (None, 0)

    async def test_of_a_batch_only_the_part_that_succeeded_is_left_uncommitted(self):
        batches: list[list[int]] = []

        def listen(batch, context):
            context.auto_commit = False
            context.suspend = 0.01
            batches.append([message.queue_offset for message in batch])
            if len(batches) == 1:
                context.ack_index = 0
                return Verdict.SUCCESS
            return Verdict.ROLLBACK if len(batches) == 2 else Verdict.COMMIT

        async with consuming(listen, ordered=True, listener=True, batch_size=2) as bench:
            owned = bench.own(messages(2), lock=LockStub())
            await until(lambda: len(owned.window) == 0)

        assert batches == [[0, 1], [1], [0, 1]]
        assert bench.position(owned) == 2

    async def test_what_is_rolled_back_counts_as_failed(self):
        verdicts = [Verdict.ROLLBACK, Verdict.COMMIT]

        def listen(batch, context):
            context.auto_commit = False
            context.suspend = 0.01
            return verdicts.pop(0)

        async with consuming(listen, ordered=True, listener=True) as bench:
            owned = bench.own(messages(1), lock=LockStub())
            await until(lambda: len(owned.window) == 0)

        counted = bench.statistics.topic("orders")
        assert (counted.consumed, counted.failed) == (1, 1)


async def test_a_run_is_never_of_both_kinds_of_handlers():
    seen: list[tuple[str, bool]] = []
    here = threading.get_ident()

    def handle(message):
        seen.append((message.topic, threading.get_ident() == here))

    async def handle_async(message):
        seen.append((message.topic, threading.get_ident() == here))

    by_topic = {
        "orders": bind_handler(handle, group=GROUP),
        "refunds": bind_handler(handle_async, group=GROUP),
    }
    topics = ["orders", "orders", "refunds", "orders", "refunds", "refunds"]
    async with consuming(by_topic, ordered=True) as bench:
        owned = bench.own([retried(at, topic) for at, topic in enumerate(topics)], lock=LockStub())
        await until(lambda: bench.position(owned) == 6)

    assert seen == [(topic, topic == "refunds") for topic in topics]


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
            handle, ordered=True, batch_size=batch_size, suspend=0.01, max_retries=limit
        ) as bench:
            owned = bench.own(lock=LockStub())
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

    done.clear()
    asyncio.run(scenario())


async def test_a_coroutine_handler_that_raises_no_exception_is_tried_again():
    attempts: list[int] = []

    async def handle(message):
        attempts.append(message.reconsume_times)
        if len(attempts) == 1:
            raise SystemExit(1)

    async with consuming(handle, ordered=True, suspend=0.01) as bench:
        owned = bench.own(messages(1), lock=LockStub())
        await until(lambda: bench.position(owned) == 1)

    assert attempts == [0, 1]


async def test_a_queue_goes_on_once_its_worker_can_be_started(monkeypatch, caplog):
    refused = refuse_threads(monkeypatch, f"orbitmq-{GROUP}", times=2)
    seen: list[int] = []

    async with consuming(
        lambda message: seen.append(message.queue_offset), ordered=True, local_retry=0.01
    ) as bench:
        owned = bench.own(messages(40))
        assert len(refused) == 1
        assert owned.running == 0
        assert owned.window.taken_count == 0
        await until(lambda: bench.position(owned) == 40)

        assert len(refused) == 2
        assert seen == list(range(40))
        assert "wait for a worker of group billing, which could not be started" in caplog.text
        assert await bench.consumption.drain(owned, DEADLINE)


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(100, [100, 100, 50]), (20, [20] * 12 + [10])], ids=str
)
async def test_batches_are_as_large_as_they_may_be(batch_size, sizes):
    batches: list[int] = []

    def handle(batch):
        batches.append(len(batch))

    async with consuming(handle, ordered=True, batch_size=batch_size) as bench:
        owned = bench.own(messages(250))
        await until(lambda: bench.position(owned) == 250)

    assert batches == sizes


async def test_a_message_that_was_put_off_stays_when_its_batch_is_given_up():
    attempts: list[list[tuple[int, int]]] = []

    class PuttingOff:
        def before(self, delivery: Delivery) -> None:
            for message in delivery.messages:
                if message.queue_offset == 1 and message.attempt == 1:
                    delivery.put_off(message, Retry("busy", delay=0.01))

    def handle(batch):
        attempts.append([(message.queue_offset, message.attempt) for message in batch])
        if batch[0].queue_offset == 0:
            raise DeadLetter("bad")

    binding = bind_handler(handle, group=GROUP, batch=True, middleware=[PuttingOff()])
    async with consuming({"orders": binding}, ordered=True) as bench:
        owned = bench.own(messages(2))
        await until(lambda: bench.position(owned) == 2)

        assert [message.queue_offset for message, _ in bench.sent_back.given_up] == [0]
        assert attempts == [[(0, 1)], [(1, 2)]]
