"""Middleware around a handler: entered one after the other, and left in the opposite order.

The invariant: on the way out, what each middleware finds in the outcome of its delivery is what
those inside of it made of the messages. A transaction that fails to commit after the handler's
success is a failure to all around it, and an error that one of them swallows is none to the others.
When all are left, the outcome is what the consumer goes by; then those are called who asked for
that with `Delivery.at_end`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    suppress,
)
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from orbitmq.client.consumer.verdict import HELD, Failure, Outcome, outcome_of_error, reason_of
from orbitmq.client.errors import WrongUse
from orbitmq.client.middleware import Around, Delivery

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import Ownership
    from orbitmq.client.queue import Queue
    from orbitmq.client.received import ReceivedMessage

log = logging.getLogger(__name__)

Messages: TypeAlias = "Sequence[ReceivedMessage]"

#: What is raised in a coroutine and concerns more than it: its task is cancelled, the program is
#: interrupted, the loop is closed with the coroutine in the middle.
NOT_FOR_HANDLERS: Final = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)

_Result_co = TypeVar("_Result_co", covariant=True)


class Calling(Protocol[_Result_co]):
    """How something is called with messages of one queue."""

    def __call__(
        self, queue: Queue, messages: Messages, ownership: Ownership | None = None, /
    ) -> _Result_co:
        """`ownership`: the spell in which they are delivered. None: this call stands alone."""


class Callee(Protocol):
    """A handler or listener, bare."""

    name: str

    @property
    def spared(self) -> Outcome:
        """What becomes of messages that it is not called with."""

    def raising(self, queue: Queue, messages: Messages, /) -> Outcome:
        """Call a `def` handler, in this thread. Raises what it raises."""

    async def on_loop(self, queue: Queue, messages: Messages, /) -> Outcome:
        """Call an `async def` handler. Raises what it raises."""


class Surrounded:
    """A handler or listener with middleware around it."""

    __slots__ = ("_call", "_group", "_is_async", "_stages")

    def __init__(
        self, call: Callee, stages: Sequence[Around], group: str, *, is_async: bool
    ) -> None:
        self._call = call
        self._stages = stages
        self._group = group
        self._is_async = is_async

    def in_thread(
        self, queue: Queue, messages: Messages, ownership: Ownership | None = None
    ) -> Outcome:
        """Raises nothing: see `Binding`."""
        delivery = self._delivery(queue, messages, ownership)
        course = _Course(delivery, self._call.spared)
        stack = ExitStack()
        try:
            with stack:
                stack.push(course.left)
                for stage in self._stages:
                    stack.enter_context(_synchronous(stage, delivery))
                    stack.push(course.passed)
                course.enter()
                if delivery.messages:
                    course.said(self._call.raising(queue, delivery.messages))
        except BaseException as error:  # noqa: BLE001  # the delivery's outcome tells of it
            if not course.is_left:
                course.leave(stack, error)
        _end(delivery)
        return _with_put_off(delivery.outcome, delivery)

    async def on_loop(
        self, queue: Queue, messages: Messages, ownership: Ownership | None = None
    ) -> Outcome:
        """Raises what is meant for its task or its loop."""
        delivery = self._delivery(queue, messages, ownership)
        course = _Course(delivery, self._call.spared)
        try:
            async with AsyncExitStack() as stack:
                stack.push(course.passed)
                for stage in self._stages:
                    surrounding = stage(delivery)
                    if isinstance(surrounding, AbstractAsyncContextManager):
                        await stack.enter_async_context(surrounding)
                    else:
                        stack.enter_context(surrounding)
                    stack.push(course.passed)
                course.enter()
                if delivery.messages:
                    course.said(await self._call.on_loop(queue, delivery.messages))
        except NOT_FOR_HANDLERS:
            await _end_async(delivery)
            raise
        except BaseException:  # noqa: BLE001, S110  # the delivery's outcome tells of it
            pass
        await _end_async(delivery)
        return _with_put_off(delivery.outcome, delivery)

    def _delivery(self, queue: Queue, messages: Messages, ownership: Ownership | None) -> Delivery:
        return Delivery(
            self._group,
            queue,
            self._call.name,
            messages,
            is_async=self._is_async,
            ownership=ownership,
        )


class _Course:
    """Keeps the outcome of a delivery true between any two of its middlewares on the way out."""

    __slots__ = ("_delivery", "_is_entered", "_said", "_spared", "_was_raised", "is_left")

    def __init__(self, delivery: Delivery, spared: Outcome) -> None:
        """`spared`: what becomes of messages without the handler having a say in it."""
        self._delivery = delivery
        self._spared = spared
        self._is_entered = False
        self._said: Outcome | None = None
        self._was_raised = False
        #: Whether all middleware is left.
        self.is_left = False

    def enter(self) -> None:
        """All middleware is entered; what is left of the messages is the handler's."""
        self._is_entered = True
        self._delivery.outcome = self._spared

    def said(self, outcome: Outcome) -> None:
        """What the handler came to, unless it raised."""
        self._said = self._delivery.outcome = outcome

    def passed(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """On the way out, between two middlewares: with what is raised there, if anything is."""
        if error is not None:
            self._was_raised = True
            self._delivery.outcome = self._outcome_of(error)
        elif self._was_raised:
            self._was_raised = False
            self._delivery.outcome = self._outcome_without_error()

    def left(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """On the way out, around the outermost middleware."""
        self.passed(kind, error, trace)
        self.is_left = True

    def leave(self, stack: ExitStack, error: BaseException) -> None:
        """Leave the middleware that is not left yet.

        A time limit strikes in any line of Python code of its thread: in the stack's own as well,
        between the handler's return and the way out of the limit. The stack then goes no further.
        """
        with suppress(BaseException):
            stack.__exit__(type(error), error, error.__traceback__)
        if not self.is_left:
            self._delivery.outcome = self._outcome_of(error)

    def _outcome_of(self, error: BaseException) -> Outcome:
        outcome = outcome_of_error(error, self._delivery.messages)
        if self._said is None or not self._said.is_rolled_back:
            return outcome
        # The listener has taken back what it did in the calls before, whatever came after that. A
        # failure would bring this call's messages again, and the others would be committed.
        if self._said is self._delivery.outcome:
            log.warning(
                "after a rollback of %s, its middleware failed (group %s, %s): %s",
                self._delivery.handler,
                self._delivery.group,
                self._delivery.queue,
                reason_of(error),
                extra={"group": self._delivery.group, "queue": str(self._delivery.queue)},
            )
        return replace(self._said, failure=outcome.failure)

    def _outcome_without_error(self) -> Outcome:
        """A middleware swallowed it. The handler's error it may take for success; but when it is
        one from the way in, the handler has not seen the messages."""
        if self._said is not None:
            return self._said
        return self._spared if self._is_entered else self._delivery.not_called


def _end(delivery: Delivery) -> None:
    """Call those who wait for the end. Their errors are not the handler's, and change nothing."""
    for ending in reversed(delivery.endings):
        try:
            result = ending(delivery)
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    result.close()
                raise WrongUse(f"{ending!r} needs an `async def` handler")  # noqa: TRY301
        except BaseException as error:  # noqa: BLE001  # as those of handlers
            _log_ending(delivery, error)


async def _end_async(delivery: Delivery) -> None:
    for ending in reversed(delivery.endings):
        try:
            result = ending(delivery)
            if isinstance(result, Awaitable):
                await result
        except NOT_FOR_HANDLERS:
            raise
        except BaseException as error:  # noqa: BLE001  # as those of handlers
            _log_ending(delivery, error)


def _log_ending(delivery: Delivery, error: BaseException) -> None:
    log.error(
        "what middleware does at the end of a delivery failed (group %s, %s)",
        delivery.group,
        delivery.queue,
        exc_info=error,
        extra={"group": delivery.group, "queue": str(delivery.queue)},
    )


def _with_put_off(outcome: Outcome, delivery: Delivery) -> Outcome:
    """What became of all messages: those that middleware put off or holds have failed as well."""
    if delivery.put_off_until is not None:
        put_off = outcome_of_error(delivery.put_off_until, delivery.put_off_messages)
        failed = [*outcome.failed, *put_off.failed]
        outcome = replace(
            outcome,
            failed=failed,
            failure=outcome.failure or put_off.failure,
            put_off=put_off.failed,
            put_off_failure=put_off.failure,
        )
    if held := delivery.held_messages:
        failed = [*outcome.failed, *held]
        failure = outcome.failure or Failure(reason=HELD)
        outcome = replace(
            outcome, failed=failed, failure=failure, held=held, hold=delivery.hold_seconds
        )
    return outcome


def _synchronous(stage: Around, delivery: Delivery) -> AbstractContextManager[Any]:
    surrounding = stage(delivery)
    if isinstance(surrounding, AbstractContextManager):
        return surrounding
    raise WrongUse(f"{stage!r} gives no context manager that a `def` handler can have around it")
