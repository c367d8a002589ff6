"""Transactions with synchronous flushing: what a producer says before the disk has the message."""

from __future__ import annotations

import logging

import pytest

from orbitmq.store.settings import FlushPolicy
from orbitmq.wire.codes import RequestCode, ResponseCode, TransactionState
from tests.support.broker import SMALL_STORE, until
from tests.support.delivery import AskedProducer, HandBroker, end_header, hand_broker, send_half
from tests.support.slowdisk import GatedFiles
from tests.support.store import with_policy

COMMIT = TransactionState.COMMIT
ROLLBACK = TransactionState.ROLLBACK
INTERVAL = 30.0


@pytest.fixture
def disk():
    return GatedFiles()


@pytest.fixture
async def broker(tmp_path, disk):
    store = with_policy(SMALL_STORE, FlushPolicy.SYNC)
    async with hand_broker(tmp_path, store=store, files=disk) as (broker, _):
        yield broker
        # Before the broker is stopped, which flushes.
        disk.gate.set()


@pytest.fixture
async def producer(broker):
    producer = await AskedProducer.join(broker.broker)
    yield producer
    await producer.close()


def check(broker: HandBroker) -> None:
    """Let half a minute pass, and begin a round, without waiting for the disk."""
    broker.clock.advance(INTERVAL)
    broker.parts.transactions.step(broker.clock.now())
    broker.parts.writes.finish()


async def flushed(broker: HandBroker, disk: GatedFiles) -> None:
    """The disk takes everything that there is."""
    disk.gate.set()
    statistics = broker.parts.store.statistics
    await until(lambda: statistics().dispatched == statistics().log_end)


async def test_a_question_may_be_answered_before_its_copy_is_on_the_disk(broker, producer, disk):
    await send_half(producer, "T", b"x", broker)
    disk.gate.clear()

    check(broker)
    await until(lambda: producer.questions)
    answer = await producer.answer_question(producer.questions[0], COMMIT)
    is_seen_early = broker.bodies("T") != []
    await flushed(broker, disk)
    check(broker)
    await flushed(broker, disk)

    assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, None)
    assert not is_seen_early
    assert broker.bodies("T") == [b"x"]
    assert len(producer.questions) == 1
    assert broker.bodies("TRANS_CHECK_MAX_TIME_TOPIC") == []


@pytest.mark.parametrize(("state", "seen"), [(COMMIT, [b"x"]), (ROLLBACK, [])])
async def test_a_half_message_that_does_not_wait_can_be_ended_at_once(
    broker, producer, disk, state, seen
):
    disk.gate.clear()

    half = await send_half(producer, "T", b"x", broker, WAIT="false")
    answer = await producer.end(end_header(half, state))
    await flushed(broker, disk)

    assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, None)
    assert broker.bodies("T") == seen


async def test_a_round_does_not_pass_what_ended_before_the_disk_had_it(
    broker, producer, disk, caplog
):
    halves = broker.parts.transactions.halves
    disk.gate.clear()
    half = await send_half(producer, "T", b"x", broker, WAIT="false")
    await producer.end(end_header(half, COMMIT))

    check(broker)
    position, still_open = halves.position, halves.open_count
    await flushed(broker, disk)
    check(broker)
    await flushed(broker, disk)

    assert (position, still_open) == (0, 0)
    assert (halves.position, halves.open_count) == (1, 0)
    assert producer.questions == []
    assert "there is nothing at offset" not in caplog.text


async def test_the_refusal_of_an_end_that_nobody_waits_for_is_logged(broker, producer, caplog):
    half = await send_half(producer, "T", b"x", broker)
    wrong = end_header(half, COMMIT, commit_log_offset=1)

    with caplog.at_level(logging.WARNING, logger="orbitmq.broker.transactions"):
        producer.connection.notify(RequestCode.END_TRANSACTION, wrong)
        # What comes on the same connection is served in order.
        answer = await producer.end(wrong)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    (record,) = [each for each in caplog.records if "was refused" in each.getMessage()]
    assert answer.remark is not None
    assert answer.remark in record.getMessage()
