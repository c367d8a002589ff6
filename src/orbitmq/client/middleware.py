"""What runs around a handler: logging, tracing, time limits, idempotence.

A middleware is one of two things:

*   an object with any of `before(delivery)`, `after(delivery)` and `on_failure(delivery, error)`:
    before the handler, after it when all messages succeeded, and when at least one comes again:
    because it failed, or because a listener rolled it back. The error is what was raised, or None
    when the handler said so by its answer;
*   a function of the delivery that returns a context manager, such as a generator function under
    `contextlib.contextmanager`. It sees what the handler raises, and swallows it if it likes: the
    messages then count as done. What a middleware raises before the handler was called can be
    swallowed, too, by one around it; nobody has seen the messages then, and they come again.

Those around an `async def` handler may have `async def` hooks and be asynchronous context managers.
They are entered in the order in which they were given and left in the opposite one. What `before`
raises counts as raised by the handler, which is then not called: a middleware may raise `Retry` or
`DeadLetter` as well. It may also keep single messages from the handler: `delivery.drop` lets them
count as done, `delivery.put_off` has them come again, `delivery.hold` keeps them here for a while
without an attempt being spent. What depends on what becomes of the messages in the end, after the
middleware around has had its say as well, is done with `delivery.at_end`.

    @contextmanager
    def traced(delivery):
        with tracer.start_as_current_span(delivery.handler):
            yield

    consumer = Consumer("billing", middleware=[traced, TimeLimit(30), Idempotence()])
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from orbitmq.client.consumer.verdict import DONE, Failure, Outcome, Retry, Verdict
from orbitmq.client.durations import Duration
from orbitmq.client.durations import seconds as as_seconds
from orbitmq.client.errors import SettingError, WrongUse

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import Ownership
    from orbitmq.client.queue import Queue
    from orbitmq.client.received import ReceivedMessage

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
        "put_off_messages",
        "put_off_until",
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
        #: The spell of owning the queue in which this is delivered: a queue that was lost and is
        #: back has another one. None: the call stands alone, as one that an administrator asks for.
        self.ownership = ownership
        #: The name of the handler.
        self.handler = handler
        self._messages = tuple(messages)
        #: Whether the handler is a coroutine function.
        self.is_async = is_async
        #: What became of the messages, once the handler has returned, and those middlewares that
        #: are left before the one who asks; until then, nothing did.
        self.outcome = Outcome(Verdict.RETRY, self._messages, _NOT_CALLED)
        #: What comes again without having reached the handler, and when.
        self.put_off_messages: list[ReceivedMessage] = []
        self.put_off_until: Retry | None = None
        #: What waits here without having reached the handler, and how long.
        self.held_messages: list[ReceivedMessage] = []
        self.hold_seconds = 0.0
        #: Where a middleware keeps something between its hooks, under itself as a key.
        self.notes: dict[object, Any] = {}
        #: What is done when all middleware is left: see `at_end`.
        self.endings: list[Callable[[Delivery], Awaitable[None] | None]] = []

    @property
    def messages(self) -> tuple[ReceivedMessage, ...]:
        """What the handler is going to be called with, or was; see `drop` and `put_off`."""
        return self._messages

    @property
    def not_called(self) -> Outcome:
        """What becomes of the messages when the handler is never called: they come again."""
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

    def put_off(self, message: ReceivedMessage, retry: Retry) -> None:
        """Keep a message from the handler; it comes again."""
        self.drop(message)
        self.put_off_messages.append(message)
        self.put_off_until = retry

    def hold(self, message: ReceivedMessage, seconds: Duration) -> None:
        """Keep a message from the handler for a while; it is offered again, here, after that.

        No attempt is spent, however often it happens. Progress of the queue waits for it (in order,
        the queue does), so this is for what passes soon. With several, the last time counts.
        """
        self.hold_seconds = as_seconds(seconds, "seconds of Delivery.hold")
        self.drop(message)
        self.held_messages.append(message)

    def at_end(self, ending: Callable[[Delivery], Awaitable[None] | None]) -> None:
        """Have something called when all middleware is left, and the outcome is the last word.

        Whatever raised. In the hooks of a middleware, those around it have yet to say theirs.
        """
        self.endings.append(ending)

    def let_go(self, message: ReceivedMessage) -> None:
        """A message that was held need not come again after all; it counts as done."""
        self.held_messages = [each for each in self.held_messages if each is not message]

    @property
    def succeeded(self) -> list[ReceivedMessage]:
        """Messages that the handler was called with and that did not fail, nor were rolled back."""
        if self.outcome.is_rolled_back:
            return []
        failed = {id(message) for message in self.outcome.failed}
        return [message for message in self.messages if id(message) not in failed]

    @property
    def done(self) -> list[ReceivedMessage]:
        """Those of the succeeded ones that are done for good.

        None of them, as long as a listener in order that commits by itself has not: a rollback
        would bring them again. A `COMMIT` is for those of the calls before it as well, which are
        not listed here.
        """
        return self.succeeded if self.outcome.commits(is_open=False) else []


Surrounding: TypeAlias = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]
#: What surrounds one delivery.
Around: TypeAlias = Callable[[Delivery], Surrounding]


def around(middleware: object, *, is_async: bool) -> Around:
    """A middleware of either kind as a function that gives a context manager for a delivery.

    Raises `SettingError` for what is no middleware, or needs an `async def` handler and has none.
    """
    hooks = [name for name in _HOOKS if callable(getattr(middleware, name, None))]
    if hooks:
        if not is_async:
            _refuse_async(middleware, [getattr(middleware, name) for name in hooks])
        kind = _AsyncHooks if is_async else _Hooks
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
    """The hooks of an object as a context manager."""

    __slots__ = ("_delivery", "_middleware")

    def __init__(self, middleware: Any, delivery: Delivery) -> None:
        self._middleware = middleware
        self._delivery = delivery

    def __enter__(self) -> None:
        self._hook("before")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None or self._delivery.outcome.has_failed:
            self._hook("on_failure", error)
        else:
            self._hook("after")

    def _hook(self, name: str, *details: object) -> None:
        hook = getattr(self._middleware, name, None)
        if hook is None:
            return
        result = hook(self._delivery, *details)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise WrongUse(f"{name} of {self._middleware!r} needs an `async def` handler")


class _AsyncHooks:
    """The hooks of an object, `def` or `async def`, as an asynchronous context manager."""

    __slots__ = ("_delivery", "_middleware")

    def __init__(self, middleware: Any, delivery: Delivery) -> None:
        self._middleware = middleware
        self._delivery = delivery

    async def __aenter__(self) -> None:
        await self._hook("before")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None or self._delivery.outcome.has_failed:
            await self._hook("on_failure", error)
        else:
            await self._hook("after")

    async def _hook(self, name: str, *details: object) -> None:
        hook = getattr(self._middleware, name, None)
        if hook is not None:
            result = hook(self._delivery, *details)
            if isinstance(result, Awaitable):
                await result


class LogDeliveries:
    """Logs every delivery: debug when it begins, info when it succeeded, warning when it failed."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._log = logger or log

    def before(self, delivery: Delivery) -> None:
        self._log.debug("%s begins", self._what(delivery), extra=self._fields(delivery))

    def after(self, delivery: Delivery) -> None:
        # What a listener has not committed can still be rolled back.
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
