"""Progress of groups, as tables."""

from __future__ import annotations

from msgspec import field

from orbitmq.wire.bodies.base import Body, Int32, Int64
from orbitmq.wire.bodies.route import MessageQueue
from orbitmq.wire.bodies.topics import DataVersion


class ResetOffsets(Body, frozen=True, kw_only=True):
    """INVOKE_BROKER_TO_RESET_OFFSET answered, and RESET_CONSUMER_CLIENT_OFFSET."""

    offset_table: dict[MessageQueue, Int64] = field(default_factory=dict)


class QueueOffset(Body, frozen=True, kw_only=True):
    """A queue and an offset in it, side by side."""

    broker_name: str
    offset: Int64
    queue_id: Int32
    topic: str


class ResetOffsetList(Body, frozen=True, kw_only=True):
    """RESET_CONSUMER_CLIENT_OFFSET in the form that C++ clients read."""

    offset_table: tuple[QueueOffset, ...] = ()


class ConsumerOffsets(Body, frozen=True, kw_only=True):
    """The answer to GET_ALL_CONSUMER_OFFSET: by `topic@group`, then by queue."""

    data_version: DataVersion | None = None
    offset_table: dict[str, dict[Int32, Int64]] = field(default_factory=dict)


class DelayOffsets(Body, frozen=True, kw_only=True):
    """The answer to GET_ALL_DELAY_OFFSET: by delay level."""

    data_version: DataVersion | None = None
    offset_table: dict[Int32, Int64] = field(default_factory=dict)


class CorrectionOffsets(Body, frozen=True, kw_only=True):
    """The answer to QUERY_CORRECTION_OFFSET: by queue."""

    correction_offsets: dict[Int32, Int64] = field(default_factory=dict)


class ConsumerStatus(Body, frozen=True, kw_only=True):
    """A client's own progress (second table), or that of all clients of a group (first)."""

    consumer_table: dict[str, dict[MessageQueue, Int64]] | None = None
    message_queue_table: dict[MessageQueue, Int64] | None = None


class TimingCount(Body, frozen=True, kw_only=True):
    """How many timer messages of a topic wait."""

    count: Int64 = 0
    time_stamp: Int64 = 0


class TimerMetrics(Body, frozen=True, kw_only=True):
    """The answer to GET_TIMER_METRICS."""

    data_version: DataVersion | None = None
    timing_count: dict[str, TimingCount] = field(default_factory=dict)
