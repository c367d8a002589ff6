"""Keyword arguments that a public function does not take: the error names the one that was meant.

A call with correct names pays nothing, or one comparison: `send` and `Message` look at names only
when one was left over, other functions of `explained` classes when Python has refused a call.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, TypeVar, cast

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

#: Names that other clients use, and ours: the first one that the function takes is meant.
_MEANT: Final[dict[str, tuple[str, ...]]] = {
    "acks": ("wait_stored",),
    "auto_offset_reset": ("consume_from",),
    "bootstrap_server": ("name_server", "name_servers"),
    "bootstrap_servers": ("name_server", "name_servers"),
    "broker": ("name_server", "name_servers"),
    "broker_list": ("name_server", "name_servers"),
    "brokers": ("name_server", "name_servers"),
    "compression_type": ("compression", "sending"),
    "concurrency": ("workers",),
    "consumer_group": ("group",),
    "consumer_property": ("property",),
    "data": ("body",),
    "filter": ("tags",),
    "from_beginning": ("from",),
    "group_id": ("group",),
    "header": ("properties",),
    "headers": ("properties",),
    "idempotency_key": ("dedup_id",),
    "host": ("name_server", "name_servers"),
    "linger_ms": ("linger", "sending"),
    "max_messages": ("limit",),
    "key": ("keys", "ordering_key"),
    "max_poll_records": ("max_messages",),
    "name_servers": ("name_server",),
    "name_server": ("name_servers",),
    "namesrv": ("name_server", "name_servers"),
    "namesrv_addr": ("name_server", "name_servers"),
    "num_partitions": ("queues",),
    "offset_reset": ("consume_from",),
    "order_key": ("ordering_key",),
    "partition": ("queue", "ordering_key"),
    "partition_key": ("ordering_key",),
    "partitions": ("queues",),
    "payload": ("body",),
    "producer_group": ("group",),
    "reset_offsets": ("to",),
    "retries": ("max_retries", "sending"),
    "server": ("name_server", "name_servers"),
    "servers": ("name_server", "name_servers"),
    "start": ("consume_from",),
    "start_from": ("consume_from",),
    "tag": ("tags",),
    "threads": ("workers",),
    "timeout_ms": ("timeout",),
    "value": ("body",),
    "value_deserializer": ("serializer",),
    "value_serializer": ("serializer",),
}


#: What other clients have to be told, and ours do always.
_NEEDLESS: Final = {
    "acks": "a send returns when the broker has stored the message; send_one_way does not wait",
    "enable_auto_commit": "a message is committed when its handler has returned",
    "enable_idempotence": "a send that is tried again keeps its id, by which copies are known",
}
#: Deprecated names, which no hint mentions.
_FORMER: Final = frozenset({"allocation", "rebalancing", "key", "sharding_key"})
_unpacked = re.compile(r"Unpack\[(\w+)\]").fullmatch


def check_known(given: Iterable[str], allowed: Sequence[str], called: str | None = None) -> None:
    """Raise `TypeError` for the first name that is not allowed, with the one that was meant.

    `called` is the function; by default the one of this package that the application called.
    """
    for name in given:
        if name not in allowed:
            function = called or _caller().name
            raise TypeError(
                f"{function}() has no argument {name!r}{_hint(name, allowed)}"
            ) from None


def _hint(name: str, allowed: Sequence[str]) -> str:
    if found := meant(name, allowed):
        return f"; did you mean {found!r}?"
    if name in _NEEDLESS:
        return f": {_NEEDLESS[name]}"
    return f"; it takes {', '.join(allowed)}"


def meant(name: str, allowed: Collection[str]) -> str | None:
    """The allowed name that was meant by a beginning, by a similar or by another tool's name."""
    given = name.lower()
    if len(begun := [each for each in allowed if each.startswith(given)]) == 1:
        return begun[0]
    for close in difflib.get_close_matches(given, [*allowed, *_MEANT], n=3):
        for found in (close, *_MEANT.get(close, ())):
            if found in allowed:
                return found
    return begun[0] if begun else None


def explained(*, besides: Collection[str] = ()) -> Callable[[C], C]:
    """Decorates a class: its public methods explain keyword arguments that they do not take.

    `besides` are hot methods that call `check_known` themselves.
    """

    def explain(kind: C) -> C:
        for name, function in tuple(vars(kind).items()):
            if not isinstance(function, types.FunctionType) or name in besides:
                continue
            if name == "__init__" or (not name.startswith("_") and _takes_names(function.__code__)):
                public = f"{kind.__qualname__}.{name}".removesuffix(".__init__")
                setattr(kind, name, _explaining(function, public))
        return kind

    return explain


def explained_function(function: F) -> F:
    """Decorates a function: it explains keyword arguments that it does not take."""
    return cast("F", _explaining(function, function.__name__))


def _takes_names(code: types.CodeType) -> bool:
    takes_any = code.co_flags & inspect.CO_VARKEYWORDS
    return bool(code.co_kwonlyargcount or code.co_argcount > 1 or takes_any)


def _explaining(function: Callable[..., Any], called: str) -> Callable[..., Any]:
    """The function; a call that fails because of a name says which one was meant."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError:
            check_known(options, allowed_names(function), called)
            raise

    @functools.wraps(function)
    async def call_async(*args: Any, **options: Any) -> Any:
        try:
            return await function(*args, **options)
        except TypeError:
            check_known(options, allowed_names(function), called)
            raise

    return call_async if inspect.iscoroutinefunction(function) else call


def allowed_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of arguments that a method takes, with those of its `**options: Unpack[...]`."""
    found: list[str] = []
    for each in list(inspect.signature(function).parameters.values())[1:]:
        if each.kind is not inspect.Parameter.VAR_KEYWORD:
            found.append(each.name)
            continue
        if options := _unpacked(str(each.annotation)):
            found += inspect.unwrap(function).__globals__[options[1]].__annotations__
    return tuple(name for name in found if name not in _FORMER)


def warn_deprecated(former: str, replacement: str) -> None:
    """Warn the application about a former name. docs/deprecations.md lists them."""
    warnings.warn(
        f"{former} is deprecated; use {replacement}",
        DeprecationWarning,
        stacklevel=_caller().depth,
    )


class _Caller(typing.NamedTuple):
    name: str  #: of the outermost function of this package
    depth: int  #: of the application's frame, as `warnings.warn` counts


def _caller() -> _Caller:
    """The function of this package that the application called."""
    name, depth = "orbitmq", 1
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("orbitmq."):
        if frame.f_globals["__name__"] != __name__:
            name = frame.f_code.co_qualname
        frame, depth = frame.f_back, depth + 1
    return _Caller(name.removesuffix(".__init__"), depth)
