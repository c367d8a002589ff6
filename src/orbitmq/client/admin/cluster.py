"""The cluster as a whole: its brokers and name servers, and whether they are well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orbitmq.client.admin.asking import Asking, Failed
from orbitmq.client.admin.runtime import RuntimeInfo, runtime_info
from orbitmq.client.admin.topology import BrokerNode, Directory, Topology
from orbitmq.client.errors import BrokerRefused
from orbitmq.remoting.address import Address
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.properties import parse_properties
from orbitmq.wire.bodies.route import KVTable
from orbitmq.wire.codes import RequestCode


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """A broker, and how it is."""

    node: BrokerNode
    #: Whether it answers at all.
    is_up: bool
    #: None when it does not tell.
    runtime: RuntimeInfo | None
    #: Why it does not.
    problem: str | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What needs a hand, in words."""
        if self.runtime is not None:
            return self.runtime.warnings
        if self.is_up:
            return (f"it does not tell how it is: {self.problem}",)
        return (f"it is registered and cannot be reached: {self.problem}",)


@dataclass(frozen=True, slots=True)
class NameServerStatus:
    """A name server, and what it knows."""

    address: Address
    #: The brokers that are registered with it, as `name` or `name/id`.
    brokers: tuple[str, ...] = ()
    #: None when it does not show it.
    config: Mapping[str, str] | None = field(default=None, hash=False)
    problem: str | None = None

    @property
    def is_up(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """Everything that a cluster consists of."""

    brokers: tuple[BrokerStatus, ...]
    name_servers: tuple[NameServerStatus, ...]

    @property
    def clusters(self) -> tuple[str, ...]:
        """The names of the clusters that the brokers say they belong to."""
        return tuple(sorted({each.node.cluster for each in self.brokers}))

    @property
    def is_healthy(self) -> bool:
        return not self.warnings

    @property
    def in_rate(self) -> float:
        return sum(each.runtime.in_rate or 0.0 for each in self.brokers if each.runtime)

    @property
    def out_rate(self) -> float:
        return sum(each.runtime.out_rate or 0.0 for each in self.brokers if each.runtime)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What needs a hand anywhere, with the server's name in front."""
        found = [f"{each.node}: {text}" for each in self.brokers for text in each.warnings]
        masters = {each.node.broker for each in self.brokers if each.node.is_master}
        for name in sorted({each.node.broker for each in self.brokers} - masters):
            found.append(f"{name}: it has no master; nothing can be sent to it")
        everywhere = {str(each.node) for each in self.brokers}
        for server in self.name_servers:
            if server.problem is not None:
                found.append(f"name server {server.address}: {server.problem}")
            elif missing := sorted(everywhere - set(server.brokers)):
                found.append(
                    f"name server {server.address}: does not know {', '.join(missing)}; clients "
                    "that ask it miss their queues"
                )
        return tuple(found)


class ClusterView:
    """Asks every server how it is."""

    def __init__(self, asking: Asking, directory: Directory) -> None:
        self._asking = asking
        self._directory = directory

    async def status(self) -> ClusterStatus:
        """All brokers and name servers; one that cannot be asked is in it with its problem."""
        # Raises when no name server answers at all: then there is nothing to show.
        topology = await self._directory.look()
        servers = await self._asking.all(
            self._name_server(address) for address in self._asking.name_servers
        )
        nodes = {node for _, known in servers if known is not None for node in known.nodes}
        brokers = await self._asking.all(
            self._broker(node) for node in sorted(nodes | set(topology.nodes))
        )
        return ClusterStatus(tuple(brokers), tuple(status for status, _ in servers))

    async def runtime(self, broker: str) -> RuntimeInfo:
        """What one broker says about itself; `broker` is its name, `name/id`, or its address."""
        node = (await self._directory.look()).find(broker)
        return await self._runtime(node)

    async def _broker(self, node: BrokerNode) -> BrokerStatus:
        try:
            return BrokerStatus(node, True, await self._runtime(node))
        except BrokerRefused as refused:
            # Apache's does so for a second after its start, and to those who may not ask.
            return BrokerStatus(node, True, None, str(refused))
        except Failed as error:
            return BrokerStatus(node, False, None, str(error))

    async def _runtime(self, node: BrokerNode) -> RuntimeInfo:
        answer = await self._asking.ask(node.address, RequestCode.GET_BROKER_RUNTIME_INFO)
        return runtime_info(decode_body(KVTable, answer.body or b"{}").table, answer.version)

    async def _name_server(self, address: Address) -> tuple[NameServerStatus, Topology | None]:
        try:
            topology = await self._directory.look(address)
        except Failed as error:
            return NameServerStatus(address, problem=str(error)), None
        brokers = tuple(str(node) for node in topology.nodes)
        try:
            answer = await self._asking.ask(address, RequestCode.GET_NAMESRV_CONFIG)
            config = parse_properties(bytes(answer.body).decode("utf-8", "replace"))
        except Failed:
            # It serves clients well without showing its settings to everybody.
            return NameServerStatus(address, brokers), topology
        return NameServerStatus(address, brokers, config), topology
