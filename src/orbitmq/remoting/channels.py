"""One connection per peer, opened on demand and opened again after a loss.

Concurrent callers of one peer share one attempt. After a failed attempt the next one waits, with
exponential backoff and jitter, so that many clients do not return to a restarted broker at the same
moment. A caller whose timeout would pass during that pause gets its error immediately.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import ssl
from collections.abc import Mapping

from orbitmq.clock import Clock, SystemClock
from orbitmq.logonce import LogEveryNth
from orbitmq.remoting.connection import Connection, Owner, Prepare
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.server import IdleSweep
from orbitmq.remoting.settings import (
    Address,
    ChannelSettings,
    ConnectFailed,
    ConnectionSettings,
    RequestTimedOut,
    parse_address,
)
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers import Header


def pause_after(failures: int, settings: ChannelSettings, chance: random.Random) -> float:
    """Seconds to wait after that many failed attempts in a row."""
    # The exponent is limited because a power of a large number of failures does not fit a float.
    pause = min(settings.longest_pause, settings.first_pause * 2.0 ** min(failures - 1, 64))
    return pause * (1 - settings.jitter * chance.random())


class _Channel:
    """The state of one peer."""

    __slots__ = (
        "address", "attempt", "connection", "failures", "faults", "last_failure", "not_before"
    )  # fmt: skip

    def __init__(self, address: Address) -> None:
        self.address = address
        self.connection: Connection | None = None
        self.attempt: asyncio.Task[Connection] | None = None
        self.failures = 0
        #: A wrong port is tried repeatedly; the log has the first attempt and every n-th.
        self.faults = LogEveryNth()
        self.last_failure = ""
        self.not_before = 0.0


class Channels:
    """Connections by address."""

    def __init__(
        self,
        settings: ChannelSettings | None = None,
        *,
        owner: Owner | None = None,
        tls: ssl.SSLContext | None = None,
        prepare: Prepare | None = None,
        clock: Clock | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self._settings = settings or ChannelSettings()
        self._owner = owner or Dispatcher({})
        self._tls = tls
        self._prepare = prepare
        self._clock = clock or SystemClock()
        self._chance = chance or random.Random()  # noqa: S311  # spreads load, guards nothing
        self._channels: dict[Address, _Channel] = {}
        #: Connections that get no new requests, until they end.
        self._retired: set[Connection] = set()
        self._is_closed = False
        self._sweep = IdleSweep(
            self._open_connections,
            idle=self._settings.idle,
            interval=self._settings.sweep,
            clock=self._clock,
        )

    async def request(
        self,
        address: Address,
        code: int,
        header: Header | None = None,
        *,
        body: Bytes = b"",
        extra: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # for connecting and answering together
    ) -> Command:
        """Send a request to the peer at `address`. Raises as `get` and `Connection.request` do."""
        if timeout is None:
            timeout = self._settings.connection.request_timeout
        began = self._clock.monotonic()
        connection = await self.get(address, timeout=timeout)
        left = timeout - (self._clock.monotonic() - began)
        if left <= 0:
            raise RequestTimedOut(address, code, timeout)
        return await connection.request(code, header, body=body, extra=extra, timeout=left)

    async def get(self, address: Address, *, timeout: float | None = None) -> Connection:  # noqa: ASYNC109  # it names the pause that it cannot outlast
        """The open connection to `address`, or a new one. Raises `ConnectFailed`."""
        if timeout is None:
            timeout = self._settings.connect_timeout
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = _Channel(address)
        if channel.connection is not None and channel.connection.is_open:
            return channel.connection
        attempt = channel.attempt or self._begin(channel, timeout)
        done, _ = await asyncio.wait((attempt,), timeout=timeout)
        if not done:
            raise ConnectFailed(address, f"no connection within {timeout:g} s")
        if attempt.cancelled():
            raise ConnectFailed(address, "closed while connecting")
        if (failure := attempt.exception()) is not None:
            # A copy for every caller, because tracebacks are added to it.
            raise ConnectFailed(
                address, channel.last_failure, retry_in=self.retry_in(address)
            ) from failure
        return attempt.result()

    def retry_in(self, address: Address) -> float:
        """Seconds during which no attempt is made, because the last ones failed."""
        channel = self._channels.get(address)
        return max(0.0, channel.not_before - self._clock.monotonic()) if channel else 0.0

    def retire(self, address: Address, connection: Connection) -> None:
        """Send no further requests on a connection after GO_AWAY; answers may still arrive.

        The next request to that peer opens a new connection.
        """
        channel = self._channels.get(address)
        if channel is not None and channel.connection is connection:
            channel.connection = None
            self._retired.add(connection)
            connection.on_close(self._retired.discard)

    def drop(self, address: Address) -> None:
        """Drop a peer that is no longer used; its connection is closed."""
        channel = self._channels.pop(address, None)
        if channel is None:
            return
        if channel.attempt is not None:
            channel.attempt.cancel()
        if channel.connection is not None:
            channel.connection.close("no longer needed")

    async def close(self) -> None:
        """Close all connections; waiting requests fail with `ConnectionLost`."""
        self._is_closed = True
        self._sweep.stop()
        attempts = [channel.attempt for channel in self._channels.values() if channel.attempt]
        connections = self._open_connections()
        for address in tuple(self._channels):
            self.drop(address)
        if attempts:
            await asyncio.wait(attempts)
        for connection in connections:
            # A graceful close would wait for a peer that does not read.
            connection.abort("closed here")
            await connection.wait_closed()

    def abort(self) -> None:
        """Close all connections without waiting; open requests fail with `ConnectionLost`."""
        self._is_closed = True
        self._sweep.stop()
        for connection in self._open_connections():
            connection.abort("closed here")

    def _begin(self, channel: _Channel, timeout: float) -> asyncio.Task[Connection]:
        if self._is_closed:
            raise ConnectFailed(channel.address, "the channels are closed")
        pause = self.retry_in(channel.address)
        if pause > timeout:
            raise ConnectFailed(channel.address, channel.last_failure, retry_in=pause)
        task = asyncio.get_running_loop().create_task(self._attempt(channel, pause))
        channel.attempt = task
        # All callers may have left before it fails: mark the error as retrieved.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _attempt(self, channel: _Channel, pause: float) -> Connection:
        try:
            if pause > 0:
                await asyncio.sleep(pause)
            connection = await connect(
                channel.address,
                owner=self._owner,
                tls=self._tls,
                timeout=self._settings.connect_timeout,
                settings=self._settings.connection,
                clock=self._clock,
                prepare=self._prepare,
                faults=channel.faults,
                silence=self._settings.silence,
            )
        except ConnectFailed as failure:
            self._failed(channel, failure.reason)
            raise
        finally:
            channel.attempt = None
        channel.connection = connection
        opened = self._clock.monotonic()
        connection.on_close(lambda _: self._lost(channel, connection, opened))
        self._sweep.start()
        return connection

    def _lost(self, channel: _Channel, connection: Connection, opened: float) -> None:
        if channel.connection is not connection:
            return  # retired: its end is no failure of the peer
        channel.connection = None
        if self._clock.monotonic() - opened < self._settings.settled:
            # Accepted and closed immediately, for instance by a server at its limit.
            self._failed(channel, connection.reason)
        else:
            channel.failures = 0

    def _failed(self, channel: _Channel, reason: str) -> None:
        channel.failures += 1
        channel.last_failure = reason
        pause = pause_after(channel.failures, self._settings, self._chance)
        channel.not_before = self._clock.monotonic() + pause

    def _open_connections(self) -> list[Connection]:
        current = [each.connection for each in self._channels.values()]
        return [*(each for each in current if each is not None), *self._retired]


_CODE = re.compile(r"\[Errno (\d+)\]")


async def connect(
    address: Address | str,
    *,
    owner: Owner | None = None,
    tls: ssl.SSLContext | None = None,
    timeout: float = 3.0,  # noqa: ASYNC109  # part of the error that it leads to
    settings: ConnectionSettings | None = None,
    clock: Clock | None = None,
    prepare: Prepare | None = None,
    faults: LogEveryNth | None = None,
    silence: float | None = None,
) -> Connection:
    """Open a connection. Raises `ConnectFailed`, also for a failed handshake.

    Without an owner, requests of the peer are answered as not supported. `faults` counts protocol
    errors of the peer over all connections that share it.
    """
    if isinstance(address, str):
        address = parse_address(address)
    connection = Connection(
        owner or Dispatcher({}),
        settings=settings,
        clock=clock,
        prepare=prepare,
        faults=faults,
        silence=silence,
    )
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            await loop.create_connection(
                lambda: connection,
                address.host,
                address.port,
                ssl=tls,
                server_hostname=address.host if tls is not None else None,
            )
    except TimeoutError as error:
        raise ConnectFailed(address, f"no connection within {timeout:g} s") from error
    except (OSError, ssl.SSLError) as error:
        raise ConnectFailed(address, _reason(error)) from error
    return connection


def _reason(error: OSError) -> str:
    """The system's error text.

    asyncio replaces it by its own words and tuples, and for a name with several addresses by all
    of them in a row.
    """
    text = str(error)
    codes = set(_CODE.findall(text))
    if "Connect call failed" in text and len(codes) == 1:
        return os.strerror(int(codes.pop()))
    return error.strerror or text
