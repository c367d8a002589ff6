"""Every error can travel between processes: Spark's executors and pools of workers send them."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import orbitmq
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused, InvalidFilter, OrbitError, SettingError
from orbitmq.remoting.settings import Address

ROOMS = (
    *("wire", "message", "filter", "store", "remoting", "broker", "namesrv", "testing"),
    *("cluster", "errors"),
)

#: A value for every kind of parameter that constructors of errors have, by its annotation.
VALUES: dict[str, Any] = {
    "str": "text",
    "str | None": None,
    "int": 7,
    "int | None": 7,
    "float": 1.5,
    "bool": True,
    "Path": Path("somewhere"),
    "Address": Address("127.0.0.1", 10911),
    "OSError": OSError(5, "broken"),
    "BaseException": OSError(5, "broken"),
    "Iterable[str]": ("one", "two"),
    "Sequence[str]": ("one", "two"),
    "ResponseCode": 1,
    "ForbiddenType": 1,
    "BaseException | None": OSError(5, "broken"),
    "BrokerRefused": BrokerRefused(1, "no", "broker:1", 10),
    "Iterable[object]": ("one", "two"),
    "Iterable[tuple[str, str]]": (("one", "two"),),
    "Queue": Queue("orders", "broker-a", 0),
    "Sequence[SendResult | None]": (None,),
    "object": "text",
}


def kinds() -> Iterator[type[OrbitError]]:
    """All errors of these rooms."""
    found: dict[str, type[OrbitError]] = {}
    for module in pkgutil.walk_packages(orbitmq.__path__, "orbitmq."):
        if module.name.split(".")[1] not in ROOMS or module.name.endswith("__main__"):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if not isinstance(value, type) or not issubclass(value, OrbitError):
                continue
            if value.__module__.split(".")[1] in ROOMS:
                found[f"{value.__module__}.{value.__qualname__}"] = value
    yield from (found[name] for name in sorted(found))


def made(kind: type[OrbitError]) -> OrbitError:
    """An error of a kind, with a value for each of its parameters."""
    if kind.__init__ is Exception.__init__:
        return kind("text")
    given: dict[str, Any] = {}
    for parameter in list(inspect.signature(kind.__init__).parameters.values())[1:]:
        # A place in the text of the expression.
        is_place = parameter.name == "position"
        given[parameter.name] = 2 if is_place else VALUES[str(parameter.annotation)]
    return kind(**given)


ALL = tuple(kinds())


def test_there_are_errors_to_look_at():
    assert len(ALL) > 40
    assert {InvalidFilter, SettingError} <= set(ALL)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_an_error_comes_back_as_it_was(kind, protocol):
    error = made(kind)

    back = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301  # our own

    assert type(back) is kind
    assert str(back) == str(error)
    assert back.args == error.args
    assert facts(back) == facts(error)
    assert str(copy.copy(error)) == str(error)


def facts(error: OrbitError) -> dict[str, str]:
    """What the error says besides its text."""
    return {name: repr(value) for name, value in vars(error).items()}
