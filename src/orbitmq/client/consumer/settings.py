"""The settings of a consumer: calls of handlers, pulls, flow control, rebalancing."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq.arguments import explained
from orbitmq.errors import SettingError
from orbitmq.parsing import Fields

if TYPE_CHECKING:
    from orbitmq.client.consumer.window import Window


#: The largest number of workers, as with Apache's clients.
MOST_WORKERS = 1000
#: The largest number of messages of one call, likewise.
LARGEST_BATCH = 1024


@explained()
@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeSettings:
    """Numbers and seconds of consumption. The defaults are RocketMQ's unless a comment says so.

    A stop waits for running handlers for `RebalanceSettings.handover` seconds.
    """

    workers: int = 20  #: handler calls at once
    #: Messages of one call. None: 1, and 32 for a handler that takes a batch.
    batch_size: int | None = None
    #: Attempts after the first. None: as the group is set at the broker (16); in order, no limit.
    max_retries: int | None = None
    #: A call that takes longer is given up: its messages are delivered again.
    timeout: float = 900.0
    send_back_timeout: float = 5.0  #: for one attempt to send a failed message back
    local_retry: float = 5.0  #: pause before a failed message that could not be sent back
    suspend: float = 1.0  #: in order: pause of a queue after a failure, 0.01 to 30
    time_slice: float = 60.0  #: in order: how long a queue may keep a worker

    def __post_init__(self) -> None:
        fields = Fields(self, "consume")
        fields.whole("workers", most=MOST_WORKERS)
        fields.whole("batch_size", most=LARGEST_BATCH, optional=True)
        fields.whole("max_retries", least=0, optional=True)
        fields.durations("suspend", least=0.01, most=30.0)
        fields.durations("timeout", "send_back_timeout", "local_retry", "time_slice")


# ---- pulls


KIB = 1024


@explained()
@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """Every interval of a pull, in seconds."""

    batch_size: int = 256  #: messages per pull; Apache's brokers return at most 32
    batch_bytes: int = 512 * KIB  #: bytes per pull
    hold: float = 15.0  #: how long the broker may hold an empty pull
    timeout: float = 30.0  #: when the client gives a pull up; above `hold`
    interval: float = 0.0  #: after a pull that found messages
    error_delay: float = 1.0  #: after a failed pull
    busy_delay: float = 0.02  #: after FLOW_CONTROL of the broker
    flow_delay: float = 0.05  #: while flow control holds the queue back
    paused_delay: float = 1.0  #: while the application has paused
    #: Between two corrections of an illegal offset of a queue; the first one is immediate. (Java
    #: clients of version 4 wait before each, because running handlers could undo it.)
    correction_delay: float = 10.0
    #: Send the subscription with every pull, so that brokers serve groups that they do not know.
    post_subscription: bool = False

    def __post_init__(self) -> None:
        fields = Fields(self, "pull")
        fields.whole("batch_size", most=1024)
        fields.whole("batch_bytes", most=1024 * KIB * KIB)
        fields.durations("hold", least=0, most=3600)
        fields.durations("interval", least=0, most=65.535)
        delays = ("error_delay", "busy_delay", "flow_delay", "paused_delay", "correction_delay")
        fields.durations(*delays, least=0.001, most=3600)
        fields.durations("timeout")
        fields.switches("post_subscription")
        if not self.hold < self.timeout:
            raise SettingError(
                f"pull.timeout must be above pull.hold ({self.hold:g} s), got {self.timeout:g}"
            )


# ---- flow control
#
# Limits hold per queue: messages, bytes, and in concurrent consumption the distance between the
# smallest and the largest unfinished offset, as everything in between is repeated after a crash. A
# queue above a limit is pulled later. Limits per topic are divided among the consumer's queues.


MIB = 1024 * 1024


class FlowReason(enum.StrEnum):
    """The exceeded limit."""

    MESSAGES = "cached messages"
    BYTES = "cached bytes"
    SPAN = "offset span"


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """The limits of one queue."""

    messages: int
    size: int
    #: None: no limit.
    span: int | None

    def exceeded_by(self, window: Window) -> FlowReason | None:
        """The limit that a queue exceeds."""
        if len(window) > self.messages:
            return FlowReason.MESSAGES
        if window.size > self.size:
            return FlowReason.BYTES
        if self.span is not None and window.span > self.span:
            return FlowReason.SPAN
        return None


@explained()
@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """How far a consumer fetches ahead."""

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
        """The limits of each of `queues` owned queues."""
        return FlowLimits(
            _share(self.max_cached_messages, self.max_cached_messages_per_topic, queues),
            _share(self.max_cached_bytes, self.max_cached_bytes_per_topic, queues),
            None if is_orderly else self.max_span,
        )


def _share(per_queue: int, per_topic: int | None, queues: int) -> int:
    """A limit per topic replaces the one per queue, as in Java clients."""
    return per_queue if per_topic is None else max(1, per_topic // max(1, queues))


# ---- rebalancing and hand-over


_MAY_BE_ZERO = ("handover", "return_grace", "spacing", "silence", "persist_idle")


@explained()
@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceSettings:
    """Times in seconds. The defaults are RocketMQ's where it has them."""

    interval: float = 20.0  #: between rounds without events
    retry: float = 1.0  #: before the next round when this one could not finish
    spacing: float = 0.05  #: the shortest distance of rounds
    #: How long a release waits for running handler calls; with order locks, without a limit.
    handover: float = 10.0
    answer: float = 1.0  #: how long a member may take to report what it holds
    silence: float = 5.0  #: how long a member without an answer is not asked again
    #: How long a member that answers may keep a queue that is ours (Java members not as long: see
    #: `docs/internals/handover.md`).
    longest_wait: float = 300.0
    stalled: float = 120.0  #: an owned queue without a pull for this time begins again
    persist: float = 5.0  #: the interval of commits
    #: A queue that is idle for this time is committed early; 0: no early commits.
    persist_idle: float = 0.2
    #: How long missing members are waited for after a broker was connected to.
    return_grace: float = 3.0

    def __post_init__(self) -> None:
        fields = Fields(self, "rebalance")
        fields.durations(*_MAY_BE_ZERO, least=0)
        fields.durations(*(name for name in self.__slots__ if name not in _MAY_BE_ZERO))
