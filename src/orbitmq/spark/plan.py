"""Which offsets a batch of a read takes, and which task reads them.

Invariants: a batch takes of every queue the offsets from the end of the last batch to its own end
(exclusive), and every offset is in exactly one partition. So a repeated batch reads the same
messages.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final, TypeVar

from orbitmq.client.ranges.cluster import Bounds, RangeCluster, Sample, TopicQueues
from orbitmq.client.ranges.connections import OffsetsGone, QueueRange
from orbitmq.client.routes import Queue
from orbitmq.errors import OrbitError
from orbitmq.spark.options import (
    EARLIEST,
    LATEST,
    AtOffset,
    AtOffsets,
    AtTimes,
    BeforeEnd,
    DataLost,
    Earliest,
    GroupProgress,
    Latest,
    OffsetSpec,
    OnNoMatch,
    OptionRefused,
    Positions,
    SourceError,
    Subscription,
    some_of,
)

K = TypeVar("K", Queue, str)

#: Queues with fewer messages share a task: starting one takes 40 ms, the time to read this many.
SMALL: Final = 16_384


def partition(
    ranges: Iterable[QueueRange],
    *,
    min_partitions: int | None = None,
    max_records: int | None = None,
    small: int = SMALL,
) -> list[tuple[QueueRange, ...]]:
    """Distribute ranges to tasks.

    A queue stays in one task, which keeps its order, unless `max_records` or `min_partitions`
    require otherwise. Small queues share a task within these limits.
    """
    pieces = [
        piece
        for each in sorted(ranges)
        if len(each)
        for piece in cut(each, _pieces_of_most(each, max_records))
    ]
    if pieces and min_partitions is not None and len(pieces) < min_partitions:
        return [(piece,) for piece in _cut_to(pieces, min_partitions)]
    total = sum(map(len, pieces))
    most = max_records if max_records is not None else total
    small = min(small, most)
    if total > small:
        # Equal sizes, so that the last task is not much smaller.
        small = -(-total // -(-total // small))
    return _packed(pieces, least=min_partitions or 1, small=small, most=most)


def cut(whole: QueueRange, count: int) -> list[QueueRange]:
    """A range in `count` consecutive pieces whose lengths differ by at most one."""
    count = max(1, min(count, len(whole)))
    bounds = [whole.start + len(whole) * number // count for number in range(count + 1)]
    return [QueueRange(whole.queue, start, end) for start, end in pairwise(bounds)]


def batch_ends(
    start: Positions, available: Positions, limit: int | None, *, min_rows: int = 0
) -> dict[Queue, int]:
    """The end of a batch of at most `limit` messages, by queue.

    Each topic gets `min_rows`, or an equal part of the limit if that is less; of the rest a queue
    gets a share in proportion to its backlog. It gets at least one message, so that none starves;
    with more queues than `limit` this exceeds the limit. A queue that ends before its start stays
    there: `clamp_to_bounds` decides whether data is lost.
    """
    ends = dict(start)
    backlog = {
        queue: end - start.get(queue, end)
        for queue, end in available.items()
        if end > start.get(queue, end)
    }
    shares: Mapping[Queue, int] = backlog
    if limit is not None and sum(backlog.values()) > limit:
        least = dict.fromkeys((queue.topic for queue in backlog), min_rows)
        shares = _fair_shares(backlog, limit, least)
    for queue, end in available.items():
        ends[queue] = start.get(queue, end) + shares.get(queue, 0)
    return ends


class ByteEstimate:
    """The bytes of a range of a queue, estimated from samples of its messages.

    Between two samples the messages have their average size, but never more bytes than lie between
    the two in the commit log, which other queues share.
    """

    def __init__(self, start: int, end: int, samples: Iterable[Sample], *, usual: int = 1) -> None:
        """`usual` is the size of a message if there are no samples."""
        self._start = start
        self._samples = sorted(each for each in samples if start <= each.offset < end)
        known = self._samples
        first = known[0].offset if known else end
        #: The rows and bytes of each part of the range.
        self._parts = [(first - start, (first - start) * (known[0].size if known else usual))]
        for one, other in pairwise(known):
            self._parts.append((other.offset - one.offset, _bytes_between(one, other)))
        if known:
            rest = end - known[-1].offset
            self._parts.append((rest, rest * known[-1].size))

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self._parts)

    @property
    def total(self) -> int:
        return sum(size for _, size in self._parts)

    @property
    def most(self) -> int | None:
        """The bytes that the range has at most, if the first and the last message are known."""
        first, last = (self._samples[0], self._samples[-1]) if self._samples else (None, None)
        if first is None or last is None or first.offset != self._start:
            return None
        if last.offset != self._start + self.rows - 1 or last.place < first.place:
            return None
        return last.place + last.size - first.place

    def rows_within(self, limit: int) -> int:
        """How many messages from the start on have about `limit` bytes; at least one."""
        found = 0
        for rows, size in self._parts:
            if size > limit:
                return max(1, found + rows * limit // size)
            found += rows
            limit -= size
        return max(1, found)

    def doubts(self, most: int) -> tuple[int, ...]:
        """Offsets where samples would tell most: other sizes may hide between these two."""
        pairs = [
            (other.place - one.place - _bytes_between(one, other), one.offset, other.offset)
            for one, other in pairwise(self._samples)
            if other.place - one.place > 2 * _bytes_between(one, other)
        ]
        wide = sorted(pairs, reverse=True)[: max(1, most // _INSIDE)]
        return tuple(at for _, low, high in wide for at in between(low, high, _INSIDE))


#: Samples between two that leave a doubt.
_INSIDE: Final = 3


def between(low: int, high: int, count: int) -> tuple[int, ...]:
    """At most `count` offsets between two others, evenly distributed."""
    count = min(count, high - low - 1)
    return tuple(low + (high - low) * each // (count + 1) for each in range(1, count + 1))


def _bytes_between(one: Sample, other: Sample) -> int:
    guess = one.size + (other.offset - one.offset - 1) * (one.size + other.size) // 2
    most = other.place - one.place
    # Less after the log moved to another broker.
    return min(guess, most) if most > 0 else guess


def ends_within_bytes(
    start: Positions,
    ends: Positions,
    estimates: Mapping[Queue, ByteEstimate],
    limit: int,
    *,
    min_rows: int = 0,
) -> dict[Queue, int]:
    """The ends of a batch, cut so that its messages have about `limit` bytes.

    There is an estimate for each queue with messages. The rest is as in `batch_ends`.
    """
    backlog = {queue: max(1, each.total) for queue, each in estimates.items()}
    if sum(backlog.values()) <= limit:
        return dict(ends)
    least: dict[str, int] = {}
    if min_rows:
        for topic in {queue.topic for queue in backlog}:
            own = [queue for queue in backlog if queue.topic == topic]
            count = sum(estimates[queue].rows for queue in own)
            least[topic] = min(min_rows, count) * sum(backlog[queue] for queue in own) // count
    shares = _fair_shares(backlog, limit, least)
    return {
        queue: start[queue] + estimates[queue].rows_within(shares[queue])
        if queue in shares
        else end
        for queue, end in ends.items()
    }


class TriggerGate:
    """Delays a batch until it has `least` messages, but not longer than `longest` seconds.

    The first batch is not delayed, because the time of the last one is not known.
    """

    def __init__(self, least: int | None, longest: float) -> None:
        self._least = least
        self._longest = longest
        self._last: float | None = None

    def opens(self, available: int, now: float) -> bool:
        """Whether to make a batch of `available` messages now; remembers the time if so."""
        if not available:
            return False
        is_held = (
            self._least is not None
            and available < self._least
            and self._last is not None
            and now - self._last < self._longest
        )
        if is_held:
            return False
        self._last = now
        return True


def _pieces_of_most(whole: QueueRange, most: int | None) -> int:
    return 1 if most is None else -(-len(whole) // most)


def _cut_to(pieces: Sequence[QueueRange], count: int) -> list[QueueRange]:
    """At least `count` pieces, by cutting the longest, if there are enough messages."""
    parts = dict.fromkeys(pieces, 1)
    longest = [(-float(len(piece)), piece) for piece in pieces]
    heapq.heapify(longest)
    for _ in range(count - len(pieces)):
        length, piece = longest[0]
        if length >= -1:
            break  # one message in each already
        parts[piece] += 1
        heapq.heapreplace(longest, (-len(piece) / parts[piece], piece))
    return [small for piece in pieces for small in cut(piece, parts[piece])]


def _packed(
    pieces: Sequence[QueueRange], *, least: int, small: int, most: int
) -> list[tuple[QueueRange, ...]]:
    packs: list[tuple[QueueRange, ...]] = []
    pack: list[QueueRange] = []
    size = 0
    for place, piece in enumerate(pieces):
        # The number of packs if no more pieces were joined.
        would_be = len(packs) + 1 + (len(pieces) - place)
        is_full = size >= small or size + len(piece) > most or would_be <= least
        if pack and is_full:
            packs.append(tuple(pack))
            pack, size = [], 0
        pack.append(piece)
        size += len(piece)
    if pack:
        packs.append(tuple(pack))
    return packs


def _fair_shares(
    backlog: Mapping[Queue, int], limit: int, least: Mapping[str, int]
) -> dict[Queue, int]:
    """Shares of `limit`: the least of each topic first, the rest in proportion."""
    topics: dict[str, int] = {}
    for queue, size in backlog.items():
        topics[queue.topic] = topics.get(queue.topic, 0) + size
    most = limit // len(topics)
    first = {topic: min(least.get(topic, 0), size, most) for topic, size in topics.items()}
    if not any(first.values()):
        return _shares(backlog, limit)
    rest = {topic: size - first[topic] for topic, size in topics.items() if size > first[topic]}
    spare = limit - sum(first.values())
    more = _shares(rest, spare) if spare >= len(rest) else {}
    found: dict[Queue, int] = {}
    for topic, share in first.items():
        own = {queue: size for queue, size in backlog.items() if queue.topic == topic}
        found |= _shares(own, share + more.get(topic, 0))
    return found


def _shares(backlog: Mapping[K, int], limit: int) -> dict[K, int]:
    """Shares of `limit` in proportion to the backlog, at least one each."""
    total = sum(backlog.values())
    if total <= limit:
        return dict(backlog)
    shares = {queue: max(1, size * limit // total) for queue, size in backlog.items()}
    left = limit - sum(shares.values())
    # The remainder goes to those that rounding cost most; not to those raised to one.
    rounded = [queue for queue, size in backlog.items() if size * limit >= total]
    for queue in sorted(rounded, key=lambda each: (-(backlog[each] * limit % total), each)):
        if left <= 0:
            break
        shares[queue] += 1
        left -= 1
    # Shares raised to one may exceed the limit.
    for queue in sorted(shares, key=lambda each: (-shares[each], each)):
        if left >= 0:
            break
        less = min(-left, shares[queue] - 1)
        shares[queue] -= less
        left += less
    return shares


log = logging.getLogger(__name__)

#: The end of a warning about a queue that ends before its start offset.
_PASSED_OVER = (
    "nothing of it is read in this batch, and a stream goes on at its present end; if the queue "
    "was created again, which is not known here, read it with a new checkpointLocation, or with "
    "startingOffsets for that queue"
)


def subscribed_queues(
    cluster: RangeCluster, subscription: Subscription, *, refresh: bool = False
) -> TopicQueues:
    """The present queues of a subscription, and the errors of its topics."""
    if subscription.pattern is not None:
        return cluster.routed(cluster.topics(subscription.pattern), refresh=refresh)
    if subscription.topics:
        return cluster.routed(subscription.topics, refresh=refresh)
    return _assigned(cluster, subscription.queues, refresh=refresh)


def _assigned(cluster: RangeCluster, queues: tuple[Queue, ...], *, refresh: bool) -> TopicQueues:
    found = cluster.routed(sorted({queue.topic for queue in queues}), refresh=refresh)
    existing = set(found.queues)
    failures: dict[str, OrbitError] = dict(found.failures)
    for queue in queues:
        if queue not in existing and queue.topic not in failures:
            missing = [each for each in queues if each not in existing]
            failures[queue.topic] = OptionRefused(
                "assign", some_of(missing), f"queues that exist: {some_of(found.queues)}"
            )
    return TopicQueues(tuple(queue for queue in queues if queue in existing), failures)


def resolve(
    place: OffsetSpec,
    queues: Iterable[Queue],
    cluster: RangeCluster,
    *,
    seen: Mapping[Queue, Bounds] | None = None,
) -> dict[Queue, int]:
    """The offset that a start or end means for each queue. Raises what the cluster raises.

    A queue's end is the one that was seen first (`seen`), so that messages stored during further
    questions are not skipped.
    """
    queues = tuple(queues)
    match place:
        case Earliest():
            return {queue: each.low for queue, each in cluster.bounds(queues).or_raise().items()}
        case Latest():
            return _ends(queues, cluster, seen)
        case GroupProgress():
            known = cluster.progress(queues).or_raise()
            without = [queue for queue, offset in known.items() if offset is None]
            found = {queue: offset for queue, offset in known.items() if offset is not None}
            return found | resolve(Earliest(), without, cluster)
        case AtOffset(offset):
            bounds = cluster.bounds(queues).or_raise()
            return {queue: min(max(offset, at.low), at.high) for queue, at in bounds.items()}
        case BeforeEnd(count):
            ends, bounds = _ends(queues, cluster, seen), cluster.bounds(queues).or_raise()
            return {queue: max(bounds[queue].low, at - count) for queue, at in ends.items()}
        case AtOffsets(offsets, option):
            return _at_offsets(offsets, option, queues, cluster, seen)
        case AtTimes():
            return _at_times(place, queues, cluster, seen)


def _ends(
    queues: Iterable[Queue], cluster: RangeCluster, seen: Mapping[Queue, Bounds] | None
) -> dict[Queue, int]:
    known = {queue: seen[queue].high for queue in queues if queue in seen} if seen else {}
    return known | cluster.ends(queue for queue in queues if queue not in known).or_raise()


def clamp_to_bounds(
    positions: Positions, bounds: Mapping[Queue, Bounds], *, fail: bool
) -> dict[Queue, int]:
    """The offsets at which queues continue; raises `DataLost` with `fail` if one does not exist.

    Otherwise a queue that ends before its offset continues at its end. Whether it lost its end,
    lags after a crash or was created again is not known here, and going back could repeat days of
    reading. `available` leaves out what has expired. A queue of unknown bounds keeps its offset.
    """
    found = dict(positions)
    problems: list[str] = []
    for queue, at in sorted(positions.items()):
        if queue not in bounds or bounds[queue].low <= at <= bounds[queue].high:
            continue
        low, high = bounds[queue].low, bounds[queue].high
        problem = f"{queue} is to be read from offset {at} on and has {low} to {high}"
        problems.append(problem)
        if at > high:
            found[queue] = high
            if not fail:
                log.warning("%s; %s", problem, _PASSED_OVER)
    if problems and fail:
        raise DataLost(problems)
    return found


def available(
    wanted: Iterable[QueueRange], bounds: Mapping[Queue, Bounds], *, fail: bool
) -> list[QueueRange]:
    """The existing parts of ranges; raises `DataLost` with `fail` if a part is missing.

    A range of a queue with unknown bounds stays as it is: reading it finds out.
    """
    found: list[QueueRange] = []
    problems: list[str] = []
    for each in wanted:
        if each.queue not in bounds or not len(each):
            found.append(each)
            continue
        low, high = bounds[each.queue].low, bounds[each.queue].high
        if each.start < low or each.end > high:
            problems.append(str(OffsetsGone(each, low, high)))
        start = min(max(each.start, low), high)
        found.append(QueueRange(each.queue, start, max(start, min(each.end, high))))
    if problems and fail:
        raise DataLost(problems)
    for problem in problems:
        log.warning("messages are gone and are skipped: %s", problem)
    return found


def _at_offsets(
    offsets: Positions,
    option: str,
    queues: tuple[Queue, ...],
    cluster: RangeCluster,
    seen: Mapping[Queue, Bounds] | None,
) -> dict[Queue, int]:
    if missing := sorted(set(queues) - offsets.keys()):
        raise OptionRefused(
            option,
            f"no offset for {some_of(missing)}",
            "an offset for every queue that is read (-2: earliest, -1: latest)",
        )
    if unknown := sorted(offsets.keys() - set(queues)):
        raise OptionRefused(option, some_of(unknown), f"offsets of queues that are read: {queues}")
    earliest = [queue for queue in queues if offsets[queue] == EARLIEST]
    latest = [queue for queue in queues if offsets[queue] == LATEST]
    found = dict(offsets) | resolve(Earliest(), earliest, cluster)
    return found | _ends(latest, cluster, seen)


def _at_times(
    place: AtTimes,
    queues: tuple[Queue, ...],
    cluster: RangeCluster,
    seen: Mapping[Queue, Bounds] | None,
) -> dict[Queue, int]:
    times: dict[Queue, float] = dict(place.times)
    if place.time is not None:
        times = dict.fromkeys(queues, place.time) | times
    if missing := sorted(set(queues) - times.keys()):
        raise OptionRefused(
            place.option, f"no time for {some_of(missing)}", "a time for every queue that is read"
        )
    times = {queue: times[queue] for queue in queues}
    is_error = place.on_no_match is OnNoMatch.ERROR
    # Asked before the search, so that messages stored meanwhile lie behind this end.
    ends = {} if is_error else _ends(queues, cluster, seen)
    known = cluster.at_times(times).or_raise()
    without = [queue for queue, offset in known.items() if offset is None]
    if without and is_error:
        raise SourceError(
            f"no message of {some_of(without)} was stored at or after "
            f"{datetime.fromtimestamp(times[without[0]], UTC).isoformat()}, as {place.option} "
            "wants it; set startingOffsetsByTimestampStrategy to latest to begin at the end there"
        )
    return {queue: ends[queue] if at is None else at for queue, at in known.items()}
