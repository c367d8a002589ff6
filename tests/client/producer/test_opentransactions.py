"""Stopping a producer while transactions are under way."""

from __future__ import annotations

import asyncio
import threading

import pytest

from orbitmq.client.message import Message
from orbitmq.client.producer.producer import AsyncProducer, Producer
from orbitmq.client.producer.transactions import OpenTransactions, TransactionResult
from orbitmq.errors import NotRunning
from orbitmq.wire.codes import TransactionState
from tests.support.producing import scripted_cluster
from tests.support.remoting import DEADLINE, until

MESSAGE = Message("orders", b"paid", keys="o-1")


@pytest.fixture
def is_waiting(monkeypatch):
    """Set when a stop has come to wait for transactions."""
    is_waiting = threading.Event()
    until_ended = OpenTransactions.until_ended

    async def noted(transactions):
        is_waiting.set()
        return await until_ended(transactions)

    monkeypatch.setattr(OpenTransactions, "until_ended", noted)
    return is_waiting


@pytest.fixture
async def cluster(new_cluster):
    async with new_cluster() as cluster:
        await cluster.create_topic("orders")
        yield cluster


async def test_a_stop_waits_until_the_end_of_a_transaction_is_told(cluster, is_waiting):
    producer = AsyncProducer("svc", name_server=cluster.name_server)
    await producer.start()
    half = await producer.send_half(Message("orders", b"half"))
    stops: list[asyncio.Task[None]] = []

    async def local(_, __):
        stops.append(asyncio.create_task(producer.stop()))
        await until(is_waiting.is_set)
        assert not stops[0].done()
        with pytest.raises(NotRunning):
            await producer.send_in_transaction(MESSAGE, lambda *_: True)
        # Another one, begun by hand, can be ended as long as there is time.
        await producer.end_transaction(half, TransactionState.COMMIT)
        return True

    result = await producer.send_in_transaction(MESSAGE, local, timeout=DEADLINE)
    await asyncio.wait_for(stops[0], DEADLINE)

    assert result.state is TransactionState.COMMIT
    await until(lambda: {each.body for each in cluster.messages("orders")} == {b"half", b"paid"})
    with pytest.raises(NotRunning):
        await producer.end_transaction(result.sent, TransactionState.COMMIT)


async def test_a_stop_of_the_blocking_face_waits_as_well(cluster, is_waiting):
    producer = Producer("svc", name_server=cluster.name_server)
    stop = threading.Thread(target=producer.stop)

    def local(_, __):
        stop.start()
        assert is_waiting.wait(DEADLINE)
        with pytest.raises(NotRunning):
            producer.send_in_transaction(MESSAGE, lambda *_: True)
        producer.end_transaction(half, TransactionState.COMMIT)
        return True

    def work():
        try:
            return producer.send_in_transaction(MESSAGE, local, timeout=DEADLINE)
        finally:
            stop.join(DEADLINE)

    await asyncio.to_thread(producer.start)
    half = await asyncio.to_thread(producer.send_half, Message("orders", b"half"))
    result = await asyncio.to_thread(work)

    assert not stop.is_alive()
    assert result.state is TransactionState.COMMIT
    await until(lambda: {each.body for each in cluster.messages("orders")} == {b"half", b"paid"})
    with pytest.raises(NotRunning):
        producer.end_transaction(half, TransactionState.COMMIT)


@pytest.mark.parametrize("face", ["async", "blocking"])
@pytest.mark.parametrize(
    "error", [None, ValueError("the database is gone")], ids=["done", "raised"]
)
async def test_work_that_ends_after_the_stop_has_its_own_outcome_and_is_left_to_the_broker(
    face, error, monkeypatch, caplog
):
    async def given_up(_):
        return False

    async def local(_, __):
        await producer.stop()
        return outcome()

    def blocking_local(_, __):
        blocking.stop()
        return outcome()

    def outcome():
        if error is not None:
            raise error
        return True

    def blocking_work():
        blocking.start()
        return blocking.send_in_transaction(MESSAGE, blocking_local)

    monkeypatch.setattr(OpenTransactions, "until_ended", given_up)
    result: object
    async with scripted_cluster("a") as cluster:
        address = str(cluster.name_server.address)
        producer, blocking = AsyncProducer(name_server=address), Producer(name_server=address)
        try:
            if face == "blocking":
                result = await asyncio.to_thread(blocking_work)
            else:
                await producer.start()
                result = await producer.send_in_transaction(MESSAGE, local)
        except Exception as raised:  # noqa: BLE001  # looked at below
            result = raised

    state = "COMMIT" if error is None else "UNKNOWN"
    if error is None:
        assert isinstance(result, TransactionResult)
        assert result.state is TransactionState.COMMIT
    else:
        assert result is error
    assert f"the end ({state}) of the transaction" in caplog.text
    assert "was not reported, the broker will ask" in caplog.text
