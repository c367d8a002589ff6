"""Handlers at work in a task: the consumption of plain consumers, over pieces instead of queues.

Nothing about handlers, verdicts and failed messages is decided here. A piece is given to the very
consumption that runs in a `Consumer`, as a queue that is owned for the time of the task. Two things
differ. When time is up, nothing more is begun, and what runs is waited for. And in order, a failing
message ends the work on its queue for this batch instead of pausing it: the driver plans the queue
again after the pause, so that no task sits and waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from orbitmq.client.consumer.concurrent import ConcurrentConsumption
from orbitmq.client.consumer.orderly import OrderlyConsumption
from orbitmq.client.consumer.owned import OwnedQueue
from orbitmq.client.ranges import QueueRange
from orbitmq.spark.consuming.reports import PieceReport

if TYPE_CHECKING:
    from orbitmq.client.consumer.consuming import Parts
    from orbitmq.client.consumer.orderly import _Line
    from orbitmq.client.consumer.owned import HeldLock
    from orbitmq.client.consumer.verdict import Outcome
    from orbitmq.client.received import ReceivedMessage
    from orbitmq.spark.consuming.planning import Piece
    from orbitmq.spark.consuming.returning import Returns


@dataclass(slots=True)
class Remarks:
    """What did not go well with the messages of a queue in this task."""

    reason: str | None = None  #: of the last failure
    held: int = 0  #: times that middleware kept a message from its handler
    #: Messages that failed, by the attempts that were before. In order, most of them stay in their
    #: place, and are sent nowhere where they could be counted.
    failures: Counter[int] = field(default_factory=Counter)
    #: In order: the pause that a failure asked for, which ended the work on the queue.
    pause: float | None = None

    def take(self, outcome: Outcome) -> None:
        if outcome.failure is not None and outcome.failure.reason:
            self.reason = outcome.failure.reason
        self.held += len(outcome.held)
        self.failures.update(message.reconsume_times for message in outcome.tried)


class ConcurrentInTask(ConcurrentConsumption):
    """Concurrent consumption that remembers what went wrong."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.remarks: defaultdict[OwnedQueue, Remarks] = defaultdict(Remarks)

    def _log_failure(self, owned: OwnedQueue, outcome: Outcome, handler: str) -> None:
        super()._log_failure(owned, outcome, handler)
        self.remarks[owned].take(outcome)


class OrderlyInTask(OrderlyConsumption):
    """Orderly consumption in which a failure ends the work on its queue."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.remarks: defaultdict[OwnedQueue, Remarks] = defaultdict(Remarks)

    def _log_failure(self, owned: OwnedQueue, outcome: Outcome, handler: str) -> None:
        super()._log_failure(owned, outcome, handler)
        self.remarks[owned].take(outcome)

    def _pause(self, line: _Line, seconds: float | None) -> None:
        owned = line.owned
        self.remarks[owned].pause = self._settings.suspend if seconds is None else seconds
        owned.is_draining = True
        self._close(line)
        self.has_room(owned)


class Work:
    """One piece on its way."""

    __slots__ = (
        "error",
        "fed",
        "fetched",
        "given",
        "owned",
        "piece",
        "place",
        "reset_to",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self, place: int, piece: Piece, *, now: float, lock: HeldLock | None) -> None:
        self.place = place
        self.piece = piece
        self.owned = OwnedQueue(piece.range.queue, piece.range.start, now=now, lock=lock)
        #: Read, and not given to the handlers yet. Everything before `fetched` was read, everything
        #: before `given` was given.
        self.waiting: list[ReceivedMessage] = []
        self.waiting_bytes = 0
        self.fetched = self.given = piece.range.start
        #: Messages that were given to the handlers.
        self.fed = 0
        #: What kept the rest of it from being read.
        self.error: str | None = None
        #: Where the group is to go on instead, if the broker said so.
        self.reset_to: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether handlers may still be called for it."""
        return not self.owned.is_draining

    @property
    def unread(self) -> QueueRange | None:
        """What is still to be read of it."""
        whole = self.piece.range
        if not self.is_open or self.fetched >= whole.end:
            return None
        return QueueRange(whole.queue, self.fetched, whole.end)


