"""Polling messages of real brokers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.errors import QueueNotAssigned
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer, PollSettings
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.errors import NoRoute, NotRunning, OffsetOutOfRange, SettingError, WrongUse
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers import ResetOffsetRequest
from tests.support.broker import until
from tests.support.polling import (
    BY_HAND,
    DEADLINE,
    GROUP,
    TOPIC,
    consumer,
    poll_count,
    polling,
    progress,
    queue,
    send,
)

QUEUE_COUNT = 2


def bodies(messages: list[ReceivedMessage]) -> list[bytes]:
    return [message.body for message in messages]


# ---- polling


@pytest.mark.feature("B2")
async def test_a_subscribed_consumer_gets_all_messages_of_its_queues_in_order(cluster, sender):
    await send(sender, 100, queues=2)

    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        found = await poll_count(reader, 100)

        assert reader.assignment() == (queue(0), queue(1))
    for number in (0, 1):
        mine = [each.body for each in found if each.queue == queue(number)]
        assert mine == [b"%d" % place for place in range(number, 100, 2)]
    assert found[0].group == GROUP


async def test_a_poll_waits_for_a_message_and_gives_up_without_an_error(cluster, sender):
    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        await until(reader.assignment, DEADLINE)
        assert await reader.poll(0.01) == []
        assert await reader.poll(0) == []

        waiting = asyncio.create_task(reader.poll(DEADLINE))
        await sender.stored(TOPIC, b"now")

        assert bodies(await waiting) == [b"now"]


async def test_messages_come_one_by_one_until_the_consumer_is_stopped(cluster, sender):
    await send(sender, 5)
    found: list[bytes] = []

    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC)

        async def read():
            async for message in reader:
                found.append(message.body)

        reading = asyncio.create_task(read())
        await until(lambda: len(found) == 5, DEADLINE)
        await reader.stop()
        await asyncio.wait_for(reading, DEADLINE)

    assert found == [b"%d" % number for number in range(5)]
    assert progress(cluster)[0] == 5


@pytest.mark.feature("G11")
async def test_a_stop_that_is_cancelled_goes_on_and_commits(cluster, sender):
    await send(sender, 6)
    reader = consumer(cluster)
    reader.subscribe(TOPIC)
    await reader.start()
    await poll_count(reader, 6)

    # As early as can be: wherever it is cancelled, it must have begun.
    stopping = asyncio.create_task(reader.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await asyncio.wait_for(reader.stop(), DEADLINE)

    assert progress(cluster)[0] == 6


async def test_tags_and_conditions_choose_messages(cluster, sender):
    for tag, amount in (("Aa", "1"), ("BB", "2"), ("c", "3")):
        await sender.stored(TOPIC, tag.encode(), properties={"TAGS": tag, "amount": amount})

    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC, "Aa || c")  # "BB" has the hash of "Aa"
        assert bodies(await poll_count(reader, 2)) == [b"Aa", b"c"]
        await until(lambda: reader.position(queue(0)) == 3, DEADLINE)

    async with consumer(cluster) as reader:
        await reader.assign([queue(0)], sql="amount >= 2")
        await reader.seek_to_begin()
        assert bodies(await poll_count(reader, 2)) == [b"BB", b"c"]


async def test_fetching_ahead_is_bounded(cluster, sender):
    await send(sender, 600)
    few = polling(max_cached_messages=20)

    async with consumer(cluster, polling=few) as reader:
        reader.subscribe(TOPIC)
        await until(lambda: reader.statistics().delays, DEADLINE)
        cached = await reader.poll(0)

        assert 20 <= len(cached) < 20 + 256
        assert len(await poll_count(reader, 600 - len(cached))) == 600 - len(cached)


async def test_two_polls_at_a_time_are_refused(cluster):
    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        first = asyncio.create_task(reader.poll(DEADLINE))
        await asyncio.sleep(0)

        with pytest.raises(WrongUse, match="one caller at a time"):
            await reader.poll()

        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await reader.poll(0) == [], "a poll that was cancelled is over"


# ---- progress


@pytest.mark.feature("G11")
async def test_automatic_commits_store_what_earlier_polls_returned(cluster, sender):
    await send(sender, 6)

    quick = polling(auto_commit_interval=0.01)
    async with consumer(cluster, polling=quick) as reader:
        reader.subscribe(TOPIC)
        await reader.poll(DEADLINE, max_messages=2)
        await reader.poll(DEADLINE, max_messages=3)

        await until(lambda: progress(cluster).get(0) == 2, DEADLINE)
        assert await reader.committed(queue(0)) == 2, "the last three are in work"


@pytest.mark.feature("G11")
async def test_a_consumer_that_is_stopped_commits_what_it_returned(cluster, sender):
    await send(sender, 6)

    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        await reader.poll(DEADLINE, max_messages=4)

    assert progress(cluster)[0] == 4


@pytest.mark.feature("G11")
async def test_what_was_in_work_when_an_error_came_is_not_committed(cluster, sender):
    await send(sender, 6)

    async def work():
        async with consumer(cluster) as reader:
            reader.subscribe(TOPIC)
            await reader.poll(DEADLINE, max_messages=2)
            await reader.poll(DEADLINE, max_messages=2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()

    assert progress(cluster)[0] == 2


@pytest.mark.feature("G11")
async def test_without_automatic_commits_progress_is_what_commit_says(cluster, sender):
    await send(sender, 10)

    async with consumer(cluster, polling=BY_HAND) as reader:
        reader.subscribe(TOPIC)
        await reader.poll(DEADLINE, max_messages=4)
        assert await reader.committed(queue(0)) in (None, 0)
        assert (await reader.commit())[queue(0)] == 4
        assert progress(cluster)[0] == 4, "the broker has it when commit returns"

        found = await reader.poll(DEADLINE, max_messages=4)
        await reader.commit({queue(0): 5})
        assert await reader.committed(queue(0)) == 5
        await reader.commit(found[2])
        assert await reader.committed(queue(0)) == 7
        await reader.commit(found[:2])
        assert await reader.committed(queue(0)) == 6, "it does what it is told"

    assert progress(cluster)[0] == 6


@pytest.mark.feature("G12")
async def test_the_next_consumer_goes_on_from_what_was_committed(cluster, sender):
    await send(sender, 10)
    async with consumer(cluster, polling=BY_HAND) as reader:
        reader.subscribe(TOPIC)
        await reader.poll(DEADLINE, max_messages=4)
        await reader.commit()
        await reader.poll(DEADLINE, max_messages=4)

    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        found = await poll_count(reader, 6)

    assert bodies(found)[0] == b"4"


@pytest.mark.parametrize(
    ("done", "error", "text"),
    [
        ({queue(0, "nothing"): 5}, QueueNotAssigned, "nothing@broker-a:0"),
        (
            {queue(1): 1, queue(0): -1},
            SettingError,
            "an offset to commit must be .*0 or more|0 or more",
        ),
        ({queue(1): 1, queue(0): 1.5}, SettingError, "an offset to commit must be a whole number"),
        ({queue(1): 1, queue(0): True}, SettingError, "an offset to commit must be a whole number"),
        ({queue(1): 1, queue(0): 5}, OffsetOutOfRange, "0 to 4, got 5"),
        ([b"?"], SettingError, "or messages"),
        (7, SettingError, "or messages"),
    ],
)
async def test_commits_that_cannot_be_are_refused_and_change_nothing(
    cluster, sender, done, error, text
):
    await send(sender, 8, queues=2)

    async with consumer(cluster, polling=BY_HAND) as reader:
        await reader.assign([queue(0), queue(1)])
        await poll_count(reader, 8)
        with pytest.raises(error, match=text):
            await reader.commit(done)

    assert not any(progress(cluster).values())


async def test_messages_may_be_passed_over_up_to_the_end_that_the_broker_has_now(cluster, sender):
    await send(sender, 4)

    async with consumer(cluster, polling=BY_HAND) as reader:
        await reader.assign([queue(0)])
        await reader.poll(DEADLINE, max_messages=1)
        await send(sender, 10)
        await reader.commit({queue(0): 14})

        assert progress(cluster)[0] == 14


# ---- positions


async def test_seeking_goes_on_from_there_and_forgets_what_was_fetched(cluster, sender):
    await send(sender, 50)

    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        await reader.poll(DEADLINE, max_messages=5)

        await reader.seek(queue(0), 40)
        assert reader.position(queue(0)) == 40
        assert bodies(await poll_count(reader, 10))[0] == b"40"
        await reader.seek_to_begin(queue(0))
        assert bodies(await poll_count(reader, 50))[0] == b"0"
        await reader.seek_to_end()
        await sender.stored(TOPIC, b"new")
        assert bodies(await poll_count(reader, 1)) == [b"new"]


async def test_seeking_to_a_time_finds_the_first_message_from_then_on(cluster, sender):
    await send(sender, 3)
    cluster.advance(100)
    middle = datetime.fromtimestamp(cluster.clock.now(), UTC)
    cluster.advance(100)
    await send(sender, 2)

    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        await until(lambda: len(reader.assignment()) == 2, DEADLINE)
        assert await reader.offsets_for_time(middle) == {queue(0): 3, queue(1): 0}
        await reader.seek_to_time(middle.timestamp())
        assert len(await poll_count(reader, 2)) == 2

        assert await reader.first_offsets() == {queue(0): 0, queue(1): 0}
        assert await reader.end_offsets([queue(0)]) == {queue(0): 5}


async def test_an_offset_outside_of_the_queue_cannot_be_sought(cluster, sender):
    await send(sender, 3)

    async with consumer(cluster) as reader:
        await reader.assign([queue(0)])
        for place, offset, error, text in (
            (queue(0), 4, OffsetOutOfRange, "0 to 3, got 4"),
            (queue(0), "newest", SettingError, "seek must be earliest, latest, a time"),
            (queue(1), 0, QueueNotAssigned, "orders@broker-a:1"),
        ):
            with pytest.raises(error, match=text):
                await reader.seek(place, offset)

        assert len(await poll_count(reader, 3)) == 3


async def test_a_paused_queue_returns_nothing_until_it_is_resumed(cluster, sender):
    await send(sender, 6, queues=2)

    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        await until(lambda: len(reader.assignment()) == 2, DEADLINE)
        reader.pause(queue(0))
        found = await poll_count(reader, 3)
        assert {each.queue for each in found} == {queue(1)}
        assert await reader.poll(0.01) == []

        reader.pause([])  # none of them, and not all
        reader.resume()

        assert {each.queue for each in await poll_count(reader, 3)} == {queue(0)}
        with pytest.raises(SettingError, match=r"must be a Queue\(topic, broker, id\), got"):
            reader.pause("orders")  # type: ignore[arg-type]  # as users write it


async def test_a_reset_by_an_administrator_is_followed(cluster, sender):
    await send(sender, 10)
    async with consumer(cluster) as reader:
        await reader.assign([queue(0)])
        await poll_count(reader, 10)
        reset = ResetOffsetRequest(
            topic=TOPIC, group=GROUP, queue_id=0, offset=4, timestamp=0, is_force=True
        )
        answer = await sender.connection.request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset)
        assert answer.code == 0, answer.remark

        assert bodies(await poll_count(reader, 6))[0] == b"4"
    assert progress(cluster)[0] == 10


# ---- which queues


@pytest.mark.feature("B2")
async def test_assigned_queues_are_read_and_others_are_not(cluster, sender):
    await send(sender, 6, queues=2)

    async with consumer(cluster) as reader:
        await reader.assign([queue(1)])
        first = await poll_count(reader, 3)
        await reader.assign(await reader.queues(TOPIC))
        second = await poll_count(reader, 3)

        assert {each.queue for each in first} == {queue(1)}
        assert {each.queue for each in second} == {queue(0)}
        assert reader.assignment() == (queue(0), queue(1))
        await reader.assign([])
        assert reader.assignment() == ()
    assert progress(cluster) == {0: 3, 1: 3}


async def test_a_consumer_subscribes_or_is_assigned_queues(cluster):
    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        with pytest.raises(WrongUse, match=r"has called subscribe\(\) and cannot assign\(\)"):
            await reader.assign([queue(0)])
    other = consumer(cluster)
    await other.assign([queue(0)])
    with pytest.raises(WrongUse, match=r"has called assign\(\) and cannot subscribe\(\)"):
        other.subscribe(TOPIC)


async def test_a_queue_that_does_not_exist_cannot_be_assigned(cluster):
    async with consumer(cluster) as reader:
        with pytest.raises(SettingError, match="it has orders@broker-a:0, orders@broker-a:1"):
            await reader.assign([queue(7)])
        with pytest.raises(NoRoute):
            await reader.assign([queue(0, "nothing")])
        with pytest.raises(SettingError, match="Queue"):
            await reader.assign(["orders"])  # type: ignore[list-item]
        with pytest.raises(SettingError, match="not by both"):
            await reader.assign([queue(0)], "a", sql="b > 1")

        assert reader.assignment() == ()


async def test_a_topic_that_is_unsubscribed_from_is_given_up_with_its_progress(cluster, sender):
    await send(sender, 4)
    async with consumer(cluster) as reader:
        reader.subscribe(TOPIC)
        await poll_count(reader, 4)

        reader.unsubscribe(TOPIC)
        await until(lambda: reader.assignment() == (), DEADLINE)

        await until(lambda: progress(cluster)[0] == 4, DEADLINE)


async def test_a_queue_is_not_handed_over_while_its_messages_are_in_work(cluster, sender):
    await send(sender, 20, queues=2)

    async with consumer(cluster) as first:
        first.subscribe(TOPIC)
        # All in one poll: a second one would say that what the first returned is done.
        await until(lambda: sum(first.lag().values()) == 20, DEADLINE)
        in_work = await poll_count(first, 20)
        async with consumer(cluster) as second:
            second.subscribe(TOPIC)
            await until(lambda: len(first.assignment()) == 1, DEADLINE)
            (leaving,) = {queue(0), queue(1)} - set(first.assignment())
            assert await second.poll(0.1) == []
            assert leaving not in second.assignment(), "the application has not polled again"

            await first.poll(0)  # done with what it had

            await until(lambda: second.assignment() == (leaving,), DEADLINE)
            await sender.stored(TOPIC, b"new", queue_id=leaving.id)
            assert bodies(await poll_count(second, 1)) == [b"new"]
    assert len(in_work) == 20
    assert sum(progress(cluster).values()) == 21


async def test_an_application_that_does_not_poll_again_keeps_a_queue_for_a_bounded_time(
    cluster, sender
):
    await send(sender, 20, queues=2)
    hasty = RebalanceSettings(handover=0.2, persist=3600.0)

    async with consumer(cluster, rebalance=hasty) as first:
        first.subscribe(TOPIC)
        # All in one poll: a second one would say that what the first returned is done.
        await until(lambda: sum(first.lag().values()) == 20, DEADLINE)
        await poll_count(first, 20)
        async with consumer(cluster, rebalance=hasty) as second:
            second.subscribe(TOPIC)
            again = await poll_count(second, 10)

            assert {each.queue for each in again} == set(second.assignment())


async def test_a_listener_is_told_of_the_assignment(cluster):
    told: list[tuple[str, tuple[Queue, ...], tuple[Queue, ...]]] = []

    async with consumer(cluster, on_assignment=lambda *change: told.append(change)) as reader:
        reader.subscribe(TOPIC)
        both = (queue(0), queue(1))
        await until(lambda: told and told[-1] == (TOPIC, both, both), DEADLINE)


# ---- life


async def test_a_consumer_says_when_it_is_not_running(cluster):
    reader = consumer(cluster)
    reader.subscribe(TOPIC)
    with pytest.raises(NotRunning, match="start it"):
        await reader.poll()
    await reader.start()
    with pytest.raises(WrongUse):
        await reader.start()
    await reader.stop()
    await reader.stop()

    for call in (reader.poll, reader.commit, reader.start):
        with pytest.raises(NotRunning, match="make a new one"):
            await call()
    with pytest.raises(NotRunning):
        reader.subscribe(TOPIC)


@pytest.mark.parametrize("topic", [TOPIC, "shop%orders"])
async def test_queues_may_be_named_with_their_namespace_or_without(cluster, sender, topic):
    await cluster.create_topic("shop%orders", queues=1)
    await send(sender, 3, topic="shop%orders")
    settings = ClientSettings(name_servers=(cluster.name_server,), namespace="shop")
    mine, known = queue(0, topic), queue(0, "shop%orders")

    async with consumer(cluster, polling=BY_HAND, name_server=None, client=settings) as reader:
        await reader.assign([mine])
        assert reader.assignment() == await reader.queues(TOPIC) == (known,)
        found = await poll_count(reader, 3)
        assert {(each.topic, each.queue) for each in found} == {(TOPIC, known)}

        assert await reader.commit({mine: 1}) == {mine: 1}
        assert await reader.commit(found[1]) == {known: 2}
        assert await reader.committed(mine) == 2
        assert await reader.first_offsets([mine]) == {mine: 0}
        assert await reader.end_offsets([mine]) == {mine: 3}
        assert await reader.offsets_for_time(found[0].stored_at, [mine]) == {mine: 0}
        await reader.seek(mine, 1)
        assert reader.position(mine) == 1
        await reader.seek_to_begin(mine)
        assert reader.position(mine) == 0
        reader.pause(mine)
        reader.resume([mine])
        await reader.seek_to_time(found[0].stored_at, mine)
        await reader.seek_to_end(mine)
        assert reader.position(mine) == 3
        await reader.seek_to_begin()
        assert bodies(await poll_count(reader, 3)) == [b"0", b"1", b"2"]
        with pytest.raises(QueueNotAssigned):
            reader.position(queue(1, topic))
        with pytest.raises(SettingError, match="Queue"):
            await reader.commit({"orders": 1})  # type: ignore[arg-type]
    assert cluster.progress("shop%billing", "shop%orders") == {("broker-a", 0): 2}


@pytest.mark.parametrize(
    "wrong",
    [{"max_messages": 0}, {"auto_commit_interval": 0}, {"timeout": -1}, {"max_cached_bytes": 0}],
)
def test_settings_that_cannot_work_are_refused_by_name(wrong):
    (name,) = wrong

    with pytest.raises(SettingError, match=f"poll.{name}"):
        PollSettings(**wrong)  # any of its settings


async def test_a_commit_is_said_to_the_broker_even_if_it_was_said_before(cluster, sender):
    await send(sender, 4)
    async with consumer(cluster, polling=BY_HAND) as reader:
        reader.subscribe(TOPIC)
        await poll_count(reader, 4)
        for _ in range(3):
            await reader.commit()
        assert progress(cluster)[0] == 4
        # What a broker has that was killed before it wrote progress down.
        await sender.report(TOPIC, 1, consumer_group=GROUP)
        assert progress(cluster)[0] == 1

        assert (await reader.commit())[queue(0)] == 4

        assert progress(cluster)[0] == 4


def test_former_names_of_options_still_work_with_a_warning():
    with pytest.warns(DeprecationWarning, match="use strategy="):
        AsyncPullConsumer("billing", name_server="a:1", allocation="AVG_BY_CIRCLE")
    with pytest.warns(DeprecationWarning, match="use rebalance="):
        AsyncPullConsumer("billing", name_server="a:1", rebalancing=None)
    with (
        pytest.raises(SettingError, match="strategy"),
        pytest.warns(DeprecationWarning, match="use strategy="),
    ):
        AsyncPullConsumer("billing", name_server="a:1", allocation="nope")
    with pytest.raises(TypeError, match="no argument 'colour'"):
        AsyncPullConsumer("billing", name_server="a:1", colour="red")  # type: ignore[call-arg]
