"""Failed messages, from the handler through the broker and back, to the dead letters."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from typing import Any

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.settings import ConsumeSettings
from orbitmq.client.consumer.verdict import DeadLetter, Retry
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import MessageRefused
from orbitmq.message.properties import (
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
)
from orbitmq.message.stored import StoredMessage
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings
from tests.support.consumers import (
    committed,
    consumer_of,
    done_here,
    new_group,
    producer_of,
    send,
    until_owned,
    until_retry_is_owned,
)
from tests.support.consuming import DEADLINE, until, until_at_least

QUEUE_COUNT = 1

PARKED = "SCHEDULE_TOPIC_XXXX"
TIMED = "rmq_sys_wheel_timer"
#: Seconds of the retries, by their number.
DELAYS = [10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200]


class Failing:
    """A handler that fails for its first calls, or for ever."""

    def __init__(self, times: int | None = None, error: BaseException | None = None) -> None:
        self._times = times
        self._error = error or ValueError("no such order")
        self.calls: list[ReceivedMessage] = []

    def __call__(self, message: ReceivedMessage) -> None:
        self.calls.append(message)
        if self._times is None or len(self.calls) <= self._times:
            raise self._error

    @property
    def attempts(self) -> list[int]:
        return [message.attempt for message in self.calls]


def parked_levels(cluster: AsyncEmbeddedCluster) -> list[int]:
    """The delay levels of everything that was ever put off, in order."""
    return [message.queue_id + 1 for message in cluster.messages(PARKED)]


def stored(messages: list[StoredMessage]) -> list[bytes]:
    return [message.body for message in messages]


@pytest.mark.feature("F2")
async def test_the_copy_keeps_everything_but_the_count_of_attempts(cluster):
    fail = Failing(times=1)
    consumer = consumer_of(cluster)
    consumer.on("orders", tags="paid")(fail)
    async with consumer:
        await send(cluster, "orders", ["x"], tags="paid", keys="o-1", properties={"colour": "red"})
        await until(lambda: consumer.statistics().sent_back == 1)
        await until_retry_is_owned(consumer)
        (original,) = cluster.messages("orders")
        cluster.advance(10)
        await until(lambda: len(fail.calls) == 2)

    first, second = fail.calls
    assert second.topic == first.topic == "orders"
    assert second.unique_id == first.unique_id
    assert (second.tags, second.keys, second.get("colour")) == ("paid", ("o-1",), "red")
    assert (first.reconsume_times, second.reconsume_times) == (0, 1)
    assert second.origin_id == first.offset_id
    assert second.get(ORIGIN_MESSAGE_ID) == first.offset_id
    assert second.get(RETRY_TOPIC) == "orders"
    (same,) = cluster.messages("orders")
    assert same == original, "the message itself was touched"


@pytest.mark.feature("F3")
@pytest.mark.feature("F6")
async def test_delays_grow_up_to_two_hours_and_after_sixteen_retries_it_is_dead(cluster):
    fail = Failing()
    consumer = consumer_of(cluster)
    consumer.on("orders")(fail)
    async with consumer:
        await send(cluster, "orders", ["x"])
        await until_retry_is_owned(consumer)
        for retry, delay in enumerate(DELAYS, 1):
            await until_at_least(lambda: consumer.statistics().sent_back, retry)
            assert parked_levels(cluster) == list(range(3, 3 + retry))
            cluster.advance(delay)
            await until_at_least(lambda: len(fail.calls), retry + 1)
        dead_letters = f"%DLQ%{consumer.group}"
        await until(lambda: len(cluster.messages(dead_letters)) == 1)
        await until(lambda: consumer.statistics().dead_letters == 1)

    assert fail.attempts == list(range(1, 18))
    (dead,) = cluster.messages(dead_letters)
    assert dead.body == b"x"
    assert dead.reconsume_times == 17
    assert dead.get_property(DLQ_ORIGIN_TOPIC) == "orders"
    assert dead.get_property(DLQ_ORIGIN_MESSAGE_ID) == fail.calls[0].offset_id
    assert dead.get_property("DLQ_REASON") == "ValueError: no such order"


@pytest.mark.feature("F3")
async def test_a_handler_names_its_own_delay(cluster):
    fail = Failing(times=1, error=Retry("bank is closed", delay=45))
    consumer = consumer_of(cluster)
    consumer.on("orders")(fail)
    async with consumer:
        await send(cluster, "orders", ["x"])
        await until(lambda: consumer.statistics().sent_back == 1)
        await until_retry_is_owned(consumer)
        (timed,) = cluster.messages(TIMED)
        due = int(timed.get_property("TIMER_OUT_MS") or 0)
        assert 44_000 < due - timed.store_ms <= 46_000

        cluster.advance(46)
        await until(lambda: len(fail.calls) == 2)

    assert parked_levels(cluster) == []


@pytest.mark.feature("F4")
async def test_a_retry_is_seen_by_its_group_only_and_with_its_own_topic(cluster):
    fail, other_calls = Failing(times=1), Counter[str]()
    consumer, other = consumer_of(cluster), consumer_of(cluster)
    consumer.on("orders")(fail)
    other.on("orders")(lambda message: other_calls.update([message.text()]))
    async with consumer, other:
        await send(cluster, "orders", ["x"])
        await until(lambda: consumer.statistics().sent_back == 1 and other_calls["x"] == 1)
        await until_retry_is_owned(consumer)
        await until_retry_is_owned(other)
        cluster.advance(10)
        await until(lambda: len(fail.calls) == 2)

        assert stored(cluster.messages(f"%RETRY%{consumer.group}")) == [b"x"]
        assert fail.calls[1].queue.topic == f"%RETRY%{consumer.group}"
        assert fail.calls[1].topic == "orders"

    assert other_calls == {"x": 1}


@pytest.mark.feature("F5")
async def test_a_new_group_has_its_retry_topic_without_asking_for_it(cluster):
    group = new_group("never-seen")
    async with AsyncAdmin(name_server=cluster.name_server) as admin:
        before = {each.name for each in await admin.topics.list()}
        consumer = consumer_of(cluster, group)
        consumer.on("orders")(lambda message: None)
        async with consumer:
            await until_retry_is_owned(consumer)
        after = {each.name for each in await admin.topics.list()}

    assert after - before == {f"%RETRY%{group}"}


@pytest.mark.feature("F6")
@pytest.mark.parametrize("by", ["consumer", "group"])
async def test_the_number_of_retries_is_a_setting_of_the_consumer_or_of_the_group(cluster, by):
    group = new_group()
    options: dict[str, Any] = {}
    if by == "consumer":
        options["max_retries"] = 1
    else:
        async with AsyncAdmin(name_server=cluster.name_server) as admin:
            await admin.groups.create(group, max_retries=1)
    fail = Failing()
    consumer = consumer_of(cluster, group, **options)
    consumer.on("orders")(fail)
    async with consumer:
        await send(cluster, "orders", ["x"])
        await until(lambda: consumer.statistics().sent_back == 1)
        await until_retry_is_owned(consumer)
        cluster.advance(10)
        await until(lambda: len(cluster.messages(f"%DLQ%{group}")) == 1)
        await until(lambda: consumer.statistics().sent_back == 2)
        # How many a group is allowed at the broker is not known here.
        assert consumer.statistics().dead_letters == (1 if by == "consumer" else 0)

    assert fail.attempts == [1, 2]


@pytest.mark.feature("F11")
@pytest.mark.feature("D7")
async def test_failures_do_not_hold_progress_back(cluster):
    def handle(message):
        if int(message.text()) % 3 == 0:
            raise ValueError("every third")

    consumer = consumer_of(cluster)
    consumer.on("orders")(handle)
    async with consumer:
        await send(cluster, "orders", range(30))
        await until(lambda: done_here(consumer) == 30)

    assert committed(cluster, consumer.group, "orders") == 30
    assert sorted(parked_levels(cluster)) == [3] * 10


@pytest.mark.feature("D13")
async def test_a_message_whose_handler_takes_too_long_is_sent_back(cluster):
    entered, opened = threading.Event(), threading.Event()
    calls: list[int] = []

    def handle(message):
        calls.append(message.attempt)
        if message.attempt == 1:
            entered.set()
            opened.wait(DEADLINE)

    consumer = consumer_of(cluster, consume=ConsumeSettings(timeout=0.1))
    consumer.on("orders")(handle)
    async with consumer:
        await send(cluster, "orders", ["x"])
        await until(lambda: done_here(consumer) == 1)
        assert parked_levels(cluster) == [3]
        assert consumer.statistics().timed_out == 1
        await until_retry_is_owned(consumer)

        cluster.advance(10)
        await until(lambda: calls == [1, 2])
        opened.set()

    assert ConsumeSettings().timeout == 15 * 60


async def test_when_its_broker_is_gone_the_copy_goes_to_another_one():
    async with AsyncEmbeddedCluster(brokers=2) as cluster:
        await cluster.create_topic("orders", queues=1)
        entered, go_on = asyncio.Event(), asyncio.Event()
        calls: list[ReceivedMessage] = []

        async def handle(message):
            calls.append(message)
            entered.set()
            await go_on.wait()
            if message.attempt == 1:
                raise ValueError("no")

        consumer = consumer_of(cluster, consume=ConsumeSettings(send_back_timeout=0.5))
        consumer.on("orders")(handle)
        async with consumer:
            await until_owned(consumer, 2)
            await until_retry_is_owned(consumer)
            await send(cluster, "orders", ["b"], queue=Queue("orders", "broker-b", 0))
            await entered.wait()
            await cluster.brokers[1].stop()
            go_on.set()
            await until(lambda: consumer.statistics().sent_back == 1)
            assert PARKED in {queue.topic for queue in cluster.brokers[0].parts.store.queues()}

            cluster.clock.advance(10)
            cluster.brokers[0].parts.delays.wake()
            await until(lambda: len(calls) == 2)

        assert (calls[1].topic, calls[1].attempt) == ("orders", 2)
        assert calls[1].unique_id == calls[0].unique_id
        assert calls[1].origin_id == calls[0].offset_id


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("raises", [ValueError("x" * 900), DeadLetter("x" * 900)])
async def test_a_message_with_many_properties_fails_like_any_other(cluster, ordered, raises):
    fail = Failing(times=1, error=raises)
    consumer = consumer_of(cluster, ordered=ordered)
    consumer.on("orders")(fail)
    filled = {"mine": "y" * 32_100}
    async with consumer:
        await send(cluster, "orders", ["large"], properties=filled)
        await send(cluster, "orders", ["small"])
        await until(lambda: done_here(consumer) == 2)
        assert consumer.statistics().kept_back == 0

    assert committed(cluster, consumer.group, "orders") == 2
    copies = cluster.messages(PARKED) + cluster.messages(f"%DLQ%{consumer.group}")
    if ordered and isinstance(raises, ValueError):
        assert copies == [], "it was tried again in its place"
    else:
        (copy,) = copies
        assert copy.get_property("mine") == filled["mine"]
        assert (copy.get_property("DLQ_REASON") or "").strip("x") in ("", "ValueError: ")


@pytest.mark.parametrize("fields", [{}, {"delay": 3.5}, {"delay_level": 2}])
async def test_what_the_client_lets_pass_the_broker_stores(cluster, fields):
    async with producer_of(cluster) as producer:

        async def send_with(size):
            await producer.send(Message("orders", b"x", properties={"a": "b" * size}, **fields))

        with pytest.raises(MessageRefused, match=r"take \d+ bytes.* may take \d+") as refused:
            await send_with(40_000)
        taken, limit = map(int, re.findall(r"\d\d+", str(refused.value)))
        largest = 40_000 - (taken - limit)

        await send_with(largest)
        with pytest.raises(MessageRefused):
            await send_with(largest + 1)


# ---- brokers that take messages back or do not


#: What an administrator sets a broker to that is to take nothing.
READ_ONLY = {"brokerPermission": "4"}


@pytest.mark.feature("F1")
async def test_each_failed_message_comes_again_from_the_broker_that_stored_it(new_cluster):
    calls: list[ReceivedMessage] = []

    def fail_once(message):
        calls.append(message)
        if message.attempt == 1:
            raise ValueError("no such order")

    async with new_cluster(brokers=2) as cluster:
        await cluster.create_topic("orders", queues=1)
        # That the retry topic is on the second broker as well is told by a later route.
        client = quick_settings(cluster.name_server, route_refresh=0.1)
        consumer = consumer_of(cluster, client=client)
        consumer.on("orders")(fail_once)
        async with consumer:
            for broker in ("broker-a", "broker-b"):
                bodies = [f"{broker} {number}" for number in range(3)]
                await send(cluster, "orders", bodies, queue=Queue("orders", broker, 0))
            await until(lambda: consumer.statistics().sent_back == 6)
            await until(lambda: len(_retry_brokers(consumer.assignment())) == 2)
            cluster.advance(10)
            await until(lambda: len(calls) == 12)
        parked = cluster.messages("SCHEDULE_TOPIC_XXXX")

    first, again = ([each for each in calls if each.attempt == number] for number in (1, 2))
    # Each of them once. Both brokers have messages at the same places, and could be mistaken.
    assert sorted(map(ReceivedMessage.text, again)) == sorted(map(ReceivedMessage.text, first))
    assert len(parked) == 6
    for message in again:
        assert message.queue.topic == f"%RETRY%{consumer.group}"
        assert message.text().startswith(message.queue.broker)


@pytest.mark.feature("F8")
async def test_a_message_that_its_broker_refuses_to_take_back_is_tried_again_here(cluster):
    attempts: list[int] = []
    progress: list[int] = []

    def fail_twice(message):
        attempts.append(message.attempt)
        progress.append(committed(cluster, consumer.group, "orders"))
        if len(attempts) < 3:
            raise ValueError("not yet")

    consumer = consumer_of(cluster, consume=ConsumeSettings(local_retry=0.05))
    consumer.on("orders")(fail_twice)
    await send(cluster, "orders", ["x"])
    async with AsyncAdmin(name_server=cluster.name_server) as admin:
        await admin.config.update_broker("broker-a", READ_ONLY)
    async with consumer:
        await until(lambda: done_here(consumer) == 1)

    statistics = consumer.statistics()
    assert attempts == [1, 2, 3]
    assert progress == [0, 0, 0], "what is not done would be forgotten in a crash"
    assert (statistics.sent_back, statistics.kept_back) == (0, 2)
    assert committed(cluster, consumer.group, "orders") == 1
    assert ConsumeSettings().local_retry == 5.0


def _retry_brokers(queues: frozenset[Queue]) -> set[str]:
    return {queue.broker for queue in queues if queue.topic.startswith("%RETRY%")}
