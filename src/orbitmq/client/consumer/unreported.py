"""Positions that could not be put by when their queue was given up, kept until they are.

A broker that is killed leaves the route, and so its queues leave the shares of their owners. Nobody
can take their progress at that moment; but the consumer lives on and knows where it was. When the
broker is back, it has what was saved before its end, or less. It is asked then, and told if it has
less. If it has more, somebody else has the queue by now, and is not set back.

But a broker that was killed may have lost messages as well, or a slave that had not got them may
have taken its place. Their numbers go to other messages, maybe before we are back: a position tells
nothing then of what lies before it, and to believe it would pass those over. So a message is kept
with each position, by which it is seen that everything before is what it was (`landmarks`): the
first one that is unfinished, or the last one that was fetched. What is told is never beyond that
message: stretches that the filter left out behind it may have been lost, too. If it is not there
any more, or cannot be read, the position is thrown away.

Only where the broker has no progress and the group would begin behind the position, that needs no
proof: nothing is passed over by it that would not be otherwise.

A position of a queue whose progress is reset meanwhile is thrown away, too, and the oldest if there
are very many. All that costs is that messages come again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.landmarks import landmark_at
from orbitmq.client.consumer.pullanswers import AnswerUnusable
from orbitmq.client.errors import BrokerRefused, BrokerUnavailable
from orbitmq.errors import OrbitError
from orbitmq.message.errors import MessageError
from orbitmq.remoting.errors import RemotingError
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.errors import WireError

if TYPE_CHECKING:
    from orbitmq.client.consumer.landmarks import Landmark
    from orbitmq.client.consumer.ownership import Ownership
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.starting import Starting
    from orbitmq.client.engine import Engine
    from orbitmq.client.periodic import Periodic
    from orbitmq.client.queue import Queue

log = logging.getLogger(__name__)

#: So many positions are kept.
MOST: Final = 10_000

#: What is no answer of a broker, but of nobody.
_AWAY: Final = (RemotingError, BrokerUnavailable)
#: What makes an answer to a pull one that nobody can read.
_UNREADABLE: Final = (WireError, MessageError, AnswerUnusable)


class _Kept:
    """A position, what proves that it still counts, and whose turn it is to put it by."""

    __slots__ = ("landmark", "position", "turn")

    def __init__(self, position: int, landmark: Landmark | None) -> None:
        self.position = position
        self.landmark = landmark
        self.turn = asyncio.Lock()


class Unreported:
    """What is still to be reported of queues that were given up. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        progress: ProgressStore,
        ownership: Ownership,
        starting: Starting,
        *,
        most: int = MOST,
    ) -> None:
        self._engine = engine
        self._group = group
        self._progress = progress
        self._ownership = ownership
        self._starting = starting
        self._most = most
        self._reports: Periodic | None = None
        self._kept: dict[Queue, _Kept] = {}

    def start(self, interval: float) -> None:
        """Report what can be reported, again and again."""
        self._reports = self._engine.every(
            interval, self.report, name=f"late reports of {self._group}"
        )

    def wake(self) -> None:
        """Somebody was connected to: try it now."""
        if self._reports is not None and self._kept:
            self._reports.wake()

    def stop(self) -> None:
        if self._reports is not None:
            self._reports.stop()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, queue: Queue, position: int, landmark: Landmark | None) -> None:
        """A queue is given up with a position that nobody took.

        `landmark` is some message of it, the nearer to the position the better.
        """
        self._kept.pop(queue, None)
        self._kept[queue] = _Kept(position, landmark)
        if len(self._kept) > self._most:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            log.warning(
                "progress of group %s in %s is forgotten, because so much else is unreported: "
                "its messages come again",
                self._group,
                oldest,
                extra={"group": self._group, "queue": str(oldest)},
            )

    def drop(self, queues: Iterable[Queue]) -> None:
        """The progress of these was settled by somebody else."""
        for queue in queues:
            was_kept = self._kept.pop(queue, None) is not None
            if was_kept and queue not in self._ownership.owned:
                # It may be on its way already, and wait for its turn.
                self._progress.forget(queue)

    async def report(self) -> None:
        """Report what can be; a queue that is about to be ours is settled when it is begun."""
        away: set[str] = set()
        for queue in list(self._kept):
            if queue.broker in away or self._is_ours(queue):
                continue
            try:
                await self.settle(queue)
            except OrbitError as error:
                if isinstance(error, (*_AWAY, BrokerRefused)):
                    # The others there would have to wait as long for the same.
                    away.add(queue.broker)
                log.debug("progress in %s is still unreported: %s", queue, error)
            else:
                if not self._is_ours(queue):
                    self._progress.forget(queue)

    def _is_ours(self, queue: Queue) -> bool:
        return queue in self._ownership.owned or queue in self._ownership.claims

    async def settle(self, queue: Queue) -> None:
        """Put by what is kept of a queue, if anything is. Raises when its broker cannot, now.

        Its position in memory is then what is put by.
        """
        kept = self._kept.get(queue)
        if kept is None:
            return
        async with kept.turn:
            if self._kept.get(queue) is not kept:
                return
            try:
                told = await self._tell(queue, kept)
            except BrokerRefused as refused:
                if refused.code == ResponseCode.SYSTEM_BUSY:
                    raise
                told = None
                log.warning(
                    "progress of group %s in %s is refused, its messages come again: %s",
                    self._group,
                    queue,
                    refused,
                    extra={"group": self._group, "queue": str(queue)},
                )
            if self._kept.get(queue) is kept:
                del self._kept[queue]
        if told is not None:
            log.info(
                "progress of group %s in %s reported: %d, after its broker came back",
                self._group,
                queue,
                told,
                extra={"group": self._group, "queue": str(queue), "offset": told},
            )

    async def _tell(self, queue: Queue, kept: _Kept) -> int | None:
        """Report a position, if there is less and it still counts; what was reported."""
        held = await self._progress.fetch(queue)
        if held is not None and held >= kept.position:
            return None
        position = await self._proven(queue, kept, held)
        if self._kept.get(queue) is not kept:
            # Somebody has reset the progress meanwhile.
            return None
        if position is None:
            log.warning(
                "progress of group %s in %s was %d, but the messages before that may be other ones "
                "now: they come again",
                self._group,
                queue,
                kept.position,
                extra={"group": self._group, "queue": str(queue), "offset": kept.position},
            )
            return None
        if held is not None and held >= position:
            return None
        self._progress.update(queue, position)
        await self._progress.persist([queue])
        return position

    async def _proven(self, queue: Queue, kept: _Kept, held: int | None) -> int | None:
        """How far what lies before a position is what it was: see the head of the module."""
        mark = kept.landmark
        if mark is not None:
            try:
                found = await landmark_at(self._engine, self._group, queue, mark.offset)
            except _UNREADABLE as error:
                # It would be the next time, too, and the queue would never be begun.
                log.debug("what %s has at %d proves nothing: %s", queue, mark.offset, error)
                found = None
            if found == mark:
                return min(kept.position, mark.offset + 1)
        if held is None and kept.position <= await self._starting.without_progress(queue):
            return kept.position
        return None
