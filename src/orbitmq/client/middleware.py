"""Middleware around a handler: logging, tracing, time limits, idempotence.

A middleware is an object with any of `before(delivery)`, `after(delivery)` and
`on_failure(delivery, error)`, or a function of the delivery that returns a context manager. It is
entered in the order given and left in the opposite one. What it raises counts as raised by the
handler; what it swallows counts as done, unless the handler was not called. Around an `async def`
handler, hooks and context managers may be asynchronous. See docs/consuming.md.

    consumer = Consumer("billing", middleware=[traced, TimeLimit(30), Idempotence()])
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
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

from orbitmq.client.consumer.verdict import (
    DONE,
    HELD,
    Failure,
    Outcome,
    Verdict,
    outcome_of_error,
    reason_of,
)
from orbitmq.errors import SettingError, WrongUse
from orbitmq.parsing import Duration, seconds
from orbitmq.parsing import seconds as as_seconds

if TYPE_CHECKING:
    from orbitmq.client.consumer.window import Ownership
    from orbitmq.client.message import ReceivedMessage
    from orbitmq.client.routes import Queue


log = logging.getLogger(__name__)

_NOT_CALLED = Failure(reason="the handler was not called")
_HOOKS = ("before", "after", "on_failure")


class Delivery:
    """Messages on their way to a handler, as middleware sees them."""

    __slots__ = (
        "_messages",
        "endings",
        "group",
        "handler",
        "held_messages",
        "hold_seconds",
        "is_async",
        "notes",
        "outcome",
        "ownership",
        "queue",
    )

    def __init__(
        self,
        group: str,
        queue: Queue,
        handler: str,
        messages: Sequence[ReceivedMessage],
        *,
        is_async: bool,
        ownership: Ownership | None = None,
    ) -> None:
        self.group = group
        self.queue = queue
        #: The ownership of the queue during which this is delivered. A queue that was lost and
        #: acquired again has a new one. None for a call that an administrator requested.
        self.ownership = ownership
        #: The name of the handler.
        self.handler = handler
        self._messages = tuple(messages)
        #: Whether the handler is a coroutine function.
        self.is_async = is_async
        #: The outcome of the messages, once the handler and all inner middleware have returned.
        self.outcome = Outcome(Verdict.RETRY, self._messages, _NOT_CALLED)
        #: Messages that were held before the handler, and for how long.
        self.held_messages: list[ReceivedMessage] = []
        self.hold_seconds = 0.0
        #: Where a middleware keeps state between its hooks, with itself as the key.
        self.notes: dict[object, Any] = {}
        #: Functions for `at_end`.
        self.endings: list[Callable[[Delivery], Awaitable[None] | None]] = []

    @property
    def messages(self) -> tuple[ReceivedMessage, ...]:
        """The messages that the handler gets or got; see `drop` and `hold`."""
        return self._messages

    @property
    def not_called(self) -> Outcome:
        """The outcome when the handler is never called: the messages are delivered again."""
        if not self._messages:
            return DONE
        return Outcome(Verdict.RETRY, self._messages, _NOT_CALLED)

    @property
    def message(self) -> ReceivedMessage:
        """The first message; the only one unless the handler takes batches."""
        return self.messages[0]

    @property
    def topic(self) -> str:
        return self.messages[0].topic

    def drop(self, message: ReceivedMessage) -> None:
        """Keep a message from the handler; it counts as done."""
        self._messages = tuple(each for each in self._messages if each is not message)

    def hold(self, message: ReceivedMessage, seconds: Duration) -> None:
        """Keep a message from the handler for a while; then it is offered again, in this process.

        This uses none of its attempts. The progress of the queue waits for it (with `ordered`, the
        whole queue waits), so use it for short delays. The last time given counts.
        """
        self.hold_seconds = as_seconds(seconds, "seconds of Delivery.hold")
        self.drop(message)
        self.held_messages.append(message)

    def at_end(self, ending: Callable[[Delivery], Awaitable[None] | None]) -> None:
        """Call a function after all middleware was left, when the outcome is final.

        It is called whatever was raised. In a hook, middleware further out may still change the
        outcome.
        """
        self.endings.append(ending)

    def let_go(self, message: ReceivedMessage) -> None:
        """Do not deliver a held message again; it counts as done."""
        self.held_messages = [each for each in self.held_messages if each is not message]

    @property
    def succeeded(self) -> list[ReceivedMessage]:
        """Messages that the handler got and that neither failed nor were rolled back."""
        if self.outcome.is_rolled_back:
            return []
        failed = {id(message) for message in self.outcome.failed}
        return [message for message in self.messages if id(message) not in failed]

    @property
    def done(self) -> list[ReceivedMessage]:
        """The succeeded messages that are finally done.

        None until an ordered listener that commits by itself has committed: a rollback would
        deliver them again. Its `COMMIT` also covers messages of earlier calls, which are not listed
        here.
        """
        return self.succeeded if self.outcome.commits(is_open=False) else []


Surrounding: TypeAlias = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]
#: What surrounds one delivery.
Around: TypeAlias = Callable[[Delivery], Surrounding]


def around(middleware: object, *, is_async: bool) -> Around:
    """A middleware of either kind as a function that returns a context manager for a delivery.

    Raises `SettingError` for an object that is no middleware, or that needs an `async def`
    handler.
    """
    hooks = [name for name in _HOOKS if callable(getattr(middleware, name, None))]
    if hooks:
        if not is_async:
            _refuse_async(middleware, [getattr(middleware, name) for name in hooks])
        kind = _AsyncHooks if is_async else _SyncHooks
        return lambda delivery: kind(middleware, delivery)
    if inspect.isclass(middleware) or not callable(middleware):
        raise SettingError(
            "a middleware must have before, after or on_failure, or be a function that returns a "
            f"context manager, got {middleware!r}"
        )
    if not is_async:
        _refuse_async(middleware, [inspect.unwrap(middleware)])
    return middleware


def _refuse_async(middleware: object, functions: Sequence[Callable[..., object]]) -> None:
    for function in functions:
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise SettingError(f"{middleware!r} is asynchronous and needs an `async def` handler")


class _Hooks:
    """The hooks of an object."""

    __slots__ = ("_delivery", "_middleware")

    def __init__(self, middleware: Any, delivery: Delivery) -> None:
        self._middleware = middleware
        self._delivery = delivery

    def _call(self, name: str, *details: object) -> object:
        hook = getattr(self._middleware, name, None)
        return None if hook is None else hook(self._delivery, *details)

    def _leave(self, error: BaseException | None) -> object:
        if error is not None or self._delivery.outcome.has_failed:
            return self._call("on_failure", error)
        return self._call("after")


class _SyncHooks(_Hooks):
    """As a context manager."""

    def __enter__(self) -> None:
        _refuse_awaitable(self._call("before"), self._middleware)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        _refuse_awaitable(self._leave(error), self._middleware)


class _AsyncHooks(_Hooks):
    """`def` or `async def` hooks as an asynchronous context manager."""

    async def __aenter__(self) -> None:
        await _finished(self._call("before"))

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await _finished(self._leave(error))


def _refuse_awaitable(result: object, what: object) -> None:
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise WrongUse(f"{what!r} needs an `async def` handler")


async def _finished(result: object) -> None:
    if isinstance(result, Awaitable):
        await result


class LogDeliveries:
    """Logs every delivery: debug when it begins, info when it succeeds, warning when it fails."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._log = logger or log

    def before(self, delivery: Delivery) -> None:
        self._log.debug("%s begins", self._what(delivery), extra=self._fields(delivery))

    def after(self, delivery: Delivery) -> None:
        # Messages that a listener has not committed can still be rolled back.
        is_done = delivery.outcome.commits(is_open=False)
        became = "is done" if is_done else "succeeded and is not committed yet"
        self._log.info("%s %s", self._what(delivery), became, extra=self._fields(delivery))

    def on_failure(self, delivery: Delivery, error: BaseException | None) -> None:
        failure = delivery.outcome.failure
        why = error if error is not None else failure.reason if failure else None
        self._log.warning("%s failed: %s", self._what(delivery), why, extra=self._fields(delivery))

    @staticmethod
    def _what(delivery: Delivery) -> str:
        messages = delivery.messages
        if not messages:
            return f"{delivery.handler} (group {delivery.group}, {delivery.queue})"
        first = messages[0]
        return (
            f"{delivery.handler} (group {delivery.group}, {len(messages)} message(s) of "
            f"{delivery.queue} from offset {first.queue_offset}, message {first.msg_id}, "
            f"attempt {first.attempt})"
        )

    @staticmethod
    def _fields(delivery: Delivery) -> dict[str, object]:
        messages = delivery.messages
        fields: dict[str, object] = {
            "group": delivery.group,
            "queue": str(delivery.queue),
            "messages": len(messages),
        }
        if messages:
            fields |= {
                "topic": messages[0].topic,
                "offset": messages[0].queue_offset,
                "message_id": messages[0].msg_id,
                "attempt": messages[0].attempt,
            }
        return fields


