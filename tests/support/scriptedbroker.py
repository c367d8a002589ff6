"""A name server and broker in one, that answers pulls as a test tells it to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Self, TypeAlias

from orbitmq.remoting.settings import parse_address
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command, decode_command, encode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import PullMessageRequest, PullMessageResponse
from orbitmq.wire.javajson import encode_body
from tests.support.client import topic_route

#: What becomes of the pulls that came together: bytes to send, in the order to send them.
#: None closes the connection.
Script: TypeAlias = Callable[[list[Command]], list[bytes] | None]


class ScriptedBroker:
    """Listens on a free port. Pulls that are read at once go to the script at once.

    As a name server it tells of itself as the master, unless it is not registered, and of the
    addresses of replicas.
    """

    def __init__(
        self, script: Script, *, replicas: Sequence[str] = (), is_registered: bool = True
    ) -> None:
        self._script = script
        self._replicas = replicas
        self._is_registered = is_registered
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        #: How many connections were made.
        self.connections = 0
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            each.close()
        for thread in (self._accepting, *self._threads):
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            connection.settimeout(10)
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        reader = FrameReader()
        with connection:
            while True:
                try:
                    data = connection.recv(65536)
                except OSError:
                    return
                if not data:
                    return
                requests = [decode_command(frame) for frame in reader.feed(data)]
                pulls = [each for each in requests if each.code == RequestCode.PULL_MESSAGE]
                answers = [self._route(each) for each in requests if each not in pulls]
                if pulls:
                    scripted = self._script(pulls)
                    if scripted is None:
                        return
                    answers += scripted
                try:
                    connection.sendall(b"".join(answers))
                except OSError:
                    return

    def _route(self, request: Command) -> bytes:
        addresses = dict(enumerate(map(parse_address, self._replicas), 1))
        if self._is_registered:
            addresses[0] = parse_address(self.address)
        route = topic_route({"broker-a": addresses}, queues=1)
        return encode_command(request.answer(ResponseCode.SUCCESS, body=encode_body(route)))


def brought(
    pull: Command, data: bytes, following: int, *, low: int = 0, high: int = 10**6
) -> bytes:
    """An answer with messages."""
    return told(pull, ResponseCode.SUCCESS, following, low=low, high=high, body=data)


def told(
    pull: Command,
    code: int,
    following: int,
    *,
    low: int = 0,
    high: int = 10**6,
    body: bytes = b"",
    remark: str | None = None,
) -> bytes:
    """An answer with bounds."""
    header = PullMessageResponse(
        suggest_which_broker_id=0, next_begin_offset=following, min_offset=low, max_offset=high
    )
    return encode_command(pull.answer(code, header, remark=remark, body=body))


def refused(pull: Command, code: int, remark: str = "no") -> bytes:
    """An answer without anything."""
    return encode_command(pull.answer(code, remark=remark))


def asked(pull: Command) -> tuple[int, int]:
    """The offset that a pull begins at, and how many messages it wants."""
    header = pull.header(PullMessageRequest)
    return header.queue_offset, header.max_msg_nums
