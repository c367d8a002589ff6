"""Requests to many servers with bounded concurrency, and the choice of brokers.

All requests of an admin share one bound, so that a listing of thousands of groups neither floods a
broker nor runs one by one. Requests are counted, because the cost of a listing is promised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerNotFound, BrokerUnavailable
from orbitmq.client.routes import Queue
from orbitmq.errors import ClientError, PartlyDone
from orbitmq.remoting.settings import Address, AddressError, RemotingError, parse_address
from orbitmq.wire.bodies import ClusterInfo
from orbitmq.wire.codes import RequestCode, ResponseCode, WireError
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers import Header
from orbitmq.wire.javajson import Body, decode_body

B = TypeVar("B", bound=Body)
K = TypeVar("K")
S = TypeVar("S", bound="Address | BrokerNode")
T = TypeVar("T")

SUCCESS = frozenset({int(ResponseCode.SUCCESS)})

#: The errors of a request: refused, unreachable, or an invalid answer.
Failed = (ClientError, RemotingError, WireError)


class AdminRequests:
    """The requests of one admin."""

    def __init__(self, engine: Engine, *, at_once: int, timeout: float) -> None:
        self.engine = engine
        self.clock = engine.clock
        self.timeout = timeout
        #: The number of requests so far.
        self.requests = 0
        self._free = asyncio.Semaphore(at_once)

    async def ask(
        self,
        where: Address,
        code: int,
        header: Header | None = None,
        *,
        body: Bytes = b"",
        extra: Mapping[str, str] | None = None,
        accept: frozenset[int] = SUCCESS,
        timeout: float | None = None,  # noqa: ASYNC109  # of the request
    ) -> Command:
        """Send a request and return its answer. Raises `BrokerRefused` for other codes."""
        async with self._free:
            self.requests += 1
            return await self.engine.ask(
                where,
                code,
                header,
                body=body,
                extra=extra,
                accept=accept,
                timeout=self.timeout if timeout is None else timeout,
            )

    async def ask_body(
        self,
        kind: type[B],
        where: Address,
        code: int,
        header: Header | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> B:
        """The body of an answer."""
        answer = await self.ask(where, code, header, timeout=timeout)
        return decode_body(kind, answer.body or b"{}")

    async def find(
        self, where: Address, code: int, header: Header, *, absent: ResponseCode
    ) -> Command | None:
        """As `ask`; None for an answer with the code `absent`."""
        answer = await self.ask(where, code, header, accept=SUCCESS | {int(absent)})
        return None if answer.code == absent else answer

    async def find_body(
        self, kind: type[B], where: Address, code: int, header: Header, *, absent: ResponseCode
    ) -> B | None:
        """As `ask_body`; None for an answer with the code `absent`."""
        answer = await self.find(where, code, header, absent=absent)
        return None if answer is None else decode_body(kind, answer.body or b"{}")

    async def ask_name_server(
        self,
        code: int,
        header: Header | None = None,
        *,
        accept: frozenset[int] = SUCCESS,
    ) -> Command:
        """Send a request to the first name server that answers."""
        async with self._free:
            self.requests += 1
            return await self.engine.ask_name_server(
                code, header, timeout=self.timeout, accept=accept
            )

    @property
    def name_servers(self) -> tuple[Address, ...]:
        """The addresses of all name servers, for changes."""
        return self.engine.settings.addresses

    async def all(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """The results in order. The first failure cancels the rest and is raised."""
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def each(
        self, keys: Iterable[K], work: Callable[[K], Coroutine[Any, Any, T]]
    ) -> Outcomes[K, T]:
        """Run a request for every key; failures do not affect the others."""

        done: dict[K, T] = {}
        failed: dict[K, Exception] = {}

        async def tried(key: K) -> None:
            try:
                done[key] = await work(key)
            except Failed as error:
                failed[key] = error

        order = tuple(keys)
        await self.all(map(tried, order))
        return Outcomes(
            {key: done[key] for key in order if key in done},
            {key: failed[key] for key in order if key in failed},
        )

    async def change(
        self, what: str, servers: Iterable[S], code: int, header: Header | None = None
    ) -> Mapping[S, Command]:
        """Send a request to each broker or name server. Raises unless all accept it."""

        async def ask(server: S) -> Command:
            where = server if isinstance(server, Address) else server.address
            return await self.ask(where, code, header)

        return (await self.each(servers, ask)).check(what)

    async def topology(self, name_server: Address | None = None) -> Topology:
        """All brokers, from any name server or from this one."""
        code = RequestCode.GET_BROKER_CLUSTER_INFO
        if name_server is None:
            answer = await self.ask_name_server(code)
        else:
            answer = await self.ask(name_server, code)
        return _topology(decode_body(ClusterInfo, answer.body or b"{}"))

    async def of_readers(
        self, work: Callable[[BrokerNode], Coroutine[Any, Any, T]]
    ) -> Outcomes[BrokerNode, T]:
        """Send a query to one member of every broker name."""
        return await self.each((await self.topology()).readers(), work)


@dataclass(frozen=True, slots=True)
class Outcomes(Generic[K, T]):
    """The results and failures of requests by key."""

    done: Mapping[K, T]
    failed: Mapping[K, Exception]

    def check(self, what: str, name: Callable[[K], str] = str) -> Mapping[K, T]:
        """The results. Raises if any failed, for a single key its own error."""
        if not self.failed:
            return self.done
        if not self.done and len(self.failed) == 1:
            raise next(iter(self.failed.values()))
        failed = [(name(key), str(error)) for key, error in self.failed.items()]
        raise PartlyDone(what, map(name, self.done), failed)


T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A server without an answer, and the reason."""

    server: str
    reason: str

    def __str__(self) -> str:
        return f"{self.server}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Listing(Generic[T_co]):
    """A result with the servers whose part is missing."""

    items: tuple[T_co, ...]
    unreachable: tuple[Unreachable, ...] = ()

    @property
    def is_complete(self) -> bool:
        return not self.unreachable

    def __iter__(self) -> Iterator[T_co]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> T_co:
        return self.items[place]


# Queries go to one member of every broker name: the master, or while it is down the slave with the
# lowest id. Changes go to masters only.


MASTER = 0


class OfQueue:
    """Mixin with the parts of `queue` as attributes, for flat records."""

    __slots__ = ()

    queue: Queue

    @property
    def topic(self) -> str:
        return self.queue.topic

    @property
    def broker(self) -> str:
        return self.queue.broker

    @property
    def queue_id(self) -> int:
        return self.queue.id


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
        """One member of every broker name, or of the named ones, for queries."""
        first: dict[str, BrokerNode] = {}
        for node in self.nodes:
            first.setdefault(node.broker, node)
        return self._chosen(first, brokers)

    def masters(
        self, brokers: Collection[str] | None = None, *, cluster: str | None = None
    ) -> tuple[BrokerNode, ...]:
        """The masters of all, the given or a cluster's brokers. Raises `BrokerUnavailable`."""
        in_cluster = self.nodes
        if not in_cluster and not brokers and cluster is None:
            # A change at no broker would look successful.
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
        """The broker named by its name, name and id (`broker-a/1`) or address."""
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
            # An invalid registered address; skipped.
            continue
