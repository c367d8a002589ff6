"""Where a group stands in its queues: what brokers have for it, and where they want it to be.

An administrator may reset the progress of the group. Pulls are told so, those of tasks first, and a
task may be lost with what it was told. So nothing that a task hears is forgotten by the broker: it
says the same to every pull of a task, and takes no report of the group, until the driver has pulled
(`orbitmq.broker.resets`). The driver does that when it knows where to go. It alone reports, so what
comes after is of the new place; and as long as it has not pulled, what it reports undoes nothing.

Of a queue that nobody pulls, the broker is asked where the group stands. Another answer than what
it was told is no more than a suspicion: it may have lost reports, and anybody may have reported
something. A pull then brings the truth, and without a reset the broker is told once more.

Apache's brokers tell of a reset once, whoever pulls.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.progress import TrackedProgress
from orbitmq.client.consumer.resetquestions import reset_told
from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue
    from orbitmq.spark.consuming.portion import Portion

log = logging.getLogger(__name__)

#: Seconds between two questions where the group stands in a queue.
_COMPARED: Final = 3.0


class Standing:
    """Keeps a group and its brokers of one mind. Belongs to the event loop."""

    def __init__(self, engine: Engine, group: str) -> None:
        self._engine = engine
        self._group = group
        self._monotonic = engine.clock.monotonic
        self.progress: ProgressStore | None = None

    async def is_moved(self, portion: Portion) -> bool:
        """Whether an administrator has moved the group in a queue; it goes on there."""
        queue, progress, now = portion.owned.queue, self.progress, self._monotonic()
        if now < portion.compared_next or not isinstance(progress, TrackedProgress):
            return False
        # A queue that was just gained begins where a reset wants it. Its tasks need not be told.
        is_new = portion.compared_next == float("-inf")
        portion.compared_next = now + _COMPARED
        at = portion.ledger.committed
        try:
            held = await progress.stored(queue)
            is_agreed = held is None or held == at
            if is_agreed:
                portion.doubted = None
            if held is None or (is_agreed and not is_new):
                return False
            offset = await reset_told(self._engine, self._group, queue, at, keep=True)
        except OrbitError as error:
            # No reason to leave its messages: what is done with them is reported later, too.
            log.debug("it is not known where the group stands in %s: %s", queue, error)
            return False
        if portion.owned.is_draining or portion.owned.is_dropped:
            # It is for whoever has the queue next.
            return False
        if offset is not None:
            return await self.follow(portion, offset)
        if not is_agreed:
            await self._contest(portion, progress, held)
        return False

    async def follow(self, portion: Portion, told: int) -> bool:
        """Go on where a reset wants the group, of which we were told; whether that is elsewhere.

        Then the broker may forget it. In this order: its answer to that may be lost.
        """
        owned = portion.owned
        is_moved = self._move(portion, told)
        if owned.is_dropped:
            # It is for whoever has the queue next.
            return is_moved
        try:
            newest = await reset_told(
                self._engine, self._group, owned.queue, portion.ledger.committed
            )
        except OrbitError as error:
            # If it was not forgotten, we are told again.
            log.debug("a reset of %s may still be told: %s", owned.queue, error)
            return is_moved
        return (newest is not None and self._move(portion, newest)) or is_moved

    async def report(self, queues: Sequence[Queue]) -> None:
        """Tell brokers where the group stands, as far as they can be reached."""
        if self.progress is None or not queues:
            return
        try:
            await self.progress.persist(queues)
        except OrbitError as error:
            # It is in memory, and tried again: after the next batch, and every few seconds.
            log.warning("progress could not be reported: %s", error)

    def _move(self, portion: Portion, offset: int) -> bool:
        """Go on at another offset; False when the group is there.

        Then what it has done beyond is to be done once more.
        """
        queue = portion.owned.queue
        if offset == portion.ledger.committed:
            portion.move(offset)
            return False
        log.info(
            "the progress of the group was reset: %s goes on at %d",
            queue,
            offset,
            extra={"queue": str(queue), "offset": offset},
        )
        portion.move(offset)
        if self.progress is not None and not portion.owned.is_dropped:
            self.progress.update(queue, offset, increase_only=False)
            if isinstance(self.progress, TrackedProgress):
                # What was last reported is not there any more, and may soon be reported again.
                self.progress.insist([queue])
        return True

    async def _contest(self, portion: Portion, progress: TrackedProgress, held: int) -> None:
        """Tell a broker again where the group stands, which has something else for it."""
        queue, at = portion.owned.queue, portion.ledger.committed
        if held != portion.doubted:
            # Perhaps it goes on: the queue is somebody else's by now, and we have yet to hear it.
            portion.doubted = held
            return
        if not portion.is_contested:
            portion.is_contested = True
            log.warning(
                "the broker has %d as the progress of the group in %s, which is at %d: it has lost "
                "a report, or somebody else reports for the group",
                held,
                queue,
                at,
                extra={"queue": str(queue), "offset": at},
            )
        progress.update(queue, at, increase_only=False)
        progress.insist([queue])
        await self.report([queue])
