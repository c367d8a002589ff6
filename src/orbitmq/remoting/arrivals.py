"""Takes connections off a listening socket and finds out what each of them speaks.

The first byte decides (see `tls`). It is looked at without being taken, with a deadline, and each
connection by itself: one that stays silent holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
from collections.abc import Callable

from orbitmq.remoting.address import Address
from orbitmq.remoting.errors import ListenFailed
from orbitmq.remoting.tls import TLS_HANDSHAKE

if sys.platform != "win32":
    import resource

log = logging.getLogger(__name__)

#: Connections taken in one step of the loop.
_AT_ONCE = 64

#: No more handles or memory: what is open goes on, new connections wait in the backlog.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

#: Handles that connections do not get: who is connected sends on only as long as there are some for
#: new files of the log, for queues and for what is saved. Fewer where there are few: one in eight.
_LEFT_TO_FILES = 32
_SHARE = 8

#: The first protocol that a greeting in TLS names, and where it does so.
_HTTP2 = b"\x02h2"
_GREETING = 4096


class Listener:
    """A listening socket that hands out accepted ones."""

    def __init__(self, arrived: Callable[[socket.socket], None], *, pause: float) -> None:
        self._arrived = arrived
        self._pause = pause
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def listen(self, address: Address, backlog: int) -> Address:
        """Begin to accept; return the address with its real port. Raises `ListenFailed`."""
        listening: socket.socket | None = None
        try:
            found = await self._loop.getaddrinfo(
                address.host or None,
                address.port,
                type=socket.SOCK_STREAM,
                flags=socket.AI_PASSIVE,
            )
            # A name like localhost has both kinds; most peers of RocketMQ know only the old one.
            family, _, _, _, name = min(found, key=lambda entry: entry[0] != socket.AF_INET)
            listening = socket.socket(family, socket.SOCK_STREAM)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(name)
            listening.listen(backlog)
        except OSError as error:
            if listening is not None:
                listening.close()
            raise ListenFailed(address, error.strerror or str(error)) from error
        listening.setblocking(False)
        self._socket = listening
        self._loop.add_reader(listening, self._accept)
        return Address(address.host, int(listening.getsockname()[1]))

    def close(self) -> None:
        """Accept no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if self._socket is None:
                return
            try:
                _leave_some_to_files(self._socket)
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._wait_for_handles(self._socket, error)
                return
            accepted.setblocking(False)
            # asyncio does this by itself only for sockets whose protocol number it is told. Some
            # systems refuse it for a peer that has left already.
            with contextlib.suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._arrived(accepted)

    def _wait_for_handles(self, listening: socket.socket, error: OSError) -> None:
        log.error("cannot accept connections: %s; trying again in %g s", error, self._pause)
        self._loop.remove_reader(listening)
        self._timer = self._loop.call_later(self._pause, self._listen_again)

    def _listen_again(self) -> None:
        self._timer = None
        if self._socket is not None:
            self._loop.add_reader(self._socket, self._accept)


def _leave_some_to_files(listening: socket.socket) -> None:
    """Raise an OSError, as if there were no handles, when only those of files are left."""
    if sys.platform == "win32":
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    # The next handle is the lowest number that is free.
    lowest = os.dup(listening.fileno())
    os.close(lowest)
    if lowest >= limit - min(_LEFT_TO_FILES, limit // _SHARE):
        raise OSError(errno.EMFILE, "too many open files; the last ones are for files")


async def speaks_tls(accepted: socket.socket) -> bool | None:
    """Whether the peer begins with a TLS handshake; None when it went away. Takes no bytes."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    first = _peek(accepted)
    if first is None:
        loop.add_reader(accepted, wake)
        try:
            await readable
        finally:
            loop.remove_reader(accepted)
        first = _peek(accepted)
    return first == TLS_HANDSHAKE if first else None


def asks_for_http2(accepted: socket.socket) -> bool:
    """Whether a peer that speaks TLS says that it wants HTTP/2 (ALPN), as gRPC clients do."""
    return _HTTP2 in (_peek(accepted, _GREETING) or b"")


def _peek(accepted: socket.socket, size: int = 1) -> bytes | None:
    """The first bytes, b"" when the peer is gone, None when nothing has come yet."""
    with contextlib.suppress(BlockingIOError, InterruptedError):
        try:
            return accepted.recv(size, socket.MSG_PEEK)
        except ConnectionError:
            return b""
    return None
