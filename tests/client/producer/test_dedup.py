"""Messages with a `dedup_id`: every way of sending meets the first copy, at the same broker."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from orbitmq import Message, Producer, SendSettings
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.producer.send import SendResult, broker_of_id
from orbitmq.errors import MessageRefused, OrbitError
from orbitmq.store.store import Store
from tests.support.brokerlives import BrokerProcess

BROKER_COUNT = 2

IDS = [f"order-{number}" for number in range(40)]


def messages() -> list[Message]:
    return [Message("orders", each, dedup_id=each) for each in IDS]


async def by_send(producer: AsyncProducer) -> list[SendResult]:
    return [await producer.send(each) for each in messages()]


async def by_sends_at_once(producer: AsyncProducer) -> list[SendResult]:
    return await asyncio.gather(*(producer.send("orders", each, dedup_id=each) for each in IDS))


async def by_submit(producer: AsyncProducer) -> list[SendResult]:
    return [await sent for sent in [await producer.submit(each) for each in messages()]]


async def by_batch(producer: AsyncProducer) -> list[SendResult]:
    return await producer.send_batch(messages())


async def by_columns(producer: AsyncProducer) -> list[SendResult]:
    results = await producer.send_many("orders", [each.encode() for each in IDS], dedup_ids=IDS)
    table = results.to_arrow().to_pylist()
    assert [(each.msg_id, each.queue.id, each.queue_offset) for each in results] == [
        (row["msgId"], row["queueId"], row["queueOffset"]) for row in table
    ]
    return list(results)


WAYS = [by_send, by_sends_at_once, by_submit, by_batch, by_columns]


@pytest.mark.feature("S6")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_copy_gets_the_place_of_the_first_message_whichever_way_it_is_sent(cluster, way):
    async with AsyncProducer("svc", name_server=cluster.name_server) as producer:
        first = await way(producer)
        copies = [await each(producer) for each in WAYS]

    def places(results: list[SendResult]) -> list[tuple[object, ...]]:
        return [(each.msg_id, each.offset_id, each.queue, each.queue_offset) for each in results]

    assert not any(each.is_duplicate for each in first)
    assert len({each.queue.broker for each in first}) == 2
    for again in copies:
        assert all(each.is_duplicate for each in again)
        assert places(again) == places(first)
    assert sorted(each.body.decode() for each in cluster.messages("orders")) == sorted(IDS)


async def test_a_batch_tells_new_messages_and_copies_apart(producer):
    given = [Message("orders", "x", dedup_id="a", ordering_key="k"), Message("orders", "y")]
    await producer.send(given[0])

    results = await producer.send_batch([*given, given[0], Message("orders", "z", dedup_id="b")])

    assert [each.is_duplicate for each in results] == [True, False, True, False]


async def test_a_copy_of_a_delayed_message_can_be_recalled_like_the_first(producer):
    first = await producer.send("orders", "x", dedup_id="later", delay=3600)
    copy = await producer.send("orders", "x", dedup_id="later", delay=3600)

    assert copy.is_duplicate
    assert copy.recall_handle == first.recall_handle
    assert await producer.recall("orders", str(copy.recall_handle)) == first.msg_id


async def test_what_cannot_be_de_duplicated_is_refused(producer):
    with pytest.raises(MessageRefused, match="dedup_id cannot be given in a transaction"):
        await producer.send_half(Message("orders", "x", dedup_id="a"))
    with pytest.raises(MessageRefused, match="dedup_id has 300 characters and may have 255"):
        Message("orders", "x", dedup_id="a" * 300)
    with pytest.raises(MessageRefused, match=r"\[1\].dedup_id has 300 characters"):
        await producer.send_many("orders", [b"x", b"y"], dedup_ids=[None, "a" * 300])


def test_only_the_ids_of_a_lost_broker_move():
    brokers = ["a", "b", "c"]
    ids = [each.encode() for each in IDS]

    before = {each: broker_of_id(each, brokers) for each in ids}
    after = {each: broker_of_id(each, ["a", "c"]) for each in ids}

    assert set(before.values()) == set(brokers)
    assert all(after[each] == before[each] for each in ids if before[each] != "b")


@pytest.mark.feature("S6")
def test_messages_are_stored_once_while_the_broker_is_killed(tmp_path):
    """The producer sends again what it has no answer to, and so does the application."""
    count, sending = 3000, SendSettings(timeout=20, retries=5)
    with BrokerProcess(tmp_path) as broker:
        with Producer("svc", name_server=broker.name_server, sending=sending) as producer:
            done = threading.Event()

            def kill() -> None:
                for _ in range(2):
                    done.wait(0.15)
                    broker.stop()
                    broker.start()

            killer = threading.Thread(target=kill)
            killer.start()
            left = list(range(count))
            while left:
                sent: dict[int, Future[SendResult]] = {
                    number: producer.submit("orders", b"%d" % number, dedup_id=f"n{number}")
                    for number in left
                }
                left = [number for number, future in sent.items() if not _is_ok(future)]
            killer.join()
            again = producer.send_many(
                "orders", [b"x"] * count, dedup_ids=[f"n{n}" for n in range(count)]
            )
        places = {(each.queue, each.queue_offset) for each in again}
        broker.stop()
        with Store(broker.folder) as store:
            stored = sum(each.max_offset for each in store.queues() if each.topic == "orders")
        broker.start()

    assert all(each.is_duplicate for each in again)
    assert stored == len(places) == count


def _is_ok(future: Future[SendResult]) -> bool:
    try:
        return future.result().is_ok
    except OrbitError:
        return False
