"""How a batch is cut into pieces, and how pieces are dealt out to tasks.

In order a queue is one piece, whole, in one task. Otherwise pieces are cut until every task has its
share: handlers may be slow, and then an even load is what counts. Few messages make few tasks,
because a task has its price too.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from orbitmq.client.queue import Queue
from orbitmq.client.rangenotes import Gap
from orbitmq.client.ranges import QueueRange

#: Messages that are worth a task of their own: it takes some 40 ms to start one.
WORTH_A_TASK: Final = 16
#: Messages of the first batch: how fast its handlers are, nobody knows.
FIRST_BATCH: Final = 5000


@dataclass(frozen=True, slots=True)
class Piece:
    """Messages of one queue that one task handles."""

    range: QueueRange
    #: In order: how often messages of it were tried before, by their offset.
    attempts: Mapping[int, int] = field(default_factory=dict, hash=False)
    #: Where the group stands in the queue, which may be before the piece.
    committed: int | None = None
    #: Whether its broker did not answer the driver: then a replica may have it.
    is_doubtful: bool = False
    #: What a master was heard to lack in the queue, and for how long.
    gaps: tuple[Gap, ...] = ()

    @property
    def first_gap(self) -> int | None:
        """Where the first of these gaps begins in it."""
        start, end = self.range.start, self.range.end
        inside = [gap.start for gap in self.gaps if gap.start < end and start < gap.end]
        return max(start, min(inside)) if inside else None


def deal(
    pieces: Sequence[Piece], tasks: int, *, may_cut: bool, worth: int = WORTH_A_TASK
) -> list[tuple[Piece, ...]]:
    """Pieces for at most `tasks` tasks, each with about the same number of messages."""
    total = sum(len(piece.range) for piece in pieces)
    tasks = max(1, min(tasks, -(-total // worth)))
    if may_cut:
        share = max(worth, -(-total // tasks))
        pieces = [small for piece in pieces for small in _cut(piece, share)]
    loads = [(0, number) for number in range(tasks)]
    dealt: list[list[Piece]] = [[] for _ in loads]
    for piece in sorted(pieces, key=lambda each: (-len(each.range), each.range)):
        load, number = loads[0]
        dealt[number].append(piece)
        heapq.heapreplace(loads, (load + len(piece.range), number))
    return [tuple(some) for some in dealt if some]


def fair_shares(backlog: Mapping[Queue, int], limit: int) -> dict[Queue, int]:
    """`limit` messages dealt out to queues, the shortest first: no queue waits for a long one."""
    shares: dict[Queue, int] = {}
    left = limit
    for place, queue in enumerate(sorted(backlog, key=lambda each: (backlog[each], each))):
        share = max(1, left // (len(backlog) - place))
        shares[queue] = min(backlog[queue], share)
        left -= shares[queue]
    return shares


class Pace:
    """How many messages the next batch takes: as many as were handled in the time for one.

    Messages that a task did not come to are read again; so what slow handlers do not manage is not
    given to them in the first place. The first batch is a careful one.
    """

    def __init__(self, most: int, *, least: int = WORTH_A_TASK) -> None:
        self._most = most
        self._least = min(least, most)
        self.size = min(most, FIRST_BATCH)

    def learn(self, planned: int, handled: int) -> None:
        """Of `planned` messages so many were handled."""
        if handled < planned:
            self.size = max(self._least, handled + handled // 2)
        elif planned >= self.size:
            self.size *= 2
        self.size = min(self.size, self._most)


def _cut(piece: Piece, most: int) -> list[Piece]:
    whole = piece.range
    count = -(-len(whole) // most)
    bounds = [whole.start + len(whole) * number // count for number in range(count + 1)]
    return [
        replace(piece, range=QueueRange(whole.queue, start, end), attempts={})
        for start, end in pairwise(bounds)
    ]
