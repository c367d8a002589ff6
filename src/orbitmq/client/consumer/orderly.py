"""Orderly consumption: the messages of a queue one after the other, each before the next.

The invariant: at no time are two handlers at work on messages of one queue, and a message is given
to a handler only when all before it in its queue are done, or given up. Three locks keep it:

1.  the broker's lock on the queue keeps other consumers of the group away. It is looked at before
    each call; once it has lapsed nothing is begun, and the queue has to be gained anew;
2.  within the consumer a queue has one `_Line`, which has at most one run of calls at work. As the
    line belongs to the event loop, that takes a flag and no lock;
3.  whoever gives the queue up waits for that run (`drain`) before progress is reported and the
    broker's lock is given back.

A run takes some messages at once into a worker, so that a queue does not cross to the event loop
for every message, and ends early when one fails, the queue is lost, or its time slice is over. Then
the queue goes to the end of the line of those who want a worker: many queues share few workers.

A failed message is put back, and its queue pauses before the next attempt: later messages wait.
Attempts are counted in memory. After the allowed ones, if there is such a limit, the message is
given up, which a broker makes a dead letter of, and its queue goes on.

A listener that commits by itself leaves messages taken and uncommitted. They are what its window
has in hand from before the run: nothing but the listener's own verdict commits them, and neither a
failure nor a message that middleware kept from it does.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from orbitmq.client.consumer.calls import Run
from orbitmq.client.consumer.consuming import Consuming, Parts
from orbitmq.client.consumer.nextattempt import after_failure_in_order, dropped_after_failure
from orbitmq.client.consumer.verdict import DEAD, Failure, Outcome, Verdict, accounted

if TYPE_CHECKING:
    from orbitmq.client.consumer.handlers import Binding
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.received import ReceivedMessage

log = logging.getLogger(__name__)

#: Messages taken into a worker at once, and as many more as fill the last batch.
RUN_LENGTH: Final = 32
#: Pauses of a queue are at least so long, whatever a handler says. Apache's clients cut those that
#: are longer than 30 s; but who asks for an hour does not want to be tried again every half minute,
#: and the queue's lock is renewed as long as it takes.
SHORTEST_PAUSE: Final = 0.01

Calls: TypeAlias = "list[tuple[Binding, Sequence[ReceivedMessage]]]"


class _State(enum.Enum):
    IDLE = enum.auto()  #: nothing to do, as far as is known
    RUNNING = enum.auto()  #: a run is in a worker
    SETTLING = enum.auto()  #: messages are being given up
    PAUSED = enum.auto()  #: after a failure


class _Line:
    """One queue and what is done with it now. Changed on the loop only."""

    __slots__ = ("owned", "run", "state", "timer", "waiters")

    def __init__(self, owned: OwnedQueue) -> None:
        self.owned = owned
        self.state = _State.IDLE
        #: What was last begun.
        self.run: Run | None = None
        self.timer: asyncio.TimerHandle | None = None
        #: Who waits for the end of what runs.
        self.waiters: list[asyncio.Future[None]] = []

    @property
    def is_busy(self) -> bool:
        return self.state in (_State.RUNNING, _State.SETTLING)

    def become(self, state: _State) -> None:
        self.state = state
        self.owned.running = int(self.is_busy)
        if not self.is_busy:
            for waiter in self.waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self.waiters.clear()


class OrderlyConsumption(Consuming):
    """Consumes the messages of each queue in order. See the head of the module."""

    #: Also in broadcasting, without locks: a queue is not begun anew while a handler is at work.
    is_in_order = True

    def __init__(self, parts: Parts, *, lapsed: Callable[[OwnedQueue], None] | None = None) -> None:
        """`lapsed` is called for a queue whose lock turned out to be held no more."""
        super().__init__(parts)
        self._lines: dict[OwnedQueue, _Line] = {}
        self._lapsed = lapsed

    async def start(self) -> None:
        """Nothing to begin."""

    def accept(self, owned: OwnedQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Messages of a queue are in its window."""
        line = self._lines.get(owned)
        if line is None:
            line = self._lines[owned] = _Line(owned)
        if line.state is _State.IDLE:
            self._go_on(line)

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Begin no call for a queue, and wait for the one that runs."""
        owned.is_draining = True
        line = self._lines.get(owned)
        if line is None:
            return True
        if line.is_busy:
            ended = asyncio.get_running_loop().create_future()
            line.waiters.append(ended)
            try:
                async with asyncio.timeout(timeout):
                    await ended
            except TimeoutError:
                return False
            finally:
                if ended in line.waiters:
                    line.waiters.remove(ended)
        self._close(line)
        return True

    def in_hand(self, owned: OwnedQueue) -> int:
        """Messages of a queue that were begun and are not settled."""
        line = self._lines.get(owned)
        if line is None or line.run is None or not line.is_busy:
            return 0
        # The call that is made now has no outcome yet.
        return _messages(line.run, len(line.run.outcomes) + (line.state is _State.RUNNING))

    # ---- one run after the other

    def _go_on(self, line: _Line) -> None:
        """Begin the next run of a queue, if there is anything to run."""
        line.timer = None
        owned = line.owned
        if owned.is_draining or self._is_stopped:
            self._close(line)
            return
        if owned.lock is not None and not owned.lock.is_held(self._monotonic()):
            self._lost_lock(line)
            return
        calls = self._next_calls(owned)
        if not calls:
            self._close(line)
            return
        line.become(_State.RUNNING)
        line.run = Run(calls, owned, self._monotonic, lasts=self._settings.time_slice)
        try:
            self.crew.submit(line.run)
        except Exception as error:  # noqa: BLE001  # the queue must not stand still for ever
            taken = [each for _, some in calls for each in some]
            self._log_not_begun(owned, len(taken), error)
            owned.window.rollback(taken)
            self._pause(line, self._settings.local_retry)

    def _next_calls(self, owned: OwnedQueue) -> Calls:
        """The next calls of a queue; what they are made with is taken from its window."""
        taken = owned.window.take(self._run_length(owned))
        calls: Calls = []
        used = 0
        for binding, messages in self._bindings.split(owned.queue, taken):
            # A run is of one kind; what a listener says may concern all that was taken before.
            first = calls[0][0] if calls else binding
            if first.is_async is not binding.is_async or (calls and first.is_listener):
                break
            calls.append((binding, messages))
            used += len(messages)
        if used < len(taken):
            owned.window.rollback(taken[used:])
        return calls

    def _run_length(self, owned: OwnedQueue) -> int:
        """How many messages make whole batches, and are a run."""
        binding = self._bindings.of_queue(owned.queue)
        size = 1 if binding is None else binding.batch_size
        return -(-RUN_LENGTH // size) * size

    def _lost_lock(self, line: _Line) -> None:
        owned = line.owned
        log.warning(
            "the order lock of %s is held no more by group %s: its consumption stops",
            owned.queue,
            self._group,
            extra={"group": self._group, "queue": str(owned.queue)},
        )
        self._close(line)
        if self._lapsed is not None:
            self._lapsed(owned)

    def _close(self, line: _Line) -> None:
        """There is nothing to do for a queue; the next messages begin a new line."""
        if line.timer is not None:
            line.timer.cancel()
            self._timers.discard(line.timer)
            line.timer = None
        line.become(_State.IDLE)
        if self._lines.get(line.owned) is line:
            del self._lines[line.owned]

    def _pause(self, line: _Line, seconds: float) -> None:
        if line.owned.is_draining or self._is_stopped:
            self._close(line)
            return
        line.become(_State.PAUSED)
        line.timer = self._later(seconds, self._go_on, line)

    def _pause_after(self, outcome: Outcome, wanted: float | None) -> float:
        """How long a queue pauses: as the handler wants, as the listener says, as it is set."""
        pause = outcome.suspend if wanted is None else wanted
        return max(self._settings.suspend if pause is None else pause, SHORTEST_PAUSE)

    # ---- what became of a run

    def _settle(self, jobs: list[Run]) -> None:
        for run in jobs:
            self._count(run)
            owned = run.owned
            owned.last_consumed = self._monotonic()
            line = self._lines.get(owned)
            if line is None:
                line = self._lines[owned] = _Line(owned)
            if owned.is_dropped:
                self.statistics.duplicates += _messages(run, len(run.outcomes))
                self._close(line)
            else:
                self._judge(line, run)

    def _count(self, run: Run) -> None:
        made = len(run.outcomes)
        if not made:
            return
        # Of a run, only the last call can have been rolled back.
        was_rolled_back = run.outcomes[-1].is_rolled_back
        back = len(run.calls[made - 1][1]) if was_rolled_back else 0
        outcomes = run.outcomes[:-1] if was_rolled_back else run.outcomes
        again = sum(len(outcome.failed) for outcome in outcomes)
        self.statistics.consumed(
            run.owned.queue.topic,
            done=_messages(run, made) - again - back,
            failed=sum(len(outcome.tried) for outcome in outcomes) + back,
            times=run.times(),
        )

    def _judge(self, line: _Line, run: Run) -> None:
        owned, made = line.owned, len(run.outcomes)
        if made < len(run.calls):
            # Not called any more: to be taken again, here or by the next owner.
            owned.window.rollback([each for _, some in run.calls[made:] for each in some])
        last = accounted(run.outcomes[-1], run.calls[made - 1][1]) if made else None
        if last is None:
            self._go_on(line)
            return
        # What is in hand besides the messages of these calls was left uncommitted before them.
        is_open = owned.window.taken_count > _messages(run, made)
        commits = last.commits(is_open=is_open)
        if last.is_rolled_back:
            # With what middleware kept from the listener, if there is any.
            owned.window.rollback()
            self._pause(line, self._pause_after(last, None))
        elif last.failed:
            self._log_failure(owned, last, run.calls[made - 1][0].name)
            line.become(_State.SETTLING)
            self._engine.spawn(
                self._retry(line, last, commits=commits),
                f"{self._group}: failed message of {owned.queue}",
            )
        else:
            if last.auto_commit and last.verdict is not Verdict.SUCCESS:
                log.warning(
                    "%s without auto_commit = False counts as success (group %s, %s)",
                    last.verdict.name,
                    self._group,
                    owned.queue,
                    extra={"group": self._group, "queue": str(owned.queue)},
                )
            if commits:
                self._commit(owned)
            self._go_on(line)

    def _commit(self, owned: OwnedQueue) -> None:
        """Everything that was taken is done with."""
        # Backwards as well: a message that was put back is not done with.
        self._report(owned, owned.window.commit(), increase_only=False)

    def _next(self, message: ReceivedMessage, outcome: Outcome, failure: Failure) -> str:
        retries = self._settings.max_retries
        if self._sending_back is None and not self._may_try_again(message, failure):
            return dropped_after_failure(message.attempt)
        return after_failure_in_order(
            message.attempt, failure, retries, self._pause_after(outcome, failure.pause)
        )

    async def _retry(self, line: _Line, outcome: Outcome, *, commits: bool) -> None:
        """Have failed messages tried again after a pause, or give them up."""
        owned = line.owned
        again = list(outcome.held)
        pauses: list[float] = []
        for messages, failure in outcome.failures:
            for message in messages:
                if self._may_try_again(message, failure) or not await self._give_up(
                    message, failure
                ):
                    again.append(message.with_reconsume_times(message.reconsume_times + 1))
                    if failure.pause is not None:
                        pauses.append(failure.pause)
        if owned.is_dropped:
            self._close(line)
            return
        owned.window.rollback(again)
        if commits:
            self._commit(owned)
        if again:
            if len(again) == len(outcome.held):
                pauses = [outcome.hold]
            self._pause(line, self._pause_after(outcome, max(pauses, default=None)))
        else:
            self._go_on(line)

    def _may_try_again(self, message: ReceivedMessage, failure: Failure) -> bool:
        if failure.level == DEAD:
            return False
        limit = self._settings.max_retries
        return limit is None or message.reconsume_times < limit

    async def _give_up(self, message: ReceivedMessage, failure: Failure) -> bool:
        if self._sending_back is None:
            log.warning(
                "group %s is broadcast to: message %s (offset %d of %s) failed and is dropped: %s",
                self._group,
                message.msg_id,
                message.queue_offset,
                message.queue,
                failure.reason or "no reason given",
                extra={
                    "group": self._group,
                    "queue": str(message.queue),
                    "offset": message.queue_offset,
                    "message_id": message.msg_id,
                },
            )
            return True
        try:
            is_taken = await self._sending_back.give_up(message, failure)
        except Exception as error:  # noqa: BLE001  # the queue must not stand still for ever
            self._log_not_taken(message, error)
            return False
        if is_taken:
            self.statistics.dead_letters += 1
        return is_taken


def _messages(run: Run, calls: int) -> int:
    """How many messages the first `calls` calls of a run were made with."""
    return sum(len(messages) for _, messages in run.calls[:calls])