class TimeLimitExceeded(Exception):
    """Raised in a handler that took too long.

    Not a `TimeoutError`, which is an `OSError`: it can be raised in any line, and code around a
    socket or a file would treat it as a failure of that.
    """


class TimeLimit:
    """Ends handlers that take longer than `limit` seconds; their messages are delivered again.

    An `async def` handler is cancelled. A `def` handler is interrupted once: `TimeLimitExceeded` is
    raised in its thread at the next step of Python code. A call into C that does not return, such
    as a socket without a timeout, is not interrupted; the error is raised when it returns.
    """

    def __init__(self, limit: Duration) -> None:
        self.limit = seconds(limit, "TimeLimit.limit")
        if self.limit <= 0:
            raise SettingError(f"TimeLimit.limit must be positive, got {limit!r}")
        self._watchdog = _Watchdog(self.limit)

    def __repr__(self) -> str:
        return f"TimeLimit({self.limit:g})"

    def __reduce__(self) -> tuple[type[TimeLimit], tuple[float]]:
        return TimeLimit, (self.limit,)

    def __call__(self, delivery: Delivery) -> Surrounding:
        if delivery.is_async:
            return asyncio.timeout(self.limit)
        if self._watchdog.pid != os.getpid():
            # A fork: the thread does not exist here, and the lock may be held.
            self._watchdog = _Watchdog(self.limit)
        call = _InterruptibleCall(self._watchdog)
        delivery.at_end(call.end)
        return call


