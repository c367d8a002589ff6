"""How a consumer calls its handlers, and what it does when they fail."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq.errors import SettingError
from orbitmq.parsing import Fields

if TYPE_CHECKING:
    from orbitmq.client.consumer.window import Window


#: The largest number of workers, as with Apache's clients.
MOST_WORKERS = 1000
#: The largest number of messages of one call, likewise.
LARGEST_BATCH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeSettings:
    """Numbers and seconds of consumption. The defaults are RocketMQ's unless a comment says so.

    How long a stop waits for handlers that run is `RebalanceSettings.handover`: longer than that
    nobody waits for their queues.
    """

    workers: int = 20  #: handler calls at once
    #: Messages of one call. None: 1, and 32 for a handler that takes a batch.
    batch_size: int | None = None
    #: Attempts after the first. None: as the group is set at the broker (16); in order, no limit.
    max_retries: int | None = None
    #: A call that takes longer is given up: its messages come again, whatever it does in the end.
    timeout: float = 900.0
    send_back_timeout: float = 5.0  #: for one attempt to send a failed message back
    local_retry: float = 5.0  #: pause before a failed message that could not be sent back
    suspend: float = 1.0  #: in order: pause of a queue after a failure, 0.01 to 30
    time_slice: float = 60.0  #: in order: how long a queue may keep a worker before others

    def __post_init__(self) -> None:
        fields = Fields(self, "consume")
        fields.whole("workers", most=MOST_WORKERS)
        fields.whole("batch_size", most=LARGEST_BATCH, optional=True)
        fields.whole("max_retries", least=0, optional=True)
        fields.durations("suspend", least=0.01, most=30.0)
        fields.durations("timeout", "send_back_timeout", "local_retry", "time_slice")


# How queues are pulled: sizes, waits, and what is put off for how long.


KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """Every interval of a pull, in seconds."""

    batch_size: int = 32  #: messages asked for at once; Apache's brokers give no more than 32
    batch_bytes: int = 256 * KIB  #: bytes asked for at once
    hold: float = 15.0  #: how long the broker may keep an empty pull
    timeout: float = 30.0  #: when the client gives a pull up; above `hold`
    interval: float = 0.0  #: between messages that were fetched and the next pull
    error_delay: float = 1.0  #: after a pull that failed
    busy_delay: float = 0.02  #: after a broker that asks for less (FLOW_CONTROL)
    flow_delay: float = 0.05  #: while too much is cached
    paused_delay: float = 1.0  #: while the application wants nothing
    #: Between two corrections of an illegal offset of one queue; the first is made at once. (Java's
    #: clients of version 4 wait as long before each, because handlers that run could undo it. Here
    #: and in version 5 they cannot.)
    correction_delay: float = 10.0
    #: Send the subscription with every pull: brokers then serve groups that they do not know.
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


# How far fetching may run ahead of consuming.
#
# Limits hold per queue: on messages, on bytes, and, for concurrent consumption, on the distance
# between the smallest and the largest unfinished offset, so that one stuck message does not let its
# queue run ahead for ever (everything behind it would be repeated after a crash). A queue that is
# above a limit is pulled later; nothing is refused, and other queues go on.
#
# Limits per topic are shared out: the queues of the consumer each get an equal part.


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


# How often shares are worked out anew, and how queues change hands.


_MAY_BE_ZERO = ("handover", "return_grace", "spacing", "silence", "persist_idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceSettings:
    """Times in seconds. The defaults are RocketMQ's, where it has them."""

    interval: float = 20.0  #: between rounds when nothing happens
    retry: float = 1.0  #: before the next round when this one left something undone
    spacing: float = 0.05  #: rounds are never closer, however many notices come
    #: How long the loss of a queue waits for handler calls that run; with order locks, without end.
    handover: float = 10.0
    answer: float = 1.0  #: how long a member may take to say what it holds
    silence: float = 5.0  #: how long one that did not say is left alone (see `handover`)
    #: How long a member keeps a queue that is ours, although it answers, if it does not let go
    #: (Java members not so long: see `handover`).
    longest_wait: float = 300.0
    stalled: float = 120.0  #: an owned queue that was not pulled for so long is begun anew
    persist: float = 5.0  #: how often progress is put by
    #: Also when a queue had nothing to do for so long (see `reporting`); 0: only as often as that.
    persist_idle: float = 0.2
    #: After a broker was connected to, members that no broker lists are waited for (see `survey`).
    return_grace: float = 3.0
    #: A queue that somebody else still holds is asked for again after so long, and slower then.
    first_poll: float = 0.02
    slowest_poll: float = 0.2

    def __post_init__(self) -> None:
        fields = Fields(self, "rebalance")
        fields.durations(*_MAY_BE_ZERO, least=0)
        fields.durations(*(name for name in self.__slots__ if name not in _MAY_BE_ZERO))
