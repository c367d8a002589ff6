"""Consumption: which handler a message is for, and what follows from the result of its call.

Concurrent consumption calls handlers in any order; orderly consumption calls them one after the
other for each queue. Pulling passes messages in (`accept`), a hand-over waits for running calls
(`drain`). The worker pool runs the calls; results are settled on the event loop.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from orbitmq.client.consumer.handlers import Binding, bind_handler
from orbitmq.client.consumer.pull import decode_pulled
from orbitmq.client.consumer.sendback import DEFAULT_RETRIES, FIRST_LEVEL, log_fields
from orbitmq.client.consumer.settings import FlowSettings
from orbitmq.client.consumer.verdict import (
    DEAD,
    DELAY_LEVELS,
    AnswerInvalid,
    Failure,
    Outcome,
    Retry,
    Verdict,
    reason_of,
)
from orbitmq.client.consumer.workers import Calls, Run, WorkerPool
from orbitmq.client.message import ReceivedMessage
from orbitmq.message.properties import RETRY_TOPIC

if TYPE_CHECKING:
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.publish import Sender
    from orbitmq.client.consumer.pull import Pulled
    from orbitmq.client.consumer.sendback import SendBack
    from orbitmq.client.consumer.settings import ConsumeSettings, FlowReason
    from orbitmq.client.consumer.statistics import Statistics
    from orbitmq.client.consumer.subscriptions import Subscription
    from orbitmq.client.consumer.window import OwnedQueue
    from orbitmq.client.engine import Engine, Periodic
    from orbitmq.client.message import ReceivedMessage
    from orbitmq.client.routes import Queue


log = logging.getLogger(__name__)

#: How long the workers may take to end. Their queues are drained by then.
WORKERS_END: Final = 1.0


class Bindings:
    """Finds the handler of a message; a retried message has the handler of its original topic."""

    def __init__(
        self, by_topic: Mapping[str, Binding], group: str, sender: Sender | None = None
    ) -> None:
        """Topics as brokers know them. `sender` sends what handlers return."""
        self._by_topic: dict[str, Binding] = {}
        self._sender = sender
        for topic, binding in by_topic.items():
            self.put(topic, binding)
        self._stranger = bind_handler(_refuse_stranger, group=group)

    def put(self, topic: str, binding: Binding) -> None:
        if binding.publication is not None:
            binding.publication.sender = self._sender
        self._by_topic[topic] = binding

    def remove(self, topic: str) -> None:
        self._by_topic.pop(topic, None)

    def of_queue(self, queue: Queue) -> Binding | None:
        """The handler of all messages of a queue; None in a retry topic, where it varies."""
        return self._by_topic.get(queue.topic)

    def of_message(self, message: ReceivedMessage) -> Binding:
        """The handler of one message; one that fails if the topic has none.

        Newer members of the group may have handlers that we lack, and their failed messages come to
        us as well. They are retried until they reach a member that has one.
        """
        topic = message.stored.get_property(RETRY_TOPIC) or message.queue.topic
        return self._by_topic.get(topic, self._stranger)

    def split(
        self, queue: Queue, messages: Sequence[ReceivedMessage]
    ) -> Iterable[tuple[Binding, Sequence[ReceivedMessage]]]:
        """Split messages of a queue into calls, in order: one handler and one batch each.

        Batches are tuples, so that a handler cannot change what others see.
        """
        return (
            (binding, some[begin : begin + binding.batch_size])
            for binding, some in self.by_handler(queue, tuple(messages))
            for begin in range(0, len(some), binding.batch_size)
        )

    def by_handler(
        self, queue: Queue, messages: Sequence[ReceivedMessage]
    ) -> Iterable[tuple[Binding, Sequence[ReceivedMessage]]]:
        """Messages of a queue in order, those in a row that have the same handler together."""
        binding = self.of_queue(queue)
        if binding is not None:
            return ((binding, messages),)
        bound = [(self.of_message(message), message) for message in messages]
        return (
            (each, tuple(message for _, message in some))
            for each, some in itertools.groupby(bound, key=itemgetter(0))
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that consumption works with."""

    engine: Engine
    #: As brokers know it.
    group: str
    bindings: Bindings
    progress: ProgressStore
    #: None for broadcasting, where failed messages are dropped.
    sending_back: SendBack | None
    settings: ConsumeSettings
    statistics: Statistics


