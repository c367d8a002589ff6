"""What a consumer has done, by topic: messages, failures, durations, rates and totals.

Rates and durations are those of the last minute, as Apache's tools show them.
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

from orbitmq import __version__
from orbitmq.client.consumer.progress import wire_name
from orbitmq.client.consumer.sendback import DEFAULT_RETRIES
from orbitmq.client.consumer.strategies import name_of
from orbitmq.clock import milliseconds
from orbitmq.wire.bodies import ConsumeStatus, ConsumeType
from orbitmq.wire.codes import OUR_VERSION, release_of

if TYPE_CHECKING:
    from orbitmq.client.consumer.consumer import ConsumerOptions
    from orbitmq.client.consumer.pull import PullDelay
    from orbitmq.client.consumer.subscriptions import Subscriptions
    from orbitmq.client.routes import Queue
    from orbitmq.wire.bodies import ConsumerRunningInfo


#: Slots of a rate, and the seconds of each.
_MINUTE: Final = (12, 5.0)
_HOUR: Final = (60, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatistics:
    """What a consumer has done with a topic. Rates and times are those of the last minute."""

    consumed: int = 0  #: messages that handlers finished, in all
    failed: int = 0  #: messages that handlers failed on, in all
    failed_last_hour: int = 0
    pulled: int = 0  #: messages fetched, in all
    consumed_per_second: float = 0.0
    failed_per_second: float = 0.0
    pulled_per_second: float = 0.0
    consume_time: float = 0.0  #: mean seconds of a handler call
    #: The distribution of handler calls: p50, p95, p99, longest; None when there was no call.
    consume_times: CallTimes = field(default_factory=lambda: CallTimes({}))
    pull_time: float = 0.0  #: mean seconds of pulls that found messages
    calls: int = 0  #: handler calls, in all
    call_seconds: float = 0.0  #: their total duration


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatistics:
    """What a consumer has done."""

    topics: Mapping[str, TopicStatistics]
    #: Messages whose queue was lost before their handler call: the new owner has them.
    passed_over: int = 0
    #: Messages consumed here whose queue was lost meanwhile: they are delivered a second time.
    duplicates: int = 0
    #: Failed messages that a broker took back, and those that none took: retried here.
    sent_back: int = 0
    kept_back: int = 0
    #: Messages whose handler took too long.
    timed_out: int = 0
    #: Dead letters, as far as this consumer knows: brokers count attempts by themselves.
    dead_letters: int = 0
    #: What prevents messages from arriving, a sentence each: a missing topic, a name server that
    #: does not answer, a group that brokers do not have, a missing permission.
    troubles: tuple[str, ...] = ()
    #: How often pulls were delayed or unusual, by queue and reason: flow control, a refusal, an
    #: offset that went back.
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
    """The counters of a consumer. Belongs to its event loop."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        #: Counts what is pending; called before numbers are read.
        self.catch_up: Callable[[], None] = _nothing
        self._topics: dict[str, _Topic] = {}
        self.passed_over = 0
        self.duplicates = 0
        self.sent_back = 0
        self.kept_back = 0
        self.timed_out = 0
        self.dead_letters = 0

    def consumed(self, topic: str, *, done: int, failed: int, times: Sequence[float]) -> None:
        """Handler calls have ended; `times` are their durations."""
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
        """A pull has found messages."""
        now = self._monotonic()
        counts = self._topics.get(topic) or self._topic(topic, now)
        counts.pulled.add(now, messages)
        counts.pulls.add(now, 1, seconds)

    def topic(self, topic: str) -> TopicStatistics:
        """The numbers of a topic."""
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
        """All numbers of now."""
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
        """In the form of running info: times in milliseconds."""
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
    """The default of `catch_up`."""


# ---- sums over a moving interval


#: Durations are put into buckets in groups of this size, which is far cheaper.
_AT_ONCE: Final = 512


