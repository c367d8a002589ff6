"""What the commands run: a name server, a broker, or a whole cluster of processes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import BrokerSettings
from orbitmq.cli.errors import CommandError, NotStopped, PortTaken, ProcessEnded
from orbitmq.cli.serving import Listening
from orbitmq.cluster import Cluster
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.address import Address
from orbitmq.remoting.errors import ListenFailed

log = logging.getLogger(__name__)

#: How long a broker process may take from its start to listening; recovery of a large store counts.
_START_DEADLINE = 120.0
#: How long name servers may take to hear of a broker before it counts as ready all the same.
_INTRODUCTION = 3.0
#: How long a broker process may take to stop before it is killed.
_STOP_DEADLINE = 30.0


class NameServerService:
    """A name server by itself."""

    def __init__(self, settings: NameServerSettings) -> None:
        self._server = NameServer(settings)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    def listening(self) -> Sequence[Listening]:
        return (_name_server(self._server),)

    async def until_failed(self) -> CommandError:
        return await _never()

    def kill(self) -> None:
        """Nothing outlives this process."""


class BrokerService:
    """A broker by itself."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._broker = Broker(settings)

    async def start(self) -> None:
        await self._broker.start()
        # Whoever starts clients when this is ready expects that they find it.
        await self._broker.parts.registration.until_tried(_INTRODUCTION)
        if not self._settings.name_servers:
            log.warning("no name server is told of this broker; clients must know its address")

    async def stop(self) -> None:
        await self._broker.stop()

    def listening(self) -> Sequence[Listening]:
        return _broker(self._settings, self._broker)

    async def until_failed(self) -> CommandError:
        return await _never()

    def kill(self) -> None:
        """Nothing outlives this process."""


class ClusterService:
    """A name server and a broker in this process."""

    def __init__(self, name_server: NameServerSettings, broker: BrokerSettings) -> None:
        self._name_server = name_server
        self._settings = broker
        self._cluster = Cluster(name_server, (broker,))

    async def start(self) -> None:
        try:
            await self._cluster.start()
        except ListenFailed as error:
            raise PortTaken(error, self._option(error.address)) from error

    async def stop(self) -> None:
        await self._cluster.stop()

    def _option(self, address: Address) -> str:
        """The flag that chooses an address."""
        if address.port == self._name_server.server.port:
            return "--namesrv-port"
        return "--http-port" if address.port == self._settings.http.port else "--broker-port"

    def listening(self) -> Sequence[Listening]:
        (broker,) = self._cluster.brokers
        return (_name_server(self._cluster.name_server), *_broker(self._settings, broker))

    async def until_failed(self) -> CommandError:
        return await _never()

    def kill(self) -> None:
        """Nothing outlives this process."""


class ProcessesService:
    """A name server here, and a process for every broker."""

    def __init__(
        self,
        name_server: NameServerSettings,
        brokers: Mapping[str, Mapping[str, str]],
        name_servers: Sequence[str] = (),
    ) -> None:
        """`brokers` are names, and the environment in which each process finds its settings.

        `name_servers` are others that the brokers register with besides this one.
        """
        self._cluster = Cluster(name_server)
        self._others = tuple(name_servers)
        self._processes = [BrokerProcess(name, each) for name, each in brokers.items()]

    async def start(self) -> None:
        try:
            await self._cluster.start()
        except ListenFailed as error:
            raise PortTaken(error, "--namesrv-port") from error
        name_servers = (str(self._cluster.name_server_address), *self._others)
        try:
            await _all(process.start(name_servers) for process in self._processes)
            await self._cluster.until_registered(process.name for process in self._processes)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        try:
            await _all(process.stop() for process in self._processes)
        finally:
            await self._cluster.stop()

    def listening(self) -> Sequence[Listening]:
        brokers = (told for process in self._processes for told in process.listening)
        return (_name_server(self._cluster.name_server), *brokers)

    async def until_failed(self) -> CommandError:
        waits = [asyncio.create_task(process.until_ended()) for process in self._processes]
        try:
            ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return ended.pop().result()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


class BrokerProcess:
    """`orbitmq broker` as a child: its standard output tells where it listens.

    It stops when its standard input ends, so none is left behind, however this process ends.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self.listening: list[Listening] = []
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, name_servers: Sequence[str]) -> None:
        """Returns when it listens; raises `CommandError` when it does not."""
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "orbitmq.cli", "broker", "--json", "--stop-with-input"),
            *("--name-server", ",".join(name_servers)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **self._environment},
            # Ctrl-C on the terminal is for the parent, which stops everybody in order.
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_START_DEADLINE):
                await self._listen(process)
        except TimeoutError:
            raise CommandError(
                f"{self.name} was not ready within {_START_DEADLINE:g} s; everything was stopped"
            ) from None

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is not None:
            async for line in process.stdout:
                told = json.loads(line)
                if told.pop("event") == "ready":
                    return
                self.listening.append(Listening(**told))
        raise ProcessEnded(self.name, await process.wait())

    async def stop(self) -> None:
        """Raises `NotStopped` when it did not end in order."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_DEADLINE):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()
        if process.returncode:
            raise NotStopped(self.name, process.returncode)

    async def until_ended(self) -> CommandError:
        if self._process is None:
            return await _never()
        return ProcessEnded(self.name, await self._process.wait())

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


def _name_server(server: NameServer) -> Listening:
    return Listening("name server", "name server", str(server.address))


def _broker(settings: BrokerSettings, broker: Broker) -> Sequence[Listening]:
    told = [Listening("broker", settings.name, str(broker.address), str(settings.root))]
    for role, port in (("second port", broker.vip_address), ("replication", broker.ha_address)):
        if port is not None:
            address = str(Address(broker.address.host, port.port))
            told.append(Listening(role, f"{settings.name} {role}", address))
    if broker.http_address is not None:
        address = f"http://{broker.http_address}"
        told.append(Listening("metrics", f"{settings.name} metrics", address))
    return told


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all, also when one fails, so that none is on its way when the rest is stopped."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome


async def _never() -> CommandError:
    waits: asyncio.Future[CommandError] = asyncio.get_running_loop().create_future()
    return await waits
