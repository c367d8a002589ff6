"""A name server that listens on a port."""

from __future__ import annotations

import asyncio

from orbitmq.clock import Clock
from orbitmq.namesrv.service import NameService
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.address import Address
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.server import Server


class NameServer:
    """One name server. Several know nothing of each other: brokers register with all of them."""

    def __init__(
        self, settings: NameServerSettings | None = None, *, clock: Clock | None = None
    ) -> None:
        settings = settings or NameServerSettings()
        self.service = NameService(settings, clock=clock)
        dispatcher = Dispatcher(self.service.handlers, closed=self.service.connection_closed)
        self._server = Server(dispatcher, settings.server, clock=clock)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def address(self) -> Address:
        """Where it listens, with the real port."""
        return self._server.address

    async def start(self) -> None:
        """Load what was kept, and listen. Raises `FileUnusable`, `SettingError`, `ListenFailed`."""
        self.service.load()
        await self._server.start()
        self._scan_later()

    async def stop(self, grace: float | None = None) -> None:
        """Answer what was asked, within `grace` seconds if given, and end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._server.stop(grace)

    def _scan_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.service.settings.scan_interval, self._scan)

    def _scan(self) -> None:
        self.service.scan()
        self._scan_later()
