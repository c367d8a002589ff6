"""Many messages in few frames.

A frame of a batch has messages of one topic, all for one queue, and the broker stores them one
after the other or not at all. Messages of several topics are sorted apart, and so are those that a
sharding key binds to a queue, each queue's in their own order; what does not fit into one frame, or
differs from it in `wait_stored`, goes into the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from orbitmq.client.errors import MessageRefused
from orbitmq.client.message import Message
from orbitmq.client.names import is_retry_topic
from orbitmq.client.producer.drafts import Draft, Drafting
from orbitmq.client.queue import Queue
from orbitmq.message.batch import MIN_ELEMENT_SIZE, BatchElement, encode_batch
from orbitmq.message.wellknown import UNIQ_KEY, WAIT
from orbitmq.wire.codes import RequestCode

_SEND_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)


class Batch(NamedTuple):
    """One frame: what it sends, and which of the given messages those are."""

    draft: Draft
    #: The same for brokers before 5.0, which add the frame's properties to those of each message:
    #: an id among them would take the place of the messages' own.
    before_5: Draft
    places: tuple[int, ...]
    unique_ids: tuple[str, ...]
    #: The one that its messages are bound to, if they are.
    queue: Queue | None


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
    found = []
    for place, message in enumerate(messages):
        _check(place, message)
        unique_id, properties = drafting.element_properties(message)
        element = Element(place, unique_id, BatchElement(message.body, message.flag, properties))
        if element.size > limit:
            raise MessageRefused(
                f"[{place}].body",
                f"makes a message of {element.size} bytes, a batch may have {limit}",
            )
        found.append(element)
    return found


def batches(
    messages: Sequence[Message],
    elements: Iterable[Element],
    bound: Mapping[int, Queue],
    drafting: Drafting,
    limit: int,
) -> Iterator[Batch]:
    """The messages as frames of at most `limit` bytes; `bound` are queues by messages' places."""
    groups: dict[tuple[str, Queue | None], list[Element]] = {}
    for element in elements:
        group = messages[element.place].topic, bound.get(element.place)
        groups.setdefault(group, []).append(element)
    for (_, queue), members in groups.items():
        for part in _parts(members, messages, limit):
            yield _batch(queue, part, messages[part[0].place], drafting)


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


def _batch(queue: Queue | None, part: list[Element], first: Message, drafting: Drafting) -> Batch:
    unique_id = drafting.new_id()
    body = encode_batch(each.element for each in part)

    def draft(properties: dict[str, str]) -> Draft:
        return Draft(
            drafting.wire_topic(first.topic),
            body,
            drafting.property_string(properties),
            unique_id,
            code=_SEND_BATCH,
            is_batch=True,
            message=first,
        )

    waits = {WAIT: "true" if first.wait_stored else "false"}
    return Batch(
        # A batch has an id of its own, as Java's have: on some topics it is stored as one record.
        draft({UNIQ_KEY: unique_id, **waits}),
        draft(waits),
        tuple(each.place for each in part),
        tuple(each.unique_id for each in part),
        queue,
    )


def _check(place: int, message: Message) -> None:
    if not isinstance(message, Message):
        raise MessageRefused(f"[{place}]", f"must be a Message, got {type(message).__name__}")
    if message.delay_level or message.delay is not None or message.deliver_at is not None:
        # Brokers would deliver it at once: the elements of a batch are stored where they arrive.
        raise MessageRefused(
            f"[{place}].delay", "is not possible in a batch; send delayed messages one by one"
        )
    if is_retry_topic(message.topic):
        raise MessageRefused(f"[{place}].topic", "is a retry topic, which takes no batches")
