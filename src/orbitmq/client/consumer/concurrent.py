"""Concurrent consumption: any worker takes the next message, in whatever order they finish.

The way of a message: pulled and in the window -> a call of its handler waits for a worker -> the
call runs -> what it came to is settled on the loop. Done, or sent back to the broker, the message
leaves the window, and progress moves to the smallest offset that is unfinished. A failed message
thus holds nothing back: its copy at the broker stands for it.

When no broker takes a failed message back, it stays in the window and is tried again here after a
pause; progress waits for it. So does a message that middleware holds back for a while, which costs
it no attempt. Nothing is dropped silently, but in broadcasting, where nobody takes
anything back and a warning is all there is.

A queue may be lost while a handler runs. Its messages are looked after by the new owner, so that
what the handler says does not count any more: neither progress nor a send-back follows from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.calls import Call
from orbitmq.client.consumer.consuming import Consuming, Parts
from orbitmq.client.consumer.nextattempt import after_failure, dropped_after_failure
from orbitmq.client.consumer.verdict import DONE, Failure, Outcome, accounted

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.periodic import Periodic
    from orbitmq.client.received import ReceivedMessage

log = logging.getLogger(__name__)

#: The delay level of a message whose handler took too long.
TIMEOUT_LEVEL: Final = 3
#: How often calls that take too long are looked for, at the most.
_LONGEST_LOOK: Final = 60.0


class _Work:
    """What is under way for one queue."""

    __slots__ = ("calls", "owned", "sending_back", "waiters")

    def __init__(self, owned: OwnedQueue) -> None:
        self.owned = owned
        #: Given to workers and not settled.
        self.calls: set[Call] = set()
        #: Failed messages that are on their way back.
        self.sending_back = 0
        #: Who waits for the end of what runs.
        self.waiters: list[asyncio.Future[None]] = []

    @property
    def is_running(self) -> bool:
        """Whether anything runs that was begun: calls that only wait do not count."""
        return self.sending_back > 0 or any(call.began for call in self.calls)

    def changed(self) -> None:
        self.owned.running = len(self.calls) + self.sending_back
        if self.waiters and not self.is_running:
            for waiter in self.waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self.waiters.clear()


class _Tally:
    """What the calls of one queue that ended together came to."""

    __slots__ = ("done", "failed", "offsets", "times")

    def __init__(self) -> None:
        #: Of messages that are done with.
        self.offsets: list[int] = []
        self.done = 0
        self.failed = 0
        #: Seconds that each call took.
        self.times: list[float] = []

    def add_done(self, calls: Sequence[Call]) -> None:
        """Calls that simply succeeded."""
        self.offsets += [message.queue_offset for call in calls for message in call.messages]
        self.done += len(self.offsets)
        self.times += [call.ended - call.began for call in calls]

    def add(self, call: Call, outcome: Outcome) -> None:
        self.done += len(call.messages) - len(outcome.failed)
        self.failed += len(outcome.tried)
        self.times.append(call.ended - call.began)


class ConcurrentConsumption(Consuming):
    """Consumes messages in any order. See the head of the module."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._works: dict[OwnedQueue, _Work] = {}
        self._looking: Periodic | None = None

    async def start(self) -> None:
        """Begin to look for calls that take too long."""
        interval = min(self._settings.timeout / 4, _LONGEST_LOOK)
        self._looking = self._engine.every(
            interval, self._look_for_late, first=interval, name=f"{self._group}: late handlers"
        )

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.stop()
        await super().stop()

    def accept(self, owned: OwnedQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Have messages of a queue consumed; they are in its window already."""
        if owned.is_draining or self._is_stopped:
            return
        work = self._works.get(owned)
        if work is None:
            work = self._works[owned] = _Work(owned)
        monotonic = self._monotonic
        calls = [
            Call(binding, owned, some, monotonic)
            for binding, some in self._bindings.split(owned.queue, messages)
        ]
        work.calls.update(calls)
        # One by one and in order: what is begun stays a beginning of the queue, so that a hand-over
        # that waits for the calls that run leaves no gap.
        crew, binding = self.crew, None
        try:
            for call in calls:
                if call.binding is not binding:
                    binding = call.binding
                    submit = crew.workers_for(binding.is_async).submit
                submit(call)
        except Exception as error:  # noqa: BLE001  # the messages must not be forgotten
            self._not_begun(work, calls[calls.index(call) :], error)
        owned.running = len(work.calls) + work.sending_back

    def _not_begun(self, work: _Work, calls: Sequence[Call], error: Exception) -> None:
        """There is no worker for some calls, and will be later, it is hoped."""
        messages = [message for call in calls for message in call.messages]
        self._log_not_begun(work.owned, len(messages), error)
        work.calls.difference_update(calls)
        self._later(self._settings.local_retry, self._offer_again, work.owned, messages)
        self._finish(work.owned, ())

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Begin no call for a queue, and wait for those that run and for what is sent back."""
        owned.is_draining = True
        work = self._works.get(owned)
        if work is None or not work.is_running:
            return True
        ended = asyncio.get_running_loop().create_future()
        work.waiters.append(ended)
        try:
            async with asyncio.timeout(timeout):
                await ended
        except TimeoutError:
            return False
        finally:
            if ended in work.waiters:
                work.waiters.remove(ended)
        return True

    def in_hand(self, owned: OwnedQueue) -> int:
        """Messages of a queue that were begun and are not settled."""
        work = self._works.get(owned)
        if work is None:
            return 0
        # Those of calls that were given up are on their way back, or there.
        begun = [call for call in work.calls if call.began and not call.is_given_up]
        return work.sending_back + sum(len(call.messages) for call in begun)

    # ---- what became of calls

    def _settle(self, jobs: list[Call]) -> None:
        by_queue: dict[OwnedQueue, list[Call]] = {}
        for call in jobs:
            owned = call.owned
            if owned in by_queue:
                by_queue[owned].append(call)
            else:
                by_queue[owned] = [call]
        now = self._monotonic()
        for owned, calls in by_queue.items():
            tally = self._tally(owned, calls)
            owned.last_consumed = now
            if tally.times:
                self.statistics.consumed(
                    owned.queue.topic, done=tally.done, failed=tally.failed, times=tally.times
                )
            self._finish(owned, tally.offsets)

    def _tally(self, owned: OwnedQueue, calls: list[Call]) -> _Tally:
        """What calls of one queue came to."""
        work = self._works.get(owned)
        if work is not None:
            work.calls.difference_update(calls)
        tally = _Tally()
        # Nearly always all of them.
        good = [call for call in calls if call.outcome is DONE and not call.is_given_up]
        if owned.is_dropped:
            good = []
        tally.add_done(good)
        if len(good) < len(calls):
            done = set(good)
            for call in calls:
                if call not in done:
                    self._settle_other(call, tally)
        return tally

    def _settle_other(self, call: Call, tally: _Tally) -> None:
        """A call that did not simply succeed."""
        outcome, owned, count = call.outcome, call.owned, len(call.messages)
        if outcome is None:
            self.statistics.passed_over += count
            return
        outcome = accounted(outcome, call.messages)
        tally.add(call, outcome)
        if owned.is_dropped:
            self.statistics.duplicates += count
        elif call.is_given_up:
            # They were sent back when it took too long, and the window has forgotten them.
            self.statistics.duplicates += count - len(outcome.failed)
        elif outcome.failed:
            tally.offsets += self._failed(owned, call, outcome)
        else:
            tally.offsets += [message.queue_offset for message in call.messages]

    def _finish(self, owned: OwnedQueue, offsets: Sequence[int]) -> None:
        """Forget messages that are done with, and move progress on."""
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

    def _failed(self, owned: OwnedQueue, call: Call, outcome: Outcome) -> list[int]:
        """Some messages of a call failed. Returns the offsets of those that are done with."""
        self._log_failure(owned, outcome, call.binding.name)
        failed = {message.queue_offset for message in outcome.failed}
        done = [
            message.queue_offset for message in call.messages if message.queue_offset not in failed
        ]
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
        for messages, failure in outcome.failures:
            self._start_sending_back(owned, messages, failure)
        return done

    def _offer_again(self, owned: OwnedQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Messages that were kept from their handler for a while."""
        # The queue may have been read anew from elsewhere since.
        self.accept(owned, [each for each in messages if each.queue_offset in owned.window])

    # ---- sending back

    def _start_sending_back(
        self, owned: OwnedQueue, messages: Sequence[ReceivedMessage], failure: Failure
    ) -> None:
        if self._is_stopped:
            return
        work = self._works.get(owned)
        if work is None:
            work = self._works[owned] = _Work(owned)
        work.sending_back += len(messages)
        self._engine.spawn(
            self._send_back(work, messages, failure), f"{self._group}: send back to {owned.queue}"
        )

    async def _send_back(
        self, work: _Work, messages: Sequence[ReceivedMessage], failure: Failure
    ) -> None:
        owned, count = work.owned, len(messages)
        # The queue may have been read anew from elsewhere since.
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
            # The new owner has them as well as the retry topic.
            statistics.duplicates += len(taken)
        elif kept and not self._is_stopped:
            self._later(self._settings.local_retry, self.accept, owned, kept)

    async def _send_one_back(self, message: ReceivedMessage, failure: Failure) -> bool:
        assert self._sending_back is not None  # noqa: S101  # told apart before
        try:
            is_taken = await self._sending_back.send_back(message, failure)
        except Exception as error:  # noqa: BLE001  # the message must not be forgotten
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
                call
                for call in work.calls
                if call.began and not call.is_given_up and now - call.began > limit
            ]
            for call in sorted(late, key=lambda each: each.messages[0].queue_offset):
                self._give_up(owned, call)

    def _give_up(self, owned: OwnedQueue, call: Call) -> None:
        """Have the messages of a call tried again without waiting for its end."""
        limit = self._settings.timeout
        call.is_given_up = True
        self.statistics.timed_out += len(call.messages)
        log.warning(
            "%s takes longer than %g s; its %d message(s) go back (group %s, %s, from offset %d, "
            "message %s)",
            call.binding.name,
            limit,
            len(call.messages),
            self._group,
            owned.queue,
            call.messages[0].queue_offset,
            call.messages[0].msg_id,
            extra={
                "group": self._group,
                "queue": str(owned.queue),
                "offset": call.messages[0].queue_offset,
            },
        )
        reason = f"the handler took longer than {limit:g} s"
        self._start_sending_back(owned, call.messages, Failure(TIMEOUT_LEVEL, reason=reason))
