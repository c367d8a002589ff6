"""Which handler answers which request code, and what is answered when it cannot.

A handler is given the connection and the request, and returns

* a `Command`, or the pieces of an encoded one: the answer, written at the end of the turn;
* `LATER`: it will call `connection.reply` itself, be it at the end of the turn or after minutes;
* None: this request is never answered;
* a coroutine: run as a task, its result is the answer.

It raises `Refused` for an answer that refuses. One-way requests are never answered, whatever the
handler returns or raises.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Final, TypeAlias

from orbitmq.remoting.connection import Answer, Connection
from orbitmq.remoting.settings import Refused
from orbitmq.wire.codes import Flag, ResponseCode, WireError
from orbitmq.wire.command import Command

log = logging.getLogger(__name__)

_ONE_WAY = int(Flag.ONE_WAY)


class _Later(enum.Enum):
    LATER = enum.auto()


LATER: Final = _Later.LATER

#: What a handler returns.
Result: TypeAlias = Answer | _Later | None
Handler: TypeAlias = Callable[
    [Connection, Command], Result | Coroutine[object, object, Answer | None]
]
Hook: TypeAlias = Callable[[Connection], None]


class Dispatcher:
    """The owner of connections whose requests are answered from a table. No I/O of its own."""

    def __init__(
        self,
        handlers: Mapping[int, Handler],
        *,
        before: Callable[[Connection, Command], None] | None = None,
        opened: Hook | None = None,
        turn_done: Hook | None = None,
        closed: Hook | None = None,
    ) -> None:
        """`before` sees every request first and may raise `Refused`; the others are notified."""
        self.handlers = dict(handlers)
        self._before = before
        self._tasks: set[asyncio.Task[None]] = set()
        self.connection_opened: Hook = opened or _nothing
        self.turn_done: Hook = turn_done or _nothing
        self.connection_closed: Hook = closed or _nothing

    def serve(self, code: int, handler: Handler) -> None:
        """Answer requests of this code with `handler` from now on."""
        self.handlers[code] = handler

    def request_received(self, connection: Connection, request: Command) -> None:
        try:
            if self._before is not None:
                self._before(connection, request)
            handler = self.handlers.get(request.code)
            if handler is None:
                result: Result | Coroutine[object, object, Answer | None] = _unsupported(request)
            else:
                result = handler(connection, request)
            if result is None:
                return
            if result is LATER:
                connection.leave_open(request)
            elif not isinstance(result, (Command, list)) and isinstance(result, Coroutine):
                self._start(connection, request, result)
            elif not request.flag & _ONE_WAY:
                connection.send(result)
        except Exception as error:  # noqa: BLE001  # whatever a handler does, others are served
            self._refuse(connection, request, error)

    def _start(
        self,
        connection: Connection,
        request: Command,
        handling: Coroutine[object, object, Answer | None],
    ) -> None:
        connection.leave_open(request)
        task = asyncio.get_running_loop().create_task(self._run(connection, request, handling))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self,
        connection: Connection,
        request: Command,
        handling: Coroutine[object, object, Answer | None],
    ) -> None:
        try:
            answer = await handling
            if answer is not None and not request.flag & _ONE_WAY:
                connection.send(answer)
        except Exception as error:  # noqa: BLE001  # as above
            self._refuse(connection, request, error)
        finally:
            connection.release(request)

    def _refuse(self, connection: Connection, request: Command, error: Exception) -> None:
        answer = refusal(request, error)
        if answer.code == ResponseCode.SYSTEM_ERROR and not isinstance(error, Refused | WireError):
            log.error(
                "request failed",
                exc_info=error,
                extra={"client": str(connection.remote), "code": request.code},
            )
        if not request.flag & _ONE_WAY:
            connection.send(answer)

    @property
    def running(self) -> int:
        """Handlers that are coroutines and not done yet."""
        return len(self._tasks)

    async def stop(self) -> None:
        """Cancel handlers that are still running, and wait for their end."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def refusal(request: Command, error: Exception) -> Command:
    """The answer that an error stands for."""
    if isinstance(error, Refused):
        return request.answer(error.code, remark=error.remark)
    if isinstance(error, WireError):
        # A field or body that is wrong: the text names it, and what is allowed.
        return request.answer(ResponseCode.SYSTEM_ERROR, remark=str(error))
    return request.answer(
        ResponseCode.SYSTEM_ERROR, remark=f"{type(error).__name__}: {error}"[:1000]
    )


def _unsupported(request: Command) -> Command:
    return request.answer(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        # The leading space is Apache's.
        remark=f" request type {request.code} not supported",
    )


def _nothing(_: Connection) -> None:
    """For an owner that does not care."""
