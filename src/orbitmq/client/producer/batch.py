"""Many messages in few frames.

A frame has messages of one topic for one queue. The broker stores all of them, one after the other,
or none. Messages that an ordering key or a `dedup_id` binds to a queue are grouped by queue, in
their order. A message that does not fit into a frame, or differs in `wait_stored`, begins the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from orbitmq.client.message import Message
from orbitmq.client.producer.send import (
    Sending,
    SendResult,
    broker_of_id,
    by_key,
    by_ordering_key,
    results_in,
)
from orbitmq.client.routes import Queue, queues_by_broker
from orbitmq.errors import MessageRefused, OrbitError, SendFailed, SettingError
from orbitmq.message.stored import MIN_ELEMENT_SIZE, BatchElement, encode_batch
from orbitmq.names import is_retry_topic

if TYPE_CHECKING:
    from orbitmq.client.producer.core import Drafting, ProducerCore
    from orbitmq.client.producer.send import Publisher


class Element(NamedTuple):
    """One of the given messages as it stands in a frame."""

    place: int
    unique_id: str
    element: BatchElement

    @property
    def size(self) -> int:
        return MIN_ELEMENT_SIZE + len(self.element.body) + len(self.element.properties)


def elements(messages: Sequence[Message], drafting: Drafting, limit: int) -> list[Element]:
    """What becomes of the messages in frames of `limit` bytes. Raises `MessageRefused`."""
    # Columns of these (`message.columns`) take 0.6 of the time in calls of 500 messages and twice
    # the time in calls of 32, and need Arrow, an extra: who has columns sends those.
    found = []
    unique_ids = drafting.ids.texts(len(messages))
    for place, (message, unique_id) in enumerate(zip(messages, unique_ids, strict=True)):
        _check(place, message)
        properties = drafting.element_properties(message, unique_id)
        element = Element(place, unique_id, BatchElement(message.body, message.flag, properties))
        if element.size > limit:
            raise MessageRefused(
                f"[{place}].body",
                f"makes a message of {element.size} bytes, a batch may have {limit}",
            )
        found.append(element)
    return found


def frames(
    messages: Sequence[Message],
    elements: Iterable[Element],
    bound: Mapping[int, Queue],
    limit: int,
) -> Iterator[tuple[Queue | None, list[Element]]]:
    """What goes into frames of at most `limit` bytes, and the queue that it is bound to.

    `bound` are queues by messages' places.
    """
    groups: dict[tuple[str, Queue | None], list[Element]] = {}
    for element in elements:
        group = messages[element.place].topic, bound.get(element.place)
        groups.setdefault(group, []).append(element)
    for (_, queue), members in groups.items():
        for part in _parts(members, messages, limit):
            yield queue, part


def _parts(
    elements: Iterable[Element], messages: Sequence[Message], limit: int
) -> Iterator[list[Element]]:
    part: list[Element] = []
    size, waits = 0, True
    for element in elements:
        following = messages[element.place].wait_stored
        if part and (size + element.size > limit or following != waits):
            yield part
            part, size = [], 0
        part.append(element)
        size += element.size
        waits = following
    if part:
        yield part


def _check(place: int, message: Message) -> None:
    if not isinstance(message, Message):
        raise MessageRefused(f"[{place}]", f"must be a Message, got {type(message).__name__}")
    if message.delay_level or message.delay is not None or message.deliver_at is not None:
        # Brokers would deliver it immediately: elements of a batch are stored where they arrive.
        raise MessageRefused(
            f"[{place}].delay", "is not possible in a batch; send delayed messages one by one"
        )
    if is_retry_topic(message.topic):
        raise MessageRefused(f"[{place}].topic", "is a retry topic, which takes no batches")


async def send_in_batches(
    core: ProducerCore,
    messages: Sequence[Message],
    timeout: float,  # noqa: ASYNC109  # for all frames together
    *,
    queue: Queue | None = None,
    ordering_key: str | int | None = None,
) -> list[SendResult]:
    """Send messages in frames of a message's most bytes. Raises `SendFailed`.

    Before anything is sent `MessageRefused`, and `SettingError` for a queue and a key.
    """
    publisher, drafting, monotonic = core.running(), core.drafting, core.monotonic
    if queue is not None and ordering_key is not None:
        raise SettingError("queue and ordering_key exclude each other: give one of them")
    select = None if ordering_key is None else by_key(ordering_key)
    deadline = monotonic() + timeout
    results: list[SendResult | None] = [None] * len(messages)
    limit = core.settings.max_message_size
    checked = elements(messages, drafting, limit)
    #: The queue that a topic goes to: that of its first frame, so that its order is kept.
    queues: dict[str, Queue] = {}
    bound: Mapping[int, Queue] = {}
    if queue is not None:
        topic = drafting.wire_topic(queue.topic)
        _check_topics(messages, drafting, topic, queue)
        queues[topic] = Queue(topic, queue.broker, queue.id)
    elif select is None:
        # As in a single send: the arguments of the call come before the messages' own.
        bound = await _bound(messages, publisher, drafting, lambda: deadline - monotonic())
    for bound_to, part in frames(messages, checked, bound, limit):
        first = messages[part[0].place]
        topic = drafting.wire_topic(first.topic)
        is_old = await publisher.is_before_5(topic, deadline - monotonic())
        draft = drafting.batch(
            topic,
            encode_batch([each.element for each in part]),
            len(part),
            is_before_5=is_old,
            waits=first.wait_stored,
            message=first,
            may_repeat=all(messages[each.place].dedup_id is not None for each in part),
        )
        now = monotonic()
        sending = Sending(
            draft,
            made=now,
            timeout=max(0.0, deadline - now),
            queue=bound_to or queues.get(topic),
            select=select,
        )
        try:
            result = await publisher.send(sending)
        except OrbitError as error:
            raise _failed(sending.topic, error, results, sending.attempts) from error
        if bound_to is None:
            queues.setdefault(topic, result.queue)
        _fill_in(results, part, result)
    return [result for result in results if result is not None]


def _failed(
    topic: str, error: OrbitError, results: Sequence[SendResult | None], attempts: int = 0
) -> SendFailed:
    """The error of a batch, which says what was stored before it."""
    if isinstance(error, SendFailed):
        return SendFailed(topic, error.attempts, error.cause, results)
    return SendFailed(topic, attempts, error, results)


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
    """The queues of messages with an ordering key or a `dedup_id`, by their places.

    A `dedup_id` binds a message only where a topic has several brokers.
    """
    bound: dict[int, Queue] = {}
    #: One look for the whole call: queues that come or go meanwhile do not part a key's messages.
    of_topics: dict[str, tuple[Queue, ...]] = {}
    chosen: dict[tuple[str, str], Queue] = {}
    for place, message in enumerate(messages):
        if message.ordering_key is None and message.dedup_id is None:
            continue
        topic = message.topic
        if topic not in of_topics:
            try:
                of_topics[topic] = await publisher.queues(drafting.wire_topic(topic), left())
            except OrbitError as error:
                raise _failed(topic, error, [None] * len(messages)) from error
        if message.ordering_key is not None:
            bound[place] = by_ordering_key(of_topics[topic], message)
        elif len(own := queues_by_broker(of_topics[topic])) > 1 and message.dedup_id is not None:
            # Messages of one broker stay in their order, in one queue.
            queues = own[broker_of_id(message.dedup_id.encode(), own)]
            bound[place] = chosen.setdefault((topic, queues[0].broker), queues[place % len(queues)])
    return bound


def _fill_in(results: list[SendResult | None], part: list[Element], result: SendResult) -> None:
    """One result for each message of a frame that was stored."""
    found = results_in([element.unique_id for element in part], result)
    for element, each in zip(part, found, strict=True):
        results[element.place] = each
