"""The ports on which a broker is asked: its own, and the one two below it.

RocketMQ's brokers answer every request on a second port as well, so that whoever uses it is not
held up by what the first one has to do. Nobody is told that port: clients with `vipChannelEnabled`
and slaves that copy the tables of their master subtract two. It is served as long as it is free;
in a broker with one loop it makes nothing faster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import replace

from orbitmq.broker.settings import BrokerSettings
from orbitmq.clock import Clock
from orbitmq.remoting.address import Address
from orbitmq.remoting.capacity import Capacity
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.errors import ListenFailed
from orbitmq.remoting.owner import Owner
from orbitmq.remoting.server import Server

log = logging.getLogger(__name__)

#: From the second port to the first.
VIP_DISTANCE = 2


class Doors:
    """One owner of connections, listening on one or two ports."""

    def __init__(self, owner: Owner, settings: BrokerSettings, clock: Clock) -> None:
        self._owner = owner
        self._settings = settings
        self._clock = clock
        #: One for both: who is refused at one door is not let in at the other.
        self.capacity = Capacity(settings.server, clock.monotonic)
        self._first = Server(owner, settings.server, clock=clock, capacity=self.capacity)
        self._second: Server | None = None

    @property
    def address(self) -> Address:
        """Where it listens, with the real port."""
        return self._first.address

    @property
    def vip_address(self) -> Address | None:
        """The second one; None when there is none."""
        return None if self._second is None else self._second.address

    @property
    def connections(self) -> Collection[Connection]:
        """Those of both ports."""
        second = () if self._second is None else self._second.connections
        return frozenset((*self._first.connections, *second))

    async def listen(self) -> None:
        """Take the broker's port; nobody is served yet. Raises `ListenFailed`, `SettingError`."""
        await self._first.listen()

    async def open(self) -> None:
        """Serve on the broker's port. Raises `ListenFailed`, `SettingError`."""
        await self._first.start()

    async def open_second(self) -> None:
        """Listen on the port two below, unless that is not wanted or not possible."""
        settings = self._settings
        port = settings.server.port - VIP_DISTANCE
        if not settings.vip or port <= 0:
            return
        second = Server(
            self._owner,
            replace(settings.server, port=port),
            clock=self._clock,
            capacity=self.capacity,
        )
        try:
            await second.start()
        except ListenFailed as error:
            log.warning(
                "%s; clients with vipChannelEnabled and Apache's slaves will not find the second "
                "port; broker.vip = false does without it",
                error,
            )
        else:
            self._second = second

    async def close(self, grace: float) -> None:
        """Accept nobody else, answer what is open within `grace` seconds, close."""
        servers = [self._first] if self._second is None else [self._first, self._second]
        await asyncio.gather(*(server.stop(grace) for server in servers))
        self._second = None