class BaseConsumption(ABC):
    """What both kinds of consumption share: workers, statistics, direct calls."""

    is_in_order = False

    def __init__(self, parts: Parts) -> None:
        self._engine = parts.engine
        self._group = parts.group
        self._bindings = parts.bindings
        self._progress = parts.progress
        self._sending_back = parts.sending_back
        self._settings = parts.settings
        self.statistics = parts.statistics
        self._monotonic = parts.engine.clock.monotonic
        self.worker_pool = WorkerPool(parts.settings.workers, self._settle, group=parts.group)
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_stopped = False
        #: Called with a queue that has fewer messages than before; its pull may have waited for
        #: that.
        self.has_room: Callable[[OwnedQueue], None] = _ignore

    async def stop(self) -> None:
        """Begin no call and end the workers; a call that does not end is abandoned."""
        self._is_stopped = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        late = await self.worker_pool.stop(WORKERS_END)
        if late:
            log.warning(
                "%d handler calls of group %s did not end; their messages are delivered again",
                late,
                self._group,
                extra={"group": self._group},
            )

    @abstractmethod
    def _settle(self, jobs: list[Any]) -> None:
        """Act on the results of finished jobs; called on the loop."""

    def _report(self, owned: OwnedQueue, position: int | None, *, increase_only: bool) -> None:
        """Messages of a queue below `position` are finished."""
        if position is None or owned.is_dropped:
            return
        try:
            self._progress.update(owned.queue, position, increase_only=increase_only)
        except Exception:
            # An error of the application's store. The next update covers this one.
            log.exception(
                "progress of group %s in %s could not be noted: offset %d",
                self._group,
                owned.queue,
                position,
                extra={"group": self._group, "queue": str(owned.queue), "offset": position},
            )
        self.has_room(owned)

    def _later(self, delay: float, work: Any, *arguments: Any) -> asyncio.TimerHandle:
        """Call a function later on the loop, unless consumption stops before."""

        def call() -> None:
            self._timers.discard(timer)
            work(*arguments)

        timer = asyncio.get_running_loop().call_later(delay, call)
        self._timers.add(timer)
        return timer

    @abstractmethod
    def _next(self, message: ReceivedMessage, outcome: Outcome, failure: Failure) -> str:
        """What happens next to a failed message, in words."""

    def _log_failure(self, owned: OwnedQueue, outcome: Outcome, handler: str) -> None:
        """Log a failure in one line; an unexpected exception of a handler with its traceback."""
        messages, failure = outcome.tried, outcome.failure or Failure()
        if not messages:
            return
        first = messages[0]
        log.log(
            logging.INFO if failure.error is None else logging.WARNING,
            "%s of group %s failed on %d message(s) of %s from offset %d (id %s; %s): %s",
            handler,
            self._group,
            len(messages),
            owned.queue,
            first.queue_offset,
            first.msg_id,
            self._next(first, outcome, failure),
            failure.reason or "no reason given",
            exc_info=None if isinstance(failure.error, AnswerInvalid) else failure.error,
            extra=log_fields(self._group, first),
        )

    def _log_not_begun(self, owned: OwnedQueue, count: int, error: Exception) -> None:
        """Log that no worker could be started: the system has no thread left."""
        log.error(
            "%d message(s) of %s wait for a worker of group %s, which could not be started: %s",
            count,
            owned.queue,
            self._group,
            reason_of(error),
            extra={"group": self._group, "queue": str(owned.queue)},
        )

    def _log_not_taken(self, message: ReceivedMessage, error: Exception) -> None:
        """Log an unexpected error of sending a message back."""
        log.error(
            "message %s of group %s (offset %d of %s) could not be sent back; it is tried again "
            "here",
            message.msg_id,
            self._group,
            message.queue_offset,
            message.queue,
            exc_info=error,
            extra=log_fields(self._group, message),
        )


