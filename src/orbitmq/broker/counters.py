"""Counts and times of requests and messages, and rates made of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from typing import NamedTuple, TypeAlias

from orbitmq.broker.topics import TopicTable
from orbitmq.clock import Clock
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.remoting.settings import Refused
from orbitmq.wire.bodies import BrokerStatsData, BrokerStatsItem
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command

#: Sizes of messages, as in RocketMQ's metrics. Small ones, which are most, cost nothing to count.
SIZE_BOUNDS = (1024.0, 4096.0, 524_288.0, 1_048_576.0, 2_097_152.0, 4_194_304.0)
SMALL = int(SIZE_BOUNDS[0])


class TopicCounts:
    """Messages put into a topic."""

    __slots__ = ("_larger", "put_bytes", "puts", "taken")

    def __init__(self) -> None:
        self.puts = 0
        self.put_bytes = 0
        #: Sizes of messages that are not written yet: see `Writes.counting`.
        self.taken: list[int] = []
        #: Sizes of those that are not small.
        self._larger: Histogram | None = None

    def settle(self, *, are_stored: bool) -> None:
        """What was taken is stored, and counts; or it is not."""
        taken, self.taken = self.taken, []
        if not are_stored or not taken:
            return
        self.puts += len(taken)
        self.put_bytes += sum(taken)
        if max(taken) > SMALL:
            if self._larger is None:
                self._larger = Histogram(SIZE_BOUNDS)
            for size in taken:
                if size > SMALL:
                    self._larger.note(size)

    def sizes(self) -> Histogram:
        """The sizes of all messages."""
        sizes = Histogram(SIZE_BOUNDS)
        if self._larger is not None:
            sizes.counts = list(self._larger.counts)
        sizes.counts[0] = self.puts - len(sizes)
        sizes.total = float(self.put_bytes)
        return sizes

    def add(self, other: TopicCounts) -> None:
        """Add the counts of another topic."""
        self.puts += other.puts
        self.put_bytes += other.put_bytes


class GroupCounts:
    """Messages that a group got of a topic."""

    __slots__ = ("dead_letters", "get_bytes", "gets", "hits", "pulls", "sent_back")

    def __init__(self) -> None:
        self.gets = 0
        self.get_bytes = 0
        self.pulls = 0
        self.hits = 0  #: pulls that got messages
        self.sent_back = 0
        self.dead_letters = 0

    def add(self, other: GroupCounts) -> None:
        """Add the counts of another group."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Counters:
    """All counts of a broker since its start."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicCounts] = {}
        self.groups: dict[tuple[str, str], GroupCounts] = {}  #: by topic and group
        #: The counts of topics and groups that were removed.
        self.gone_topics = TopicCounts()
        self.gone_groups = GroupCounts()
        self.failed_puts = 0
        self.busy_puts = 0  #: refused by flow control

    def topic(self, topic: str) -> TopicCounts:
        counts = self.topics.get(topic)
        if counts is None:
            counts = self.topics[topic] = TopicCounts()
        return counts

    def group(self, topic: str, group: str) -> GroupCounts:
        counts = self.groups.get((topic, group))
        if counts is None:
            counts = self.groups[topic, group] = GroupCounts()
        return counts

    def forget_topic(self, topic: str) -> None:
        # The broker's totals never decrease.
        if (counts := self.topics.pop(topic, None)) is not None:
            self.gone_topics.add(counts)
        for key in [key for key in self.groups if key[0] == topic]:
            self.gone_groups.add(self.groups.pop(key))

    def forget_group(self, group: str) -> None:
        for key in [key for key in self.groups if key[1] == group]:
            self.gone_groups.add(self.groups.pop(key))


# Histograms.


class Histogram:
    """The number of values at or below each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        #: One for each bound, and one for larger values.
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def __len__(self) -> int:
        return sum(self.counts)

    def note(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Every bound with the number of values up to it; the last bound is infinite."""
        count = 0
        for bound, more in zip((*self.bounds, float("inf")), self.counts, strict=True):
            count += more
            yield bound, count

    def coarser(self, bounds: tuple[float, ...]) -> Histogram:
        """The same values with fewer bounds, which must be among its own."""
        upto = dict(self.cumulative())
        other = Histogram(bounds)
        passed = 0
        for place, bound in enumerate((*bounds, float("inf"))):
            other.counts[place] = upto[bound] - passed
            passed = upto[bound]
        other.total = self.total
        return other

    def percentile(self, share: float) -> float:
        """The value at this share of all, estimated from the buckets.

        Values count as spread evenly over their bucket; values above all bounds as the last bound.
        0 without values.
        """
        wanted = share * len(self)
        if not wanted:
            return 0.0
        below = 0.0
        passed = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and passed + count >= wanted:
                # Not above the bound, however the division is rounded.
                return min(bound, below + (bound - below) * (wanted - passed) / count)
            passed += count
            below = bound
        return below


# Latencies. Puts are measured by writes: from the begin of a write until its messages are stored as
# the flush policy says, so a write of a hundred messages reads the clock twice. Figures for people
# are those of the last complete minute, as RocketMQ's are. Other requests are measured from the
# call of their handler to its answer, unless they are answered later.


#: Milliseconds, as in RocketMQ's metrics.
RPC_BOUNDS = (1.0, 3.0, 5.0, 7.0, 10.0, 100.0, 1000.0, 2000.0, 3000.0)
CREATE_BOUNDS = (10.0, 100.0, 1000.0, 3000.0, 5000.0)
#: Milliseconds: finer than RocketMQ's at the lower end, where most times are.
PUT_BOUNDS = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.7),
    *(float(each) for each in range(1, 20)),
    *(float(each) for each in range(20, 50, 2)),
    *(float(each) for each in range(50, 100, 5)),
    *(float(each) for each in range(100, 200, 10)),
    *(float(each) for each in range(200, 500, 50)),
    *(float(each) for each in range(500, 1000, 100)),
    *(float(each) for each in range(1000, 10_001, 1000)),
)
#: The ranges of `putMessageDistributeTime`, and their ends in milliseconds.
_STRETCHES = (
    ("[<=0ms]", 0.0),
    ("[0~10ms]", 10.0),
    ("[10~50ms]", 50.0),
    ("[50~100ms]", 100.0),
    ("[100~200ms]", 200.0),
    ("[200~500ms]", 500.0),
    ("[500ms~1s]", 1000.0),
    ("[1~2s]", 2000.0),
    ("[2~3s]", 3000.0),
    ("[3~4s]", 4000.0),
    ("[4~5s]", 5000.0),
    ("[5~10s]", 10_000.0),
    ("[10s~]", float("inf")),
)
_WINDOW = 60.0
#: In place of a request code, for the broker's own puts.
OWN = 0

#: Request code, response code, whether it was held before.
CallKey = tuple[int, int, bool]

CREATING = {
    RequestCode.UPDATE_AND_CREATE_TOPIC: "rocketmq_topic_create_execution_time",
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: (
        "rocketmq_consumer_group_create_execution_time"
    ),
}


class PutTimes:
    """Times of puts: since the start by request and answer, and of the last minute."""

    def __init__(self, now: float) -> None:
        self.longest = 0.0  #: since the start, in milliseconds
        self._since = now
        self._tables: dict[tuple[int, int], Histogram] = {}
        self._before = [0] * (len(PUT_BOUNDS) + 1)
        self._last = Histogram(PUT_BOUNDS)

    def note(self, code: int, response: int, milliseconds: float, times: int) -> None:
        """`times` messages, sent with this code, were stored in this time."""
        table = self._tables.get((code, response))
        if table is None:
            table = self._tables[code, response] = Histogram(PUT_BOUNDS)
        table.note(milliseconds, times)
        if milliseconds > self.longest:
            self.longest = milliseconds

    def tick(self, now: float) -> None:
        """Begin another minute when one is over."""
        if now - self._since < _WINDOW:
            return
        self._since = now
        every = [sum(counts) for counts in zip(*self._counts(), strict=True)]
        self._last.counts = [
            count - before for count, before in zip(every, self._before, strict=True)
        ]
        self._before = every

    def _counts(self) -> list[list[int]]:
        nothing = [0] * (len(PUT_BOUNDS) + 1)
        return [nothing, *(table.counts for table in self._tables.values())]

    def percentile(self, share: float) -> float:
        """Of the last complete minute, in milliseconds."""
        return self._last.percentile(share)

    def shares(self) -> str:
        """The distribution in the last complete minute, in RocketMQ's words."""
        upto = dict(self._last.cumulative())
        words: list[str] = []
        passed = 0
        for name, end in _STRETCHES:
            count = upto.get(end, 0) - passed if end else 0
            words.append(f"{name}:{count}")
            passed += count
        return " ".join(words)

    def calls(self) -> Iterator[tuple[CallKey, Histogram]]:
        """Those of requests, with the bounds of all requests."""
        for (code, response), table in self._tables.items():
            if code != OWN:
                yield (code, response, False), table.coarser(RPC_BOUNDS)


class Latencies:
    """The times of one broker's requests."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.monotonic = monotonic
        self.puts = PutTimes(monotonic())
        self.longest_pull = 0.0
        self._calls: dict[CallKey, Histogram] = {}
        #: By request code and success: the times of creating topics and groups.
        self.creations: dict[tuple[int, bool], Histogram] = {}

    def stored(self, began: float, codes: list[int], own: int, response: int) -> None:
        """A write is stored that began then: requests of these codes, and the broker's own puts."""
        milliseconds = (self.monotonic() - began) * 1000
        note = self.puts.note
        if codes:
            first, count = codes[0], len(codes)
            if count == 1 or codes.count(first) == count:
                note(first, response, milliseconds, count)
            else:
                for code, times in Counter(codes).items():
                    note(code, response, milliseconds, times)
        if own:
            note(OWN, response, milliseconds, own)

    def pulled(self, code: int, response: int, seconds: float, *, was_held: bool) -> None:
        """A pull was answered after this time."""
        milliseconds = seconds * 1000
        if not was_held and milliseconds > self.longest_pull:
            self.longest_pull = milliseconds
        self.call((code, response, was_held), milliseconds)

    def call(self, key: CallKey, milliseconds: float) -> None:
        """A request took this time."""
        histogram = self._calls.get(key)
        if histogram is None:
            histogram = self._calls[key] = Histogram(RPC_BOUNDS)
        histogram.note(milliseconds)

    def calls(self) -> list[tuple[CallKey, Histogram]]:
        """All requests by code, answer and whether they were held."""
        table = dict(self._calls)
        # Refused sends are noted there, stored ones here.
        table.update(self.puts.calls())
        return list(table.items())

    def timed(self, code: int, handler: Handler) -> Handler:
        """The same handler, measured when it answers directly."""
        monotonic = self.monotonic
        is_creating = code in CREATING

        def handle(connection: Connection, request: Command) -> object:
            began = monotonic()
            try:
                result = handler(connection, request)
            except Refused as refused:
                note(refused.code, began)
                raise
            if type(result) is Command:
                note(result.code, began)
            return result

        def note(response: int, began: float) -> None:
            milliseconds = (monotonic() - began) * 1000
            self.call((code, response, False), milliseconds)
            if is_creating:
                self._created(code, response, milliseconds)

        return handle  # type: ignore[return-value]  # what the handler gives

    def _created(self, code: int, response: int, milliseconds: float) -> None:
        key = (code, response == ResponseCode.SUCCESS)
        histogram = self.creations.get(key)
        if histogram is None:
            histogram = self.creations[key] = Histogram(CREATE_BOUNDS)
        histogram.note(milliseconds)


# Rates. Requests only increment counters; a sample is taken once a second, and on request. There
# are two memories: the broker's totals of every second for ten minutes (`per_second`), and for each
# topic, and each group in a topic, the increments in slots of ten seconds, ten minutes and an hour
# (`recent`). A slot holds only active ones, so an idle topic costs one comparison every ten
# seconds. Instants are seconds of a monotonic clock, except for `wall`, which decides when a day
# begins.


#: The interval between two calls of `sample`.
SAMPLE_INTERVAL = 1.0
_SLOT_INTERVAL = 10.0
#: Seconds of a slot, and the number of slots: about a minute, an hour, a day.
_SPANS = ((_SLOT_INTERVAL, 6), (600.0, 6), (3600.0, 24))
_LONGEST_WINDOW = 600
#: A rate over less time than this is not meaningful.
_SHORTEST = 1.0

#: A topic, or a topic and a group.
Key: TypeAlias = str | tuple[str, str]
#: The counts of one key, in the order of `_amounts`.
Amounts: TypeAlias = tuple[int, ...]


class Totals(NamedTuple):
    """Counts of the whole broker since its start."""

    puts: int = 0
    put_bytes: int = 0
    gets: int = 0
    get_bytes: int = 0
    pulls: int = 0
    hits: int = 0  #: pulls that got messages

    def minus(self, other: Totals) -> Totals:
        return Totals(*map(int.__sub__, self, other))


class Recent(NamedTuple):
    """What was added over some time."""

    amounts: Amounts
    seconds: float


class SinceMidnight(NamedTuple):
    """Totals at the begin of days, for "yesterday" and "today"."""

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
        """Take a sample of the counters."""
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
        # Only existing keys: a topic that was deleted disappears.
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
        """The totals since the start, including removed topics."""
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
        """Rates over these windows of seconds, or since the start; by the names in `Totals`."""
        now, totals = self._clock.monotonic(), self.totals()
        rates = []
        for window in windows:
            then, before = self._seconds[max(0, len(self._seconds) - window)]
            seconds = max(now - then, _SHORTEST)
            added = totals.minus(before)
            rates.append({name: amount / seconds for name, amount in added._asdict().items()})
        return rates

    def mornings(self) -> SinceMidnight:
        return SinceMidnight(self._morning_before, self._morning, self.totals())

    # One topic, or one group in a topic.

    def topics(self) -> tuple[str, ...]:
        """The topics that got messages."""
        return tuple(self._counters.topics)

    def groups(self) -> tuple[tuple[str, str], ...]:
        """Topics and groups with pulls."""
        return tuple(self._counters.groups)

    def recent(self, key: Key) -> tuple[Recent, Recent, Recent] | None:
        """What was added in about a minute, an hour and a day; None without any count."""
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
        """Messages per second that were sent to a topic in the last minute."""
        return self._rate(topic)

    def get_rate(self, topic: str, group: str) -> float:
        """Messages per second that a group got of a topic in the last minute."""
        return self._rate((topic, group))

    def _rate(self, key: Key) -> float:
        found = self.recent(key)
        return 0.0 if found is None else found[0].amounts[0] / found[0].seconds


class _Slots:
    """Recent increments, in slots of equal length; the present one is last."""

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
    # Fewer than before: the topic was deleted and created again in between.
    if before is None:
        return amounts
    difference = tuple(map(int.__sub__, amounts, before))
    return amounts if min(difference) < 0 else difference


def _sum(first: Amounts, second: Amounts) -> Amounts:
    return tuple(map(int.__add__, first, second))


# Counts over the last minute, hour and day, under RocketMQ's names (VIEW_BROKER_STATS_DATA).
#
# TOPIC_PUT_NUMS  TOPIC_PUT_SIZE                    by topic
# GROUP_GET_NUMS  GROUP_GET_SIZE  SNDBCK_PUT_NUMS   by topic@group
# BROKER_PUT_NUMS  BROKER_GET_NUMS                  by cluster, and the same without the system's
#                                                   own topics: ..._WITHOUT_SYSTEM_TOPIC


_WITHOUT_SYSTEM = "_WITHOUT_SYSTEM_TOPIC"

#: The index of a count among the amounts of a key.
_MESSAGES, _BYTES, _REQUESTS, _SENT_BACK = range(4)
_OF_TOPICS: Mapping[str, int] = {"TOPIC_PUT_NUMS": _MESSAGES, "TOPIC_PUT_SIZE": _BYTES}
_OF_GROUPS: Mapping[str, int] = {
    "GROUP_GET_NUMS": _MESSAGES,
    "GROUP_GET_SIZE": _BYTES,
    "SNDBCK_PUT_NUMS": _SENT_BACK,
}


def stats_data(
    name: str, key: str, rates: Rates, cluster: str, topics: TopicTable
) -> BrokerStatsData | None:
    """The count `name` of `key`; None when there is none."""
    if name in _OF_TOPICS:
        return _of_keys(rates, (key,), _OF_TOPICS[name])
    if name in _OF_GROUPS:
        topic, _, group = key.partition("@")
        return _of_keys(rates, ((topic, group),), _OF_GROUPS[name])
    plain = name.removesuffix(_WITHOUT_SYSTEM)
    if plain not in ("BROKER_PUT_NUMS", "BROKER_GET_NUMS") or key != cluster:
        return None
    keys: Iterable[Key] = rates.topics() if plain == "BROKER_PUT_NUMS" else rates.groups()
    if plain != name:
        keys = [key for key in keys if not topics.is_system(_topic_of(key))]
    return _of_keys(rates, keys, _MESSAGES) or BrokerStatsData()


def _topic_of(key: Key) -> str:
    return key if isinstance(key, str) else key[0]


def _of_keys(rates: Rates, keys: Iterable[Key], which: int) -> BrokerStatsData | None:
    """One count of all keys together."""
    together: list[tuple[Recent, Recent, Recent]] = [
        found for key in keys if (found := rates.recent(key)) is not None
    ]
    if not together:
        return None
    minute, hour, day = (_item(spans, which) for spans in zip(*together, strict=True))
    return BrokerStatsData(stats_minute=minute, stats_hour=hour, stats_day=day)


def _item(spans: tuple[Recent, ...], which: int) -> BrokerStatsItem:
    amounts: list[Amounts] = [span.amounts for span in spans]
    total = sum(each[which] for each in amounts)
    times = total if which == _SENT_BACK else sum(each[_REQUESTS] for each in amounts)
    return BrokerStatsItem(
        sum=total,
        tps=total / max(span.seconds for span in spans),
        avgpt=total / times if times else 0.0,
    )
