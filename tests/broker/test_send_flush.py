"""Synchronous flushing: when a send is answered, and what it is told when the disk is slow."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from typing import Any

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.errors import PutResult, PutStatus
from orbitmq.broker.settings import SendSettings
from orbitmq.broker.writes import Draft
from orbitmq.message.record import pack_host
from orbitmq.message.stored import decode_messages
from orbitmq.store.settings import FlushPolicy
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.headers import SendMessageResponse
from tests.support.broker import GROUP, SMALL_STORE, bodies_in, until
from tests.support.delivery import send_back
from tests.support.slowdisk import GatedFiles

SYNC_STORE = replace(SMALL_STORE, flush=replace(SMALL_STORE.flush, policy=FlushPolicy.SYNC))


@pytest.fixture
async def disk():
    files = GatedFiles()
    yield files
    files.error = None
    files.gate.set()


@pytest.fixture
async def start(disk, start_broker):
    async def start_one(**send):
        return await start_broker(
            store=SYNC_STORE, send=SendSettings(**send), parts={"files": disk}
        )

    yield start_one
    # Before the broker is stopped, which flushes.
    disk.gate.set()


async def test_a_send_is_answered_when_its_message_is_on_the_disk(start, open_client, disk):
    broker = await start()
    client = await open_client(broker)
    disk.gate.clear()

    sending = asyncio.ensure_future(client.stored("orders"))
    await until(lambda: disk.waiting)
    # Nobody sees it either, before it is safe.
    assert await client.max_offset("orders") == 0
    assert not sending.done()
    disk.gate.set()

    assert (await sending).queue_offset == 0
    assert bodies_in(await client.pull("orders")) == [b"hello"]


@pytest.mark.parametrize(
    ("level", "topic"), [(3, "SCHEDULE_TOPIC_XXXX"), (-1, f"%DLQ%{GROUP}")], ids=["retry", "dead"]
)
async def test_a_message_is_taken_back_when_its_copy_is_on_the_disk(
    start, open_client, disk, level, topic
):
    """The consumer forgets it then: a copy that the power takes would be lost for good."""
    broker = await start()
    client = await open_client(broker)
    await client.stored("orders", b"bad")
    (message,) = decode_messages((await client.pull("orders")).body)
    disk.gate.clear()

    returning = asyncio.ensure_future(send_back(client, message, level=level))
    await until(lambda: disk.waiting)
    # Answers of a connection that did not wait would have come before this one.
    await client.max_offset("orders")
    assert not returning.done()
    disk.gate.set()

    assert (await returning).code == ResponseCode.SUCCESS
    copies = [broker.parts.store.max_offset(topic, queue) for queue in range(4)]
    assert sum(copies) == 1


async def test_a_consumer_is_answered_before_it_would_send_a_copy_of_its_own(
    start, open_client, disk
):
    """Clients wait for 5 s, which is also how long a send waits for the disk."""
    broker = await start(flush_timeout=60.0)
    client = await open_client(broker)
    await client.stored("orders", b"bad")
    (message,) = decode_messages((await client.pull("orders")).body)
    disk.gate.clear()

    async with asyncio.timeout(30):
        answer = await send_back(client, message)
    disk.gate.set()
    # What comes from the disk afterwards is no second answer: the connection goes on in order.
    await client.stored("orders", b"next")

    assert answer.code == ResponseCode.SUCCESS


async def test_a_message_whose_copy_cannot_be_flushed_is_not_taken_back(start, open_client, disk):
    broker = await start()
    client = await open_client(broker)
    await client.stored("orders", b"bad")
    (message,) = decode_messages((await client.pull("orders")).body)
    disk.error = OSError(errno.EIO, "injected")

    answer = await send_back(client, message)

    assert answer.code == ResponseCode.SYSTEM_ERROR


async def test_what_comes_during_a_flush_shares_the_next_one(start, open_client, disk):
    broker = await start()
    clients = [await open_client(broker) for _ in range(4)]
    await clients[0].stored("orders")
    disk.gate.clear()
    first = asyncio.ensure_future(clients[0].stored("orders"))
    await until(lambda: disk.waiting)
    before = broker.parts.store.statistics().flushes

    rest = [asyncio.ensure_future(client.stored("orders")) for client in clients for _ in range(25)]
    await until(lambda: sum(each.open_requests for each in broker_connections(broker)) == 101)
    disk.gate.set()
    await asyncio.gather(first, *rest)

    # One for the first, one for all that gathered behind it, and one to spare.
    assert broker.parts.store.statistics().flushes - before <= 3


def broker_connections(broker: Broker) -> Any:
    return broker.parts.listeners.connections


async def test_a_send_whose_flush_takes_too_long_is_answered_stored_but_not_flushed(
    start, open_client, disk
):
    broker = await start(flush_timeout=0.05)
    client = await open_client(broker)
    disk.gate.clear()

    answer = await client.send("orders", queue_id=3, properties={"UNIQ_KEY": "K1"})
    disk.gate.set()

    place = answer.header(SendMessageResponse)
    assert answer.code == ResponseCode.FLUSH_DISK_TIMEOUT
    assert (place.queue_id, place.queue_offset, place.transaction_id) == (3, 0, "K1")
    assert place.region == "DefaultRegion"
    await until(lambda: broker.parts.store.max_offset("orders", 3) == 1)
    # A disk that is slow today may be too slow for the next one as well.
    then = (await client.send("orders", queue_id=3)).header(SendMessageResponse)
    assert then.queue_offset == 1


@pytest.mark.parametrize(
    ("wait", "is_patient"), [("false", False), ("no", False), ("true", True), ("TRUE", True)]
)
async def test_a_message_may_say_that_it_does_not_wait(start, open_client, disk, wait, is_patient):
    broker = await start(flush_timeout=0.05)
    client = await open_client(broker)
    disk.gate.clear()

    answer = await client.send("orders", properties={"WAIT": wait})

    expected = ResponseCode.FLUSH_DISK_TIMEOUT if is_patient else ResponseCode.SUCCESS
    assert answer.code == expected


async def test_a_flush_that_fails_is_answered_to_its_senders_and_ends_all_writing(
    start, open_client, disk
):
    broker = await start()
    client = await open_client(broker)
    await client.stored("orders", b"safe")
    disk.error = OSError(errno.EIO, "injected")

    answers = await asyncio.gather(*(client.send("orders") for _ in range(3)))
    later = await client.send("orders")

    assert {answer.code for answer in answers} == {ResponseCode.SERVICE_NOT_AVAILABLE}
    assert later.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert bodies_in(await client.pull("orders")) == [b"safe"]


async def test_too_many_waiting_sends_make_the_broker_busy_until_the_disk_has_caught_up(
    start, open_client, disk
):
    broker = await start(waiting_messages=8)
    client = await open_client(broker)
    disk.gate.clear()
    waiting = [asyncio.ensure_future(client.stored("orders")) for _ in range(8)]
    await until(lambda: broker.parts.writes.is_busy)

    refused = await client.send("orders")
    batch = await client.send("orders", batch=True)
    disk.gate.set()
    await asyncio.gather(*waiting)

    assert refused.code == batch.code == ResponseCode.SYSTEM_BUSY
    assert (refused.remark or "").startswith("[OVERLOAD]system busy")
    assert (await client.send("orders")).code == ResponseCode.SUCCESS
    assert broker.parts.counters.busy_puts == 2


async def test_a_stop_answers_sends_that_wait_for_the_disk(start, open_client, disk):
    broker = await start()
    client = await open_client(broker)
    disk.gate.clear()
    waiting = asyncio.ensure_future(client.stored("orders"))
    await until(lambda: disk.waiting)

    stopping = asyncio.ensure_future(broker.stop())
    disk.gate.set()
    await stopping

    assert (await waiting).queue_offset == 0


async def test_a_message_of_the_broker_itself_waits_like_any_other(start, disk):
    broker = await start(flush_timeout=0.05)
    results: list[PutResult] = []
    disk.gate.clear()

    broker.parts.writes.put(_draft("own"), results.append)
    broker.parts.writes.put(_draft("hasty", waits=False), results.append)
    await until(lambda: len(results) == 2)

    assert [result.status for result in results] == [PutStatus.PUT_OK, PutStatus.FLUSH_DISK_TIMEOUT]
    assert all(result.status.is_stored for result in results)
    assert [result.queue_offset for result in results] == [0, 0]


def _draft(topic: str, **fields: Any) -> Draft:
    return Draft(topic, 0, b"body", b"", 1_700_000_000_000, pack_host("127.0.0.1", 1), **fields)
