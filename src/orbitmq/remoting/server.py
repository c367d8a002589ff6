"""Listens for peers and keeps their connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING

from orbitmq.clock import Clock, SystemClock
from orbitmq.logonce import LogEveryNth
from orbitmq.remoting.connection import Connection, FrameMemory
from orbitmq.remoting.settings import NOWHERE, Address, ListenFailed, ServerSettings, socket_address
from orbitmq.remoting.tls import TLS_HANDSHAKE, TlsMode
from orbitmq.wire.frame import SPEAKS_HTTP2

if TYPE_CHECKING:
    from orbitmq.remoting.connection import Owner


log = logging.getLogger(__name__)

#: Seconds for which peers that connect before the start have to wait; clients wait for 3 s.
_PATIENCE = 2.0
#: How long aborted sockets may take to be reported as closed.
_ABORT_DEADLINE = 5.0


class Server:
    """A listening address whose connections all belong to one owner."""

    def __init__(
        self,
        owner: Owner,
        settings: ServerSettings | None = None,
        *,
        clock: Clock | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        """`capacity` is the limit of all servers that share it."""
        self._owner = owner
        self._settings = settings or ServerSettings()
        self._clock = clock or SystemClock()
        self.capacity = capacity or Capacity(self._settings)
        self._address: Address | None = None
        self._listener: Listener | None = None
        self._is_open = False
        #: Peers that connected before the start, and when each is closed.
        self._early: dict[socket.socket, asyncio.TimerHandle] = {}
        self._tls: ssl.SSLContext | None = None
        self._mode = TlsMode.DISABLED
        #: Tasks that detect the protocol of a new connection.
        self._greeting: set[asyncio.Task[None]] = set()
        #: Each connection with its accepted socket.
        self._connections: dict[Connection, socket.socket] = {}
        self._all_closed = asyncio.Event()
        self._refused = LogEveryNth()
        self._faults = LogEveryNth()
        self._sweep = IdleSweep(
            lambda: self._connections,
            idle=self._settings.idle,
            frames=self._settings,
            interval=self._settings.sweep,
            clock=self._clock,
        )

    @property
    def address(self) -> Address:
        """The address with the real port; before the start as configured."""
        return self._address or self._settings.address

    @property
    def connections(self) -> Collection[Connection]:
        return frozenset(self._connections)

    async def listen(self) -> None:
        """Listen before the start. Raises as `start` does.

        Peers that connect are served if the start follows soon, and closed otherwise: they then use
        another broker, and no request is served after its peer has abandoned it.
        """
        settings = self._settings
        if settings.tls is not None and settings.tls.mode is not TlsMode.DISABLED:
            self._tls = settings.tls.context()
            self._mode = settings.tls.mode
        self._listener = Listener(self._arrived, pause=settings.accept_pause)
        self._address = await self._listener.listen(settings.address, settings.backlog)
        log.info("listening", extra={"address": str(self._address), "tls": self._mode.value})

    async def start(self) -> None:
        """Serve, on the bound address if there is one.

        Raises `ListenFailed`, or `SettingError` for a bad certificate.
        """
        if self._listener is None:
            await self.listen()
        self._is_open = True
        for accepted, timer in tuple(self._early.items()):
            timer.cancel()
            self._arrived(accepted)
        self._early.clear()

    async def stop(self, grace: float | None = None) -> None:
        """Accept no connection, answer open requests within `grace` seconds, close."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._is_open = False
        for accepted, timer in self._early.items():
            timer.cancel()
            accepted.close()
        self._early.clear()
        for task in tuple(self._greeting):
            task.cancel()
        if self._greeting:
            await asyncio.wait(tuple(self._greeting))
        for connection in tuple(self._connections):
            connection.finish("the server stops")
        if not await self._closed_within(self._settings.grace if grace is None else grace):
            for connection in tuple(self._connections):
                connection.abort("the server stops")
            await self._closed_within(_ABORT_DEADLINE)
        self._sweep.stop()

    async def _closed_within(self, seconds: float) -> bool:
        while self._connections:
            self._all_closed.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._all_closed.wait()
            except TimeoutError:
                return False
        return True

    def _arrived(self, accepted: socket.socket) -> None:
        if not self._is_open:
            self._hold(accepted)
            return
        _bound_silence(accepted, self._settings.idle)
        problem = self.capacity.enter(accepted, _peer(accepted).host)
        if problem is not None:
            self._refuse(accepted, problem)
            return
        task = asyncio.get_running_loop().create_task(self._greet(accepted))
        self._greeting.add(task)
        task.add_done_callback(lambda done: self._greeted(done, accepted))

    def _hold(self, accepted: socket.socket) -> None:
        if len(self._early) >= self._settings.backlog:
            accepted.close()
            return
        loop = asyncio.get_running_loop()
        self._early[accepted] = loop.call_later(_PATIENCE, self._let_go, accepted)

    def _let_go(self, accepted: socket.socket) -> None:
        del self._early[accepted]
        accepted.close()

    def _greeted(self, done: asyncio.Task[None], accepted: socket.socket) -> None:
        self._greeting.discard(done)
        if done.cancelled():
            # Possibly before its first step, where the task itself cannot close the socket.
            accepted.close()
            self.capacity.leave(accepted)

    async def _greet(self, accepted: socket.socket) -> None:
        """Create the connection of an accepted socket after detecting the protocol."""
        try:
            async with asyncio.timeout(self._settings.first_byte):
                is_tls = await speaks_tls(accepted)
        except TimeoutError:
            self._refuse(accepted, f"it said nothing for {self._settings.first_byte:g} s")
            return
        if is_tls is None:
            accepted.close()
            self.capacity.leave(accepted)
        elif is_tls and self._mode is TlsMode.DISABLED:
            problem = "it speaks TLS, which is disabled here"
            if asks_for_http2(accepted):
                problem += f"; within it {SPEAKS_HTTP2}"
            self._refuse(accepted, problem)
        elif not is_tls and self._mode is TlsMode.ENFORCING:
            self._refuse(accepted, "it speaks without TLS, which is required here")
        else:
            await self._connect(accepted, self._tls if is_tls else None)

    async def _connect(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        peer = _peer(accepted)
        connection = Connection(
            self._owner,
            settings=self._settings.connection,
            clock=self._clock,
            faults=self._faults,
            memory=self.capacity.frames,
        )
        connection.on_close(self._closed)
        self._connections[connection] = accepted
        self._sweep.start()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=tls,
                ssl_handshake_timeout=self._settings.handshake if tls else None,
            )
        except (OSError, ssl.SSLError) as error:
            self._closed(connection)
            accepted.close()
            self._log_refusal(peer, f"no TLS handshake: {error}")
        except asyncio.CancelledError:
            self._closed(connection)
            raise

    def _closed(self, connection: Connection) -> None:
        accepted = self._connections.pop(connection, None)
        if accepted is not None:
            self.capacity.leave(accepted)
        if not self._connections:
            self._all_closed.set()

    def _refuse(self, accepted: socket.socket, reason: str) -> None:
        peer = _peer(accepted)
        accepted.close()
        self.capacity.leave(accepted)
        self._log_refusal(peer, reason)

    def _log_refusal(self, peer: Address, reason: str) -> None:
        self.capacity.refused += 1
        if count := self._refused.note(reason):
            log.warning(
                "connection refused: %s (%d so far)", reason, count, extra={"client": str(peer)}
            )


