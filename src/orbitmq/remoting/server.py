"""Listens for peers and keeps their connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Collection

from orbitmq.clock import Clock, SystemClock
from orbitmq.remoting.address import NOWHERE, Address, socket_address
from orbitmq.remoting.arrivals import Listener, asks_for_http2, speaks_tls
from orbitmq.remoting.capacity import Capacity
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.occurrences import Occurrences
from orbitmq.remoting.owner import Owner
from orbitmq.remoting.settings import ServerSettings
from orbitmq.remoting.sweeping import IdleSweep
from orbitmq.remoting.tls import TlsMode
from orbitmq.wire.frame import SPEAKS_HTTP2

log = logging.getLogger(__name__)

#: How long peers are kept waiting who come before the start; clients wait for 3 s.
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
        """`capacity` is what all servers that are given the same one may take together."""
        self._owner = owner
        self._settings = settings or ServerSettings()
        self._clock = clock or SystemClock()
        self._capacity = capacity or Capacity(self._settings, self._clock.monotonic)
        self._address: Address | None = None
        self._listener: Listener | None = None
        self._is_open = False
        #: Who came before the start, and when each is let go.
        self._early: dict[socket.socket, asyncio.TimerHandle] = {}
        self._tls: ssl.SSLContext | None = None
        self._mode = TlsMode.DISABLED
        #: Tasks that still find out what a new connection speaks.
        self._greeting: set[asyncio.Task[None]] = set()
        #: Each with the socket that it was made of.
        self._connections: dict[Connection, socket.socket] = {}
        self._all_closed = asyncio.Event()
        self._refused = Occurrences()
        self._faults = Occurrences()
        self._sweep = IdleSweep(
            lambda: self._connections,
            idle=self._settings.idle,
            frame=self._settings.frame,
            frame_rate=self._settings.frame_rate,
            interval=self._settings.sweep,
            clock=self._clock,
        )

    @property
    def address(self) -> Address:
        """Where it listens, with the real port; as configured before the start."""
        return self._address or self._settings.address

    @property
    def connections(self) -> Collection[Connection]:
        return frozenset(self._connections)

    async def listen(self) -> None:
        """Take the address, before there is anybody to serve. Raises as `start` does.

        Who connects is served after the start if that comes soon, and is else let go: peers are to
        learn that they should go elsewhere, and what they gave up should not be done much later.
        """
        settings = self._settings
        if settings.tls is not None and settings.tls.mode is not TlsMode.DISABLED:
            self._tls = settings.tls.context()
            self._mode = settings.tls.mode
        self._listener = Listener(self._arrived, pause=settings.accept_pause)
        self._address = await self._listener.listen(settings.address, settings.backlog)
        log.info("listening", extra={"address": str(self._address), "tls": self._mode.value})

    async def start(self) -> None:
        """Serve, at the address that was taken if one was.

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
        """Accept nobody else, answer what is open within `grace` seconds, close."""
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
        problem = self._capacity.enter(accepted, _peer(accepted).host)
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
            # Possibly before its first step, so that nobody else could.
            accepted.close()
            self._capacity.leave(accepted)

    async def _greet(self, accepted: socket.socket) -> None:
        """Make a connection of an accepted socket, once it is known what the peer speaks."""
        try:
            async with asyncio.timeout(self._settings.first_byte):
                is_tls = await speaks_tls(accepted)
        except TimeoutError:
            self._refuse(accepted, f"it said nothing for {self._settings.first_byte:g} s")
            return
        if is_tls is None:
            accepted.close()
            self._capacity.leave(accepted)
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
            places=self._capacity.frames,
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
            self._capacity.leave(accepted)
        if not self._connections:
            self._all_closed.set()

    def _refuse(self, accepted: socket.socket, reason: str) -> None:
        peer = _peer(accepted)
        accepted.close()
        self._capacity.leave(accepted)
        self._log_refusal(peer, reason)

    def _log_refusal(self, peer: Address, reason: str) -> None:
        self._capacity.refused += 1
        if count := self._refused.note(reason):
            log.warning(
                "connection refused: %s (%d so far)", reason, count, extra={"client": str(peer)}
            )


def _bound_silence(accepted: socket.socket, seconds: float) -> None:
    """Have the system end a connection whose peer acknowledges nothing that we write.

    To whom we write now and then is not idle, though it may have vanished without a word; the
    system alone would try for a quarter of an hour.
    """
    option: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux has it
    if option is not None:
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, option, max(1, round(seconds * 1000)))


def _peer(accepted: socket.socket) -> Address:
    """Where a socket leads; nowhere if the peer has left already."""
    try:
        return socket_address(accepted.getpeername())
    except OSError:
        return NOWHERE
