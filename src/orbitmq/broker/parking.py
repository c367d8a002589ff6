"""Parked messages: in a topic of the broker for a while, with where they belong as properties.

A message with a delay, one with a time, and one of an unfinished transaction are stored in a system
topic under `REAL_TOPIC` and `REAL_QID`. When its time comes it is stored again, there. It keeps its
body, its producer's time and address, its flags and its count of attempts; and, as with Apache's
broker, the whole property string, with what parked it still in it; except when it was committed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from orbitmq.broker import names
from orbitmq.broker.destinations import Destinations
from orbitmq.broker.drafts import Draft
from orbitmq.message.errors import BodyCorrupt
from orbitmq.message.hosts import pack_host
from orbitmq.message.properties import append_property, remove_properties
from orbitmq.message.stored import StoredMessage, decode_messages
from orbitmq.message.wellknown import REAL_QUEUE_ID, REAL_TOPIC, TIMER_OUT_MS
from orbitmq.store.reading import ReadStatus
from orbitmq.store.store import Store

log = logging.getLogger(__name__)

#: Properties that say where a parked message belongs.
ADDRESS = (REAL_TOPIC, REAL_QUEUE_ID)
_LARGEST_QUEUE = 0x7FFFFFFF
_LONGEST_QUEUE = len(str(_LARGEST_QUEUE))
#: What parking notes at most, without the topic: a time has 15 digits at the very most.
_NOTES = ((REAL_TOPIC, ""), (REAL_QUEUE_ID, "9" * _LONGEST_QUEUE), (TIMER_OUT_MS, "9" * 15))
_NOTES_SIZE = sum(len(name) + len(value) + 2 for name, value in _NOTES)
#: Outcomes of a read after which there is nothing more to be had for now.
_AT_THE_END = frozenset({ReadStatus.OFFSET_OVERFLOW_ONE, ReadStatus.NO_MESSAGE_IN_QUEUE})


def park(draft: Draft, topic: str, queue_id: int) -> None:
    """Have the draft stored in `topic`, with its own place noted."""
    properties = remove_properties(draft.properties, ADDRESS)
    properties = append_property(properties, REAL_TOPIC, draft.topic)
    draft.properties = append_property(properties, REAL_QUEUE_ID, str(draft.queue_id))
    draft.topic = topic
    draft.queue_id = queue_id


def room_to_park(topic: str) -> int:
    """Bytes of properties that parking, for a level or a time, adds to a message of `topic`."""
    return _NOTES_SIZE + len(topic.encode())


def copied(message: StoredMessage, topic: str, queue_id: int) -> Draft:
    """A draft of the same message for another place. Raises `BodyCorrupt`."""
    message.verify()
    return Draft(
        topic,
        queue_id,
        message.stored_body,
        message.raw_properties,
        message.born_ms,
        pack_host(*message.born_host),
        message.sys_flag,
        message.flag,
        message.reconsume_times,
        # Whoever sent it was answered long ago.
        waits=False,
    )


def real_place(message: StoredMessage) -> tuple[str, int] | None:
    """Topic and queue that a parked message belongs to; None when it does not say."""
    topic = message.get_property(REAL_TOPIC)
    queue = message.get_property(REAL_QUEUE_ID)
    if not topic or queue is None or not queue.isascii() or not queue.isdecimal():
        return None
    if len(queue) > _LONGEST_QUEUE:
        return None
    if int(queue) > _LARGEST_QUEUE or names.topic_problem(topic) is not None:
        return None
    return topic, int(queue)


def released(message: StoredMessage, destinations: Destinations) -> Draft | None:
    """A parked message on its way to where it belongs; None when that cannot be.

    It then stays where it is, and the log says which one it was; or what happened to its topic.
    """
    place = real_place(message)
    reason = ""
    if place is None:
        reason = "it does not say where it belongs"
    elif place[0] in names.NOT_FOR_PRODUCERS:
        # For instance a half message that somebody sent with a delay: out of its transaction.
        reason = f"{place[0]} is a topic of the broker"
    elif not destinations.takes(*place, message.physical_offset):
        return None
    else:
        try:
            return copied(message, *place)
        except BodyCorrupt as error:
            reason = str(error)
    log.error(
        "a parked message cannot be delivered: %s",
        reason,
        extra={"topic": message.topic, "queue": message.queue_id, "offset": message.queue_offset},
    )
    return None


class Reading:
    """Reads a queue from an offset on, up to its end, and follows corrections of the offset."""

    def __init__(self, store: Store, topic: str, queue_id: int, offset: int) -> None:
        self._store = store
        self._topic = topic
        self._queue_id = queue_id
        #: Where the next read begins; behind every message that was returned or is gone.
        self.offset = offset

    def batches(self, most: int) -> Iterator[list[StoredMessage]]:
        """What there is, at most so many messages, as the store returns them.

        `offset` is behind a batch when the next one is asked for, not before.
        """
        left = most
        while left > 0:
            result = self._store.read(self._topic, self._queue_id, self.offset, left)
            if result.status is ReadStatus.FOUND:
                messages = decode_messages(b"".join(result.pieces))
                left -= len(messages)
                yield messages
            elif result.status in _AT_THE_END and result.max_offset >= self.offset:
                return
            if result.damaged:
                log.error(
                    "parked messages were destroyed on the disk",
                    extra={"topic": self._topic, "queue": self._queue_id}
                    | {"offset": list(result.damaged)},
                )
            if result.next_offset == self.offset:
                return
            if result.status is not ReadStatus.FOUND and not result.damaged:
                log.warning(
                    "there is nothing at offset %d of %s queue %d (%s); going on at %d",
                    self.offset,
                    self._topic,
                    self._queue_id,
                    result.status.value,
                    result.next_offset,
                )
            self.offset = result.next_offset
