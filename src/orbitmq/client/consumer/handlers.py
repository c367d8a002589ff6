"""Handlers and listeners, bound to a topic and ready to be called.

Every kind of handler (`def` or `async def`, for one message or a batch, with or without middleware,
a low-level listener) becomes a `Binding`, which is called with messages of one queue and returns an
`Outcome`. A binding never raises what the application raised. If a `def` handler returns an
awaitable, it is awaited on the event loop.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from orbitmq.client.consumer.settings import LARGEST_BATCH
from orbitmq.client.consumer.verdict import (
    DONE,
    SPARED,
    ConsumeContext,
    Outcome,
    Verdict,
    outcome_of_answer,
    outcome_of_error,
    outcome_of_verdict,
)
from orbitmq.client.consumer.workers import awaited
from orbitmq.client.middleware import NOT_FOR_HANDLERS, Calling, Messages, Surrounded, around
from orbitmq.errors import SettingError
from orbitmq.parsing import whole

if TYPE_CHECKING:
    from orbitmq.client.consumer.window import Ownership
    from orbitmq.client.message import ReceivedMessage
    from orbitmq.client.routes import Queue


#: Takes one message or a batch; `verdict` lists what it may return.
HandlerFunction: TypeAlias = Callable[[Any], object]
#: Takes a batch and a context, and returns a verdict.
ListenerFunction: TypeAlias = Callable[
    ["Sequence[ReceivedMessage]", ConsumeContext], "Verdict | Awaitable[Verdict | None] | None"
]

#: The default batch size of a batch handler: the messages of one pull.
DEFAULT_BATCH = 32


@dataclass(frozen=True, slots=True)
class Binding:
    """A handler or listener as consumption calls it."""

    name: str
    #: Called on the event loop; otherwise in a worker thread.
    is_async: bool
    #: The largest number of messages of a call.
    batch_size: int
    #: A low-level listener, whose verdict may concern earlier calls.
    is_listener: bool
    #: Calls a `def` handler in the current thread. Never raises: even SystemExit must not end a
    #: worker. An attribute and not a method, as every message passes here.
    call: Calling[Outcome]
    #: Calls an `async def` handler. Raises only what is meant for its task or its loop.
    call_async: Calling[Coroutine[Any, Any, Outcome]]


def bind_handler(
    function: HandlerFunction,
    *,
    group: str,
    batch: bool | None = None,
    batch_size: int | None = None,
    middleware: Sequence[object] = (),
) -> Binding:
    """Bind a handler. Without `batch`, the annotation of its parameter decides."""
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
        return Binding(
            name,
            is_async,
            _checked(batch_size),
            False,
            call.in_thread if is_batch else _with_one(call, function),
            call.on_loop_to_the_end,
        )
    surrounded = Surrounded(call, stages, group, is_async=is_async)
    call_async = _to_the_end(surrounded.on_loop)
    return Binding(name, is_async, _checked(batch_size), False, surrounded.in_thread, call_async)


def bind_listener(
    function: ListenerFunction,
    *,
    group: str,
    batch_size: int | None = None,
    middleware: Sequence[object] = (),
    in_order: bool = True,
) -> Binding:
    """Bind a low-level listener: `function(messages, context) -> Verdict`; None is a failure.

    With `in_order` it may commit by itself. Otherwise verdicts about that are refused here, so that
    middleware sees the real outcome.
    """
    if not callable(function):
        raise SettingError(f"a listener must be callable, got {function!r}")
    _check_callable(function, 2, "a listener is called with a list of messages and a context")
    is_async = _is_async(function)
    name = _name(function)
    call = _Listener(function, name, group, in_order=in_order)
    stages = [around(each, is_async=is_async) for each in middleware]
    target = Surrounded(call, stages, group, is_async=is_async) if stages else call
    size = _checked(1 if batch_size is None else batch_size)
    return Binding(name, is_async, size, True, target.in_thread, _to_the_end(target.on_loop))


def _check_callable(function: Callable[..., object], arguments: int, allowed: str) -> None:
    """Raise `SettingError` for a function that would fail with every message, or never run."""
    name = _name(function)
    if any(map(_yields, _called(function))):
        raise SettingError(f"{name} has a `yield`: it is a generator, of which nothing would run")
    try:
        # A wrapped function may take more than its decorator passes.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # a function in C without a signature
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        takes = f"takes {signature}" if signature.parameters else "takes no argument"
        raise SettingError(f"{name} {takes}; {allowed}: {error}") from None


def takes_batch(function: HandlerFunction) -> bool:
    """Whether the first parameter is annotated as a list of messages."""
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
            # A name that exists for the type checker only; its text is enough.
            return annotation.split("[")[0].rpartition(".")[2].lower() in _BATCH_NAMES
    origin = typing.get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, Sequence) and origin not in (str, bytes)


_BATCH_NAMES = frozenset({"list", "sequence", "tuple"})


class _Handler:
    """Calls a handler and converts its answer.

    The handler gets a list of its own, which it may change.
    """

    __slots__ = ("_function", "_is_batch", "name")

    #: The outcome of messages that middleware keeps from it.
    spared = DONE

    def __init__(self, function: HandlerFunction, name: str, *, is_batch: bool) -> None:
        self._function = function
        self._is_batch = is_batch
        self.name = name

    def in_thread(
        self, _: Queue, messages: Messages, ownership: Ownership | None = None
    ) -> Outcome:
        """Call with a batch; see `_with_one` for single messages."""
        try:
            answer = self._function(list(messages))
            return DONE if answer is None else self.meaning(answer, messages)
        except BaseException as error:  # noqa: BLE001  # see `Binding`
            return outcome_of_error(error, messages)

    def raising(self, _: Queue, messages: Messages) -> Outcome:
        """Call for middleware, which sees what the handler raises."""
        answer = self._function(list(messages) if self._is_batch else messages[0])
        return DONE if answer is None else self.meaning(answer, messages)

    def meaning(self, answer: object, messages: Messages) -> Outcome:
        """Convert an answer; in a thread."""
        if isinstance(answer, Awaitable):
            answer = awaited(answer)
        return outcome_of_answer(answer, messages, self.name, is_batch=self._is_batch)

    async def on_loop(
        self, _: Queue, messages: Messages, ownership: Ownership | None = None
    ) -> Outcome:
        answer: Any = self._function(list(messages) if self._is_batch else messages[0])
        answer = await answer
        if answer is None:
            return DONE
        return outcome_of_answer(answer, messages, self.name, is_batch=self._is_batch)

    async def on_loop_to_the_end(
        self, _: Queue, messages: Messages, ownership: Ownership | None = None
    ) -> Outcome:
        """The same as `_to_the_end`, without one coroutine around another."""
        try:
            answer: Any = self._function(list(messages) if self._is_batch else messages[0])
            answer = await answer
            if answer is None:
                return DONE
            return outcome_of_answer(answer, messages, self.name, is_batch=self._is_batch)
        except NOT_FOR_HANDLERS:
            raise
        except BaseException as error:  # noqa: BLE001  # as those in threads
            return outcome_of_error(error, messages)


def _with_one(handler: _Handler, function: HandlerFunction) -> Calling[Outcome]:
    """Call the handler with one message: the most frequent and cheapest way."""
    meaning = handler.meaning

    def call(_: Queue, messages: Messages, ownership: Ownership | None = None) -> Outcome:
        try:
            answer = function(messages[0])
            return DONE if answer is None else meaning(answer, messages)
        except BaseException as error:  # noqa: BLE001  # see `Binding`
            return outcome_of_error(error, messages)

    return call


class _Listener:
    """Calls a low-level listener with a context, and converts both."""

    __slots__ = ("_function", "_group", "_in_order", "name", "spared")

    def __init__(
        self, function: ListenerFunction, name: str, group: str, *, in_order: bool
    ) -> None:
        self._function = function
        self._group = group
        self._in_order = in_order
        self.name = name
        #: As in `_Handler`.
        self.spared = SPARED if in_order else DONE

    def in_thread(
        self, queue: Queue, messages: Messages, ownership: Ownership | None = None
    ) -> Outcome:
        try:
            return self.raising(queue, messages)
        except BaseException as error:  # noqa: BLE001  # see `Binding`
            return outcome_of_error(error, messages)

    def raising(self, queue: Queue, messages: Messages) -> Outcome:
        """Call for middleware, which sees what the listener raises."""
        context = ConsumeContext(self._group, queue)
        verdict: object = self._function(list(messages), context)
        if isinstance(verdict, Awaitable):
            verdict = awaited(verdict)
        return self._meaning(verdict, context, messages)

    async def on_loop(
        self, queue: Queue, messages: Messages, ownership: Ownership | None = None
    ) -> Outcome:
        context = ConsumeContext(self._group, queue)
        verdict = await cast("Awaitable[object]", self._function(list(messages), context))
        return self._meaning(verdict, context, messages)

    def _meaning(self, verdict: object, context: ConsumeContext, messages: Messages) -> Outcome:
        return outcome_of_verdict(verdict, context, messages, self.name, in_order=self._in_order)


def _to_the_end(calling: Calling[Awaitable[Outcome]]) -> Calling[Coroutine[Any, Any, Outcome]]:
    """Convert the errors of a call to its outcome, except those meant for its task or loop."""

    async def call(queue: Queue, messages: Messages, ownership: Ownership | None = None) -> Outcome:
        try:
            return await calling(queue, messages, ownership)
        except NOT_FOR_HANDLERS:
            raise
        except BaseException as error:  # noqa: BLE001  # as those in threads
            return outcome_of_error(error, messages)

    return call


def _is_async(function: Callable[..., object]) -> bool:
    return any(map(inspect.iscoroutinefunction, _called(function)))


def _yields(function: object) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _called(function: object) -> tuple[object, object]:
    """The function that a call runs: itself, or the `__call__` of an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return function, type(function).__call__


def _name(function: object) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _checked(batch_size: int) -> int:
    return whole(batch_size, "batch_size", most=LARGEST_BATCH)
