"""What a group has registered to filter a topic by, in memory and as consumerFilter.json has it."""

from __future__ import annotations

import msgspec

from orbitmq.broker.compiledfilters import memory_of
from orbitmq.clock import milliseconds
from orbitmq.filter.subscription import MessageFilter
from orbitmq.wire.bodies.base import Body, Int64

#: Bytes of a registration beside its texts and its filter.
_REGISTRATION = 512
#: Bytes of a filter that its registration keeps; a larger one is compiled again if need be.
_KEPT_BYTES = 64 * 1024


class Registration:
    """What a group filters a topic by, if that is more than tags."""

    __slots__ = (
        "born_at",
        "expression",
        "expression_type",
        "filter",
        "left_at",
        "size",
        "version",
        "was_compiled",
    )

    def __init__(
        self,
        expression: str,
        expression_type: str,
        compiled: MessageFilter | None,
        version: int,
        at: float,
    ) -> None:
        self.expression = expression
        self.expression_type = expression_type
        #: None when it takes much memory, or is not compiled yet.
        self.filter: MessageFilter | None = None
        self.was_compiled = False
        #: Bytes that it takes, about.
        self.size = _REGISTRATION + len(expression) + len(expression_type)
        if compiled is not None:
            self.keep(compiled)
        self.version = version
        self.born_at = at
        #: None while somebody of the group is there.
        self.left_at: float | None = None

    def keep(self, compiled: MessageFilter) -> None:
        """Have the filter at hand, unless it takes much memory."""
        self.was_compiled = True
        if (size := memory_of(compiled)) <= _KEPT_BYTES:
            self.filter = compiled
            self.size += size

    def says(self, expression: str, expression_type: str) -> bool:
        return self.expression == expression and self.expression_type == expression_type

    def data(self, group: str, topic: str) -> FilterData:
        """The registration as it is written."""
        return FilterData(
            born_time=milliseconds(self.born_at),
            client_version=self.version,
            consumer_group=group,
            dead_time=0 if self.left_at is None else milliseconds(self.left_at),
            expression=self.expression,
            expression_type=self.expression_type,
            topic=topic,
        )


class FilterData(Body, frozen=True, kw_only=True):
    """A registration as consumerFilter.json has it; times in milliseconds, dead: from born on."""

    born_time: Int64 = 0
    client_version: Int64 = 0
    consumer_group: str
    dead_time: Int64 = 0
    expression: str
    expression_type: str
    topic: str

    def left_at(self, otherwise: float) -> float:
        """When its group left; if that is not known, `otherwise`, but not before it came."""
        if self.dead_time > 0 and self.dead_time >= self.born_time:
            return self.dead_time / 1000
        return max(self.born_time / 1000, otherwise)


class TopicFilters(Body, frozen=True, kw_only=True):
    """The registrations for one topic, by group."""

    group_filter_data: dict[str, FilterData] = msgspec.field(default_factory=dict)
    topic: str


class FilterFile(Body, frozen=True, kw_only=True):
    """consumerFilter.json, by topic.

    Apache's broker adds bloom filter positions to each entry and, at start, ignores a file without
    them: it then compiles what the first heartbeats bring.
    """

    filter_data_by_topic: dict[str, TopicFilters] = msgspec.field(default_factory=dict)
