"""How much goes in and out: rates and sums over time, made of the counters.

Sending and pulling only increment counters; everything here happens once a second (`sample`) or
when somebody asks. There are two memories:

* of the whole broker, its totals of every second for ten minutes (`per_second`);
* of each topic and of each group in a topic, what was added within slots of ten seconds, ten
  minutes and an hour (`recent`). A slot holds only those to which something happened, so an idle
  topic costs one comparison every ten seconds and no memory.

What is asked for includes what happened since the last sample. Instants are seconds of a clock that
never goes back, except for `wall`, which says when a day begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from typing import NamedTuple, TypeAlias

from orbitmq.broker.counters import Counters, GroupCounts, TopicCounts
from orbitmq.clock import Clock

#: How often `sample` wants to be called.
SAMPLE_INTERVAL = 1.0
_SLOT_INTERVAL = 10.0
#: Seconds of a slot, and how many are kept: about a minute, an hour, a day.
_SPANS = ((_SLOT_INTERVAL, 6), (600.0, 6), (3600.0, 24))
_LONGEST_WINDOW = 600
#: A rate over less time than this says more about chance than about the broker.
_SHORTEST = 1.0

#: A topic, or a topic and a group.
Key: TypeAlias = str | tuple[str, str]
#: What was counted for one key, in the order of `_amounts`.
Amounts: TypeAlias = tuple[int, ...]


class Totals(NamedTuple):
    """Counts of the whole broker since its start."""

    puts: int = 0
    put_bytes: int = 0
    gets: int = 0
    get_bytes: int = 0
    pulls: int = 0
    hits: int = 0  #: pulls that brought something

    def minus(self, other: Totals) -> Totals:
        return Totals(*map(int.__sub__, self, other))


class Recent(NamedTuple):
    """What was added over some time."""

    amounts: Amounts
    seconds: float


class Mornings(NamedTuple):
    """Totals at the beginnings of days, for "yesterday" and "today"."""

    yesterday: Totals
    today: Totals
    now: Totals


class Rates:
    """The rates of one broker."""

    def __init__(self, counters: Counters, clock: Clock) -> None:
        self._counters = counters
        self._clock = clock
        now = clock.monotonic()
        self._seconds: deque[tuple[float, Totals]] = deque(maxlen=_LONGEST_WINDOW + 1)
        self._seconds.append((now, Totals()))
        self._seen: dict[Key, Amounts] = {}
        self._seen_at = now
        self._spans = tuple(_Slots(length, count, now) for length, count in _SPANS)
        self._day = self._today()
        self._morning = self._morning_before = Totals()

    # Once a second.

    def sample(self) -> None:
        """Remember where the counters are now."""
        now = self._clock.monotonic()
        totals = self.totals()
        self._seconds.append((now, totals))
        if now - self._seen_at >= _SLOT_INTERVAL:
            self._fill_slots(now)
        today = self._today()
        if today != self._day:
            self._day = today
            self._morning_before, self._morning = self._morning, totals

    def _fill_slots(self, now: float) -> None:
        self._seen_at = now
        seen: dict[Key, Amounts] = {}
        added: dict[Key, Amounts] = {}
        for key, counts in self._all_counts():
            amounts = seen[key] = _amounts(counts)
            before = self._seen.get(key)
            if amounts != before and any(amounts):
                added[key] = _added(amounts, before)
        # Only what there is: a topic that was deleted leaves no trace here.
        self._seen = seen
        for span in self._spans:
            span.add(now, added)

    def _all_counts(self) -> Iterable[tuple[Key, TopicCounts | GroupCounts]]:
        yield from self._counters.topics.items()
        yield from self._counters.groups.items()

    def _today(self) -> date:
        return datetime.fromtimestamp(self._clock.now(), UTC).astimezone().date()

    # The whole broker.

    def totals(self) -> Totals:
        """Everything since the start, also of topics that are gone."""
        counters = self._counters
        puts, put_bytes = counters.gone_topics.puts, counters.gone_topics.put_bytes
        for topic in counters.topics.values():
            puts += topic.puts
            put_bytes += topic.put_bytes
        gone = counters.gone_groups
        gets, get_bytes, pulls, hits = gone.gets, gone.get_bytes, gone.pulls, gone.hits
        for group in counters.groups.values():
            gets += group.gets
            get_bytes += group.get_bytes
            pulls += group.pulls
            hits += group.hits
        return Totals(puts, put_bytes, gets, get_bytes, pulls, hits)

    def per_second(self, *windows: int) -> list[dict[str, float]]:
        """Rates over the last so many seconds, or since the start; by the names in `Totals`."""
        now, totals = self._clock.monotonic(), self.totals()
        rates = []
        for window in windows:
            then, before = self._seconds[max(0, len(self._seconds) - window)]
            seconds = max(now - then, _SHORTEST)
            added = totals.minus(before)
            rates.append({name: amount / seconds for name, amount in added._asdict().items()})
        return rates

    def mornings(self) -> Mornings:
        return Mornings(self._morning_before, self._morning, self.totals())

    # One topic, or one group in a topic.

    def topics(self) -> tuple[str, ...]:
        """Those to which something was sent."""
        return tuple(self._counters.topics)

    def groups(self) -> tuple[tuple[str, str], ...]:
        """Topic and group of those who pulled something."""
        return tuple(self._counters.groups)

    def recent(self, key: Key) -> tuple[Recent, Recent, Recent] | None:
        """What was added within about a minute, an hour and a day; None if never anything was."""
        counts = self._counts(key)
        if counts is None:
            return None
        now = self._clock.monotonic()
        fresh = _added(_amounts(counts), self._seen.get(key))
        minute, hour, day = (span.recent(key, fresh, now) for span in self._spans)
        return minute, hour, day

    def _counts(self, key: Key) -> TopicCounts | GroupCounts | None:
        if isinstance(key, str):
            return self._counters.topics.get(key)
        return self._counters.groups.get(key)

    def put_rate(self, topic: str) -> float:
        """Messages per second that were sent to a topic within the last minute."""
        return self._rate(topic)

    def get_rate(self, topic: str, group: str) -> float:
        """Messages per second that a group got of a topic within the last minute."""
        return self._rate((topic, group))

    def _rate(self, key: Key) -> float:
        found = self.recent(key)
        return 0.0 if found is None else found[0].amounts[0] / found[0].seconds


class _Slots:
    """What was added lately, in slots of equal length; the one that is being filled comes last."""

    def __init__(self, length: float, count: int, now: float) -> None:
        self._length = length
        self._full: deque[tuple[float, Mapping[Key, Amounts]]] = deque(maxlen=count)
        self._begin = now
        self._filling: dict[Key, Amounts] = {}

    def add(self, now: float, added: Mapping[Key, Amounts]) -> None:
        for key, amounts in added.items():
            before = self._filling.get(key)
            self._filling[key] = amounts if before is None else _sum(before, amounts)
        if now - self._begin >= self._length:
            self._full.append((self._begin, self._filling))
            self._begin = now
            self._filling = {}

    def recent(self, key: Key, fresh: Amounts, now: float) -> Recent:
        amounts = fresh
        for slot in (self._filling, *(slot for _, slot in self._full)):
            found = slot.get(key)
            if found is not None:
                amounts = _sum(amounts, found)
        begin = self._full[0][0] if self._full else self._begin
        return Recent(amounts, max(now - begin, _SHORTEST))


def _amounts(counts: TopicCounts | GroupCounts) -> Amounts:
    """Messages, bytes, requests and messages sent back."""
    if isinstance(counts, TopicCounts):
        return (counts.puts, counts.put_bytes, counts.puts, 0)
    return (counts.gets, counts.get_bytes, counts.hits, counts.sent_back)


def _added(amounts: Amounts, before: Amounts | None) -> Amounts:
    # Fewer than before: the topic was deleted and made again in between.
    if before is None:
        return amounts
    difference = tuple(map(int.__sub__, amounts, before))
    return amounts if min(difference) < 0 else difference


def _sum(first: Amounts, second: Amounts) -> Amounts:
    return tuple(map(int.__add__, first, second))