class _InterruptibleCall:
    """One call of a `def` handler."""

    __slots__ = ("_watchdog", "is_interrupted", "thread")

    def __init__(self, watchdog: _Watchdog) -> None:
        self._watchdog = watchdog
        self.thread = threading.get_ident()
        self.is_interrupted = False

    def __enter__(self) -> None:
        self._watchdog.add(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._watchdog.remove(self)
            # The error may still be pending and would be raised after the handler. It is awaited
            # here: CPython 3.11 cannot withdraw it without slowing down all threads.
            while self.is_interrupted:
                _interrupt(self.thread)
        except TimeLimitExceeded:
            pass
        if self.is_interrupted:
            raise TimeLimitExceeded(
                f"the handler took longer than {self._watchdog.limit:g} s"
            ) from error

    def end(self, _: Delivery) -> None:
        """Forget a call that was entered and never left, because another error intervened."""
        self._watchdog.remove(self)


class _Watchdog:
    """A thread that interrupts calls after their time limit. It ends after an idle time."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: The deadline of each call. All have the same limit, so the first one is the next.
        self._due: dict[_InterruptibleCall, float] = {}
        self._thread: threading.Thread | None = None

    def add(self, call: _InterruptibleCall) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="orbitmq-time-limit", daemon=True)
                thread.start()
                self._thread = thread
            elif not self._due:
                self._changed.notify()
            self._due[call] = time.monotonic() + self.limit

    def remove(self, call: _InterruptibleCall) -> None:
        """After this the call is not interrupted any more."""
        if self.pid == os.getpid():
            with self._lock:
                self._due.pop(call, None)

    def _run(self) -> None:
        with self._lock:
            while self._due or self._changed.wait(_IDLE) or self._due:
                call = next(iter(self._due), None)
                if call is None:
                    continue
                left = self._due[call] - time.monotonic()
                if left > 0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                else:
                    del self._due[call]
                    call.is_interrupted = True
                    _interrupt(call.thread)
            self._thread = None


#: Seconds that the idle thread stays.
_IDLE: Final = 10.0


def _interrupt(thread: int) -> None:
    """Raise the error in a thread at its next step."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(TimeLimitExceeded)
    )


