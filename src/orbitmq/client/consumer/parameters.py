"""What a handler is called with: the annotations of its parameters decide.

The first parameter takes the message, its body as bytes or text, or a value that is decoded from
it; a list of these makes a handler of batches. A second one annotated `ReceivedMessage` takes the
message as well. A body that cannot be decoded is a dead letter immediately: no retry would help.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

from orbitmq.client.consumer.verdict import BodyMismatch, DeadLetter, Retry
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.middleware import TimeLimitExceeded
from orbitmq.client.serialization import (
    Decode,
    Serializing,
    after_pickling,
    format_of,
    mismatch,
    shown,
)
from orbitmq.errors import SettingError

#: What decoding may raise that says nothing about the body.
_NOT_OF_THE_BODY: Final = (OSError, MemoryError, Retry, DeadLetter, TimeLimitExceeded)
_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
#: Names that may exist for the type checker only: their text is enough.
_MESSAGE_NAMES: Final = frozenset({ReceivedMessage.__name__, "Any", "object"})
_BATCH_NAMES: Final = frozenset({"list", "sequence", "tuple"})


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a handler takes. Can be sent to another process, where names may be unknown."""

    #: The type of a value; `ReceivedMessage` for the message itself.
    kind: Any = ReceivedMessage
    is_batch: bool = False
    #: Whether a second parameter takes the message, or the messages.
    with_message: bool = False

    def __reduce__(self) -> tuple[Callable[..., Parameters], tuple[object, ...]]:
        return _unpickled, (self.kind, self.is_batch, self.with_message)

    @property
    def count(self) -> int:
        """How many arguments the handler gets."""
        return 1 + self.with_message

    def caller(
        self, function: Callable[..., Any], name: str, serializer: Serializing
    ) -> Callable[[Any], Any]:
        """A function of a message, or of a list of them, that calls the handler.

        Raises `SettingError` for a type that nothing can be decoded to.
        """
        if self.kind is ReceivedMessage and not self.with_message:
            return function
        decoded = self._decoded(name, serializer)
        if self.is_batch:
            return self._batch_caller(function, decoded)
        if self.with_message:
            return lambda message: function(decoded(message), message)
        return lambda message: function(decoded(message))

    def _batch_caller(
        self, function: Callable[..., Any], decoded: Callable[[ReceivedMessage], Any]
    ) -> Callable[[list[ReceivedMessage]], Any]:
        def call(messages: list[ReceivedMessage]) -> Any:
            values, mismatched = [], list[ReceivedMessage]()
            reason: DeadLetter | None = None
            for message in messages:
                try:
                    values.append(decoded(message))
                except BodyMismatch as error:
                    reason = reason or error
                    mismatched.append(message)
            if reason is not None:
                raise BodyMismatch(reason.reason, mismatched) from reason
            return function(values, messages) if self.with_message else function(values)

        return call

    def _decoded(self, name: str, serializer: Serializing) -> Callable[[ReceivedMessage], Any]:
        """The function that makes the value of a message. Raises `BodyMismatch`."""
        if self.kind is ReceivedMessage:
            return lambda message: message
        try:
            decode = _decoder(self.kind, serializer)
        except SettingError as error:
            raise SettingError(f"{name} takes {shown(self.kind)}: {error}") from error

        def value_of(message: ReceivedMessage) -> Any:
            body = message.body
            try:
                return decode(body)
            except _NOT_OF_THE_BODY:
                raise
            except Exception as error:
                reason = f"{name} takes {shown(self.kind)}: {mismatch(error)}"
                raise BodyMismatch(reason, [message]) from error

        return value_of


