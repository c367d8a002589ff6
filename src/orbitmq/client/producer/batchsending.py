"""Sends batches, one frame after the other, and gives every message its own result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orbitmq.client.errors import MessageRefused, SendFailed, SettingError
from orbitmq.client.message import Message
from orbitmq.client.producer.batches import Batch, batches, elements
from orbitmq.client.producer.drafts import Drafting
from orbitmq.client.producer.errors import BatchFailed
from orbitmq.client.producer.publishing import Publisher
from orbitmq.client.producer.queuechoice import by_key, by_sharding_key
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
    """Send messages in frames of at most `limit` bytes. Raises `BatchFailed`.

    Before anything is sent `MessageRefused`, and `SettingError` for a queue and a key.
    """
    if queue is not None and key is not None:
        raise SettingError("queue and key exclude each other: give one of them")
    select = None if key is None else by_key(key)
    deadline = monotonic() + timeout
    results: list[SendResult | None] = [None] * len(messages)
    checked = elements(messages, drafting, limit)
    #: The queue that a topic goes to: that of its first frame, so that its order is kept.
    queues: dict[str, Queue] = {}
    bound: Mapping[int, Queue] = {}
    if queue is not None:
        topic = drafting.wire_topic(queue.topic)
        _check_topics(messages, drafting, topic, queue)
        queues[topic] = Queue(topic, queue.broker, queue.id)
    elif select is None:
        # As in a single send: a wish of the call comes before the messages' own.
        bound = await _bound(messages, publisher, drafting, lambda: deadline - monotonic())
    for batch in tuple(batches(messages, checked, bound, drafting, limit)):
        is_old = await publisher.is_before_5(batch.draft.topic, deadline - monotonic())
        now = monotonic()
        sending = Sending(
            batch.before_5 if is_old else batch.draft,
            made=now,
            timeout=max(0.0, deadline - now),
            queue=batch.queue or queues.get(batch.draft.topic),
            select=select,
        )
        try:
            result = await publisher.send(sending)
        except SendFailed as error:
            raise BatchFailed(sending.topic, error.attempts, error.cause, results) from error
        except OrbitError as error:
            raise BatchFailed(sending.topic, sending.attempts, error, results) from error
        if batch.queue is None:
            queues.setdefault(batch.draft.topic, result.queue)
        _fill_in(results, batch, result)
    return [result for result in results if result is not None]


def _check_topics(
    messages: Sequence[Message], drafting: Drafting, topic: str, queue: Queue
) -> None:
    """Raises `MessageRefused` for a message that the queue is not for."""
    for place, message in enumerate(messages):
        if drafting.wire_topic(message.topic) != topic:
            raise MessageRefused(f"[{place}].topic", f"is {message.topic!r}, the queue is {queue}")


async def _bound(
    messages: Sequence[Message],
    publisher: Publisher,
    drafting: Drafting,
    left: Callable[[], float],
) -> dict[int, Queue]:
    """The queues of the messages that have a sharding key, by their places."""
    bound: dict[int, Queue] = {}
    #: One look for the whole call: queues that come or go meanwhile do not part a key's messages.
    of_topics: dict[str, tuple[Queue, ...]] = {}
    for place, message in enumerate(messages):
        if message.sharding_key is None:
            continue
        topic = message.topic
        if topic not in of_topics:
            nothing = [None] * len(messages)
            try:
                of_topics[topic] = await publisher.queues(drafting.wire_topic(topic), left())
            except SendFailed as error:
                raise BatchFailed(topic, error.attempts, error.cause, nothing) from error
            except OrbitError as error:
                raise BatchFailed(topic, 0, error, nothing) from error
        bound[place] = by_sharding_key(of_topics[topic], message)
    return bound


def _fill_in(results: list[SendResult | None], batch: Batch, result: SendResult) -> None:
    """One result for each message of a frame that was stored."""
    offset_ids = result.offset_id.split(",")
    for number, (place, unique_id) in enumerate(zip(batch.places, batch.unique_ids, strict=True)):
        # A topic that stores a batch as one record has one place for all of it.
        offset_id = offset_ids[number] if number < len(offset_ids) else offset_ids[0]
        results[place] = SendResult(
            result.status, unique_id, offset_id, result.queue, result.queue_offset + number
        )
