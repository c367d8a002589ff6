"""Transactions: commit, roll back, and what happens when the producer says neither."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from orbitmq.broker.settings import BrokerSettings, TransactionSettings
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.producer.producer import AsyncProducer, Producer
from orbitmq.client.producer.transactions import OpenTransactions, VerdictUnknown, state_of
from orbitmq.errors import MessageRefused
from orbitmq.message.stored import StoredMessage
from orbitmq.testing.cluster import AsyncEmbeddedCluster, EmbeddedCluster
from orbitmq.wire.codes import ResponseCode, TransactionState
from tests.support.producing import scripted_cluster, until_true
from tests.support.remoting import DEADLINE, until

MESSAGE = Message("orders", b"paid", keys="o-1", tags="t")


def _asks_soon(settings: BrokerSettings) -> BrokerSettings:
    return replace(settings, transactions=TransactionSettings(check_interval=0.05, timeout=0.1))


@pytest.fixture
async def cluster(new_cluster):
    asks_soon = {"check_interval": 0.05, "timeout": 0.1}
    async with new_cluster(brokers=2, changes={"transactions": asks_soon}) as cluster:
        await cluster.create_topic("orders")
        yield cluster


def _delivered(cluster: AsyncEmbeddedCluster) -> list[StoredMessage]:
    return cluster.messages("orders")


@pytest.mark.parametrize(
    ("verdict", "state"),
    [
        (True, TransactionState.COMMIT),
        (False, TransactionState.ROLLBACK),
        (None, TransactionState.UNKNOWN),
        (TransactionState.COMMIT, TransactionState.COMMIT),
        (TransactionState.UNKNOWN, TransactionState.UNKNOWN),
    ],
)
def test_what_a_verdict_means(verdict, state):
    assert state_of(verdict) is state


@pytest.mark.parametrize("verdict", ["yes", 1, 8])
def test_anything_else_is_no_verdict(verdict):
    with pytest.raises(VerdictUnknown, match="True, False or None, got"):
        state_of(verdict)


async def test_a_message_is_seen_when_its_transaction_commits(cluster):
    during = []

    async def local(message, transaction):
        during.append((message, transaction, len(_delivered(cluster))))
        return True

    async with AsyncProducer("svc", name_server=cluster.name_server) as producer:
        result = await producer.send_in_transaction(MESSAGE, local)
        await until(lambda: len(_delivered(cluster)) == 1)

    (stored,) = _delivered(cluster)
    assert result.state is TransactionState.COMMIT
    assert during == [(MESSAGE, result.sent.msg_id, 0)]
    assert (stored.unique_id, stored.body, stored.tags) == (result.sent.msg_id, b"paid", "t")


async def test_a_message_is_never_seen_when_its_transaction_rolls_back(cluster):
    asked: list[str] = []

    def check(message):
        asked.append(message.msg_id)
        return message.body == b"other"

    async with AsyncProducer("svc", name_server=cluster.name_server, check=check) as producer:
        dropped = await producer.send_in_transaction(MESSAGE, lambda *_: False)
        # A later transaction that nobody ends is asked about: by then the first one is settled.
        other = await producer.send_half(Message("orders", b"other"))
        asked.clear()  # on a busy machine the broker asks before the rollback arrives
        await until(lambda: len(_delivered(cluster)) == 1)

    assert dropped.state is TransactionState.ROLLBACK
    assert dropped.sent.msg_id not in asked
    assert [message.unique_id for message in _delivered(cluster)] == [other.msg_id]


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
async def test_a_transaction_without_an_end_is_asked_about(cluster, kind):
    asked: list[ReceivedMessage] = []

    def check(message):
        asked.append(message)
        return True if len(asked) > 1 else None

    async def check_later(message):
        await asyncio.sleep(0)
        return check(message)

    chosen = check if kind == "plain" else check_later
    async with AsyncProducer("svc", name_server=cluster.name_server, check=chosen) as producer:
        result = await producer.send_in_transaction(MESSAGE, lambda *_: None)
        await until(lambda: len(_delivered(cluster)) == 1)

    assert result.state is TransactionState.UNKNOWN
    assert len(asked) >= 2
    assert (asked[0].topic, asked[0].body, asked[0].keys) == ("orders", b"paid", ("o-1",))
    assert asked[0].msg_id == asked[0].transaction_id == result.sent.msg_id


async def test_work_that_fails_is_raised_told_of_and_asked_about_later(cluster, caplog):
    def local(_, transaction):
        transactions.append(transaction)
        raise ValueError("the database is gone")

    transactions: list[str] = []

    async with AsyncProducer(
        "svc", name_server=cluster.name_server, check=lambda _: True
    ) as producer:
        with pytest.raises(ValueError, match="the database is gone"):
            await producer.send_in_transaction(MESSAGE, local)
        await until(lambda: len(_delivered(cluster)) == 1)

    told = next(line for line in caplog.messages if "raised ValueError" in line)
    assert f"to orders (transaction {transactions[0]}, keys o-1, group svc)" in told
    assert "the broker asks check= of a producer of the group" in told
    assert "15 times at most" in told
    assert "drops the message" in told


@pytest.mark.feature("K6")
async def test_a_crash_between_half_and_commit_is_resolved_by_another_producer_of_the_group(
    cluster,
):
    program = (
        "import os, sys\n"
        "from orbitmq.client.message import Message\n"
        "from orbitmq.client.producer.producer import Producer\n"
        "producer = Producer('svc', name_server=sys.argv[1])\n"
        "producer.start()\n"
        "for body in (b'done', b'not done'):\n"
        "    producer.send_in_transaction(Message('orders', b'whole'), lambda *_: True)\n"
        "    producer.send_half(Message('orders', body))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    crashed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-c", program, cluster.name_server],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert crashed.returncode == -9, crashed.stderr
    asked: list[bytes] = []

    def check(message):
        asked.append(message.body)
        return message.body == b"done"

    async with AsyncProducer("svc", name_server=cluster.name_server, check=check):
        await until(lambda: set(asked) == {b"done", b"not done"})
        await until(lambda: len(_delivered(cluster)) == 3)

    assert sorted(message.body for message in _delivered(cluster)) == [b"done", b"whole", b"whole"]


@pytest.mark.parametrize(
    ("field", "delay"), [("delay", 60), ("delay_level", 3), ("deliver_at", 4e9)]
)
async def test_a_delay_that_brokers_would_ignore_is_refused_in_a_transaction(field, delay):
    message = Message("orders", b"x", **{field: delay})
    async with scripted_cluster("a") as cluster, cluster.producer("svc") as producer:
        with pytest.raises(MessageRefused, match="delivered when it is committed") as refused:
            await producer.send_in_transaction(message, lambda *_: True)

    assert refused.value.field == field
    assert cluster.sent == []


async def test_a_half_message_says_what_it_is_and_whose():
    async with scripted_cluster("a") as cluster, cluster.producer("svc") as producer:
        await producer.send_half(Message("orders", b"x"))

    (sent,) = cluster.sent
    assert sent.header.sys_flag == 4
    assert sent.properties == {"TRAN_MSG": "true", "PGROUP": "svc", "UNIQ_KEY": sent.unique_id}


async def test_transactions_that_nobody_could_answer_for_are_warned_of_once(caplog):
    async with scripted_cluster("a") as cluster, cluster.producer("svc") as producer:
        await producer.send_half(MESSAGE)
        await producer.send_half(MESSAGE)

    (warning,) = [each for each in caplog.records if "without check=" in each.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "'svc'" in warning.getMessage()


async def test_a_half_message_that_is_not_safe_is_rolled_back_without_the_work():
    ran: list[str] = []

    def local(_, transaction):
        ran.append(transaction)
        return True

    async with scripted_cluster("a") as cluster, cluster.producer("svc") as producer:
        cluster.script = {"a": [ResponseCode.FLUSH_DISK_TIMEOUT]}

        result = await producer.send_in_transaction(MESSAGE, local)

    assert (result.state, ran) == (TransactionState.ROLLBACK, [])


def test_the_blocking_face_runs_the_work_on_the_callers_thread(caplog):
    with EmbeddedCluster(adjust=_asks_soon) as cluster:
        cluster.create_topic("orders")
        threads = []

        def local(message, transaction):
            threads.append(threading.current_thread())
            return message.body == b"paid"

        with Producer("svc", name_server=cluster.name_server, check=lambda _: True) as producer:
            kept = producer.send_in_transaction(MESSAGE, local)
            dropped = producer.send_in_transaction(Message("orders", b"unpaid"), local)
            with pytest.raises(ZeroDivisionError):
                producer.send_in_transaction(Message("orders", b"asked"), lambda *_: 1 / 0 > 0)
            assert "raised ZeroDivisionError" in caplog.text
            wanted = {b"paid", b"asked"}
            until_true(lambda: {message.body for message in cluster.messages("orders")} == wanted)

        assert threads == [threading.current_thread()] * 2
        assert (kept.state, dropped.state) == (TransactionState.COMMIT, TransactionState.ROLLBACK)


# ---- a stop while transactions are under way


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
