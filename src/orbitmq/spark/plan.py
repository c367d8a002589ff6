"""Which offsets a batch takes, and which task reads them.

Two rules hold for whatever is planned here. A batch takes of every queue the offsets from where
the last one ended up to, and without, its own end; and every one of these offsets is in exactly
one partition. What Spark then runs twice, it runs over the same messages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from orbitmq.client.queue import Queue
from orbitmq.client.ranges import QueueRange
from orbitmq.spark.offsets import Positions

#: Queues with fewer messages to read share a task with others: a task costs 40 ms and more, in
#: which so many messages could be read.
SMALL: Final = 16_384


def partition(
    ranges: Iterable[QueueRange],
    *,
    min_partitions: int | None = None,
    max_records: int | None = None,
    small: int = SMALL,
) -> list[tuple[QueueRange, ...]]:
    """Ranges dealt out to tasks.

    A queue stays in one task, which keeps its order, unless `max_records` or `min_partitions` ask
    for more. Small ones are put together, except where that would leave fewer tasks than asked
    for or more records in one.
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
        # Equal ones: the last task would else have what happens to be left, and the others wait.
        small = -(-total // -(-total // small))
    return _packed(pieces, least=min_partitions or 1, small=small, most=most)


def cut(whole: QueueRange, count: int) -> list[QueueRange]:
    """A range in `count` consecutive pieces of equal length, give or take one."""
    count = max(1, min(count, len(whole)))
    bounds = [whole.start + len(whole) * number // count for number in range(count + 1)]
    return [QueueRange(whole.queue, start, end) for start, end in pairwise(bounds)]


def admit(start: Positions, available: Positions, limit: int | None) -> dict[Queue, int]:
    """Where a batch of at most `limit` messages ends, given where queues begin and end.

    Every queue gets a share in proportion to its backlog, and at least one message, so that none
    starves beside a busy one. (With more queues than `limit` this is more than the limit.) A queue
    that ends before it begins is left where it is: whether that is a loss is judged elsewhere.
    """
    ends = dict(start)
    backlog = {
        queue: end - start.get(queue, end)
        for queue, end in available.items()
        if end > start.get(queue, end)
    }
    total = sum(backlog.values())
    shares: Mapping[Queue, int] = backlog
    if limit is not None and total > limit:
        shares = _shares(backlog, total, limit)
    for queue, end in available.items():
        ends[queue] = start.get(queue, end) + shares.get(queue, 0)
    return ends


class TriggerGate:
    """Holds a batch back until there is enough for it, but not for ever.

    The first batch is not held back: how long it has been since the last one is not known.
    """

    def __init__(self, least: int | None, longest: float) -> None:
        self._least = least
        self._longest = longest
        self._last: float | None = None

    def opens(self, available: int, now: float) -> bool:
        """Whether a batch of so many messages is made at this time; remembers that it was."""
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
    """At least `count` pieces where there are messages enough, by cutting the longest."""
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
        # So many packs there would be if nothing more were put together.
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


def _shares(backlog: Mapping[Queue, int], total: int, limit: int) -> dict[Queue, int]:
    """`limit` dealt out in proportion, at least one each."""
    shares = {queue: max(1, size * limit // total) for queue, size in backlog.items()}
    left = limit - sum(shares.values())
    # What rounding down left goes to those who lost most by it; not to those who got one anyway.
    rounded = [queue for queue, size in backlog.items() if size * limit >= total]
    for queue in sorted(rounded, key=lambda each: (-(backlog[each] * limit % total), each)):
        if left <= 0:
            break
        shares[queue] += 1
        left -= 1
    # Those who got one anyway may have taken it beyond the limit.
    for queue in sorted(shares, key=lambda each: (-shares[each], each)):
        if left >= 0:
            break
        less = min(-left, shares[queue] - 1)
        shares[queue] -= less
        left += less
    return shares
