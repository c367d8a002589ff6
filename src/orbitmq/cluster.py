"""A name server and brokers in one process, on one event loop.

What `orbitmq up` runs on a laptop and what tests run in themselves. Several brokers here share one
core; for more, give each a process of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import WILDCARDS, BrokerSettings
from orbitmq.clock import Clock
from orbitmq.errors import OrbitError
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import Address

#: How long brokers may take to appear in the routes of a name server beside them.
REGISTRATION_DEADLINE = 10.0
#: How often the routes are looked at until then.
_LOOK_AGAIN = 0.002


class NotRegistered(OrbitError):
    """A broker is there but clients cannot find it."""

    def __init__(
        self, missing: Iterable[str], name_server: Address, reasons: Iterable[str] = ()
    ) -> None:
        self.missing = tuple(missing)
        self.reasons = tuple(reasons)
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        super().__init__(
            f"{', '.join(self.missing)} could not be found through the name server {name_server} "
            f"within {REGISTRATION_DEADLINE:g} s{why}"
        )


class Cluster:
    """A name server and the brokers that register with it. Lives on the loop it is started on."""

    def __init__(
        self,
        name_server: NameServerSettings,
        brokers: Sequence[BrokerSettings] = (),
        *,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock
        self._wanted = tuple(brokers)
        self.name_server = NameServer(name_server, clock=clock)
        self.brokers: list[Broker] = []

    async def start(self) -> None:
        """Start everything; returns when clients find every topic. Raises what the parts raise."""
        await self.name_server.start()
        try:
            for settings in self._wanted:
                await self.add(settings)
            await self.until_registered(settings.name for settings in self._wanted)
        except BaseException:
            await self.stop()
            raise

    async def add(self, settings: BrokerSettings) -> Broker:
        """Start one more broker, which registers here besides the name servers of its settings."""
        here = (str(self.name_server_address), *settings.name_servers)
        broker = Broker(replace(settings, name_servers=here), clock=self._clock)
        await broker.start()
        self.brokers.append(broker)
        return broker

    async def stop(self, grace: float | None = None) -> None:
        """Stop the brokers, then the name server that they say goodbye to.

        `grace` is how long clients may take; 0: all connections are closed immediately.
        """
        brokers, self.brokers = self.brokers, []
        stops = (broker.stop(grace) for broker in brokers)
        # One that fails does not keep the others from ending in order.
        outcomes = await asyncio.gather(*stops, return_exceptions=True)
        await self.name_server.stop(grace)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    @property
    def name_server_address(self) -> Address:
        """Where this machine reaches the name server."""
        address = self.name_server.address
        return Address("127.0.0.1", address.port) if address.host in WILDCARDS else address

    async def until_registered(self, brokers: Iterable[str]) -> None:
        """Wait until the name server knows brokers of these names. Raises `NotRegistered`."""
        await self._until_none_missing(set(brokers), self._registered)

    async def until_routed(self, topic: str, brokers: Iterable[str]) -> None:
        """Wait until clients find the topic on these brokers. Raises `NotRegistered`."""
        await self._until_none_missing(set(brokers), lambda: self._serving(topic))

    async def _until_none_missing(
        self, wanted: set[str], present: Callable[[], frozenset[str]]
    ) -> None:
        try:
            async with asyncio.timeout(REGISTRATION_DEADLINE):
                while wanted - present():  # noqa: ASYNC110  # the name server has no event for it
                    await asyncio.sleep(_LOOK_AGAIN)
        except TimeoutError:
            missing = sorted(wanted - present())
            reasons = dict.fromkeys(
                reason for broker in self.brokers for reason in broker.parts.registration.problems
            )
            raise NotRegistered(missing, self.name_server_address, reasons) from None

    def _registered(self) -> frozenset[str]:
        table = self.name_server.service.routes.clusters().broker_addr_table
        return frozenset(table)

    def _serving(self, topic: str) -> frozenset[str]:
        route = self.name_server.service.routes.route(topic)
        return frozenset() if route is None else frozenset(q.broker_name for q in route.queue_datas)
