"""Handlers and listeners, bound to a topic and ready to be called.

Every kind of handler (`def` or `async def`, for one message or a batch, with or without middleware,
a low-level listener) becomes a `Binding`, which is called with messages of one queue and returns an
`Outcome`. A binding never raises what the application raised. If a `def` handler returns an
awaitable, it is awaited on the event loop.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from orbitmq.client.consumer.parameters import Parameters, parameters_of
from orbitmq.client.consumer.publish import Publication, publication_of
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
    from orbitmq.client.serialization import Serializing


#: Takes one message or a batch, or values of them; `verdict` lists what it may return.
HandlerFunction: TypeAlias = Callable[..., object]
#: Takes a batch and a context, and returns a verdict.
ListenerFunction: TypeAlias = Callable[
    ["Sequence[ReceivedMessage]", ConsumeContext], "Verdict | Awaitable[Verdict | None] | None"
]

#: The default batch size of a batch handler: the messages of one pull.
DEFAULT_BATCH = 32
_CALLED_WITH: Final = (
    "a handler is called with a message, or with a list of them, and with the message as well if "
    "its second parameter is annotated ReceivedMessage"
)


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
    #: Where the handler's results go.
    publication: Publication | None = None


def bind_handler(
    function: HandlerFunction,
    *,
    group: str,
    batch: bool | None = None,
    batch_size: int | None = None,
    middleware: Sequence[object] = (),
    serializer: Serializing = None,
    publish: str | None = None,
    parameters: Parameters | None = None,
) -> Binding:
    """Bind a handler. Without `batch`, the annotation of its parameter decides.

    `parameters` are what `parameters_of` has said where the handler was defined.
    """
    if not callable(function):
        raise SettingError(f"a handler must be callable, got {function!r}")
    if parameters is None:
        parameters = parameters_of(function, batch=batch)
    _check_callable(function, parameters.count, _CALLED_WITH)
    is_async, is_batch = _is_async(function), parameters.is_batch
    name = _name(function)
    function = parameters.caller(function, name, serializer)
    publication = publication_of(publish, serializer, middleware, is_batch=is_batch)
    if publication is not None:
        function = publication.around(function, is_async=is_async)
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
            publication,
        )
    surrounded = Surrounded(call, stages, group, is_async=is_async)
    call_async = _to_the_end(surrounded.on_loop)
    call_thread, size = surrounded.in_thread, _checked(batch_size)
    return Binding(name, is_async, size, False, call_thread, call_async, publication)


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
