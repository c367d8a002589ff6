"""Sends batches, one frame after the other, and gives every message its own result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orbitmq.client.errors import SendFailed
from orbitmq.client.message import Message
from orbitmq.client.producer.batches import Batch, batches
from orbitmq.client.producer.drafts import Drafting
from orbitmq.client.producer.errors import BatchFailed
from orbitmq.client.producer.publishing import Publisher
from orbitmq.client.producer.queuechoice import by_key
from orbitmq.client.producer.results import SendResult
from orbitmq.client.producer.sending import Sending
from orbitmq.client.queue import Queue
from orbitmq.errors import OrbitError


async def send_in_batches(
    messages: Sequence[Message],
    publisher: Publisher,
    drafting: Drafting,
    *,
    limit: int,
    timeout: float,  # noqa: ASYNC109  # for all frames together
    monotonic: Callable[[], float],
    queue: Queue | None = None,
    key: str | int | None = None,
) -> list[SendResult]:
    """Send messages in frames of at most `limit` bytes. Raises `BatchFailed`."""
    deadline = monotonic() + timeout
    results: list[SendResult | None] = [None] * len(messages)
    #: The queue that a topic goes to: that of its first frame, so that its order is kept.
    queues: dict[str, Queue] = {}
    if queue is not None:
        topic = drafting.wire_topic(queue.topic)
        queues[topic] = Queue(topic, queue.broker, queue.id)
    for batch in tuple(batches(messages, drafting, limit)):
        is_old = await publisher.is_before_5(batch.draft.topic, deadline - monotonic())
        now = monotonic()
        sending = Sending(
            batch.before_5 if is_old else batch.draft,
            made=now,
            timeout=max(0.0, deadline - now),
            queue=queues.get(batch.draft.topic),
            select=None if key is None else by_key(key),
        )
        try:
            result = await publisher.send(sending)
        except SendFailed as error:
            raise BatchFailed(sending.topic, error.attempts, error.cause, results) from error
        except OrbitError as error:
            raise BatchFailed(sending.topic, sending.attempts, error, results) from error
        queues.setdefault(batch.draft.topic, result.queue)
        _fill_in(results, batch, result)
    return [result for result in results if result is not None]


def _fill_in(results: list[SendResult | None], batch: Batch, result: SendResult) -> None:
    """One result for each message of a frame that was stored."""
    offset_ids = result.offset_id.split(",")
    for number, (place, unique_id) in enumerate(zip(batch.places, batch.unique_ids, strict=True)):
        # A topic that stores a batch as one record has one place for all of it.
        offset_id = offset_ids[number] if number < len(offset_ids) else offset_ids[0]
        results[place] = SendResult(
            result.status, unique_id, offset_id, result.queue, result.queue_offset + number
        )
