"""A message on its way into the store, and what may still happen to it.

Some messages are not stored as they were sent: a half message goes to the half topic, one with a
delay to the schedule topic, one with a time to the timer topic. Each of these is a transformation,
added by the part of the broker that knows it. All of them are asked for by a property, so a message
without such a property (nearly every one) is recognised by a few searches in its property string
and never becomes a draft at all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from orbitmq.wire.frame import Bytes


@dataclass(slots=True)
class Draft:
    """A message that has no place in the log yet. Transformations change it in place."""

    topic: str
    queue_id: int
    body: Bytes
    properties: bytes
    born_ms: int
    born_host: bytes  #: packed
    sys_flag: int = 0
    flag: int = 0
    reconsume_times: int = 0
    prepared_offset: int = 0
    #: Whether whoever put it wants to wait for the flush policy (`WAIT`).
    waits: bool = True
    #: Told to the producer, so that it can take a timer message back.
    recall_handle: str | None = None


#: Changes a draft, or raises `broker.errors.Refused` with the code for the producer.
Transformation: TypeAlias = Callable[[Draft], None]


class Stage(enum.IntEnum):
    """The order in which transformations look at a draft, as in Apache's broker."""

    HALF_MESSAGE = 1
    TIMER = 2
    DELAY_LEVEL = 3


@dataclass(frozen=True, slots=True)
class _Rule:
    mark: str
    raw: bytes
    stage: Stage
    transform: Transformation


class Transformations:
    """Which drafts are changed before they are stored."""

    def __init__(self) -> None:
        self._rules: tuple[_Rule, ...] = ()
        self._noticed: tuple[str, ...] = ()
        #: Texts of which one must be in the properties of a message that has to be looked at.
        self.marks: tuple[str, ...] = ()

    def add(self, mark: str, stage: Stage, transform: Transformation) -> None:
        """Have `transform` called for messages whose property string contains `mark`.

        The mark is only a hint (it may stand in a value): the transformation looks itself.
        """
        rule = _Rule(mark, mark.encode(), stage, transform)
        self._rules = tuple(sorted((*self._rules, rule), key=lambda each: each.stage))
        self._set_marks()

    def notice(self, mark: str) -> None:
        """Have messages with this mark looked at as well, though no rule changes them."""
        self._noticed += (mark,)
        self._set_marks()

    def _set_marks(self) -> None:
        self.marks = tuple(dict.fromkeys((*(each.mark for each in self._rules), *self._noticed)))

    def concern(self, properties: str) -> bool:
        """Whether a message with these properties has to be looked at."""
        for mark in self.marks:  # noqa: SIM110  # a generator takes three times as long
            if mark in properties:
                return True
        return False

    def apply(self, draft: Draft) -> None:
        """Change the draft as the rules say. Raises `broker.errors.Refused`."""
        for rule in self._rules:
            if rule.raw in draft.properties:
                rule.transform(draft)
