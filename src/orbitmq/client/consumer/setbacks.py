"""Why a pull was put off: named, counted, and logged without flooding.

Two kinds. Some are the normal course of things (flow control, a pause) and come and go many times
a second; the first of a queue is logged and then every thousandth. Others are failures in a row,
which end with a pull that is served; the first of each row is logged and then every thousandth.
Held pulls that end without a message are neither.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from orbitmq.client.consumer.flowcontrol import FlowReason

if TYPE_CHECKING:
    from orbitmq.client.consumer.pullsettings import PullSettings
    from orbitmq.client.queue import Queue

log = logging.getLogger(__name__)

#: One line in the log for so many of a kind.
EVERY = 1000


class Setback(enum.StrEnum):
    """Why a pull comes later, or is odd."""

    NOT_RUNNING = "not running"
    PAUSED = "paused"
    CACHED_MESSAGES = FlowReason.MESSAGES
    CACHED_BYTES = FlowReason.BYTES
    OFFSET_SPAN = FlowReason.SPAN
    NOT_LOCKED = "not locked"
    NOT_SUBSCRIBED = "not subscribed"
    NO_BROKER = "no broker"
    NOT_SENT = "not sent"
    NO_ANSWER = "no answer"
    BROKER_BUSY = "broker busy"
    REFUSED = "refused"
    UNREADABLE = "unreadable answer"
    #: The broker answers an empty pull without holding it.
    NOT_HELD = "not held"
    #: Not a delay: the broker named an offset below the one asked for.
    WENT_BACK = "went back"
    ILLEGAL_OFFSET = "illegal offset"
    FAILED = "failed"


#: The course of things: not counted as failures in a row.
_ORDINARY = frozenset(
    {
        Setback.PAUSED,
        Setback.CACHED_MESSAGES,
        Setback.CACHED_BYTES,
        Setback.OFFSET_SPAN,
        Setback.NOT_HELD,
    }
)
#: There is nobody to pull from.
UNREACHED = frozenset({Setback.NO_BROKER, Setback.NOT_SENT, Setback.NO_ANSWER})
#: What nobody has to look at. (A span that grows means one message that does not end.)
_NO_TROUBLE = _ORDINARY - {Setback.OFFSET_SPAN}


def delays(settings: PullSettings) -> Mapping[Setback, float]:
    """How long each of them puts a pull off."""
    special = {
        Setback.PAUSED: settings.paused_delay,
        Setback.CACHED_MESSAGES: settings.flow_delay,
        Setback.CACHED_BYTES: settings.flow_delay,
        Setback.OFFSET_SPAN: settings.flow_delay,
        Setback.NOT_HELD: settings.flow_delay,
        Setback.BROKER_BUSY: settings.busy_delay,
    }
    return MappingProxyType({each: special.get(each, settings.error_delay) for each in Setback})


class SetbackCounts:
    """The setbacks of one queue."""

    __slots__ = ("_counts", "_in_a_row")

    def __init__(self) -> None:
        self._counts: Counter[Setback] = Counter()
        self._in_a_row = 0

    def note(self, setback: Setback) -> int:
        """Count one; returns the count that is worth a line in the log, else 0."""
        self._counts[setback] += 1
        if setback in _ORDINARY:
            count = self._counts[setback]
        else:
            self._in_a_row += 1
            count = self._in_a_row
        return count if count % EVERY == 1 else 0

    def served(self) -> None:
        """A pull was served: failures are no longer in a row."""
        self._in_a_row = 0

    def totals(self) -> Mapping[Setback, int]:
        return MappingProxyType(self._counts)


def tell(group: str, queue: Queue, setback: Setback, count: int, detail: object) -> None:
    """The line in the log."""
    log.log(
        logging.INFO if setback in _NO_TROUBLE else logging.WARNING,
        "pull of %s for group %s put off: %s (%s), %d so far",
        queue,
        group,
        setback.value,
        detail,
        count,
        extra={"group": group, "queue": str(queue)},
    )
