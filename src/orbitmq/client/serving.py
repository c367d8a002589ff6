"""Requests of brokers, handed to the member of a client that they are for."""

from __future__ import annotations

import enum
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final, TypeAlias

from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher, Result
from orbitmq.remoting.errors import Refused
from orbitmq.remoting.owner import Answer
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command


class NotMine(enum.Enum):
    """The kind of `NOT_MINE`."""

    NOT_MINE = enum.auto()


#: What a handler returns for a request that is for another member.
NOT_MINE: Final = NotMine.NOT_MINE

_Handled: TypeAlias = Result | Coroutine[object, object, Answer | None]
MemberHandler: TypeAlias = Callable[[Connection, Command], _Handled | NotMine]


class Serving:
    """The handlers of a client's members, by request code."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._handlers: dict[int, list[MemberHandler]] = {}

    def serve(self, code: int, handler: MemberHandler) -> Callable[[], None]:
        """Ask `handler` too; returns how to end that."""
        if code not in self._handlers:
            self._handlers[code] = []
            self.dispatcher.serve(code, partial(self._handle, int(code)))
        self._handlers[code].append(handler)
        return lambda: self._handlers[code].remove(handler)

    def _handle(self, code: int, connection: Connection, request: Command) -> _Handled:
        for handler in tuple(self._handlers[code]):
            result = handler(connection, request)
            if not isinstance(result, NotMine):
                return result
        raise Refused(
            ResponseCode.SYSTEM_ERROR, f"nobody at this client is meant by request {code}"
        )
