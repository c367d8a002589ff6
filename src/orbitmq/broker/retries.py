"""Failed messages: the copy that is consumed again later, or the dead letter.

A consumer sends back the place of a message that it could not process. The broker stores a copy of
it for the group alone, one attempt more on its count, which becomes visible after a delay that
grows with the attempts: 10 s, 30 s, 1 m up to 2 h. After the allowed attempts the copy goes to the
group's dead letters instead. The message itself stays as it is; other groups see it as before.

What a copy carries so that nothing about its origin is lost:

    RETRY_TOPIC             the topic that the message was sent to
    ORIGIN_MESSAGE_ID       the offset id of the message that was sent
    DLQ_ORIGIN_TOPIC        of a dead letter: the same as RETRY_TOPIC
    DLQ_ORIGIN_MESSAGE_ID   of a dead letter: the same as ORIGIN_MESSAGE_ID
    DLQ_REASON              what the consumer said went wrong last; if it is dead, else why that is

The last three are ours: Apache reserves two of the names and never writes them. `DLQ_REASON` is
filled from the field `reason` of the request, which Apache's clients do not send; a consumer in
order, which sends the message to the retry topic itself, sets the property. The number of attempts
is the record's own `reconsumeTimes`.

A message to a retry topic whose group holds order locks is one that its consumer gave up. Not so
one with the property `__ORBIT_PUT_OFF`, by which our client says that it never reached its handler:
it waits, and the property is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import AnyStr

from orbitmq.broker.drafts import Draft
from orbitmq.broker.parking import copied
from orbitmq.message.properties import append_property, property_value, remove_properties
from orbitmq.message.stored import StoredMessage
from orbitmq.message.wellknown import (
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
)

#: Why a dead letter is dead.
DLQ_REASON = "DLQ_REASON"
#: Says of a message to a retry topic that nobody has tried it.
PUT_OFF = "__ORBIT_PUT_OFF"
#: The level of the first attempt; each further one is a level up.
FIRST_LEVEL = 3
LONGEST_REASON = 1024

_REWRITTEN = (
    WAIT,
    DELAY,
    RETRY_TOPIC,
    ORIGIN_MESSAGE_ID,
    # Of the attempt before.
    DLQ_REASON,
    # What once made it a timer message must not count again.
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
    #: As the consumer asked: negative: dead at once; 0: by the attempts; else this one.
    level: int
    #: Attempts after the first that the group has.
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

    def retry(self, topic: str, queue_id: int) -> Draft:
        """The copy that is consumed again; `DELAY` says when. Raises `BodyCorrupt`."""
        draft = self._copy(topic, queue_id, self.next_level)
        if self.reason and (reason := _one_line(self.reason)):
            draft.properties = append_property(draft.properties, DLQ_REASON, reason)
        return draft

    def dead_letter(self, topic: str) -> Draft:
        """The copy that is consumed no more. Raises `BodyCorrupt`."""
        draft = self._copy(topic, 0, 0)
        draft.properties = dead_letter_properties(
            draft.properties, self.origin_topic, self.origin_id, self.reason or self._why()
        )
        return draft

    def _copy(self, topic: str, queue_id: int, level: int) -> Draft:
        draft = copied(self.message, topic, queue_id)
        draft.reconsume_times += 1
        properties = remove_properties(draft.properties, _REWRITTEN)
        for name, value in (
            (RETRY_TOPIC, self.origin_topic),
            (ORIGIN_MESSAGE_ID, self.origin_id),
            (WAIT, "false"),
            (DELAY, str(level)),
        ):
            properties = append_property(properties, name, value)
        draft.properties = properties
        return draft

    def _why(self) -> str:
        if self.level < 0:
            return "the consumer gave it up"
        return f"attempt {self.message.reconsume_times + 1} failed, {self.allowed} retries allowed"


def given_up_properties(properties: str, reason: str) -> str:
    """The properties of a message that a client itself sends back, and that is dead.

    Consumers in order do that. What they say about its origin and the reason is in it already.
    """
    return dead_letter_properties(
        properties,
        property_value(properties, RETRY_TOPIC) or "",
        property_value(properties, ORIGIN_MESSAGE_ID) or "",
        property_value(properties, DLQ_REASON) or reason,
    )


def dead_letter_properties(
    properties: AnyStr, origin_topic: str, origin_id: str, reason: str
) -> AnyStr:
    """The properties of a message that becomes a dead letter."""
    properties = remove_properties(properties, _DEAD)
    for name, value in (
        (DLQ_ORIGIN_TOPIC, origin_topic),
        (DLQ_ORIGIN_MESSAGE_ID, origin_id),
        (DLQ_REASON, _one_line(reason)),
    ):
        if value:
            properties = append_property(properties, name, value)
    return properties


def _one_line(reason: str) -> str:
    """A reason that can be a property's value, and be read in a list."""
    text = "".join(each if each.isprintable() else " " for each in reason[: LONGEST_REASON * 2])
    return " ".join(text.split())[:LONGEST_REASON]
