"""What a consumer has done, by topic: messages, failures, times, per second and in all.

Rates and times are those of the last minute, as Apache's tools show them.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from orbitmq.client.consumer.sendback import DEFAULT_RETRIES
from orbitmq.clock import milliseconds
from orbitmq.wire.bodies import ConsumeStatus, ConsumeType
from orbitmq.wire.codes import OUR_VERSION, release_of

if TYPE_CHECKING:
    from orbitmq.client.consumer.pull import PullDelay, Subscriptions
    from orbitmq.client.consumer.settings import ConsumeSettings, FlowSettings, PullSettings
    from orbitmq.client.routes import Queue
    from orbitmq.wire.bodies import ConsumeFromWhere, ConsumerRunningInfo, MessageModel


#: Rates are taken over so many slots of so many seconds.
_MINUTE: Final = (12, 5.0)
_HOUR: Final = (60, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatistics:
    """What a consumer has done with a topic. Rates and times are those of the last minute."""

    consumed: int = 0  #: messages that handlers were done with, ever
    failed: int = 0  #: messages that handlers failed on, ever
    failed_last_hour: int = 0
    pulled: int = 0  #: messages fetched, ever
    consumed_per_second: float = 0.0
    failed_per_second: float = 0.0
    pulled_per_second: float = 0.0
    consume_time: float = 0.0  #: mean seconds of a handler call
    #: How long handler calls took: p50, p95, p99, longest, each None when there was no call.
    consume_times: CallTimes = field(default_factory=lambda: CallTimes({}))
    pull_time: float = 0.0  #: mean seconds from asking for messages to having some
    calls: int = 0  #: handler calls, ever
    call_seconds: float = 0.0  #: that they took together


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatistics:
    """What a consumer has done."""

    topics: Mapping[str, TopicStatistics]
    #: Messages of queues that were lost before their handler was called: the new owner has them.
    passed_over: int = 0
    #: Messages consumed here whose queue was lost meanwhile: they are delivered a second time.
    duplicates: int = 0
    #: Failed messages that the broker took back, and those that it did not: tried again here.
    sent_back: int = 0
    kept_back: int = 0
    #: Messages whose handler took too long.
    timed_out: int = 0
    #: Messages given up, as far as this consumer knows: brokers count attempts by themselves.
    dead_letters: int = 0
    #: What keeps messages away now, a sentence each: a topic that is not there, a name server that
    #: does not answer, a group that brokers do not have, a permission that is missing.
    troubles: tuple[str, ...] = ()
    #: How often fetching was put off, or odd, by queue and reason: flow control, a broker that
    #: refused, an offset that went back.
    put_off: Mapping[tuple[Queue, PullDelay], int] = field(default_factory=dict)


class _Topic:
    __slots__ = ("calls", "consumed", "failed", "failed_hour", "pulled", "pulls")

    def __init__(self, now: float) -> None:
        self.consumed = Meter(now, *_MINUTE)
        self.failed = Meter(now, *_MINUTE)
        self.failed_hour = Meter(now, *_HOUR)
        self.calls = CallMeter(now, *_MINUTE)
        self.pulled = Meter(now, *_MINUTE)
        self.pulls = Meter(now, *_MINUTE)


class Statistics:
    """Where a consumer counts. Belongs to its event loop."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        #: Has counted what is known and not counted yet; called before anybody is told a number.
        self.catch_up: Callable[[], None] = _nothing
        self._topics: dict[str, _Topic] = {}
        self.passed_over = 0
        self.duplicates = 0
        self.sent_back = 0
        self.kept_back = 0
        self.timed_out = 0
        self.dead_letters = 0

    def consumed(self, topic: str, *, done: int, failed: int, times: Sequence[float]) -> None:
        """Handlers were called, and took so many seconds each."""
        now = self._monotonic()
        counts = self._topic(topic, now)
        if times:
            counts.calls.add_calls(now, times)
        if done:
            counts.consumed.add(now, done)
        if failed:
            counts.failed.add(now, failed)
            counts.failed_hour.add(now, failed)

    def pulled(self, topic: str, messages: int, seconds: float) -> None:
        """A pull found messages, after so many seconds."""
        now = self._monotonic()
        counts = self._topics.get(topic) or self._topic(topic, now)
        counts.pulled.add(now, messages)
        counts.pulls.add(now, 1, seconds)

    def topic(self, topic: str) -> TopicStatistics:
        """What was counted for a topic."""
        self.catch_up()
        return self._counted(topic)

    def _counted(self, topic: str) -> TopicStatistics:
        counts = self._topics.get(topic)
        if counts is None:
            return TopicStatistics()
        now = self._monotonic()
        return TopicStatistics(
            consumed=counts.consumed.count,
            failed=counts.failed.count,
            failed_last_hour=counts.failed_hour.recent(now),
            pulled=counts.pulled.count,
            consumed_per_second=counts.consumed.rate(now),
            failed_per_second=counts.failed.rate(now),
            pulled_per_second=counts.pulled.rate(now),
            consume_time=counts.calls.mean(now),
            consume_times=counts.calls.times(now),
            pull_time=counts.pulls.mean(now),
            calls=counts.calls.count,
            call_seconds=counts.calls.total,
        )

    def snapshot(
        self,
        troubles: Sequence[str] = (),
        put_off: Mapping[tuple[Queue, PullDelay], int] = MappingProxyType({}),
    ) -> ConsumerStatistics:
        """Everything, as it is now."""
        self.catch_up()
        return ConsumerStatistics(
            topics={topic: self._counted(topic) for topic in self._topics},
            passed_over=self.passed_over,
            duplicates=self.duplicates,
            sent_back=self.sent_back,
            kept_back=self.kept_back,
            timed_out=self.timed_out,
            dead_letters=self.dead_letters,
            troubles=tuple(troubles),
            put_off=put_off,
        )

    def status(self, topic: str) -> ConsumeStatus:
        """As running info carries it: times in milliseconds."""
        counted = self.topic(topic)
        return ConsumeStatus(
            consume_failed_msgs=counted.failed_last_hour,
            consume_failed_tps=counted.failed_per_second,
            consume_ok_tps=counted.consumed_per_second,
            consume_rt=counted.consume_time * 1000,
            pull_rt=counted.pull_time * 1000,
            pull_tps=counted.pulled_per_second,
        )

    def _topic(self, topic: str, now: float) -> _Topic:
        counts = self._topics.get(topic)
        if counts is None:
            counts = self._topics[topic] = _Topic(now)
        return counts


