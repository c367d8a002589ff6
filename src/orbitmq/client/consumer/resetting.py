"""Going on elsewhere, because an administrator wants it: a broker pushes a table of offsets.

The invariant of all progress: it never passes an unfinished message, never goes back unless it is
told to, and never overwrites what a newer owner has made. A reset is what tells it to, and must not
get lost either. So:

* every queue of a push is on its own: none waits for the handlers of another, or for its broker;
* whose a queue is counts in the moment in which the push comes, and in that moment its offset is
  frozen, before anything is waited for: nothing of ours reports another one from then on, neither
  handlers that end later nor a release that is under way;
* the offset is told at once, and once: later it could meet what another owner has done since;
* of several resets the newest counts. It is frozen last, and what is put by of a queue is what is
  frozen at that time (`progress`); an older one is not tried again, nor told any more when the
  newer one is somebody else's to follow;
* a stop waits until they are told, for a few seconds: what is not told by then is an error.

| the queue is                      | its offset is                                              |
|-----------------------------------|------------------------------------------------------------|
| owned, or being given up          | told before it is let go, and begun anew (`releasing`)     |
| claimed                           | told, and noted: the queue begins there (`gaining`)        |
| neither, but ours by the last round | told                                                     |
| given up, its lock on its way back | the same if it is ours by the last round; else an error   |
| somebody else's                   | left to that member, which was pushed the same             |

A claimed queue may have a former owner that follows the same push, and then what it has done since
is done again. That cannot be told from an owner that the push has missed: better twice than never.
For the same reason it begins there even if the report fails, which is an error nevertheless.

A queue that we do not have may become somebody else's while its offset is told. We say until then
that we hold it (`ownership`), so that whoever has it next waits, and finds the offset. In order
nobody waits for that, but for a lock that we need not have. There the offset is told, and it is an
error if the queue is not ours any more by then, as far as our rounds have noticed.

A queue between two owners, which one has let go of and the other has not seen yet to be its own, is
nobody's. No member follows a push then, and none can know that: whoever pushes has to read back
(as `admin.resetting` does).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from orbitmq.client.consumer.gaining import Gaining, PendingReset
    from orbitmq.client.consumer.ownership import Ownership
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.releasing import Releasing
    from orbitmq.client.consumer.reporting import Reporting
    from orbitmq.client.consumer.unreported import Unreported
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue

log = logging.getLogger(__name__)

#: What puts an offset by, if that is done elsewhere; the note of a claim; or neither.
_PuttingBy: TypeAlias = "asyncio.Task[OrbitError | None] | PendingReset | None"

#: How often a reset is tried while its queue comes and goes.
_TIMES: Final = 5


class ResetUnsettled(OrbitError):
    """A queue came and went while its progress was reset: it may not be."""

    retriable = True

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        super().__init__(
            f"{queue} came and went while its progress was reset; reset it again when the group is "
            "at rest"
        )


class Resetting:
    """Follows the resets of one consumer. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        ownership: Ownership,
        *,
        progress: ProgressStore,
        unreported: Unreported,
        gaining: Gaining,
        releasing: Releasing,
        reporting: Reporting,
        is_own: Callable[[Queue], bool],
        is_locked: bool,
    ) -> None:
        """`is_own`: whether a queue is ours by the last round, owned or not.

        `is_locked`: whether others wait for the locks of queues, and not for what we hold.
        """
        self._engine = engine
        self._group = group
        self._ownership = ownership
        self._progress = progress
        self._unreported = unreported
        self._gaining = gaining
        self._releasing = releasing
        self._reporting = reporting
        self._is_own = is_own
        self._is_locked = is_locked
        #: What stands for the newest reset of each queue.
        self._newest: dict[Queue, object] = {}
        self._following: set[asyncio.Task[OrbitError | None]] = set()

    async def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Go on from other offsets; returns when they are put by.

        Raises when one could not be; the others are, all the same. A claimed queue begins where it
        was reset to even then.
        """
        self._unreported.drop(offsets)
        # What counts happens here, in one step; the rest goes on even if nobody waits for it.
        following = [
            self._begin(queue, at) for queue, at in offsets.items() if self._concerns_us(queue)
        ]
        for queue in offsets:
            if not self._concerns_us(queue):
                self._supersede(queue)
        for error in await asyncio.gather(*following):
            if error is not None:
                raise error

    async def settled(self) -> None:
        """Wait until no reset is on its way: not for long once the consumer stops."""
        while self._following:
            await asyncio.wait(self._following)

    def _concerns_us(self, queue: Queue) -> bool:
        return queue in self._ownership.owned or self._is_to_be_told(queue)

    def _is_to_be_told(self, queue: Queue) -> bool:
        """Whether we tell where a queue was reset to that we do not have."""
        ownership = self._ownership
        is_waited_for = queue in ownership.resets and not self._is_locked
        return is_waited_for or queue in ownership.claims or self._is_own(queue)

    def _supersede(self, queue: Queue) -> None:
        """A newer reset is somebody else's to follow: one of ours that still waits is not told."""
        if self._newest.pop(queue, None) is not None:
            self._progress.forget(queue)

    def _begin(self, queue: Queue, at: int) -> asyncio.Future[OrbitError | None]:
        mark = self._newest[queue] = object()
        try:
            putting_by = self._freeze(queue, at)
        except OrbitError as error:
            del self._newest[queue]
            self._not_followed(queue, at, error)
            failed: asyncio.Future[OrbitError | None] = asyncio.get_running_loop().create_future()
            failed.set_result(error)
            return failed
        following = self._engine.spawn(
            self._follow(queue, at, mark, putting_by), f"follow the reset of {queue}"
        )
        self._following.add(following)
        following.add_done_callback(self._following.discard)
        return asyncio.shield(following)

    def _freeze(self, queue: Queue, at: int) -> _PuttingBy:
        """Have a queue follow: see the table."""
        owned = self._ownership.owned.get(queue)
        if owned is not None and self._releasing.is_held(owned):
            return self._releasing.reset(owned, at)
        if not self._is_to_be_told(queue):
            raise ResetUnsettled(queue)
        # In one step with the freezing: a frozen queue that begins would never be reported.
        noted = self._gaining.reset(queue, at)
        self._progress.freeze(queue, at)
        self._ownership.reset_begins(queue)
        return noted

    async def _follow(
        self, queue: Queue, at: int, mark: object, putting_by: _PuttingBy
    ) -> OrbitError | None:
        """Go on until the offset is put by, or a newer one is to be; what prevented it, if any."""
        try:
            for times in range(_TIMES):
                if times:
                    putting_by = self._freeze(queue, at)
                if isinstance(putting_by, asyncio.Task):
                    error = await putting_by
                    self._reporting.let_be_seen([queue])
                    break
                is_put_by = await self._put_by(queue, at, mark, putting_by)
                if is_put_by or self._newest.get(queue) is not mark:
                    return None
            else:
                error = ResetUnsettled(queue)
        except OrbitError as failed:
            error = failed
        except asyncio.CancelledError:
            # A stop that was cut short.
            self._not_followed(queue, at, ResetUnsettled(queue))
            raise
        finally:
            if self._newest.get(queue) is mark:
                del self._newest[queue]
        if error is not None:
            self._not_followed(queue, at, error)
        return error

    def _not_followed(self, queue: Queue, at: int, error: OrbitError) -> None:
        # Said here for each queue: brokers of Apache do not wait for an answer.
        log.warning(
            "progress of group %s in %s could not be reset to %d: %s",
            self._group,
            queue,
            at,
            error,
            extra={"group": self._group, "queue": str(queue), "offset": at},
        )

    async def _put_by(
        self, queue: Queue, at: int, mark: object, noted: PendingReset | None
    ) -> bool:
        """Put the offset of a queue by that we do not have; whether it was not forgotten before.

        That happens when the queue is claimed, or begun, or let go meanwhile. Raises when somebody
        else may have begun it before.
        """
        try:
            async with self._releasing.limit.kept(queue.broker):
                await self._progress.persist([queue])
            if noted is not None and noted.is_followed:
                return True
            is_newest = self._newest.get(queue) is mark
            if is_newest and self._is_locked and not self._concerns_us(queue):
                raise ResetUnsettled(queue)
            return self._progress.read(queue) == at
        finally:
            ownership = self._ownership
            ownership.reset_ended(queue)
            is_ours = queue in ownership.owned or queue in ownership.claims
            if self._newest.get(queue) is mark and not is_ours:
                self._progress.forget(queue)