def parameters_of(function: Callable[..., Any], *, batch: bool | None = None) -> Parameters:
    """What the annotations of a handler say. Raises `SettingError` for one that means nothing.

    Without `batch`, a handler whose first parameter is a list of something takes batches, unless
    its second one takes a single message.
    """
    target = _target(function)
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function in C
        return Parameters(is_batch=bool(batch))
    named = [each for each in found if each.kind in _POSITIONAL and each.name != "self"]
    first = _meant(_resolved(target, named[0])) if named else ReceivedMessage
    second = _second(target, named[1]) if len(named) > 1 else None
    with_message = _is_message(second) or _is_batch_of_messages(second)
    is_batch = batch
    if is_batch is None:
        is_batch = _is_batch_of_messages(second) if with_message else _is_batch(first)
    if first in (Message, list[Message]):
        raise SettingError(
            f"{_name(target)} takes Message, which is for sending; annotate "
            f"{named[0].name} with ReceivedMessage"
        )
    if not is_batch:
        return Parameters(first, with_message=with_message)
    if _is_batch(first):
        return Parameters(_meant(get_args(first)[0]), is_batch=True, with_message=with_message)
    if first in (ReceivedMessage, list, Sequence):
        return Parameters(is_batch=True, with_message=with_message)
    raise SettingError(
        f"{_name(target)} takes batches, and its parameter {named[0].name} is annotated "
        f"{shown(first)}; write list[{shown(first)}]"
    )


def _unpickled(kind: Any, *rest: bool) -> Parameters:
    if kind is not ReceivedMessage:
        after_pickling(kind)
    return Parameters(kind, *rest)


def _decoder(kind: Any, serializer: Serializing) -> Decode:
    if kind is bytes:
        return bytes
    if kind is str:
        return bytes.decode
    return format_of(serializer).decoder(kind)


def _target(function: Any) -> Any:
    """The function whose annotations count."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif (inner := inspect.unwrap(function)) is not function:
            function = inner
        elif inspect.isroutine(function) or inspect.isclass(function):
            return function
        else:
            return type(function).__call__


def _resolved(target: Any, parameter: inspect.Parameter) -> Any:
    """An annotation as a type, `ReceivedMessage` if there is none."""
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return ReceivedMessage
    # Of this parameter alone: other annotations may have names that do not exist here.
    only = types.SimpleNamespace(__annotations__={parameter.name: annotation})
    try:
        known = inspect.getclosurevars(target).nonlocals
    except (TypeError, ValueError):
        known = {}
    try:
        found = typing.get_type_hints(
            only, getattr(target, "__globals__", {}), dict(known), include_extras=True
        )
    except Exception as error:  # whatever an odd annotation causes
        if (kind := _by_text(annotation)) is not None:
            return kind
        text = annotation if isinstance(annotation, str) else shown(annotation)
        raise SettingError(
            f"{_name(target)} annotates its parameter {parameter.name} with {text}, which cannot "
            f"be resolved: {error}; define or import the name at the top of the handler's module, "
            "also when the program runs"
        ) from error
    return found[parameter.name]


def _second(target: Any, parameter: inspect.Parameter) -> Any:
    """The type of a second parameter; None if there is none that could be resolved."""
    if parameter.annotation is inspect.Parameter.empty:
        return None
    try:
        return _resolved(target, parameter)
    except SettingError:
        return None


def _by_text(annotation: object) -> Any:
    """What an annotation with unknown names means, if it is about whole messages."""
    text = annotation if isinstance(annotation, str) else str(annotation)
    outer, _, inner = text.strip().strip("\"'").partition("[")
    outer, inner = (each.strip(" ]\"'").rpartition(".")[2] for each in (outer, inner.split(",")[0]))
    if not inner and outer in _MESSAGE_NAMES:
        return ReceivedMessage
    if inner in _MESSAGE_NAMES and outer.lower() in _BATCH_NAMES:
        return list[ReceivedMessage]
    return None


def _meant(annotation: Any) -> Any:
    """A type, or `ReceivedMessage` for everything that a message is an instance of."""
    if annotation is Any or isinstance(annotation, TypeVar) or _is_message(annotation):
        return ReceivedMessage
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if isinstance(plain, type) and get_origin(plain) is None:
        with suppress(TypeError):  # what cannot be asked, as a TypedDict
            return ReceivedMessage if issubclass(ReceivedMessage, plain) else annotation
    return annotation


def _is_message(annotation: Any) -> bool:
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return ReceivedMessage in get_args(annotation)
    return annotation is ReceivedMessage


def _is_batch(annotation: Any) -> bool:
    """Whether a type is a list of something."""
    origin, elements = get_origin(annotation), get_args(annotation)
    if not isinstance(origin, type) or not issubclass(origin, Sequence) or not elements:
        return False
    return origin is not tuple or elements[-1] is Ellipsis


def _is_batch_of_messages(annotation: Any) -> bool:
    return _is_batch(annotation) and _is_message(get_args(annotation)[0])


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
