"""The shape of a family of handlers, and how their refusals become answers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Protocol

from orbitmq.broker.errors import Refused
from orbitmq.broker.parts import Parts
from orbitmq.remoting import errors as remoting
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler, Result
from orbitmq.remoting.owner import Answer
from orbitmq.wire.command import Command


class Family(Protocol):
    """Requests that belong together.

    Made once, with complete parts; it may add transformations and background jobs of its own then.
    """

    def handlers(self) -> Mapping[int, Handler]:
        """The method for each request code."""


class MakeFamily(Protocol):
    """A family's class."""

    def __call__(self, parts: Parts) -> Family: ...


def refusing(handler: Handler) -> Handler:
    """A handler whose `broker.errors.Refused` is answered with its code.

    The broker's tables know nothing of connections, so they raise an error of their own.
    """
    if inspect.iscoroutinefunction(handler):
        return _refusing_later(handler)

    @functools.wraps(handler)
    def handle(
        connection: Connection, request: Command
    ) -> Result | Coroutine[object, object, Answer | None]:
        try:
            return handler(connection, request)
        except Refused as refused:
            raise remoting.Refused(refused.code, str(refused)) from refused

    return handle


def _refusing_later(
    handler: Callable[[Connection, Command], Coroutine[object, object, Answer | None]],
) -> Handler:
    @functools.wraps(handler)
    async def handle(connection: Connection, request: Command) -> Answer | None:
        try:
            return await handler(connection, request)
        except Refused as refused:
            raise remoting.Refused(refused.code, str(refused)) from refused

    return handle
