"""What a consumer has done, by topic: messages, failures, times, per second and in all.

Rates and times are those of the last minute, as Apache's tools show them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from orbitmq.client.calltimes import CallTimes
from orbitmq.client.consumer.meters import CallMeter, Meter
from orbitmq.wire.bodies.stats import ConsumeStatus

if TYPE_CHECKING:
    from orbitmq.client.consumer.setbacks import Setback
    from orbitmq.client.queue import Queue

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
    put_off: Mapping[tuple[Queue, Setback], int] = field(default_factory=dict)


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
        put_off: Mapping[tuple[Queue, Setback], int] = MappingProxyType({}),
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