class Meter:
    """Counts events and sums values over a moving interval, in slots that are used again."""

    __slots__ = (
        "_began", "_counts", "_ends", "_slot", "_slots", "_sums", "_width", "count", "total"
    )  # fmt: skip

    def __init__(self, now: float, slots: int, width: float) -> None:
        self._slots = slots
        self._width = width
        self._began = now
        self._slot = int(now // width)
        #: The end of the present slot.
        self._ends = (self._slot + 1) * width
        self._counts = [0] * slots
        self._sums = [0.0] * slots
        #: All events and values since the start.
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
        """Events in the interval."""
        self._move_to(now)
        return sum(self._counts)

    def rate(self, now: float) -> float:
        """Events per second in the interval, or since the start if that is shorter."""
        lasted = min(now - self._began, self._slots * self._width)
        return self.recent(now) / max(lasted, 1.0)

    def mean(self, now: float) -> float:
        """The mean value of events in the interval; without any, of all events."""
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
    """Counts calls and their durations.

    Durations are collected first: `count` and `total` are complete after `recent`.
    """

    __slots__ = ("_buckets", "_longest", "_waiting")

    def __init__(self, now: float, slots: int, width: float) -> None:
        super().__init__(now, slots, width)
        self._buckets: list[Counter[int]] = [Counter() for _ in range(slots)]
        self._longest: list[float | None] = [None] * slots
        #: Durations of the present slot that are in no bucket yet.
        self._waiting: list[float] = []

    def add_calls(self, now: float, times: Sequence[float]) -> None:
        """Add calls by their durations in seconds."""
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
        """The distribution of the calls in the interval."""
        self.recent(now)
        return CallTimes.together(map(CallTimes, self._buckets, self._longest))

    def _clear(self, place: int) -> None:
        # Durations collected so far belong to the slot that ends.
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


# ---- metrics in the text format of Prometheus

_OURS: Final = "orbitmq_consumer_"


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

#: A summary: quantiles of the last minute, sum and count of all calls.
_CALLS: Final = "handler_call_seconds"
_QUANTILES: Final = (0.5, 0.95, 0.99)

_BY_GROUP: Final = (
    ("sent_back_total", "Failed messages that the broker took back.", "sent_back"),
    ("dead_letters_total", "Messages given up, as far as this consumer knows.", "dead_letters"),
    ("timed_out_total", "Messages whose handler took too long.", "timed_out"),
    ("duplicates_total", "Messages consumed here whose queue was lost meanwhile.", "duplicates"),
)


def metrics_text(group: str, client_id: str, statistics: ConsumerStatistics) -> str:
    """All metric families, labelled with the group, the member and the topic."""
    member = {"group": group, "client_id": client_id}
    lines: list[str] = []
    # No family without samples: before the first pull there are no topics.
    for name, kind, about, read in _BY_TOPIC if statistics.topics else ():
        lines += family_head(_OURS + name, kind, about)
        lines += [
            sample_line(_OURS + name, {**member, "topic": topic}, read(counted))
            for topic, counted in sorted(statistics.topics.items())
        ]
    lines += _calls(member, sorted(statistics.topics.items()))
    for name, about, counted in _BY_GROUP:
        lines += family_head(_OURS + name, "counter", about)
        lines.append(sample_line(_OURS + name, member, getattr(statistics, counted)))
    lines += family_head(_OURS + "troubles", "gauge", "Things that keep messages away now.")
    lines.append(sample_line(_OURS + "troubles", member, len(statistics.troubles)))
    lines += _put_off(member, statistics)
    return "\n".join(lines) + "\n"


def _calls(
    member: Mapping[str, str], topics: Sequence[tuple[str, TopicStatistics]]
) -> Iterator[str]:
    called = [(topic, counted) for topic, counted in topics if counted.calls]
    if not called:
        return
    yield from family_head(
        _OURS + _CALLS, "summary", "Times of handler calls; quantiles are of the last minute."
    )
    for topic, counted in called:
        labels = {**member, "topic": topic}
        for quantile in _QUANTILES:
            value = counted.consume_times.percentile(quantile)
            if value is not None:
                yield sample_line(_OURS + _CALLS, {**labels, "quantile": str(quantile)}, value)
        yield sample_line(f"{_OURS}{_CALLS}_sum", labels, counted.call_seconds)
        yield sample_line(f"{_OURS}{_CALLS}_count", labels, counted.calls)
    longest = "handler_call_longest_seconds"
    yield from family_head(_OURS + longest, "gauge", "The longest handler call of the last minute.")
    for topic, counted in called:
        if counted.consume_times.longest is not None:
            yield sample_line(
                _OURS + longest, {**member, "topic": topic}, counted.consume_times.longest
            )


def _put_off(member: Mapping[str, str], statistics: ConsumerStatistics) -> Iterator[str]:
    if not statistics.put_off:
        return
    name = "pulls_put_off_total"
    yield from family_head(
        _OURS + name, "counter", "Delayed or unusual pulls, by queue and reason."
    )
    for (queue, reason), count in sorted(statistics.put_off.items()):
        place = {"topic": queue.topic, "broker": queue.broker, "queue": str(queue.id)}
        yield sample_line(_OURS + name, {**member, **place, "reason": reason.value}, count)


def family_head(name: str, kind: str, about: str) -> Iterable[str]:
    """The lines before the samples of a metric."""
    return f"# HELP {name} {about}", f"# TYPE {name} {kind}"


def sample_line(name: str, labels: Mapping[str, str], value: float) -> str:
    """A sample in the text format of Prometheus."""
    text = ",".join(f'{label}="{_escaped(value_of)}"' for label, value_of in labels.items())
    return f"{name}{{{text}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# ---- running info (307)


_MIB = 1024 * 1024


def properties(
    group: str,
    options: ConsumerOptions,
    name_servers: Iterable[object],
    *,
    started_at: float,
    workers: int,
) -> dict[str, str]:
    """The settings of a consumer, under the names that Apache's tools read."""
    release = release_of(OUR_VERSION)
    version = str(OUR_VERSION) if release is None else f"V{release}".replace(".", "_")
    consume, pull, flow = options.consume, options.pull, options.flow
    retries = consume.max_retries
    if retries is None:
        retries = -1 if options.ordered else DEFAULT_RETRIES
    found: dict[str, object] = {
        "PROP_NAMESERVER_ADDR": ";".join(map(str, name_servers)) + ";",
        "PROP_CONSUME_TYPE": ConsumeType.CONSUME_PASSIVELY.value,
        "PROP_CONSUMEORDERLY": str(options.ordered).lower(),
        "PROP_THREADPOOL_CORE_SIZE": workers,
        "PROP_CLIENT_VERSION": version,
        # The release of this package: the one above is that of the protocol.
        "orbitmqVersion": __version__,
        "PROP_CONSUMER_START_TIMESTAMP": milliseconds(started_at),
        "consumerGroup": group,
        "messageModel": options.model.value,
        "consumeFromWhere": wire_name(options.consume_from).value,
        "allocateMessageQueueStrategy": name_of(options.strategy),
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
    settings: dict[str, str],
    subscriptions: Subscriptions,
    statistics: Statistics,
    *,
    stacks: str | None = None,
) -> ConsumerRunningInfo:
    """The complete running info, from `info` about the queues.

    Numbers that Apache's consumers do not have are in the user's own table, which brokers and tools
    of any version pass on and print.
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
        properties=settings | info.properties,
        subscription_set=subscriptions.to_data(),
        status_table={topic: statistics.status(topic) for topic in subscriptions.topics},
        user_consumer_info={name: str(count) for name, count in own.items()}
        | {
            property_of(topic): each.consume_times.to_text()
            for topic, each in counted.topics.items()
            if each.consume_times.calls
        },
        jstack=stacks,
    )


# ---- distributions of durations


#: The index of the upper 16 bits among the four parts of a double.
_UPPER: Final = 3 if sys.byteorder == "little" else 0
#: The last bucket of finite durations; above are infinite and negative ones.
_LAST_BUCKET: Final = 0x7FEF
#: The format of `CallTimes.to_text`.
_TEXT: Final = re.compile(r"calls=\d+ .* longest=(\S+) s buckets=([0-9a-f:,]+)")


def property_of(topic: str) -> str:
    """The name under which a consumer reports the call durations of a topic."""
    return f"consumeTimes.{topic}"


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The distribution of call durations in seconds; can be added up over consumers.

    A bucket is the upper 16 bits of a duration as a double: each power of two has 16 buckets of
    equal width. A percentile is the upper end of its bucket, at most a sixteenth above the true
    value.
    """

    #: The number of calls in each bucket.
    buckets: Mapping[int, int]
    longest: float | None = None

    @classmethod
    def of(cls, times: Sequence[float]) -> CallTimes:
        """The distribution of single durations, none below zero."""
        return cls(Counter(buckets_of(times)), max(times, default=None))

    @classmethod
    def together(cls, parts: Iterable[CallTimes]) -> CallTimes:
        """The sum of several distributions."""
        buckets = Counter[int]()
        longest: list[float] = []
        for part in parts:
            buckets.update(part.buckets)
            if part.longest is not None:
                longest.append(part.longest)
        return cls(buckets, max(longest, default=None))

    @property
    def calls(self) -> int:
        """The number of calls."""
        return sum(self.buckets.values())

    @property
    def p50(self) -> float | None:
        """The longest duration of the fastest half of the calls."""
        return self.percentile(0.50)

    @property
    def p95(self) -> float | None:
        """The same for 95 of 100 calls."""
        return self.percentile(0.95)

    @property
    def p99(self) -> float | None:
        """The same for 99 of 100 calls."""
        return self.percentile(0.99)

    def percentile(self, share: float) -> float | None:
        """The longest duration of this share of the calls."""
        if self.longest is None:
            return None
        left = math.ceil(self.calls * share)
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return min(self.longest, _upper_end(bucket))
        return self.longest

    def to_text(self) -> str:
        """As text: percentiles for people, buckets for programs."""
        shown = " ".join(
            f"p{share}={self.percentile(share / 100) or 0.0:.6f}" for share in (50, 95, 99)
        )
        buckets = ",".join(f"{bucket:x}:{self.buckets[bucket]}" for bucket in sorted(self.buckets))
        return f"calls={self.calls} {shown} longest={self.longest or 0.0!r} s buckets={buckets}"

    @classmethod
    def from_text(cls, text: str) -> CallTimes | None:
        """Parse `to_text`; None for any other text, as the name may be used otherwise."""
        found = _TEXT.fullmatch(text)
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
    """The bucket of each duration."""
    return array("H", array("d", times).tobytes())[_UPPER::4]


def _upper_end(bucket: int) -> float:
    end: float = struct.unpack(">d", struct.pack(">Hxxxxxx", bucket + 1))[0]
    return end
