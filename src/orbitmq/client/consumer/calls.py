"""Calls of handlers, as workers do them.

A call is made on the event loop, done in a worker and settled on the loop. The worker touches three
things of it only: when it began, what came of it, and when it ended. Just before the handler is
called it looks whether the queue is being given up; then nothing is begun any more, and what was
not begun comes to nothing. See `workers` for why that is safe without a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from typing import TYPE_CHECKING

import msgspec

from orbitmq.client.consumer.verdict import Outcome, Verdict, outcome_of_error

if TYPE_CHECKING:
    from orbitmq.client.consumer.handlers import Binding
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.queue import Queue
    from orbitmq.client.received import ReceivedMessage


class Call(msgspec.Struct, eq=False):
    """One call of a handler with messages of one queue, in no order with others."""

    binding: Binding
    owned: OwnedQueue
    messages: Sequence[ReceivedMessage]
    monotonic: Callable[[], float]
    #: When a worker took it up; 0 as long as none has.
    began: float = 0.0
    ended: float = 0.0
    #: None: the handler was not called.
    outcome: Outcome | None = None
    #: It took too long: whatever it comes to, its messages come again.
    is_given_up: bool = False

    def run(self) -> None:
        """Outside of the workers."""
        self.run_in(copy_context())

    def run_in(self, context: Context) -> bool:
        monotonic, owned = self.monotonic, self.owned
        self.began = monotonic()
        if owned.is_draining:
            return False
        self.outcome = context.run(self.binding.call, owned.queue, self.messages, owned.ownership)
        self.ended = monotonic()
        return False

    async def run_async(self) -> None:
        self.began = self.monotonic()
        owned = self.owned
        if owned.is_draining:
            return
        try:
            self.outcome = await self.binding.call_async(
                owned.queue, self.messages, owned.ownership
            )
        except BaseException as error:
            self.outcome = outcome_of_error(error, self.messages)
            raise
        finally:
            self.ended = self.monotonic()


class Run:
    """Calls with messages of one queue, one after the other, until one fails or time is up."""

    __slots__ = (
        "_begins", "_lasts", "_monotonic", "began", "calls", "ended", "is_async", "outcomes",
        "owned",
    )  # fmt: skip

    def __init__(
        self,
        calls: Sequence[tuple[Binding, Sequence[ReceivedMessage]]],
        owned: OwnedQueue,
        monotonic: Callable[[], float],
        *,
        lasts: float,
    ) -> None:
        """`lasts` seconds after its beginning no further call is begun."""
        self.calls = calls
        self.owned = owned
        self.is_async = calls[0][0].is_async
        self._monotonic = monotonic
        self._lasts = lasts
        self.began = 0.0
        self.ended = 0.0
        #: Of the calls that were made, in their order.
        self.outcomes: list[Outcome] = []
        #: When each of them began; maybe also one that was not made after all.
        self._begins: list[float] = []

    def times(self) -> list[float]:
        """Seconds that each call took that was made."""
        begins = self._begins[: len(self.outcomes)]
        return [end - began for began, end in zip(begins, [*begins[1:], self.ended], strict=False)]

    def run_in(self, context: Context) -> bool:
        context.run(self.run)
        return True

    def run(self) -> None:
        """Make the calls, in this thread."""
        self.began = self._monotonic()
        queue, ownership = self.owned.queue, self.owned.ownership
        for binding, messages in self.calls:
            if not self._may_go_on():
                break
            outcome = binding.call(queue, messages, ownership)
            self.outcomes.append(outcome)
            if not _is_good(outcome):
                break
        self.ended = self._monotonic()

    async def run_async(self) -> None:
        self.began = self._monotonic()
        queue, ownership = self.owned.queue, self.owned.ownership
        messages: Sequence[ReceivedMessage] = ()
        try:
            for binding, messages in self.calls:
                if not self._may_go_on():
                    break
                outcome = await binding.call_async(queue, messages, ownership)
                self.outcomes.append(outcome)
                if not _is_good(outcome):
                    break
        except BaseException as error:
            self.outcomes.append(outcome_of_error(error, messages))
            raise
        finally:
            self.ended = self._monotonic()

    def _may_go_on(self) -> bool:
        owned = self.owned
        if owned.is_draining:
            return False
        now = self._monotonic()
        # The first call is made in any case, or a slice that is too short would end in nothing.
        if self.outcomes and now - self.began >= self._lasts:
            return False
        self._begins.append(now)
        return owned.lock is None or owned.lock.is_held(now)


class DirectCall:
    """A call that an administrator asked for, with a message of any queue. Nothing follows."""

    __slots__ = ("_monotonic", "began", "binding", "done", "ended", "message", "outcome", "queue")

    def __init__(
        self,
        binding: Binding,
        queue: Queue,
        message: ReceivedMessage,
        monotonic: Callable[[], float],
    ) -> None:
        self.binding = binding
        self.queue = queue
        self.message = message
        self._monotonic = monotonic
        self.began = 0.0
        self.ended = 0.0
        self.outcome: Outcome | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_async(self) -> bool:
        return self.binding.is_async

    def run_in(self, context: Context) -> bool:
        context.run(self.run)
        return True

    def run(self) -> None:
        """Make the call, in this thread."""
        self.began = self._monotonic()
        self.outcome = self.binding.call(self.queue, [self.message])
        self.ended = self._monotonic()

    async def run_async(self) -> None:
        self.began = self._monotonic()
        try:
            self.outcome = await self.binding.call_async(self.queue, [self.message])
        finally:
            self.ended = self._monotonic()

    def settle(self) -> None:
        """Tell whoever waits."""
        if not self.done.done():
            self.done.set_result(None)


def _is_good(outcome: Outcome) -> bool:
    return not outcome.failed and outcome.verdict in (Verdict.SUCCESS, Verdict.COMMIT)
