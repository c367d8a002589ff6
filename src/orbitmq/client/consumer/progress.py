"""How far a group is in each queue: kept in memory, and put by where it outlives the consumer.

Three words mean three things. No progress *yet* is None. A position is the offset of the next
message to consume. *Could not ask* is an error, always: a consumer that took it for "none" would
jump to where its group begins and skip what lies between, or consume everything again.

Rules of the table in memory (`TrackedProgress`):

* a position only grows, unless the caller says otherwise (a seek, a reset, orderly consumption);
* a frozen position does not change until it is forgotten: whoever still finishes messages of
  before cannot move what was corrected or reset;
* what was known to be put by does not count for a position that is frozen: others have moved it
  since, as pulls do, and a reset back to it would not be told;
* what is put by is what changed since it was put by last, or is in doubt, one writing at a time per
  broker, so that an older position never overtakes a newer one on its way. Whoever comes while one
  is on its way goes with the next one, together with all others who wait: a broker that is silent
  costs two timeouts, however many queues wait for it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from typing import Protocol, runtime_checkable

from orbitmq.client.queue import Queue


class ProgressStore(Protocol):
    """Where a consumer keeps its positions; an application may bring its own.

    Its own is most easily a subclass of `TrackedProgress`, which leaves two methods to write.
    """

    async def load(self) -> None:
        """Called once, before anything else."""

    def update(self, queue: Queue, offset: int, *, increase_only: bool = True) -> None:
        """Messages before `offset` are done with."""

    def freeze(self, queue: Queue, offset: int) -> None:
        """Set a position that nothing changes any more until it is forgotten."""

    def read(self, queue: Queue) -> int | None:
        """The position in memory."""

    async def fetch(self, queue: Queue) -> int | None:
        """The position where it is put by, also taken into memory; None: no progress yet.

        Raises when it cannot be said.
        """

    async def persist(self, queues: Iterable[Queue]) -> None:
        """Put the positions of `queues` by; returns when they are. Raises when one is not."""

    def forget(self, queue: Queue) -> None:
        """Drop a position from memory; what is put by stays."""

    def positions(self, topic: str | None = None) -> dict[Queue, int]:
        """The positions in memory, of one topic or of all."""


@runtime_checkable
class Doubting(Protocol):
    """A store that goes by what it believes to be put by, and can be told not to."""

    def doubt(self, queues: Iterable[Queue]) -> None:
        """See to it, when the positions of `queues` are put by next, that they really are."""


@runtime_checkable
class Supposing(Protocol):
    """A store that may name a position of which nothing is put by, and later another one."""

    def is_supposed(self, queue: Queue) -> bool:
        """Whether what was fetched may be no more than a supposition."""

    def insist(self, queues: Iterable[Queue]) -> None:
        """Have positions put by the next time, whether they have changed or not."""


class _Batch:
    """Positions that are put by together, and what became of them."""

    __slots__ = ("failed", "is_done", "queues")

    def __init__(self) -> None:
        self.queues: set[Queue] = set()
        self.failed: Mapping[Queue, Exception] = {}
        self.is_done = False


class TrackedProgress(ABC):
    """Positions in memory, with what is known to be put by; where to, subclasses say."""

    def __init__(self) -> None:
        self._positions: dict[Queue, int] = {}
        self._frozen: set[Queue] = set()
        #: What the store is known to hold.
        self._stored: dict[Queue, int] = {}
        self._turns: dict[Hashable, asyncio.Lock] = {}
        #: What goes next, by turn.
        self._next: dict[Hashable, _Batch] = {}

    # What a subclass says.

    @abstractmethod
    async def stored(self, queue: Queue) -> int | None:
        """The position that is put by; None: none yet. Raises when it cannot be said."""

    @abstractmethod
    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        """Put positions by; those that could not be, with the reason. May raise for all of them."""

    def turn_of(self, queue: Queue) -> Hashable:
        """Positions that are put by one after the other have the same turn."""
        return queue.broker

    # The interface.

    async def load(self) -> None:  # noqa: B027  # most stores have nothing to read beforehand
        """Read what has to be read beforehand, if anything."""

    def update(self, queue: Queue, offset: int, *, increase_only: bool = True) -> None:
        known = self._positions.get(queue)
        if known is not None:
            if increase_only and offset <= known:
                return
            if self._frozen and queue in self._frozen:
                return
        self._positions[queue] = offset

    def freeze(self, queue: Queue, offset: int) -> None:
        self._positions[queue] = offset
        self._frozen.add(queue)
        self._stored.pop(queue, None)

    def read(self, queue: Queue) -> int | None:
        return self._positions.get(queue)

    async def fetch(self, queue: Queue) -> int | None:
        offset = await self.stored(queue)
        if offset is None:
            self._stored.pop(queue, None)
        else:
            self._stored[queue] = offset
            self.update(queue, offset, increase_only=False)
        return offset

    async def persist(self, queues: Iterable[Queue]) -> None:
        by_turn: dict[Hashable, list[Queue]] = {}
        for queue in queues:
            if self._is_changed(queue):
                by_turn.setdefault(self.turn_of(queue), []).append(queue)
        outcomes = await asyncio.gather(
            *(self._persist(turn, some) for turn, some in by_turn.items()), return_exceptions=True
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def doubt(self, queues: Iterable[Queue]) -> None:
        self.insist(queues)

    def insist(self, queues: Iterable[Queue]) -> None:
        """Have positions put by the next time, whether they have changed or not."""
        for queue in queues:
            self._stored.pop(queue, None)

    def forget(self, queue: Queue) -> None:
        self._positions.pop(queue, None)
        self._stored.pop(queue, None)
        self._frozen.discard(queue)

    def positions(self, topic: str | None = None) -> dict[Queue, int]:
        if topic is None:
            return dict(self._positions)
        return {queue: at for queue, at in self._positions.items() if queue.topic == topic}

    async def _persist(self, turn: Hashable, queues: list[Queue]) -> None:
        batch = self._next.setdefault(turn, _Batch())
        batch.queues.update(queues)
        async with self._turns.setdefault(turn, asyncio.Lock()):
            # Unless somebody who waited too has done it for all.
            if not batch.is_done:
                if self._next.get(turn) is batch:
                    del self._next[turn]
                batch.failed = await self._put_by(batch.queues)
                batch.is_done = True
        for queue in queues:
            if queue in batch.failed:
                raise batch.failed[queue]

    async def _put_by(self, queues: Iterable[Queue]) -> Mapping[Queue, Exception]:
        # Looked at again: whoever had the turn before may have put the same ones by.
        changed = {queue: self._positions[queue] for queue in queues if self._is_changed(queue)}
        if not changed:
            return {}
        were_frozen = self._frozen.intersection(changed)
        try:
            failed = await self.store(changed)
        except Exception as error:  # noqa: BLE001  # raised in whoever waits for it
            return dict.fromkeys(changed, error)
        for queue, offset in changed.items():
            # Meanwhile it may have been given up, and even be somebody else's; or be frozen, and is
            # then put by once more.
            was_frozen_since = queue in self._frozen and queue not in were_frozen
            if queue not in failed and queue in self._positions and not was_frozen_since:
                self._stored[queue] = offset
        return failed

    def _is_changed(self, queue: Queue) -> bool:
        offset = self._positions.get(queue)
        return offset is not None and self._stored.get(queue) != offset


class MemoryProgress(TrackedProgress):
    """Positions that end with the process, or that are shared by passing one mapping around."""

    def __init__(self, kept: dict[Queue, int] | None = None) -> None:
        super().__init__()
        self.kept = {} if kept is None else kept

    async def stored(self, queue: Queue) -> int | None:
        return self.kept.get(queue)

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        self.kept.update(changed)
        return {}
