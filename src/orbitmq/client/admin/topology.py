"""Which brokers there are, and which of them to ask.

Questions go to one member of every broker name: the master, or while it is away the slave with the
lowest id, which knows the same with a delay. Changes go to masters only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from orbitmq.client.admin.asking import Asking, Outcomes
from orbitmq.client.admin.errors import BrokerNotFound
from orbitmq.client.admin.listing import Unreachable
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.remoting.address import Address, parse_address
from orbitmq.remoting.errors import AddressError
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.route import ClusterInfo
from orbitmq.wire.codes import RequestCode

T = TypeVar("T")

MASTER = 0


@dataclass(frozen=True, slots=True, order=True)
class BrokerNode:
    """One broker process."""

    cluster: str
    broker: str
    id: int
    address: Address

    @property
    def is_master(self) -> bool:
        return self.id == MASTER

    def __str__(self) -> str:
        return self.broker if self.is_master else f"{self.broker}/{self.id}"


@dataclass(frozen=True, slots=True)
class Topology:
    """All brokers that a name server knows."""

    nodes: tuple[BrokerNode, ...]

    def readers(self, brokers: Collection[str] | None = None) -> tuple[BrokerNode, ...]:
        """One of every broker name, or of those named, to be asked."""
        first: dict[str, BrokerNode] = {}
        for node in self.nodes:
            first.setdefault(node.broker, node)
        return self._chosen(first, brokers)

    def masters(
        self, brokers: Collection[str] | None = None, *, cluster: str | None = None
    ) -> tuple[BrokerNode, ...]:
        """The masters of all names, of those given, or of a cluster. Raises `BrokerUnavailable`."""
        in_cluster = self.nodes
        if not in_cluster and not brokers and cluster is None:
            # A change that nobody makes would pass for one that is made.
            raise BrokerUnavailable(
                "any", "none is registered with the name servers; start one, or wait for it"
            )
        if cluster is not None:
            in_cluster = tuple(node for node in self.nodes if node.cluster == cluster)
            if not in_cluster:
                known = sorted({node.cluster for node in self.nodes})
                raise BrokerNotFound(f"of cluster {cluster}", (f"cluster {name}" for name in known))
        by_name = {node.broker: node for node in in_cluster if node.is_master}
        for name in sorted({node.broker for node in in_cluster} - by_name.keys()):
            if brokers is None or name in brokers:
                raise BrokerUnavailable(name, "it has no master at the moment; changes need one")
        return self._chosen(by_name, brokers)

    def master(self, broker: str) -> BrokerNode:
        return self.masters((broker,))[0]

    def reader(self, broker: str) -> BrokerNode:
        return self.readers((broker,))[0]

    def find(self, broker: str) -> BrokerNode:
        """A broker as people name it: its name, its name and id (`broker-a/1`), or its address."""
        for node in self.nodes:
            if broker in (str(node), node.broker, str(node.address)):
                return node
        raise BrokerNotFound(broker, map(str, self.nodes))

    def at(self, address: Address) -> BrokerNode | None:
        """The broker that is registered under an address."""
        return next((node for node in self.nodes if node.address == address), None)

    def _chosen(
        self, by_name: dict[str, BrokerNode], brokers: Collection[str] | None
    ) -> tuple[BrokerNode, ...]:
        if brokers is None:
            return tuple(by_name.values())
        for name in brokers:
            if name not in by_name:
                raise BrokerNotFound(name, sorted({node.broker for node in self.nodes}))
        return tuple(by_name[name] for name in dict.fromkeys(brokers))


class Directory:
    """Looks the brokers up."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    async def look(self, name_server: Address | None = None) -> Topology:
        """All brokers now, as any name server says, or as this one does."""
        code = RequestCode.GET_BROKER_CLUSTER_INFO
        if name_server is None:
            answer = await self._asking.ask_name_server(code)
        else:
            answer = await self._asking.ask(name_server, code)
        return _topology(decode_body(ClusterInfo, answer.body or b"{}"))

    async def of_readers(
        self, work: Callable[[BrokerNode], Coroutine[Any, Any, T]]
    ) -> Outcomes[BrokerNode, T]:
        """Ask one member of every broker name the same."""
        return await self._asking.each((await self.look()).readers(), work)


def unreachable(outcomes: Outcomes[BrokerNode, T]) -> tuple[Unreachable, ...]:
    """The brokers whose part is missing."""
    return tuple(Unreachable(str(node), str(error)) for node, error in outcomes.failed.items())


def _topology(info: ClusterInfo) -> Topology:
    clusters = {
        broker: cluster for cluster, names in info.cluster_addr_table.items() for broker in names
    }
    return Topology(
        tuple(
            sorted(
                BrokerNode(data.cluster or clusters.get(name, ""), name, broker_id, address)
                for name, data in info.broker_addr_table.items()
                for broker_id, address in _addresses(data.broker_addrs.items())
            )
        )
    )


def _addresses(table: Iterable[tuple[int, str]]) -> Iterable[tuple[int, Address]]:
    for broker_id, text in table:
        try:
            yield broker_id, parse_address(text)
        except AddressError:
            # Somebody registered nonsense; nobody could connect to it anyway.
            continue
