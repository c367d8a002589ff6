"""Runs a console on the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import uvicorn

from orbitmq.clock import Clock
from orbitmq.console.app import make_app
from orbitmq.console.errors import CannotListen, ConsoleError
from orbitmq.console.settings import ConsoleSettings

#: Seconds that open requests get at a stop.
_GRACE = 3
#: Connections and requests at the same time; more are told to come later, before files run out.
_MOST_CONNECTIONS = 800


class Console:
    """A console that listens, beside whatever else the loop does.

    settings = ConsoleSettings(client=ClientSettings(name_servers=("localhost:9876",)))
    async with Console(settings) as console:
        print(console.url)
    """

    def __init__(self, settings: ConsoleSettings, *, clock: Clock | None = None) -> None:
        self.settings = settings
        self.app = make_app(settings, clock=clock)
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when browsers can connect. Raises `ConsoleError`."""
        settings = self.settings
        self._socket = _listen(settings.host, settings.port)
        config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            server_header=False,
            # Who asks is who connects: anybody could write a header that says otherwise.
            proxy_headers=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE,
            ssl_certfile=settings.certificate,
            ssl_keyfile=settings.private_key,
            limit_concurrency=_MOST_CONNECTIONS,
            # Its answers are small and pages keep their connections.
            timeout_keep_alive=30,
        )
        parts = self.app.state.parts
        try:
            await parts.start()
        except BaseException:
            self._socket.close()
            raise
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="console")
        while not self._server.started:
            if self._task.done():
                await parts.stop()
                self._socket.close()
                await self._task
                raise ConsoleError("the console ended before it listened")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """End all streams, answer what was asked, and let go of the cluster."""
        server, self._server = self._server, None
        if server is None or self._task is None:
            return
        self.app.state.parts.events.close()
        server.should_exit = True
        await self._task
        await self.app.state.parts.stop()
        if self._socket is not None:
            self._socket.close()

    async def until_ended(self) -> str:
        """Returns, with the reason, when the server has ended by itself."""
        if self._task is None:
            return "the console is not running"
        await asyncio.wait((self._task,))
        error = None if self._task.cancelled() else self._task.exception()
        return f"the console ended by itself: {error or 'no reason given'}"

    @property
    def port(self) -> int:
        """The one that it listens on."""
        if self._socket is None:
            return self.settings.port
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Where a browser on this machine finds it."""
        host = self.settings.host
        if host in ("0.0.0.0", "::", ""):  # noqa: S104  # recognised, not listened on
            host = "127.0.0.1"
        scheme = "https" if self.settings.is_encrypted else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}/"


class _Server(uvicorn.Server):
    """A server that leaves signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise CannotListen(f"the console cannot listen on {host}:{port}: {error}") from error
    return listener