def _nothing() -> None:
    """For statistics to which everything is told at once."""


# Sums over a stretch of time that moves along.
#
# They are kept in slots of fixed length, of which the oldest is used again: no timer runs for it,
# and adding costs the same however much is counted.


#: So many times are put into buckets at once, which is far cheaper than one by one.
_AT_ONCE: Final = 512


class Meter:
    """Counts events and adds values up, over a stretch of time that moves along."""

    __slots__ = (
        "_began", "_counts", "_ends", "_slot", "_slots", "_sums", "_width", "count", "total"
    )  # fmt: skip

    def __init__(self, now: float, slots: int, width: float) -> None:
        self._slots = slots
        self._width = width
        self._began = now
        self._slot = int(now // width)
        #: When the present slot does.
        self._ends = (self._slot + 1) * width
        self._counts = [0] * slots
        self._sums = [0.0] * slots
        #: All events ever, and their values.
        self.count = 0
        self.total = 0.0

    def add(self, now: float, count: int = 1, value: float = 0.0) -> None:
        if now >= self._ends:
            self._move_to(now)
        place = self._slot % self._slots
        self._counts[place] += count
        self._sums[place] += value
        self.count += count
        self.total += value

    def recent(self, now: float) -> int:
        """Events within the stretch."""
        self._move_to(now)
        return sum(self._counts)

    def rate(self, now: float) -> float:
        """Events per second within the stretch, or since the beginning if that is shorter."""
        lasted = min(now - self._began, self._slots * self._width)
        return self.recent(now) / max(lasted, 1.0)

    def mean(self, now: float) -> float:
        """The mean value of the events within the stretch; of all ever if there were none."""
        count = self.recent(now)
        if count:
            return sum(self._sums) / count
        return self.total / self.count if self.count else 0.0

    def _move_to(self, now: float) -> None:
        slot = int(now // self._width)
        passed = min(slot - self._slot, self._slots)
        for step in range(1, passed + 1):
            self._clear((self._slot + step) % self._slots if passed < self._slots else step - 1)
        if passed > 0:
            self._slot = slot
            self._ends = (slot + 1) * self._width

    def _clear(self, place: int) -> None:
        self._counts[place] = 0
        self._sums[place] = 0.0


class CallMeter(Meter):
    """Counts calls, and by how long they took.

    What is added waits until there is much of it, or until somebody asks: `count` and `total` are
    complete after `recent` and all that begins with it.
    """

    __slots__ = ("_buckets", "_longest", "_waiting")

    def __init__(self, now: float, slots: int, width: float) -> None:
        super().__init__(now, slots, width)
        self._buckets: list[Counter[int]] = [Counter() for _ in range(slots)]
        self._longest: list[float | None] = [None] * slots
        #: Times of the present slot that are in no bucket yet.
        self._waiting: list[float] = []

    def add_calls(self, now: float, times: Sequence[float]) -> None:
        """Calls that have ended, by the seconds that each took."""
        if now >= self._ends:
            self._move_to(now)
        waiting = self._waiting
        waiting += times
        if len(waiting) >= _AT_ONCE:
            self._put_into_buckets()

    def recent(self, now: float) -> int:
        self._put_into_buckets()
        return super().recent(now)

    def times(self, now: float) -> CallTimes:
        """How long the calls within the stretch took."""
        self.recent(now)
        return CallTimes.together(map(CallTimes, self._buckets, self._longest))

    def _clear(self, place: int) -> None:
        # The slot that is left keeps what is its own.
        self._put_into_buckets()
        super()._clear(place)
        self._buckets[place] = Counter()
        self._longest[place] = None

    def _put_into_buckets(self) -> None:
        times = self._waiting
        if not times:
            return
        place, seconds = self._slot % self._slots, sum(times)
        self._buckets[place].update(buckets_of(times))
        longest = max(times)
        self._longest[place] = max(self._longest[place] or 0.0, longest)
        self._counts[place] += len(times)
        self._sums[place] += seconds
        self.count += len(times)
        self.total += seconds
        times.clear()


# A consumer's statistics in the text format of Prometheus.
#
# Brokers tell how far a group is and how fast it pulls. Only a consumer knows what its handlers
# made of the messages; a program serves this text wherever it serves its own metrics.


class _Family(NamedTuple):
    name: str
    type: str
    help: str
    read: Callable[[TopicStatistics], float]


_BY_TOPIC: Final = (
    _Family("consumed_total", "counter", "Messages that handlers were done with.",
            lambda topic: topic.consumed),
    _Family("failed_total", "counter", "Messages that handlers failed on.",
            lambda topic: topic.failed),
    _Family("pulled_total", "counter", "Messages fetched.",
            lambda topic: topic.pulled),
    _Family("consumed_per_second", "gauge", "Messages that handlers were done with, last minute.",
            lambda topic: topic.consumed_per_second),
    _Family("failed_per_second", "gauge", "Messages that handlers failed on, last minute.",
            lambda topic: topic.failed_per_second),
    _Family("pulled_per_second", "gauge", "Messages fetched, last minute.",
            lambda topic: topic.pulled_per_second),
    _Family("handler_seconds", "gauge", "Mean time of a handler call, last minute.",
            lambda topic: topic.consume_time),
    _Family("pull_seconds", "gauge", "Mean time from asking for messages to having some.",
            lambda topic: topic.pull_time),
)  # fmt: skip

#: A summary: what so many of all calls took at most in the last minute, and all calls ever.
_CALLS: Final = "handler_call_seconds"
_QUANTILES: Final = (0.5, 0.95, 0.99)

_BY_GROUP: Final = (
    ("sent_back_total", "Failed messages that the broker took back.", "sent_back"),
    ("dead_letters_total", "Messages given up, as far as this consumer knows.", "dead_letters"),
    ("timed_out_total", "Messages whose handler took too long.", "timed_out"),
    ("duplicates_total", "Messages consumed here whose queue was lost meanwhile.", "duplicates"),
)


def metrics_text(group: str, client_id: str, statistics: ConsumerStatistics) -> str:
    """All families, each with the group, the member and, where it has one, the topic."""
    member = {"group": group, "client_id": client_id}
    lines: list[str] = []
    # A family without samples is not told of: before the first pull there are no topics.
    for name, kind, about, read in _BY_TOPIC if statistics.topics else ():
        lines += _head(name, kind, about)
        lines += [
            _sample(name, {**member, "topic": topic}, read(counted))
            for topic, counted in sorted(statistics.topics.items())
        ]
    lines += _calls(member, sorted(statistics.topics.items()))
    for name, about, counted in _BY_GROUP:
        lines += _head(name, "counter", about)
        lines.append(_sample(name, member, getattr(statistics, counted)))
    lines += _head("troubles", "gauge", "Things that keep messages away now.")
    lines.append(_sample("troubles", member, len(statistics.troubles)))
    lines += _put_off(member, statistics)
    return "\n".join(lines) + "\n"


def _calls(
    member: Mapping[str, str], topics: Sequence[tuple[str, TopicStatistics]]
) -> Iterator[str]:
    called = [(topic, counted) for topic, counted in topics if counted.calls]
    if not called:
        return
    yield from _head(_CALLS, "summary", "Times of handler calls; quantiles are of the last minute.")
    for topic, counted in called:
        labels = {**member, "topic": topic}
        for quantile in _QUANTILES:
            value = counted.consume_times.percentile(quantile)
            if value is not None:
                yield _sample(_CALLS, {**labels, "quantile": str(quantile)}, value)
        yield _sample(f"{_CALLS}_sum", labels, counted.call_seconds)
        yield _sample(f"{_CALLS}_count", labels, counted.calls)
    longest = "handler_call_longest_seconds"
    yield from _head(longest, "gauge", "The longest handler call of the last minute.")
    for topic, counted in called:
        if counted.consume_times.longest is not None:
            yield _sample(longest, {**member, "topic": topic}, counted.consume_times.longest)


def _put_off(member: Mapping[str, str], statistics: ConsumerStatistics) -> Iterator[str]:
    if not statistics.put_off:
        return
    name = "pulls_put_off_total"
    yield from _head(name, "counter", "Pulls that came later, or were odd, by queue and reason.")
    for (queue, reason), count in sorted(statistics.put_off.items()):
        place = {"topic": queue.topic, "broker": queue.broker, "queue": str(queue.id)}
        yield _sample(name, {**member, **place, "reason": reason.value}, count)


def _head(name: str, kind: str, about: str) -> Iterable[str]:
    return (
        f"# HELP orbitmq_consumer_{name} {about}",
        f"# TYPE orbitmq_consumer_{name} {kind}",
    )


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    told = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"orbitmq_consumer_{name}{{{told}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# What a consumer tells whoever asks what it is and does (307).


_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerDescription:
    """What is the same for as long as a consumer lives."""

    group: str
    name_servers: Iterable[object]
    model: MessageModel
    begins: ConsumeFromWhere
    strategy: str
    is_ordered: bool
    started_at: float
    consume: ConsumeSettings
    pull: PullSettings
    flow: FlowSettings

    def properties(self, workers: int) -> dict[str, str]:
        """Under the names that Apache's tools look for."""
        release = release_of(OUR_VERSION)
        version = str(OUR_VERSION) if release is None else f"V{release}".replace(".", "_")
        consume, pull, flow = self.consume, self.pull, self.flow
        retries = consume.max_retries
        if retries is None:
            retries = -1 if self.is_ordered else DEFAULT_RETRIES
        found: dict[str, object] = {
            "PROP_NAMESERVER_ADDR": ";".join(map(str, self.name_servers)) + ";",
            "PROP_CONSUME_TYPE": ConsumeType.CONSUME_PASSIVELY.value,
            "PROP_CONSUMEORDERLY": str(self.is_ordered).lower(),
            "PROP_THREADPOOL_CORE_SIZE": workers,
            "PROP_CLIENT_VERSION": version,
            "PROP_CONSUMER_START_TIMESTAMP": milliseconds(self.started_at),
            "consumerGroup": self.group,
            "messageModel": self.model.value,
            "consumeFromWhere": self.begins.value,
            "allocateMessageQueueStrategy": self.strategy,
            "consumeThreadMin": workers,
            "consumeThreadMax": workers,
            "consumeTimeout": round(consume.timeout / 60),
            "maxReconsumeTimes": retries,
            "suspendCurrentQueueTimeMillis": round(consume.suspend * 1000),
            "pullBatchSize": pull.batch_size,
            "pullInterval": round(pull.interval * 1000),
            "pullThresholdForQueue": flow.max_cached_messages,
            "pullThresholdSizeForQueue": flow.max_cached_bytes // _MIB,
            "consumeConcurrentlyMaxSpan": flow.max_span,
        }
        return {name: str(value) for name, value in found.items()}


def describe(
    info: ConsumerRunningInfo,
    particulars: ConsumerDescription,
    subscriptions: Subscriptions,
    statistics: Statistics,
    *,
    workers: int,
    stacks: str | None = None,
) -> ConsumerRunningInfo:
    """Everything that is known, added to what `info` says about the queues.

    What Apache's consumers do not have is among the user's own facts, which its tools print as they
    are: brokers and tools of any version pass them on.
    """
    counted = statistics.snapshot()
    own = {
        "passedOver": counted.passed_over,
        "duplicates": counted.duplicates,
        "sentBack": counted.sent_back,
        "keptBack": counted.kept_back,
        "timedOut": counted.timed_out,
        "deadLetters": counted.dead_letters,
    }
    return msgspec.structs.replace(
        info,
        properties=particulars.properties(workers) | info.properties,
        subscription_set=subscriptions.to_data(),
        status_table={topic: statistics.status(topic) for topic in subscriptions.topics},
        user_consumer_info={name: str(count) for name, count in own.items()}
        | {
            property_of(topic): each.consume_times.told()
            for topic, each in counted.topics.items()
            if each.consume_times.calls
        },
        jstack=stacks,
    )


# How long calls took, as counts of buckets: percentiles of one consumer or of many together.
#
# The percentile of a group cannot be had from the percentiles of its members, but from their
# counts. So members tell their counts, in a text that people can read as well (see
# `CallTimes.told`).
#
# A bucket is named by the upper 16 bits of a time as IEEE 754 writes it: the exponent and four bits
# of the fraction. That divides each doubling into 16 parts of equal width, from nanoseconds to
# years, without a table, a logarithm or a limit, and a whole list is put into buckets by a few
# steps that leave the interpreter no work for a single time. A percentile is the upper end of its
# bucket: never below the truth, and above it by a sixteenth at most.


#: Where the upper 16 bits of a double are among its four parts of 16 bits.
_UPPER: Final = 3 if sys.byteorder == "little" else 0
#: The last bucket of finite times; above are the infinite ones and those below zero.
_LAST_BUCKET: Final = 0x7FEF
#: What `told` writes.
_TOLD: Final = re.compile(r"calls=\d+ .* longest=(\S+) s buckets=([0-9a-f:,]+)")


def property_of(topic: str) -> str:
    """The name under which a consumer tells how long the calls for a topic took."""
    return f"consumeTimes.{topic}"


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long calls took, in seconds; None when there were none."""

    #: How many calls each bucket has.
    buckets: Mapping[int, int]
    longest: float | None = None

    @classmethod
    def of(cls, times: Sequence[float]) -> CallTimes:
        """Of single times, none below zero."""
        return cls(Counter(buckets_of(times)), max(times, default=None))

    @classmethod
    def together(cls, parts: Iterable[CallTimes]) -> CallTimes:
        """Of the calls of all parts."""
        buckets = Counter[int]()
        longest: list[float] = []
        for part in parts:
            buckets.update(part.buckets)
            if part.longest is not None:
                longest.append(part.longest)
        return cls(buckets, max(longest, default=None))

    @property
    def calls(self) -> int:
        """How many calls there were."""
        return sum(self.buckets.values())

    @property
    def p50(self) -> float | None:
        """What half of the calls took at most."""
        return self.percentile(0.50)

    @property
    def p95(self) -> float | None:
        """What 95 of 100 calls took at most."""
        return self.percentile(0.95)

    @property
    def p99(self) -> float | None:
        """What 99 of 100 calls took at most."""
        return self.percentile(0.99)

    def percentile(self, share: float) -> float | None:
        """What this share of the calls took at most."""
        if self.longest is None:
            return None
        left = math.ceil(self.calls * share)
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return min(self.longest, _upper_end(bucket))
        return self.longest

    def told(self) -> str:
        """As consumers tell it: for people in front, for programs at the end."""
        shown = " ".join(
            f"p{share}={self.percentile(share / 100) or 0.0:.6f}" for share in (50, 95, 99)
        )
        buckets = ",".join(f"{bucket:x}:{self.buckets[bucket]}" for bucket in sorted(self.buckets))
        return f"calls={self.calls} {shown} longest={self.longest or 0.0!r} s buckets={buckets}"

    @classmethod
    def from_told(cls, text: str) -> CallTimes | None:
        """What `told` wrote; None for anything else: others may use the same name."""
        found = _TOLD.fullmatch(text)
        if found is None:
            return None
        try:
            pairs = [each.split(":") for each in found[2].split(",")]
            buckets = {int(bucket, 16): int(count) for bucket, count in pairs}
            longest = float(found[1])
        except ValueError:
            return None
        if not (longest >= 0 and max(buckets) <= _LAST_BUCKET and min(buckets.values()) > 0):
            return None
        return cls(buckets, longest)


def buckets_of(times: Sequence[float]) -> array[int]:
    """The bucket of each time."""
    return array("H", array("d", times).tobytes())[_UPPER::4]


def _upper_end(bucket: int) -> float:
    end: float = struct.unpack(">d", struct.pack(">Hxxxxxx", bucket + 1))[0]
    return end
