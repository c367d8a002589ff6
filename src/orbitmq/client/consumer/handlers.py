"""Handlers and listeners, bound to a topic and ready to be called.

Whatever the application registered - `def` or `async def`, for one message or a batch, with
middleware or without, a low-level listener - becomes a `Binding` that is called with messages of
one queue and gives an `Outcome`. A binding never raises what the application raised. A `def` that
returns what has to be awaited (a lambda, a decorator around an `async def`) is called in a thread
as any other, and what it returned is awaited on the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
)
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from orbitmq.client.checks import whole
from orbitmq.client.consumer.awaiting import awaited
from orbitmq.client.consumer.settings import LARGEST_BATCH
from orbitmq.client.consumer.verdict import (
    DONE,
    HELD,
    ConsumeContext,
    Failure,
    Outcome,
    Verdict,
    outcome_of_answer,
    outcome_of_error,
    outcome_of_verdict,
)
from orbitmq.client.errors import SettingError, WrongUse
from orbitmq.client.middleware import Around, Delivery, around

if TYPE_CHECKING:
    from orbitmq.client.queue import Queue
    from orbitmq.client.received import ReceivedMessage

Messages: TypeAlias = "Sequence[ReceivedMessage]"
#: Takes one message or a batch of them; what it may return is in `verdict`.
HandlerFunction: TypeAlias = Callable[[Any], object]
#: Takes a batch and a context, and must return a verdict.
ListenerFunction: TypeAlias = Callable[
    ["Sequence[ReceivedMessage]", ConsumeContext], "Verdict | Awaitable[Verdict | None] | None"
]

#: Messages of one call of a batch handler, when nobody says anything else: those of one pull.
DEFAULT_BATCH = 32

#: What is raised in a coroutine and concerns more than it: its task is cancelled, the program is
#: interrupted, the loop is closed with the coroutine in the middle.
NOT_FOR_HANDLERS: Final = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)


@dataclass(frozen=True, slots=True)
class Binding:
    """A handler or listener as consumption calls it."""

    name: str
    #: Called on the event loop if so, else in a worker thread.
    is_async: bool
    #: At most this many messages are given to one call.
    batch_size: int
    #: A low-level listener, whose verdict may depend on calls before it.
    is_listener: bool
    _call: Callable[[Queue, Messages], Outcome]
    _call_async: Callable[[Queue, Messages], Awaitable[Outcome]]

    def call(self, queue: Queue, messages: Messages) -> Outcome:
        """Call a `def` handler, in the thread that this is called from."""
        try:
            return self._call(queue, messages)
        except BaseException as error:  # noqa: BLE001  # even SystemExit must not end a worker
            return outcome_of_error(error, messages)

    async def call_async(self, queue: Queue, messages: Messages) -> Outcome:
        """Call an `async def` handler. Raises only what is meant for its task or its loop."""
        try:
            return await self._call_async(queue, messages)
        except NOT_FOR_HANDLERS:
            raise
        except BaseException as error:  # noqa: BLE001  # as in `call`
            return outcome_of_error(error, messages)


def bind_handler(
    function: HandlerFunction,
    *,
    group: str,
    batch: bool | None = None,
    batch_size: int | None = None,
    middleware: Sequence[object] = (),
) -> Binding:
    """A decorated handler. `batch` None: it takes a batch if its parameter is annotated so."""
    if not callable(function):
        raise SettingError(f"a handler must be callable, got {function!r}")
    _check_callable(function, 1, "a handler is called with a message, or with a list of them")
    is_batch = takes_batch(function) if batch is None else batch
    is_async = _is_async(function)
    name = _name(function)
    call = _Handler(function, name, is_batch=is_batch)
    stages = [around(each, is_async=is_async) for each in middleware]
    if batch_size is None or not is_batch:
        batch_size = DEFAULT_BATCH if is_batch else 1
    if not stages:
        return Binding(name, is_async, _checked(batch_size), False, call.in_thread, call.on_loop)
    surrounded = _Surrounded(call, stages, group, is_async=is_async)
    return Binding(
        name, is_async, _checked(batch_size), False, surrounded.in_thread, surrounded.on_loop
    )


def bind_listener(
    function: ListenerFunction,
    *,
    group: str,
    batch_size: int | None = None,
    middleware: Sequence[object] = (),
) -> Binding:
    """A low-level listener: `function(messages, context) -> Verdict`; None is a failure."""
    if not callable(function):
        raise SettingError(f"a listener must be callable, got {function!r}")
    _check_callable(function, 2, "a listener is called with a list of messages and a context")
    is_async = _is_async(function)
    name = _name(function)
    call = _Listener(function, name, group)
    stages = [around(each, is_async=is_async) for each in middleware]
    target = _Surrounded(call, stages, group, is_async=is_async) if stages else call
    size = _checked(1 if batch_size is None else batch_size)
    return Binding(name, is_async, size, True, target.in_thread, target.on_loop)


def _check_callable(function: Callable[..., object], arguments: int, allowed: str) -> None:
    """Refuse what would fail at every message, or never run. Raises `SettingError`."""
    name = _name(function)
    if any(map(_yields, _called(function))):
        raise SettingError(f"{name} has a `yield`: it is a generator, of which nothing would run")
    try:
        # What a decorator wraps may well take more than what it is called with.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # something of C that does not say
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        takes = f"takes {signature}" if signature.parameters else "takes no argument"
        raise SettingError(f"{name} {takes}; {allowed}: {error}") from None


def takes_batch(function: HandlerFunction) -> bool:
    """Whether the annotation of the first parameter is that of a list of messages."""
    target = inspect.unwrap(function)
    if not inspect.isroutine(target):
        target = type(target).__call__
    try:
        parameters = [
            each for each in inspect.signature(function).parameters.values() if each.name != "self"
        ]
    except (TypeError, ValueError):
        return False
    if not parameters:
        return False
    annotation = parameters[0].annotation
    if isinstance(annotation, str):
        try:
            annotation = typing.get_type_hints(target).get(parameters[0].name, annotation)
        except (NameError, TypeError, AttributeError):
            # A name that exists for the type checker only; the text says enough.
            return annotation.split("[")[0].rpartition(".")[2].lower() in _BATCH_NAMES
    origin = typing.get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, Sequence) and origin not in (str, bytes)


_BATCH_NAMES = frozenset({"list", "sequence", "tuple"})


class _Handler:
    """Calls a handler and takes its answer for what it means.

    A batch is given to it as a list of its own, which it may take to pieces: what became of the
    messages is worked out from ours.
    """

    __slots__ = ("_function", "_is_batch", "name")

    def __init__(self, function: HandlerFunction, name: str, *, is_batch: bool) -> None:
        self._function = function
        self._is_batch = is_batch
        self.name = name

    def in_thread(self, _: Queue, messages: Messages) -> Outcome:
        answer = self._function(list(messages) if self._is_batch else messages[0])
        if answer is None:
            return DONE
        if isinstance(answer, Awaitable):
            answer = awaited(answer)
        return outcome_of_answer(answer, messages, self.name, is_batch=self._is_batch)

    async def on_loop(self, _: Queue, messages: Messages) -> Outcome:
        answer = self._function(list(messages) if self._is_batch else messages[0])
        answer = await cast("Awaitable[object]", answer)
        if answer is None:
            return DONE
        return outcome_of_answer(answer, messages, self.name, is_batch=self._is_batch)


class _Listener:
    """Calls a low-level listener with a context, and takes both for what they mean."""

    __slots__ = ("_function", "_group", "name")

    def __init__(self, function: ListenerFunction, name: str, group: str) -> None:
        self._function = function
        self._group = group
        self.name = name

    def in_thread(self, queue: Queue, messages: Messages) -> Outcome:
        context = ConsumeContext(self._group, queue)
        verdict: object = self._function(list(messages), context)
        if isinstance(verdict, Awaitable):
            verdict = awaited(verdict)
        return outcome_of_verdict(verdict, context, messages, self.name)

    async def on_loop(self, queue: Queue, messages: Messages) -> Outcome:
        context = ConsumeContext(self._group, queue)
        verdict = await cast("Awaitable[object]", self._function(list(messages), context))
        return outcome_of_verdict(verdict, context, messages, self.name)


class _Surrounded:
    """A handler or listener with middleware around it."""

    __slots__ = ("_call", "_group", "_is_async", "_stages")

    def __init__(
        self,
        call: _Handler | _Listener,
        stages: Sequence[Around],
        group: str,
        *,
        is_async: bool,
    ) -> None:
        self._call = call
        self._stages = stages
        self._group = group
        self._is_async = is_async

    def in_thread(self, queue: Queue, messages: Messages) -> Outcome:
        delivery = self._delivery(queue, messages)
        is_entered = is_complete = False
        try:
            with ExitStack() as stack:
                for stage in self._stages:
                    stack.enter_context(_synchronous(stage, delivery))
                is_entered = True
                delivery.outcome = DONE
                if delivery.messages:
                    delivery.outcome = self._guarded(delivery, queue)
                is_complete = True
        except BaseException as error:  # noqa: BLE001  # as in `Binding.call`
            return _with_put_off(outcome_of_error(error, delivery.messages), delivery)
        return _left(delivery, is_entered=is_entered, is_complete=is_complete)

    async def on_loop(self, queue: Queue, messages: Messages) -> Outcome:
        delivery = self._delivery(queue, messages)
        is_entered = is_complete = False
        try:
            async with AsyncExitStack() as stack:
                for stage in self._stages:
                    surrounding = stage(delivery)
                    if isinstance(surrounding, AbstractAsyncContextManager):
                        await stack.enter_async_context(surrounding)
                    else:
                        stack.enter_context(surrounding)
                is_entered = True
                delivery.outcome = DONE
                if delivery.messages:
                    delivery.outcome = await self._guarded_async(delivery, queue)
                is_complete = True
        except NOT_FOR_HANDLERS:
            raise
        except BaseException as error:  # noqa: BLE001  # as in `Binding.call_async`
            return _with_put_off(outcome_of_error(error, delivery.messages), delivery)
        return _left(delivery, is_entered=is_entered, is_complete=is_complete)

    def _guarded(self, delivery: Delivery, queue: Queue) -> Outcome:
        """The call itself; middleware sees on its way out what an error made of the messages."""
        try:
            return self._call.in_thread(queue, delivery.messages)
        except BaseException as error:
            delivery.outcome = outcome_of_error(error, delivery.messages)
            raise

    async def _guarded_async(self, delivery: Delivery, queue: Queue) -> Outcome:
        try:
            return await self._call.on_loop(queue, delivery.messages)
        except BaseException as error:
            delivery.outcome = outcome_of_error(error, delivery.messages)
            raise

    def _delivery(self, queue: Queue, messages: Messages) -> Delivery:
        return Delivery(self._group, queue, self._call.name, messages, is_async=self._is_async)


def _left(delivery: Delivery, *, is_entered: bool, is_complete: bool) -> Outcome:
    """What became of the messages when all middleware was left without an error."""
    if is_complete:
        return _with_put_off(delivery.outcome, delivery)
    # A middleware swallowed an error. The handler's it may take for success; but when it is one
    # from the way in, the handler has not seen the messages.
    return _with_put_off(DONE if is_entered else delivery.not_called, delivery)


def _with_put_off(outcome: Outcome, delivery: Delivery) -> Outcome:
    """What became of all messages: those that middleware put off or holds have failed as well."""
    if delivery.put_off_until is not None:
        put_off = outcome_of_error(delivery.put_off_until, delivery.put_off_messages)
        failed = [*outcome.failed, *put_off.failed]
        outcome = replace(outcome, failed=failed, failure=outcome.failure or put_off.failure)
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


def _is_async(function: Callable[..., object]) -> bool:
    return any(map(inspect.iscoroutinefunction, _called(function)))


def _yields(function: object) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _called(function: object) -> tuple[object, object]:
    """What runs when it is called: itself, or if it is an object, the `__call__` of its kind."""
    while isinstance(function, functools.partial):
        function = function.func
    return function, type(function).__call__


def _name(function: object) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _checked(batch_size: int) -> int:
    return whole(batch_size, "batch_size", most=LARGEST_BATCH)
