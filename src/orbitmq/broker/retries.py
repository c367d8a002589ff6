"""Retries and dead letters: what becomes of a message that a consumer sends back.

The broker stores a copy for the group, with one attempt more. It becomes visible after 10 s, 30 s,
1 m up to 2 h; after the allowed attempts it is a dead letter. The copy carries:

    RETRY_TOPIC             the topic that the message was sent to
    ORIGIN_MESSAGE_ID       the offset id of the message that was sent
    DLQ_ORIGIN_TOPIC, DLQ_ORIGIN_MESSAGE_ID   the same, of a dead letter
    DLQ_REASON              the reason of the last failure, or of the dead letter
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, AnyStr

from orbitmq.broker.parked import ADDRESS, copied, room_to_park
from orbitmq.message.properties import (
    DELAY,
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    WAIT,
    append_property,
    property_value,
    remove_properties,
)
from orbitmq.message.record import MAX_PROPERTIES
from orbitmq.message.stored import StoredMessage

if TYPE_CHECKING:
    from orbitmq.broker.writes import Draft

# Apache reserves two of the last three names and never writes them. `DLQ_REASON` is the field
# `reason` of the request, which Apache's clients do not send; an orderly consumer, which sends the
# message to the retry topic itself, sets the property.
#
# A record has room for 32767 bytes of properties. What does not fit is left out of a dead letter,
# from the end of the reason on. A copy for another attempt needs all of it, so a message without
# room is a dead letter at its first failure. (Apache's broker refuses it, and the client repeats
# the request without end.)
#
# A message to a retry topic whose group holds order locks was given up by its consumer, unless it
# has the property `__ORBIT_PUT_OFF`: then its handler was not called, and it waits.

#: The reason of a dead letter whose consumer gave none.
DLQ_REASON = "DLQ_REASON"
#: Marks a message to a retry topic that no handler has got.
PUT_OFF = "__ORBIT_PUT_OFF"
#: The level of the first attempt; each further one is a level up.
FIRST_LEVEL = 3
LONGEST_REASON = 1024

_REWRITTEN = (
    WAIT,
    DELAY,
    RETRY_TOPIC,
    ORIGIN_MESSAGE_ID,
    # Of the previous attempt.
    DLQ_REASON,
    # It must not become a timer message again.
    TIMER_DELAY_SEC,
    TIMER_DELAY_MS,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
)
_DEAD = (DLQ_ORIGIN_TOPIC, DLQ_ORIGIN_MESSAGE_ID, DLQ_REASON)


@dataclass(frozen=True, slots=True)
class Failure:
    """A message that a group could not process."""

    message: StoredMessage
    #: As the consumer requests: negative: dead letter; 0: by the attempts; else this level.
    level: int
    #: The group's attempts after the first.
    allowed: int
    reason: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether this was the last attempt."""
        return self.level < 0 or self.message.reconsume_times >= self.allowed

    @property
    def next_level(self) -> int:
        """The delay level of the next attempt."""
        return self.level or FIRST_LEVEL + self.message.reconsume_times

    @property
    def origin_topic(self) -> str:
        return self.message.get_property(RETRY_TOPIC) or self.message.topic

    @property
    def origin_id(self) -> str:
        return self.message.get_property(ORIGIN_MESSAGE_ID) or self.message.offset_id

    def for_retry_in(self, topic: str) -> Failure:
        """The same, or a final one if a copy in `topic` has no room for what it needs."""
        message = self.message
        # Where the last copy belonged is overwritten in the next one.
        size = len(remove_properties(message.raw_properties, (*_REWRITTEN, *ADDRESS))) + 1
        size += sum(len(f"{name}{value}".encode()) + 2 for name, value in self._notes())
        if self.is_final or size + room_to_park(topic) <= MAX_PROPERTIES:
            return self
        why = (
            f"its properties of {len(message.raw_properties)} bytes leave no room for a retry, "
            f"{MAX_PROPERTIES} fit"
        )
        return replace(self, level=-1, reason=f"{why}: {self.reason}" if self.reason else why)

    def retry(self, topic: str, queue_id: int) -> Draft:
        """The copy that is consumed again, after `DELAY`. Raises `BodyCorrupt`.

        Only for a failure that is `for_retry_in` its topic.
        """
        draft = self._copy(topic, queue_id)
        room = MAX_PROPERTIES - room_to_park(topic)
        draft.properties = _with_reason(draft.properties, self.reason or "", room)
        return draft

    def dead_letter(self, topic: str) -> Draft:
        """The dead letter. Raises `BodyCorrupt`."""
        draft = self._copy(topic, 0)
        draft.properties = dead_letter_properties(
            draft.properties, self.origin_topic, self.origin_id, self.reason or self._why()
        )
        return draft

    def _copy(self, topic: str, queue_id: int) -> Draft:
        draft = copied(self.message, topic, queue_id)
        draft.reconsume_times += 1
        properties = remove_properties(draft.properties, _REWRITTEN)
        draft.properties = _with_what_fits(properties, self._notes(), MAX_PROPERTIES)
        return draft

    def _notes(self) -> Iterable[tuple[str, str]]:
        return (
            (RETRY_TOPIC, self.origin_topic),
            (ORIGIN_MESSAGE_ID, self.origin_id),
            (WAIT, "false"),
            (DELAY, "0" if self.is_final else str(self.next_level)),
        )

    def _why(self) -> str:
        if self.level < 0:
            return "the consumer gave it up"
        return f"attempt {self.message.reconsume_times + 1} failed, {self.allowed} retries allowed"


def given_up_properties(properties: str, reason: str, *, limit: int = MAX_PROPERTIES) -> str:
    """The properties of a dead letter that an orderly consumer sends itself.

    It has its origin and the reason already.
    """
    return dead_letter_properties(
        properties,
        property_value(properties, RETRY_TOPIC) or "",
        property_value(properties, ORIGIN_MESSAGE_ID) or "",
        property_value(properties, DLQ_REASON) or reason,
        limit=limit,
    )


def dead_letter_properties(
    properties: AnyStr,
    origin_topic: str,
    origin_id: str,
    reason: str,
    *,
    limit: int = MAX_PROPERTIES,
) -> AnyStr:
    """The properties of a message that becomes a dead letter, as far as they fit."""
    properties = remove_properties(properties, _DEAD)
    origin = ((DLQ_ORIGIN_TOPIC, origin_topic), (DLQ_ORIGIN_MESSAGE_ID, origin_id))
    properties = _with_what_fits(properties, origin, limit)
    return _with_reason(properties, reason, limit)


def _with_what_fits(properties: AnyStr, items: Iterable[tuple[str, str]], limit: int) -> AnyStr:
    for name, value in items:
        if value:
            grown = append_property(properties, name, value)
            if _size(grown) <= limit:
                properties = grown
    return properties


def _with_reason(properties: AnyStr, reason: str, limit: int) -> AnyStr:
    # One byte more: the last item may not have been ended yet.
    room = limit - _size(properties) - len(DLQ_REASON) - 3
    text = _one_line(reason).encode("utf-8", "replace")[: max(0, room)].decode("utf-8", "ignore")
    return append_property(properties, DLQ_REASON, text) if text else properties


def _size(properties: str | bytes) -> int:
    return len(properties if isinstance(properties, bytes) else properties.encode())


def _one_line(reason: str) -> str:
    """A reason in the form of a property's value."""
    text = "".join(each if each.isprintable() else " " for each in reason[: LONGEST_REASON * 2])
    return " ".join(text.split())[:LONGEST_REASON]
