"""What a task sent back, counted by piece; no broker is needed."""

from __future__ import annotations

from typing import Any

from orbitmq.client.consumer.verdict import DEAD, Failure
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.ranges.connections import QueueRange
from orbitmq.client.routes import Queue
from orbitmq.message.stored import StoredMessage
from orbitmq.spark.consuming.returns import CountingSendBack

QUEUE = Queue("orders", "broker-a", 0)


def message(offset: int, reconsume_times: int = 0) -> ReceivedMessage:
    stored = StoredMessage.build(
        topic="orders", stored_body=b"x", queue_offset=offset, reconsume_times=reconsume_times
    )
    return ReceivedMessage(stored, QUEUE, "billing")


class Taking(CountingSendBack):
    """Has brokers that take everything but what is at offset 9."""

    async def _resend(self, message: ReceivedMessage, *_: Any, **__: Any) -> bool:
        return message.queue_offset != 9

    async def _sent_back(self, message: ReceivedMessage, failure: Failure) -> bool:
        return message.queue_offset != 9


async def test_held_messages_are_counted_apart_from_those_that_failed():
    engine: Any = None
    returns = Taking(engine, "billing", max_retries=3, timeout=1.0)
    held = Failure(delay=1.0, reason="held", is_held=True)
    for offset, times, failure in (
        (0, 0, held),
        (1, 3, held),
        (2, 0, Failure()),
        (3, 2, Failure()),
        (4, 3, Failure()),
        (5, 0, Failure(DEAD)),
        (9, 1, Failure()),
        (9, 1, held),
        (20, 0, Failure()),
    ):
        await returns.send_back(message(offset, times), failure)

    tally = returns.tally(QueueRange(QUEUE, 0, 10))

    assert (tally.held, tally.retried, tally.dead, tally.kept) == (2, 2, 2, 2)
    assert tally.failed == 5
    assert returns.tally(QueueRange(QUEUE, 20, 21)).failed == 1