class Handling:
    """The work of one task. Belongs to the event loop of its process."""

    def __init__(
        self,
        consumption: ConcurrentInTask | OrderlyInTask,
        returns: Returns,
        *,
        deadline: float,
        most_bytes: int,
        drain: float,
    ) -> None:
        """Nothing is begun after `deadline`, by the loop's clock; what runs has `drain` seconds."""
        self._consumption = consumption
        self._returns = returns
        self._deadline = deadline
        self._most_bytes = most_bytes
        self._drain = drain
        self._now = asyncio.get_running_loop().time
        self._moved = asyncio.Event()
        consumption.has_room = self._has_room

    @property
    def is_over(self) -> bool:
        """Whether time is up."""
        return self._now() >= self._deadline

    @property
    def time_left(self) -> float:
        """Seconds until then."""
        return max(0.0, self._deadline - self._now())

    async def feed(self, work: Work, messages: Sequence[ReceivedMessage], next_offset: int) -> None:
        """Take messages of a piece; they are handled with the others of it, by `flush`."""
        # That there is nothing, as in a gap, is never news too late.
        if not work.is_open or (messages and self.is_over):
            return
        work.waiting += messages
        work.waiting_bytes += sum(message.size for message in messages)
        work.fetched = next_offset
        if work.waiting_bytes > self._most_bytes:
            await self.flush(work)

    async def flush(self, work: Work) -> None:
        """Have what was read of a piece handled, when what was before is.

        A piece is given to the handlers as a whole: they begin the messages of one giving in order,
        so that when time is up nothing lies in front of something that is done. In order none is
        begun late, when another attempt at the task may have begun; otherwise late is better than
        read in vain.
        """
        window = work.owned.window
        while work.is_open and len(window) and await self._some_time():
            pass
        is_too_late = self.is_over and isinstance(self._consumption, OrderlyInTask)
        if not work.is_open or len(window) or is_too_late:
            return
        messages, work.waiting, work.waiting_bytes = work.waiting, [], 0
        if tried := work.piece.attempts:
            messages = [
                each.with_reconsume_times(tried.get(each.queue_offset, each.reconsume_times))
                for each in messages
            ]
        work.given = work.fetched
        new = window.add(messages, work.given)
        work.fed += len(new)
        if new:
            self._consumption.accept(work.owned, new)

    async def finish(self, works: Iterable[Work]) -> list[PieceReport]:
        """Wait until all of it is handled or time is up, and for what runs then."""
        works = list(works)
        while any(work.is_open and len(work.owned.window) for work in works):
            if not await self._some_time():
                break
        await asyncio.gather(*(self._consumption.drain(work.owned, self._drain) for work in works))
        reports = [self._report(work) for work in works]
        for work in works:
            # What still runs does not count any more.
            work.owned.drop()
            self._consumption.remarks.pop(work.owned, None)
        return reports

    def _report(self, work: Work) -> PieceReport:
        owned, whole = work.owned, work.piece.range
        reached = owned.window.commit_offset
        left = self._left(work)
        tally = self._returns.tally(whole)
        remarks = self._consumption.remarks[owned]
        gone = tally.retried + tally.dead + tally.held
        return PieceReport(
            place=work.place,
            finished=whole.start if reached is None else max(whole.start, min(reached, whole.end)),
            beyond=_behind([message.queue_offset for message in left], work.given),
            done=max(0, work.fed - len(left) - gone),
            retried=tally.retried,
            dead=tally.dead,
            kept=tally.kept,
            held=tally.held + remarks.held,
            # Nearly all are in both, and count once. Calls that took too long were only sent back.
            failures=dict(tally.failures | remarks.failures),
            attempts=self._attempts(left),
            pause=remarks.pause,
            error=work.error or tally.reason or remarks.reason,
            reset_to=work.reset_to,
        )

    def _left(self, work: Work) -> list[ReceivedMessage]:
        """What is not done with, in order."""
        window = work.owned.window
        window.rollback()
        return window.take(len(window))

    def _attempts(self, left: Sequence[ReceivedMessage]) -> dict[int, int]:
        """In order: of what is not done with, what was tried beyond what the broker knows of."""
        if not isinstance(self._consumption, OrderlyInTask):
            return {}
        return {
            each.queue_offset: each.reconsume_times
            for each in left
            if each.reconsume_times != each.stored.reconsume_times
        }

    async def _some_time(self) -> bool:
        """Wait for something to be done; False when time is up."""
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._moved.wait()
        except TimeoutError:
            return False
        self._moved.clear()
        return True

    def _has_room(self, _: OwnedQueue) -> None:
        self._moved.set()


def _behind(unfinished: Sequence[int], given: int) -> tuple[int, ...]:
    """The stretches behind unfinished offsets, one after the other: start, end, start, end."""
    return tuple(
        bound
        for one, following in pairwise([*unfinished, given])
        if following > one + 1
        for bound in (one + 1, following)
    )