def _bound_silence(accepted: socket.socket, seconds: float) -> None:
    """Have the system close a connection whose peer acknowledges nothing that we write.

    Such a connection is not idle, but the peer may have vanished; by default the system tries for
    a quarter of an hour.
    """
    option: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux has it
    if option is not None:
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, option, max(1, round(seconds * 1000)))


def _peer(accepted: socket.socket) -> Address:
    """The address of a socket's peer; a placeholder if the peer has left already."""
    try:
        return socket_address(accepted.getpeername())
    except OSError:
        return NOWHERE


if sys.platform != "win32":
    import resource

#: Connections accepted in one step of the loop.
_AT_ONCE = 64

#: No more handles or memory: open connections continue, new ones wait in the backlog.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

#: Handles reserved for files: peers need new files of the log, of queues and of saved tables. One
#: in eight where there are few handles.
_LEFT_TO_FILES = 32
_SHARE = 8

#: The first protocol in the ALPN list of a TLS greeting, and its place.
_HTTP2 = b"\x02h2"
_GREETING = 4096


class Listener:
    """A listening socket that delivers accepted ones."""

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
            # A name like localhost has both families; most peers of RocketMQ know only IPv4.
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
        """Stop accepting."""
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
            # asyncio does this only for sockets whose protocol number it knows. Some systems refuse
            # it for a peer that has left already.
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
    """Raise an OSError, as without handles, when only those reserved for files are left."""
    if sys.platform == "win32":
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    # The next handle is the lowest free number.
    lowest = os.dup(listening.fileno())
    os.close(lowest)
    if lowest >= limit - min(_LEFT_TO_FILES, limit // _SHARE):
        raise OSError(errno.EMFILE, "too many open files; the last ones are for files")


async def speaks_tls(accepted: socket.socket) -> bool | None:
    """Whether the peer begins with a TLS handshake; None when it left. Consumes no bytes."""
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
    """Whether a TLS peer requests HTTP/2 (ALPN), as gRPC clients do."""
    return _HTTP2 in (_peek(accepted, _GREETING) or b"")


def _peek(accepted: socket.socket, size: int = 1) -> bytes | None:
    """The first bytes; b"" when the peer has left, None when nothing has arrived yet."""
    with contextlib.suppress(BlockingIOError, InterruptedError):
        try:
            return accepted.recv(size, socket.MSG_PEEK)
        except ConnectionError:
            return b""
    return None


class Capacity:
    """Limits the connections and the long frames of a process.

    Servers that share one share the limit of connections. One host may only have a part of them, so
    that it cannot lock out all others.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._most = settings.connections
        self._most_of_a_host = min(settings.host_connections, settings.connections)
        self._guests: dict[Hashable, str] = {}
        self._hosts: Counter[str] = Counter()
        self.frames = FrameMemory(settings.unfinished_bytes)
        #: Rejected or failed connections: at the limit, with the wrong protocol, or without any
        #: bytes.
        self.refused = 0

    @property
    def connections(self) -> int:
        """The number of admitted connections."""
        return len(self._guests)

    def enter(self, guest: Hashable, host: str) -> str | None:
        """Admit a connection, which has to `leave` later; returns the reason if it is refused."""
        if len(self._guests) >= self._most:
            return f"{self._most} connections are open already (server.connections)"
        if self._hosts.get(host, 0) >= self._most_of_a_host:
            return (
                f"{self._most_of_a_host} connections of its host are open already "
                "(server.host_connections)"
            )
        self._guests[guest] = host
        self._hosts[host] += 1
        return None

    def leave(self, guest: Hashable) -> None:
        """Release the place of a connection. Idempotent."""
        host = self._guests.pop(guest, None)
        if host is None:
            return
        self._hosts[host] -= 1
        if not self._hosts[host]:
            del self._hosts[host]


class IdleSweep:
    """Closes connections without a read or write for `idle` seconds, or with an unfinished frame
    that is slower than `frames` demands."""

    def __init__(
        self,
        connections: Callable[[], Collection[Connection]],
        *,
        idle: float,
        frames: ServerSettings | None = None,
        interval: float,
        clock: Clock,
    ) -> None:
        self._connections = connections
        self._idle = idle
        self._frames = frames
        self._swept_at = float("inf")
        self._interval = interval
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Check after each interval while there are connections. Idempotent."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval, self._again)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sweep(self) -> None:
        """Check once."""
        now = self._clock.monotonic()
        since = now - self._idle
        frames = self._frames
        # If the whole process was suspended, no peer is to blame.
        is_late = now - self._swept_at > 2 * self._interval
        self._swept_at = now
        for connection in tuple(self._connections()):
            if frames is not None:
                crowded = frames.frame if is_late else frames.crowded_frame
                connection.check_frame(now, frames.frame, crowded, frames.frame_rate)
            if connection.last_active > since:
                continue
            if connection.unwritten or not connection.is_open:
                # A graceful close would wait for a peer that has stopped reading.
                connection.abort(f"nothing was read by it for {self._idle:g} s")
            else:
                connection.close(f"idle for {self._idle:g} s")

    def _again(self) -> None:
        self._timer = None
        self.sweep()
        if self._connections():
            self.start()