# ---- calling a handler with middleware around it
#
# The invariant: on the way out, each middleware finds in `Delivery.outcome` the result of the
# handler and of the middleware inside of it. A transaction that fails to commit after the handler's
# success is a failure for the middleware further out; an error that one middleware swallows is none
# for the others. The outcome after the outermost one is final. Then the `at_end` functions run.


Messages: TypeAlias = "Sequence[ReceivedMessage]"

#: Errors in a coroutine that concern more than the coroutine: its task is cancelled, the program is
#: interrupted, or the loop is closed while it runs.
NOT_FOR_HANDLERS: Final = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)

_Result_co = TypeVar("_Result_co", covariant=True)


class Calling(Protocol[_Result_co]):
    """A function that is called with messages of one queue."""

    def __call__(
        self, queue: Queue, messages: Messages, ownership: Ownership | None = None, /
    ) -> _Result_co:
        """`ownership`: the one of the delivery. None: a single requested call."""


class Callee(Protocol):
    """A handler or listener without middleware."""

    name: str

    @property
    def spared(self) -> Outcome:
        """The outcome of messages that it is not called with."""

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
        """Never raises: see `Binding`."""
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
        return _with_held(delivery.outcome, delivery)

    async def on_loop(
        self, queue: Queue, messages: Messages, ownership: Ownership | None = None
    ) -> Outcome:
        """Raises errors that are meant for its task or its loop."""
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
        return _with_held(delivery.outcome, delivery)

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
    """Keeps the outcome of a delivery correct between two middlewares on the way out."""

    __slots__ = ("_delivery", "_is_entered", "_said", "_spared", "_was_raised", "is_left")

    def __init__(self, delivery: Delivery, spared: Outcome) -> None:
        """`spared`: the outcome of messages that the handler did not get."""
        self._delivery = delivery
        self._spared = spared
        self._is_entered = False
        self._said: Outcome | None = None
        self._was_raised = False
        #: Whether all middleware was left.
        self.is_left = False

    def enter(self) -> None:
        """All middleware was entered; the remaining messages go to the handler."""
        self._is_entered = True
        self._delivery.outcome = self._spared

    def said(self, outcome: Outcome) -> None:
        """The handler's outcome, unless it raised."""
        self._said = self._delivery.outcome = outcome

    def passed(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """On the way out, between two middlewares; with the error raised there, if any."""
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
        """Leave the remaining middleware.

        A time limit can interrupt any line of Python code of its thread, also a line of the stack
        itself between the handler's return and the exit of the limit. The stack then stops there.
        """
        with suppress(BaseException):
            stack.__exit__(type(error), error, error.__traceback__)
        if not self.is_left:
            self._delivery.outcome = self._outcome_of(error)

    def _outcome_of(self, error: BaseException) -> Outcome:
        outcome = outcome_of_error(error, self._delivery.messages)
        if self._said is None or not self._said.is_rolled_back:
            return outcome
        # The listener has rolled back the calls before, whatever happened afterwards. As a failure
        # it would deliver only this call's messages again and commit the others.
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
        """A middleware swallowed an error. After the handler's error this may mean success; after
        an error on the way in it does not, because the handler has not got the messages."""
        if self._said is not None:
            return self._said
        return self._spared if self._is_entered else self._delivery.not_called


def _end(delivery: Delivery) -> None:
    """Call the `at_end` functions. Their errors are logged and do not change the outcome."""
    for ending in reversed(delivery.endings):
        try:
            _refuse_awaitable(ending(delivery), ending)
        except BaseException as error:  # noqa: BLE001  # as those of handlers
            _log_ending(delivery, error)


async def _end_async(delivery: Delivery) -> None:
    for ending in reversed(delivery.endings):
        try:
            await _finished(ending(delivery))
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


def _with_held(outcome: Outcome, delivery: Delivery) -> Outcome:
    """The outcome of all messages; those that middleware holds have failed."""
    held = delivery.held_messages
    if not held:
        return outcome
    return replace(
        outcome,
        failed=[*outcome.failed, *held],
        failure=outcome.failure or Failure(reason=HELD),
        held=[*outcome.held, *held],
        hold=delivery.hold_seconds,
    )


def _synchronous(stage: Around, delivery: Delivery) -> AbstractContextManager[Any]:
    surrounding = stage(delivery)
    if isinstance(surrounding, AbstractContextManager):
        return surrounding
    raise WrongUse(f"{stage!r} gives no context manager that a `def` handler can have around it")
