"""What a master said that is not there, and for how long: notes that outlive a reading."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from orbitmq.client.queue import Queue
from orbitmq.client.ranges import QueueRange
from orbitmq.clock import Clock, SystemClock


class Gap(NamedTuple):
    """Offsets of a queue at which its master has said for so long that it has no entries."""

    start: int
    end: int
    seconds: float


@dataclass(slots=True)
class _Saying:
    """For how many seconds a gap was said to be there, and when it was last, if that goes on."""

    seconds: float = 0.0
    last: float | None = None


class RangeNotes:
    """What readings find out beside messages.

    A gap has to be said for a while before it is believed. Whoever reads for a short time, and then
    again, keeps the notes of one reading for the next, or a gap would stop each of them anew. Only
    the time between two words of a master on one connection counts: when nobody asks it, it says
    nothing, and one that was out of reach may have restarted, and have to be waited for again. What
    earlier readings have found counts as a word when the next one of the queue begins: whoever
    passes it on knows that the master has been there since. So one word in each reading is enough.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._monotonic = (clock or SystemClock()).monotonic
        #: What is said about gaps, by their start and end.
        self._gaps: dict[Queue, dict[tuple[int, int], _Saying]] = {}
        self._left_out: dict[Queue, list[tuple[int, int]]] = {}

    def know(self, queue: Queue, gap: Gap) -> None:
        """Take what an earlier reading has found; its master must have been in reach since."""
        self._gaps.setdefault(queue, {}).setdefault((gap.start, gap.end), _Saying(gap.seconds))

    def resume(self, queues: Iterable[Queue]) -> None:
        """A reading of these queues begins; others may have been read since they were."""
        now = self._monotonic()
        for queue in queues:
            for saying in self._gaps.get(queue, {}).values():
                saying.last = now

    def said(self, queue: Queue, at: int, end: int, *, enough: float) -> int:
        """A master says now that it has nothing from `at` to `end`; up to where it is believed.

        That is as far as it has said so for `enough` seconds: a gap may have grown since.
        """
        now = self._monotonic()
        gaps = self._gaps.setdefault(queue, {})
        known = {bounds: saying for bounds, saying in gaps.items() if bounds[0] <= at < bounds[1]}
        if not known:
            known[at, end] = gaps[at, end] = _Saying()
        for saying in known.values():
            if saying.last is not None:
                saying.seconds += now - saying.last
            saying.last = now
        believed = [stop for (_, stop), saying in known.items() if saying.seconds >= enough]
        return min(end, max(believed, default=at))

    def pause(self) -> None:
        """A reading ends: nothing is said before the next one."""
        for gaps in self._gaps.values():
            for saying in gaps.values():
                saying.last = None

    def lose(self, broker: str) -> None:
        """A master was out of reach. What it said before it may not say any more."""
        for queue in [each for each in self._gaps if each.broker == broker]:
            del self._gaps[queue]

    def found(self, queue: Queue, start: int, end: int) -> None:
        """There are messages between two offsets: what was said of them does not hold."""
        gaps = self._gaps.get(queue)
        if not gaps:
            return
        for gap in [each for each in gaps if start < each[1] and each[0] < end]:
            del gaps[gap]

    def gaps(self, within: QueueRange) -> list[Gap]:
        """The gaps that reach into a range."""
        return [
            Gap(start, end, saying.seconds)
            for (start, end), saying in sorted(self._gaps.get(within.queue, {}).items())
            if start < within.end and within.start < end
        ]

    def leave_out(self, queue: Queue, start: int, end: int) -> None:
        """There is nothing between two offsets, and nobody waits for it any more."""
        stretches = self._left_out.setdefault(queue, [])
        if stretches and stretches[-1][1] == start:
            start = stretches.pop()[0]
        stretches.append((start, end))

    def left_out(self, within: QueueRange) -> int:
        """How many offsets of a range were left out."""
        count, upto = 0, within.start
        for start, end in sorted(self._left_out.get(within.queue, ())):
            count += max(0, min(end, within.end) - max(start, upto))
            upto = max(upto, end)
        return count
