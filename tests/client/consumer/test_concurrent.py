"""Concurrent consumption: verdicts, progress, send-backs, lost queues, calls that take too long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.client.consumer.handlers import bind_handler
from orbitmq.client.consumer.verdict import (
    BY_ATTEMPTS,
    DEAD,
    DeadLetter,
    Failure,
    Outcome,
    Retry,
    Verdict,
)
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.middleware import Delivery, LogDeliveries
from orbitmq.client.routes import Queue
from tests.support.consuming import (
    DEADLINE,
    GROUP,
    consuming,
    received,
    retried,
    until,
    until_at_least,
)
from tests.support.scarcethreads import refuse_threads
from tests.support.store import HandClock


def messages(count: int, start: int = 0) -> list[ReceivedMessage]:
    return [received(offset) for offset in range(start, start + count)]


class Gate:
    """Handlers wait here, in threads, until a test lets them go."""

    def __init__(self) -> None:
        self.entered: list[int] = []
        self._opened = threading.Event()

    def __call__(self, message: ReceivedMessage) -> None:
        self.entered.append(message.queue_offset)
        self._opened.wait(DEADLINE)

    def open(self) -> None:
        self._opened.set()


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
async def test_consumed_messages_move_progress_to_the_end(is_async):
    seen: list[int] = []

    async def handle_async(message):
        await asyncio.sleep(0)
        seen.append(message.queue_offset)

    handler = handle_async if is_async else lambda message: seen.append(message.queue_offset)
    async with consuming(handler) as bench:
        owned = bench.own(messages(100, start=5))
        await until(lambda: bench.position(owned) == 105)

    assert sorted(seen) == list(range(5, 105))
    assert len(owned.window) == 0
    assert owned.running == 0


@pytest.mark.feature("D6")
async def test_progress_never_passes_an_unfinished_message():
    gate = Gate()

    def handle(message):
        if message.queue_offset == 3:
            gate(message)

    async with consuming(handle) as bench:
        owned = bench.own(messages(10))
        await until(lambda: len(owned.window) == 1)
        assert bench.position(owned) == 3

        gate.open()
        await until(lambda: bench.position(owned) == 10)


@pytest.mark.feature("D5")
async def test_messages_after_the_index_go_back():
    def handle(batch):
        return 1

    async with consuming(handle, batch_size=4) as bench:
        owned = bench.own(messages(4))
        await until(lambda: bench.position(owned) == 4)

    assert bench.sent_back.offsets == [2, 3]
    assert bench.statistics.topic("orders").consumed == 2
    assert bench.statistics.topic("orders").failed == 2


async def test_a_listener_acknowledges_by_its_context():
    def listen(batch, context):
        context.ack_index = 0
        context.delay_level = 5
        return Verdict.SUCCESS

    async with consuming(listen, listener=True, batch_size=3) as bench:
        owned = bench.own(messages(3))
        await until(lambda: bench.position(owned) == 3)

    assert bench.sent_back.offsets == [1, 2]
    assert {failure.level for _, failure in bench.sent_back.back} == {5}


def fails_by(what: BaseException | object) -> Callable[[ReceivedMessage], object]:
    def handle(message: ReceivedMessage) -> object:
        if isinstance(what, BaseException):
            raise what
        return what

    return handle


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
    async with consuming(fails_by(what)) as bench:
        owned = bench.own(messages(1))
        await until(lambda: bench.position(owned) == 1)

    ((message, failure),) = bench.sent_back.back
    assert message.queue_offset == 0
    assert (failure.level, failure.delay) == (level, delay)
    assert failure.reason


@pytest.mark.parametrize("verdict", [Verdict.COMMIT, Verdict.ROLLBACK])
async def test_verdicts_for_order_are_no_success_without_order(verdict):
    async with consuming(lambda batch, context: verdict, listener=True) as bench:
        owned = bench.own(messages(1))
        await until(lambda: bench.position(owned) == 1)

    assert bench.sent_back.offsets == [0]


@pytest.mark.feature("D7")
@pytest.mark.parametrize("surrounded", [False, True], ids=["bare", "with middleware"])
async def test_a_message_whose_handler_raises_what_ends_coroutines_goes_back(surrounded):
    seen: list[int] = []

    async def handle(message):
        seen.append(message.queue_offset)
        if message.queue_offset == 1:
            raise GeneratorExit

    middleware = [LogDeliveries()] if surrounded else []
    binding = bind_handler(handle, group=GROUP, middleware=middleware)
    async with consuming({"orders": binding}, workers=1) as bench:
        owned = bench.own(messages(3))
        await until(lambda: bench.position(owned) == 3)

    assert seen == [0, 1, 2]
    assert bench.sent_back.offsets == [1]


async def test_progress_waits_for_the_broker_to_take_a_message_back():
    async with consuming(fails_by(ValueError("no"))) as bench:
        bench.sent_back.gate = asyncio.Event()
        owned = bench.own(messages(1))
        await until(lambda: bench.sent_back.offsets == [0])
        assert bench.position(owned) is None
        assert owned.running == 1

        bench.sent_back.gate.set()
        await until(lambda: bench.position(owned) == 1)


@pytest.mark.feature("F8")
async def test_a_message_that_nobody_takes_back_is_tried_again_here():
    attempts: list[int] = []

    def handle(message):
        attempts.append(message.attempt)
        if message.attempt < 3:
            raise ValueError("not yet")

    async with consuming(handle, local_retry=0.02) as bench:
        bench.sent_back.takes = False
        owned = bench.own(messages(1))
        await until(lambda: bench.position(owned) == 1)

    assert attempts == [1, 2, 3]
    assert bench.statistics.kept_back == 2


async def test_a_message_that_fails_on_its_way_back_is_tried_again_here(caplog):
    def handle(message):
        if message.queue_offset == 1 and message.attempt == 1:
            raise ValueError("not yet")

    async with consuming(handle, local_retry=0.02) as bench:
        bench.sent_back.raises = TypeError("a mistake")
        owned = bench.own(messages(3))
        await until(lambda: bench.position(owned) == 3)

        assert owned.running == 0
        assert await bench.consumption.drain(owned, DEADLINE)
    assert bench.statistics.kept_back == 1
    (line,) = [each for each in caplog.records if "could not be sent back" in each.getMessage()]
    assert line.exc_info is not None
    assert line.exc_info[0] is TypeError


async def test_nothing_is_tried_again_after_the_stop():
    calls: list[int] = []

    def handle(message):
        calls.append(1)
        raise ValueError("no")

    async with consuming(handle, local_retry=0.5) as bench:
        bench.sent_back.takes = False
        owned = bench.own(messages(1))
        await until(lambda: bench.statistics.kept_back == 1)
    await asyncio.sleep(0.6)

    assert calls == [1]
    assert bench.position(owned) is None


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
async def test_a_queue_dropped_during_the_call_is_not_committed():
    gate = Gate()
    async with consuming(gate) as bench:
        owned = bench.own(messages(2))
        await until(lambda: sorted(gate.entered) == [0, 1])

        owned.drop()
        gate.open()
        await until(lambda: bench.statistics.duplicates == 2)

        assert bench.position(owned) is None


async def test_a_failure_on_a_dropped_queue_is_not_sent_back():
    gate = Gate()

    def handle(message):
        gate(message)
        raise ValueError("late")

    async with consuming(handle) as bench:
        owned = bench.own(messages(1))
        await until(lambda: gate.entered == [0])
        owned.drop()
        gate.open()
        await until(lambda: bench.statistics.duplicates == 1)

    assert not bench.sent_back.back


class TestDrain:
    async def test_an_idle_queue_is_drained_at_once(self):
        async with consuming(fails_by(None)) as bench:
            owned = bench.own(messages(3))
            await until(lambda: bench.position(owned) == 3)

            assert await bench.consumption.drain(owned, 0)

    async def test_running_calls_are_waited_for_and_count(self):
        gate = Gate()
        async with consuming(gate, workers=2) as bench:
            owned = bench.own(messages(6))
            await until(lambda: sorted(gate.entered) == [0, 1])
            draining = asyncio.create_task(bench.consumption.drain(owned, DEADLINE))
            await asyncio.sleep(0.01)
            assert not draining.done()

            gate.open()

            assert await draining
            assert bench.position(owned) == 2
            assert sorted(gate.entered) == [0, 1], "something was begun while draining"

    async def test_calls_that_wait_behind_other_queues_are_not_waited_for(self):
        gate = Gate()
        other = [received(n, queue=Queue("orders", "broker-b", 1)) for n in range(2)]
        async with consuming(gate, workers=1) as bench:
            busy = bench.own(messages(1))
            await until(lambda: gate.entered == [0])
            waiting = bench.own(other)

            assert await bench.consumption.drain(waiting, 0)

            gate.open()
            await until(lambda: bench.position(busy) == 1)
        assert gate.entered == [0]

    async def test_it_gives_up_after_its_time(self):
        gate = Gate()
        async with consuming(gate) as bench:
            owned = bench.own(messages(1))
            await until(lambda: gate.entered == [0])

            assert not await bench.consumption.drain(owned, 0.02)
            gate.open()

    async def test_messages_that_handlers_are_at_work_on_are_counted_not_calls(self):
        entered: list[int] = []
        gate = threading.Event()

        def handle(batch):
            entered.append(len(batch))
            gate.wait(DEADLINE)

        async with consuming(handle, workers=2, batch_size=4) as bench:
            owned = bench.own(messages(20))
            await until(lambda: entered == [4, 4])

            assert not await bench.consumption.drain(owned, 0.02)
            during = bench.consumption.in_hand(owned)
            gate.set()

            assert await bench.consumption.drain(owned, DEADLINE)
            assert (during, bench.consumption.in_hand(owned)) == (8, 0)

    async def test_what_is_being_sent_back_is_waited_for(self):
        async with consuming(fails_by(ValueError("no"))) as bench:
            bench.sent_back.gate = asyncio.Event()
            owned = bench.own(messages(1))
            await until(lambda: bench.sent_back.offsets == [0])
            assert not await bench.consumption.drain(owned, 0.02)

            bench.sent_back.gate.set()

            assert await bench.consumption.drain(owned, DEADLINE)
            assert bench.position(owned) == 1

    async def test_nothing_is_accepted_any_more(self):
        seen: list[int] = []
        async with consuming(lambda m: seen.append(m.queue_offset)) as bench:
            owned = bench.own()
            await bench.consumption.drain(owned, 0)

            bench.feed(owned, messages(3))

            assert await bench.consumption.drain(owned, 0)
        assert not seen


class TestTooLong:
    async def test_a_call_that_takes_too_long_is_given_up(self):
        gate, clock = Gate(), HandClock()

        def handle(message):
            if message.queue_offset == 0:
                gate(message)

        async with consuming(handle, timeout=0.5, clock=clock) as bench:
            owned = bench.own(messages(3))
            await until(lambda: bench.statistics.topic("orders").consumed == 2 and gate.entered)
            assert bench.statistics.timed_out == 0

            clock.advance(0.6)

            await until(lambda: bench.position(owned) == 3)

            ((message, failure),) = bench.sent_back.back
            assert message.queue_offset == 0
            assert failure.level == 3
            assert bench.statistics.timed_out == 1
            gate.open()

    async def test_what_it_comes_to_in_the_end_does_not_count(self):
        gate = Gate()

        def handle(message):
            gate(message)
            raise ValueError("late")

        async with consuming(handle, timeout=0.5) as bench:
            owned = bench.own(messages(1))
            await until(lambda: bench.position(owned) == 1)
            gate.open()
            await until(lambda: owned.running == 0)

            assert bench.sent_back.offsets == [0], "it went back twice"

    async def test_calls_that_wait_for_a_worker_are_not_late(self):
        gate, clock = Gate(), HandClock()
        async with consuming(gate, timeout=0.5, workers=1, clock=clock) as bench:
            bench.own(messages(4))
            await until(lambda: gate.entered)
            clock.advance(0.6)
            await until(lambda: bench.sent_back.offsets == [0])
            gate.open()
            await until(lambda: len(gate.entered) == 4)

            assert bench.sent_back.offsets == [0]


class TestRetryTopic:
    async def test_a_retried_message_reaches_the_handler_of_its_own_topic(self):
        seen: list[tuple[str, str]] = []

        def noting(topic):
            return lambda message: seen.append((topic, message.topic))

        by_topic = {
            topic: bind_handler(noting(topic), group=GROUP) for topic in ("orders", "refunds")
        }
        async with consuming(by_topic) as bench:
            owned = bench.own([retried(0, "refunds"), retried(1, "orders"), retried(2, "refunds")])
            await until(lambda: bench.position(owned) == 3)

        assert sorted(seen) == [
            ("orders", "orders"),
            ("refunds", "refunds"),
            ("refunds", "refunds"),
        ]

    async def test_batches_are_of_one_topic_each(self):
        batches: list[list[int]] = []

        def handle(batch):
            assert len({message.topic for message in batch}) == 1
            batches.append([message.queue_offset for message in batch])

        binding = bind_handler(handle, group=GROUP, batch_size=2)
        other = bind_handler(handle, group=GROUP, batch_size=2)
        async with consuming({"orders": binding, "refunds": other}) as bench:
            topics = ["orders", "orders", "orders", "refunds", "orders"]
            owned = bench.own([retried(at, topic) for at, topic in enumerate(topics)])
            await until(lambda: bench.position(owned) == 5)

        assert sorted(batches) == [[0, 1], [2], [3], [4]]

    async def test_a_topic_without_a_handler_is_tried_again_with_the_reason(self):
        async with consuming(fails_by(None)) as bench:
            owned = bench.own([retried(0, "invoices")])
            await until(lambda: bench.position(owned) == 1)

        ((_, failure),) = bench.sent_back.back
        assert failure.level == BY_ATTEMPTS
        assert "no handler for topic invoices" in str(failure.reason)


async def test_a_direct_call_has_no_consequences():
    def handle(message):
        raise ValueError("direct")

    async with consuming(handle) as bench:
        call = await bench.consumption.consume_directly(received(7))

        assert call.outcome is not None
        assert call.outcome.failure is not None
        assert call.outcome.failure.reason == "ValueError: direct"
        assert not bench.sent_back.back
        assert bench.progress.positions() == {}


async def test_statistics_count_messages_calls_and_time():
    def handle(batch):
        return 0

    async with consuming(handle, batch_size=2) as bench:
        owned = bench.own(messages(6))
        await until(lambda: bench.position(owned) == 6)

        status = bench.statistics.status("orders")
        counted = bench.statistics.topic("orders")

    assert (counted.consumed, counted.failed, counted.failed_last_hour) == (3, 3, 3)
    assert status.consume_ok_tps > 0
    assert status.consume_failed_msgs == 3
    assert status.consume_rt >= 0


class Plan:
    """What handlers do with each message, and when, in a random test."""

    def __init__(self, verdicts: Sequence[str]) -> None:
        self.verdicts = verdicts
        self.gates = [asyncio.Event() for _ in verdicts]
        self.handled: list[int] = []

    async def __call__(self, message: ReceivedMessage) -> None:
        offset = message.queue_offset
        await self.gates[offset].wait()
        self.handled.append(offset)
        if self.verdicts[offset] == "fail":
            raise ValueError("planned")
        if self.verdicts[offset] == "dead":
            raise DeadLetter("planned")


class Doubtful:
    """Middleware that says something about messages which are not those of the call."""

    def __init__(self, *failed: ReceivedMessage) -> None:
        self._failed = failed

    def after(self, delivery: Delivery) -> None:
        delivery.outcome = Outcome(Verdict.RETRY, self._failed, Failure())


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])
@pytest.mark.parametrize("claimed", [(7,), (1, 1)], ids=["a stranger", "one twice"])
async def test_an_outcome_that_does_not_add_up_lets_all_messages_come_again(ordered, claimed):
    doubtful = Doubtful(*(received(offset) for offset in claimed))

    def handle(batch):
        """Content with everything."""

    binding = bind_handler(handle, group=GROUP, batch=True, middleware=[doubtful])
    async with consuming({"orders": binding}, ordered=ordered, max_retries=0) as bench:
        owned = bench.own(messages(3))
        await until(lambda: bench.position(owned) == 3)

    again = bench.sent_back.given_up if ordered else bench.sent_back.back
    assert sorted(message.queue_offset for message, _ in again) == [0, 1, 2]


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
            open_ones = set(range(len(verdicts)))
            for done, offset in enumerate(order):
                plan.gates[offset].set()
                open_ones.discard(offset)
                await until_at_least(lambda: len(verdicts) - len(owned.window), done + 1)
                await _check(bench, owned_position=min(open_ones, default=len(verdicts)))
            assert sorted(bench.sent_back.offsets) == [
                at for at, verdict in enumerate(verdicts) if verdict != "ok"
            ]

    async def _check(bench, *, owned_position):
        positions = set(bench.progress.positions().values())
        assert positions == {owned_position} or (not positions and owned_position == 0)

    asyncio.run(scenario())


async def test_messages_are_handled_once_a_worker_can_be_started(monkeypatch, caplog):
    refused = refuse_threads(monkeypatch, f"orbitmq-{GROUP}", times=2)
    seen: list[int] = []

    async with consuming(
        lambda message: seen.append(message.queue_offset), local_retry=0.01
    ) as bench:
        owned = bench.own(messages(5))
        assert len(refused) == 1
        assert owned.running == 0
        await until(lambda: bench.position(owned) == 5)

        assert len(refused) == 2
        assert sorted(seen) == list(range(5))
        assert owned.running == 0
        assert "wait for a worker of group billing, which could not be started" in caplog.text


async def test_a_message_that_was_put_off_goes_back_as_it_was_put_off():
    class PuttingOff:
        def before(self, delivery: Delivery) -> None:
            delivery.put_off(delivery.messages[1], Retry("busy", delay=60))

    def handle(batch):
        raise DeadLetter("bad")

    binding = bind_handler(handle, group=GROUP, batch=True, middleware=[PuttingOff()])
    async with consuming({"orders": binding}) as bench:
        owned = bench.own(messages(2))
        await until(lambda: bench.position(owned) == 2)

        back = {message.queue_offset: failure for message, failure in bench.sent_back.back}
        assert (back[0].level, back[0].reason) == (DEAD, "bad")
        assert (back[1].level, back[1].delay, back[1].reason) == (BY_ATTEMPTS, 60, "busy")
        assert bench.statistics.dead_letters == 1