async def _all_ended(waiters: list[asyncio.Future[None]], timeout: float) -> bool:  # noqa: ASYNC109
    """Wait until `_wake` is called, at most `timeout` seconds; whether it was."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.append(ended)
    try:
        async with asyncio.timeout(timeout):
            await ended
    except TimeoutError:
        return False
    finally:
        if ended in waiters:
            waiters.remove(ended)
    return True


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


def _ignore(_: OwnedQueue) -> None:
    """The default listener."""


def _refuse_stranger(message: ReceivedMessage) -> None:
    raise Retry(f"this consumer has no handler for topic {message.topic}")


# ---- pulled messages


class Accepting(Protocol):
    """Consumption as a receiver sees it."""

    def accept(self, owned: OwnedQueue, messages: list[ReceivedMessage]) -> None:
        """Consume these messages. Never blocks."""


class WindowReceiver:
    """The receiver of a push consumer: decodes, filters by tag, and passes new messages on."""

    def __init__(
        self,
        progress: ProgressStore,
        consumption: Accepting,
        *,
        flow: FlowSettings | None = None,
        is_orderly: bool = False,
        group: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self._progress = progress
        self._consumption = consumption
        self._flow = flow or FlowSettings()
        self._is_orderly = is_orderly
        self._group = group
        self._namespace = namespace
        self._limits = self._flow.limits(1, is_orderly=is_orderly)

    def queues_changed(self, count: int) -> None:
        self._limits = self._flow.limits(count, is_orderly=self._is_orderly)

    def held_back(self, owned: OwnedQueue) -> FlowReason | None:
        return self._limits.exceeded_by(owned.window)

    def received(self, owned: OwnedQueue, pulled: Pulled, subscription: Subscription) -> int:
        wanted = subscription.accepted(self.decoded(owned, pulled))
        window = owned.window
        new = window.add(wanted, pulled.next_offset)
        if new:
            try:
                self._consumption.accept(owned, new)
            except BaseException:
                window.withdraw(new)
                raise
        elif not len(window):
            self._all_done(owned)
        return len(wanted)

    def decoded(self, owned: OwnedQueue, pulled: Pulled) -> list[ReceivedMessage]:
        """The messages of a pull. Raises `MessageError`."""
        queue, group, namespace = owned.queue, self._group, self._namespace
        stored = decode_pulled(pulled)
        return [ReceivedMessage(each, queue, group, None, namespace) for each in stored]

    def passed(self, owned: OwnedQueue, next_offset: int) -> None:
        owned.window.skip_to(next_offset)
        if not len(owned.window):
            self._all_done(owned)

    def moved(self, owned: OwnedQueue, pulled: Pulled) -> None:
        """Not called: a push consumer drops the queue and begins it again."""

    def _all_done(self, owned: OwnedQueue) -> None:
        done = owned.window.commit_offset
        if done is not None:
            self._progress.update(owned.queue, done)


# ---- concurrent consumption


#: The delay level of a message whose handler took too long.
TIMEOUT_LEVEL: Final = 3
#: The longest interval between two searches for calls that take too long.
_LONGEST_LOOK: Final = 60.0


class _QueueWork:
    """The work under way for one queue."""

    __slots__ = ("calls", "owned", "sending_back", "waiters")

    def __init__(self, owned: OwnedQueue) -> None:
        self.owned = owned
        #: Calls that are not all settled.
        self.calls: list[Calls] = []
        #: Failed messages being sent back.
        self.sending_back = 0
        #: Futures of tasks that wait for the end of running calls.
        self.waiters: list[asyncio.Future[None]] = []

    @property
    def is_running(self) -> bool:
        """Whether any call has begun; waiting calls do not count."""
        return self.sending_back > 0 or any(calls.is_begun for calls in self.calls)

    def changed(self) -> None:
        self.owned.running = sum([calls.left for calls in self.calls]) + self.sending_back
        if self.waiters and not self.is_running:
            _wake(self.waiters)


class ConcurrentConsumption(BaseConsumption):
    """Consumes messages in any order.

    A message is in the window from its pull until it is finished, and the committed offset is the
    smallest unfinished one. A failed message goes back to the broker and is then finished: its copy
    stands for it. If no broker takes it, it stays in the window and is retried here later. Only
    broadcasting drops failed messages, with a warning.

    The result of a call whose queue was lost meanwhile is ignored: the new owner has the messages.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._works: dict[OwnedQueue, _QueueWork] = {}
        self._looking: Periodic | None = None

    async def start(self) -> None:
        """Begin to search for calls that take too long."""
        interval = min(self._settings.timeout / 4, _LONGEST_LOOK)
        self._looking = self._engine.every(
            interval, self._look_for_late, first=interval, name=f"{self._group}: late handlers"
        )

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.stop()
        await super().stop()

    def accept(self, owned: OwnedQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Consume messages of a queue, which are in its window already."""
        if owned.is_draining or self._is_stopped or not messages:
            return
        work = self._works.get(owned)
        if work is None:
            work = self._works[owned] = _QueueWork(owned)
        begun = 0
        try:
            # In order, so that the calls that have begun are a prefix of the queue and a hand-over
            # that waits for them leaves no gap.
            for binding, some in self._bindings.by_handler(owned.queue, messages):
                calls = Calls(binding, owned, some, self._monotonic)
                self.worker_pool.submit(calls)
                work.calls.append(calls)
                begun += len(some)
        except Exception as error:  # noqa: BLE001  # the messages must not be lost
            self._not_begun(owned, messages[begun:], error)
        work.changed()

    def _not_begun(
        self, owned: OwnedQueue, messages: Sequence[ReceivedMessage], error: Exception
    ) -> None:
        """No worker could be started for some messages: retry later."""
        self._log_not_begun(owned, len(messages), error)
        self._later(self._settings.local_retry, self._offer_again, owned, messages)
        self._finish(owned, ())

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Begin no call for a queue; wait for running calls and for messages being sent back."""
        owned.is_draining = True
        work = self._works.get(owned)
        if work is None or not work.is_running:
            return True
        return await _all_ended(work.waiters, timeout)

    def in_hand(self, owned: OwnedQueue) -> int:
        """Messages of a queue that were begun and are not settled."""
        work = self._works.get(owned)
        if work is None:
            return 0
        # Messages of calls that timed out are being sent back, or were.
        return work.sending_back + sum(
            message.queue_offset not in calls.given_up
            for calls in work.calls
            for message in calls.unsettled()
        )

    # ---- results of calls

    def _settle(self, jobs: list[Calls]) -> None:
        now = self._monotonic()
        for calls in jobs:
            owned = calls.owned
            done, others, times = calls.take_results()
            owned.last_consumed = now
            offsets = self._counted(calls, done)
            succeeded, failed = len(done), 0
            for messages, outcome in others:
                if outcome is None:
                    self.statistics.passed_over += len(messages)
                    continue
                succeeded += len(messages) - len(outcome.failed)
                failed += len(outcome.tried)
                offsets += self._settle_other(calls, messages, outcome)
            if times:
                self.statistics.consumed(
                    owned.queue.topic, done=succeeded, failed=failed, times=times
                )
            work = self._works.get(owned)
            if work is not None and not calls.left and calls in work.calls:
                work.calls.remove(calls)
            self._finish(owned, offsets)

    def _counted(self, calls: Calls, done: Sequence[ReceivedMessage]) -> list[int]:
        """The offsets of successful messages that count here; others were delivered again."""
        offsets = [message.stored.queue_offset for message in done]
        if calls.owned.is_dropped:
            self.statistics.duplicates += len(done)
            return []
        if calls.given_up:
            counted = [offset for offset in offsets if offset not in calls.given_up]
            self.statistics.duplicates += len(offsets) - len(counted)
            return counted
        return offsets

    def _settle_other(
        self, calls: Calls, messages: Sequence[ReceivedMessage], outcome: Outcome
    ) -> Sequence[int]:
        """Handle a call that did not succeed completely; returns the offsets that are finished."""
        if calls.owned.is_dropped:
            self.statistics.duplicates += len(messages)
            return ()
        if messages[0].queue_offset in calls.given_up:
            # Sent back at the timeout; the window no longer has them.
            self.statistics.duplicates += len(messages) - len(outcome.failed)
            return ()
        if outcome.failed:
            return self._failed(calls, messages, outcome)
        return [message.queue_offset for message in messages]

    def _finish(self, owned: OwnedQueue, offsets: Sequence[int]) -> None:
        """Remove finished messages from the window and update the position."""
        if offsets and not owned.is_dropped:
            owned.window.finish(offsets)
            self._report(owned, owned.window.commit_offset, increase_only=True)
        work = self._works.get(owned)
        if work is not None:
            work.changed()
            if not work.calls and not work.sending_back:
                del self._works[owned]

    def _next(self, message: ReceivedMessage, outcome: Outcome, failure: Failure) -> str:
        if self._sending_back is None:
            return dropped_after_failure(message.attempt)
        return after_failure(message.attempt, failure, self._settings.max_retries)

    def _failed(
        self, calls: Calls, messages: Sequence[ReceivedMessage], outcome: Outcome
    ) -> list[int]:
        """Handle the failed messages of a call; returns the offsets of finished messages."""
        owned = calls.owned
        self._log_failure(owned, outcome, calls.binding.name)
        failed = {message.queue_offset for message in outcome.failed}
        done = [each.queue_offset for each in messages if each.queue_offset not in failed]
        if outcome.held:
            self._later(outcome.hold, self._offer_again, owned, outcome.held)
        tried = outcome.tried
        if not tried:
            return done
        if self._sending_back is None:
            failed = {message.queue_offset for message in tried}
            log.warning(
                "group %s is broadcast to: %d failed message(s) of %s from offset %d are dropped",
                self._group,
                len(failed),
                owned.queue,
                min(failed),
                extra={"group": self._group, "queue": str(owned.queue), "offset": min(failed)},
            )
            return done + sorted(failed)
        self._start_sending_back(owned, tried, outcome.failure or Failure())
        return done

    def _offer_again(self, owned: OwnedQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Offer messages again that middleware has held back."""
        # The queue may have been read again from another offset meanwhile.
        self.accept(owned, [each for each in messages if each.queue_offset in owned.window])

    # ---- sending back

    def _start_sending_back(
        self, owned: OwnedQueue, messages: Sequence[ReceivedMessage], failure: Failure
    ) -> None:
        if self._is_stopped:
            return
        work = self._works.get(owned)
        if work is None:
            work = self._works[owned] = _QueueWork(owned)
        work.sending_back += len(messages)
        self._engine.spawn(
            self._send_back(work, messages, failure), f"{self._group}: send back to {owned.queue}"
        )

    async def _send_back(
        self, work: _QueueWork, messages: Sequence[ReceivedMessage], failure: Failure
    ) -> None:
        owned, count = work.owned, len(messages)
        # As above.
        messages = [each for each in messages if each.queue_offset in owned.window]
        taken: list[int] = []
        kept: list[ReceivedMessage] = []
        try:
            answers = await asyncio.gather(
                *(self._send_one_back(message, failure) for message in messages)
            )
            for message, is_taken in zip(messages, answers, strict=True):
                if is_taken:
                    taken.append(message.queue_offset)
                else:
                    kept.append(message.with_reconsume_times(message.reconsume_times + 1))
        finally:
            work.sending_back -= count
            self._finish(owned, taken)
        statistics = self.statistics
        statistics.sent_back += len(taken)
        statistics.kept_back += len(kept)
        if owned.is_dropped:
            # Both the new owner and the retry topic have them.
            statistics.duplicates += len(taken)
        elif kept and not self._is_stopped:
            self._later(self._settings.local_retry, self.accept, owned, kept)

    async def _send_one_back(self, message: ReceivedMessage, failure: Failure) -> bool:
        assert self._sending_back is not None  # noqa: S101  # checked by `_failed`
        try:
            is_taken = await self._sending_back.send_back(message, failure)
        except Exception as error:  # noqa: BLE001  # the message must not be lost
            self._log_not_taken(message, error)
            return False
        if is_taken and self._sending_back.is_dead(message, failure):
            self.statistics.dead_letters += 1
        return is_taken

    # ---- calls that take too long

    async def _look_for_late(self) -> None:
        limit = self._settings.timeout
        now = self._monotonic()
        for work in tuple(self._works.values()):
            owned = work.owned
            if owned.is_dropped or self._sending_back is None:
                continue
            late = [
                (messages[0].queue_offset, calls, messages)
                for calls in work.calls
                for messages in calls.late(now - limit)
                if messages[0].queue_offset not in calls.given_up
            ]
            for _, calls, messages in sorted(late, key=itemgetter(0)):
                self._give_up(calls, messages)

    def _give_up(self, calls: Calls, messages: Sequence[ReceivedMessage]) -> None:
        """Retry the messages of a call without waiting for its end."""
        limit, owned, first = self._settings.timeout, calls.owned, messages[0]
        calls.given_up.update(message.queue_offset for message in messages)
        self.statistics.timed_out += len(messages)
        log.warning(
            "%s takes longer than %g s; its %d message(s) go back (group %s, %s, from offset %d, "
            "message %s)",
            calls.binding.name,
            limit,
            len(messages),
            self._group,
            owned.queue,
            first.queue_offset,
            first.msg_id,
            extra={"group": self._group, "queue": str(owned.queue), "offset": first.queue_offset},
        )
        reason = f"the handler took longer than {limit:g} s"
        self._start_sending_back(owned, messages, Failure(TIMEOUT_LEVEL, reason=reason))


# ---- orderly consumption


#: Messages of one run, rounded up to whole batches.
RUN_LENGTH: Final = 32
#: The shortest pause of a queue. There is no longest one, as in Apache's clients (30 s): the lock
#: is renewed during the pause.
SHORTEST_PAUSE: Final = 0.01

RunCalls: TypeAlias = "list[tuple[Binding, Sequence[ReceivedMessage]]]"


class _State(enum.Enum):
    IDLE = enum.auto()  #: nothing to do
    RUNNING = enum.auto()  #: a run is in a worker
    SETTLING = enum.auto()  #: failed messages are being handled
    PAUSED = enum.auto()  #: after a failure


class OrderedQueue:
    """One queue and its present run. Changed on the loop only."""

    __slots__ = ("owned", "run", "state", "timer", "waiters")

    def __init__(self, owned: OwnedQueue) -> None:
        self.owned = owned
        self.state = _State.IDLE
        #: The last run.
        self.run: Run | None = None
        self.timer: asyncio.TimerHandle | None = None
        #: Futures of tasks that wait for the end of the run.
        self.waiters: list[asyncio.Future[None]] = []

    @property
    def is_busy(self) -> bool:
        return self.state in (_State.RUNNING, _State.SETTLING)

    def become(self, state: _State) -> None:
        self.state = state
        self.owned.running = int(self.is_busy)
        if not self.is_busy:
            _wake(self.waiters)


class OrderlyConsumption(BaseConsumption):
    """Consumes the messages of each queue in order, one handler call at a time.

    The broker's lock keeps other members away and is checked before each call; a queue has at most
    one run of calls, and `drain` waits for it before the lock is given back. A run takes several
    messages into a worker, to save crossings between threads, and ends when a message fails, the
    queue is lost or its time slice is over.

    A failed message is put back and its queue pauses; later messages wait. After the allowed
    attempts, if there is a limit, the message becomes a dead letter and the queue goes on. A
    listener that commits by itself leaves messages taken: only its own verdict commits them.
    """

    #: Also in broadcasting, without locks: a queue does not begin again while a handler runs.
    is_in_order = True

    def __init__(self, parts: Parts, *, lapsed: Callable[[OwnedQueue], None] | None = None) -> None:
        """`lapsed` is called with a queue whose lock has lapsed."""
        super().__init__(parts)
        self._lines: dict[OwnedQueue, OrderedQueue] = {}
        self._lapsed = lapsed

    async def start(self) -> None:
        """Does nothing."""

    def accept(self, owned: OwnedQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Consume messages of a queue, which are in its window already."""
        line = self._lines.get(owned)
        if line is None:
            line = self._lines[owned] = OrderedQueue(owned)
        if line.state is _State.IDLE:
            self._go_on(line)

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Begin no call for a queue, and wait for the running one."""
        owned.is_draining = True
        line = self._lines.get(owned)
        if line is None:
            return True
        if line.is_busy and not await _all_ended(line.waiters, timeout):
            return False
        self._close(line)
        return True

    def in_hand(self, owned: OwnedQueue) -> int:
        """Messages of a queue that were begun and are not settled."""
        line = self._lines.get(owned)
        if line is None or line.run is None or not line.is_busy:
            return 0
        # The running call has no outcome yet.
        return _messages(line.run, len(line.run.outcomes) + (line.state is _State.RUNNING))

    # ---- runs

    def _go_on(self, line: OrderedQueue) -> None:
        """Begin the next run of a queue, if it has messages."""
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
            self.worker_pool.submit(line.run)
        except Exception as error:  # noqa: BLE001  # the queue must not stop
            taken = [each for _, some in calls for each in some]
            self._log_not_begun(owned, len(taken), error)
            owned.window.rollback(taken)
            self._pause(line, self._settings.local_retry)

    def _next_calls(self, owned: OwnedQueue) -> RunCalls:
        """The next calls of a queue; their messages are taken from its window."""
        taken = owned.window.take(self._run_length(owned))
        calls: RunCalls = []
        used = 0
        for binding, messages in self._bindings.split(owned.queue, taken):
            # A run has one kind of handler. A listener's verdict may cover all taken messages.
            first = calls[0][0] if calls else binding
            if first.is_async is not binding.is_async or (calls and first.is_listener):
                break
            calls.append((binding, messages))
            used += len(messages)
        if used < len(taken):
            owned.window.rollback(taken[used:])
        return calls

    def _run_length(self, owned: OwnedQueue) -> int:
        """The number of messages of a run, a multiple of the batch size."""
        binding = self._bindings.of_queue(owned.queue)
        size = 1 if binding is None else binding.batch_size
        return -(-RUN_LENGTH // size) * size

    def _lost_lock(self, line: OrderedQueue) -> None:
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

    def _close(self, line: OrderedQueue) -> None:
        """The queue has nothing to do; the next messages begin again."""
        if line.timer is not None:
            line.timer.cancel()
            self._timers.discard(line.timer)
            line.timer = None
        line.become(_State.IDLE)
        if self._lines.get(line.owned) is line:
            del self._lines[line.owned]

    def _pause(self, line: OrderedQueue, seconds: float) -> None:
        if line.owned.is_draining or self._is_stopped:
            self._close(line)
            return
        line.become(_State.PAUSED)
        line.timer = self._later(seconds, self._go_on, line)

    def _pause_after(self, outcome: Outcome, wanted: float | None) -> float:
        """The pause of a queue: as the handler, the listener or the settings say, in this order."""
        pause = outcome.suspend if wanted is None else wanted
        return max(self._settings.suspend if pause is None else pause, SHORTEST_PAUSE)

    # ---- results of runs

    def _settle(self, jobs: list[Run]) -> None:
        for run in jobs:
            self._count(run)
            owned = run.owned
            owned.last_consumed = self._monotonic()
            line = self._lines.get(owned)
            if line is None:
                line = self._lines[owned] = OrderedQueue(owned)
            if owned.is_dropped:
                self.statistics.duplicates += _messages(run, len(run.outcomes))
                self._close(line)
            else:
                self._judge(line, run)

    def _count(self, run: Run) -> None:
        made = len(run.outcomes)
        if not made:
            return
        # Only the last call of a run can have been rolled back.
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

    def _judge(self, line: OrderedQueue, run: Run) -> None:
        owned, made = line.owned, len(run.outcomes)
        if made < len(run.calls):
            # Not called: taken again later, here or by the next owner.
            owned.window.rollback([each for _, some in run.calls[made:] for each in some])
        last = run.outcomes[-1] if made else None
        if last is None:
            self._go_on(line)
            return
        # More messages are taken than those of the calls: they were left uncommitted before.
        is_open = owned.window.taken_count > _messages(run, made)
        commits = last.commits(is_open=is_open)
        if last.is_rolled_back:
            # Including messages that middleware kept from the listener.
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
        """Finish all taken messages."""
        # May go back: a message that was put back is not finished.
        self._report(owned, owned.window.commit(), increase_only=False)

    def _next(self, message: ReceivedMessage, outcome: Outcome, failure: Failure) -> str:
        retries = self._settings.max_retries
        if self._sending_back is None and not self._may_try_again(message, failure):
            return dropped_after_failure(message.attempt)
        return after_failure(
            message.attempt, failure, retries, self._pause_after(outcome, failure.pause)
        )

    async def _retry(self, line: OrderedQueue, outcome: Outcome, *, commits: bool) -> None:
        """Retry failed messages after a pause, or give them up."""
        owned = line.owned
        again = list(outcome.held)
        pause: float | None = None
        failure = outcome.failure or Failure()
        for message in outcome.tried:
            if self._may_try_again(message, failure) or not await self._give_up(message, failure):
                again.append(message.with_reconsume_times(message.reconsume_times + 1))
                pause = failure.pause
        if owned.is_dropped:
            self._close(line)
            return
        owned.window.rollback(again)
        if commits:
            self._commit(owned)
        if again:
            if len(again) == len(outcome.held):
                pause = outcome.hold
            self._pause(line, self._pause_after(outcome, pause))
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
                extra=log_fields(self._group, message),
            )
            return True
        try:
            is_taken = await self._sending_back.give_up(message, failure)
        except Exception as error:  # noqa: BLE001  # the queue must not stop
            self._log_not_taken(message, error)
            return False
        if is_taken:
            self.statistics.dead_letters += 1
        return is_taken


def _messages(run: Run, calls: int) -> int:
    """The number of messages of the first `calls` calls of a run."""
    return sum(len(messages) for _, messages in run.calls[:calls])


# ---- what happens next to a failed message, in words for the log
#
# Attempts and delays can be set at the broker, which the client does not see. The words then name
# Apache's defaults, and that they are.


_MINUTE: Final = 60
_HOUR: Final = 3600


def after_failure(
    attempt: int, failure: Failure, max_retries: int | None, pause: float | None = None
) -> str:
    """Without `max_retries` the broker decides, and in order there is no limit.

    `pause`: in order, the pause of the queue that keeps the message.
    """
    goes_on = "" if pause is None else ", and its queue goes on"
    if failure.level == DEAD:
        return f"attempt {attempt}, given up: it goes to the dead letters{goes_on}"
    if pause is not None and max_retries is None:
        return f"attempt {attempt}, without a limit; again in {duration(pause)}, its queue waits"
    attempts = 1 + (DEFAULT_RETRIES if max_retries is None else max_retries)
    if attempt >= attempts:
        unless = " unless the broker allows the group more" if max_retries is None else goes_on
        return f"attempt {attempt} of {attempts}, the last: it goes to the dead letters{unless}"
    if pause is not None:
        return f"attempt {attempt} of {attempts}, again in {duration(pause)}, its queue waits"
    delay, unless = failure.pause, ""
    if delay is None:
        delay = float(DELAY_LEVELS[min(FIRST_LEVEL + attempt - 1, len(DELAY_LEVELS)) - 1])
        unless = " unless the broker has other delays"
    if max_retries is None:
        unless = " unless the group is set otherwise at the broker"
    return f"attempt {attempt} of {attempts}, again in {duration(delay)}{unless}"


def dropped_after_failure(attempt: int) -> str:
    """For a message of a broadcasting consumer, which is not sent back."""
    return f"attempt {attempt}, not tried again: it was broadcast"


def duration(seconds: float) -> str:
    """Seconds for people: 10 s, 2 min, 2 h."""
    if seconds >= _HOUR and seconds % _HOUR == 0:
        return f"{seconds / _HOUR:g} h"
    if seconds >= _MINUTE and seconds % _MINUTE == 0:
        return f"{seconds / _MINUTE:g} min"
    return f"{seconds:g} s"
