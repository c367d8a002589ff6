"""How far fetching may run ahead of consuming.

Limits hold per queue: on messages, on bytes, and, for concurrent consumption, on the distance
between the smallest and the largest unfinished offset, so that one stuck message does not let its
queue run ahead for ever (everything behind it would be repeated after a crash). A queue that is
above a limit is pulled later; nothing is refused, and other queues go on.

Limits per topic are shared out: the queues of the consumer each get an equal part.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq.client.checks import Fields

if TYPE_CHECKING:
    from orbitmq.client.consumer.window import Window

MIB = 1024 * 1024


class FlowReason(enum.StrEnum):
    """Which limit a queue is above."""

    MESSAGES = "cached messages"
    BYTES = "cached bytes"
    SPAN = "offset span"


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """What one queue may hold."""

    messages: int
    size: int
    #: None: no limit.
    span: int | None

    def exceeded_by(self, window: Window) -> FlowReason | None:
        """The limit that a queue is above, if any."""
        if len(window) > self.messages:
            return FlowReason.MESSAGES
        if window.size > self.size:
            return FlowReason.BYTES
        if self.span is not None and window.span > self.span:
            return FlowReason.SPAN
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """How much a consumer fetches ahead."""

    max_cached_messages: int = 1000  #: per queue
    max_cached_bytes: int = 100 * MIB  #: per queue
    max_span: int = 2000  #: per queue, in offsets; concurrent consumption only
    max_cached_messages_per_topic: int | None = None  #: shared by the queues of the consumer
    max_cached_bytes_per_topic: int | None = None  #: likewise

    def __post_init__(self) -> None:
        fields = Fields(self, "flow")
        fields.whole("max_cached_messages", "max_span", most=65_535)
        fields.whole("max_cached_bytes", most=1024 * MIB)
        fields.whole("max_cached_messages_per_topic", most=6_553_500, optional=True)
        fields.whole("max_cached_bytes_per_topic", most=102_400 * MIB, optional=True)

    def limits(self, queues: int, *, is_orderly: bool = False) -> FlowLimits:
        """The limits of each of so many queues that a consumer owns."""
        return FlowLimits(
            _share(self.max_cached_messages, self.max_cached_messages_per_topic, queues),
            _share(self.max_cached_bytes, self.max_cached_bytes_per_topic, queues),
            None if is_orderly else self.max_span,
        )


def _share(per_queue: int, per_topic: int | None, queues: int) -> int:
    """A limit per topic takes the place of the one per queue, as in Java clients."""
    return per_queue if per_topic is None else max(1, per_topic // max(1, queues))
