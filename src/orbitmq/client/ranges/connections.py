"""How a cluster is reached, and a process's connections to it for reading ranges of queues.

A `RangeAccess` can be pickled: a driver creates it, its workers use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from orbitmq.client.errors import BrokerUnavailable, NoNameServer, refused_by
from orbitmq.client.routes import MASTER, Queue, TopicRoute, route_of
from orbitmq.client.settings import ClientSettings
from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import BrokerRefused, ClientError, NoRoute, SettingError
from orbitmq.names import AUTO_CREATE_TOPIC
from orbitmq.remoting.blocking import BlockingConnection
from orbitmq.remoting.settings import Address, RemotingError, parse_address
from orbitmq.remoting.tls import ClientTls
from orbitmq.wire.bodies import (
    HeartbeatData,
    TopicList,
    TopicRouteData,
)
from orbitmq.wire.codes import HeaderError, RequestCode, ResponseCode
from orbitmq.wire.command import Command, Credentials
from orbitmq.wire.headers import GetRouteInfoRequest, Header, HeartbeatResponse
from orbitmq.wire.javajson import decode_body, encode_body

__all__ = ["ClientTls", "Credentials"]  # re-exported for packages that may not import them directly


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeAccess:
    """Name servers, credentials and TLS settings of a cluster."""

    name_servers: tuple[str, ...]
    credentials: Credentials | None = field(default=None, repr=False)
    tls: ClientTls | None = None
    timeout: float = 3.0  #: seconds without a byte after which a request or answer is given up

    def settings(self, *, instance: str | None = None) -> ClientSettings:
        """The settings of an engine."""
        return ClientSettings(
            name_servers=self.name_servers,
            credentials=self.credentials,
            tls=None if self.tls is None else self.tls.context(),
            instance=instance,
            request_timeout=self.timeout,
            # The process of a planner must end quickly.
            stop_timeout=1.0,
        )


#: The filter that lets every message pass.
EVERYTHING: Final = "*"


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """The messages of a queue from `start` to `end` (exclusive)."""

    queue: Queue
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise SettingError(
                f"a range must start at 0 or later and end where it starts or later, got "
                f"{self.start} to {self.end} of {self.queue}"
            )

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.queue}[{self.start}, {self.end})"


@dataclass(frozen=True, slots=True)
class RangeFilter:
    """Which messages of a range the broker sends."""

    expression: str = EVERYTHING
    #: `TAG` or `SQL92`.
    kind: str = "TAG"

    @property
    def passes_all(self) -> bool:
        return self.kind == "TAG" and self.expression in ("", EVERYTHING)


class OffsetsGone(ClientError):
    """Requested messages are not at the broker any more, or not yet."""

    def __init__(self, wanted: QueueRange, low: int, high: int) -> None:
        self.wanted = wanted
        #: The broker has the offsets from `low` to `high` (exclusive).
        self.low = low
        self.high = high
        super().__init__(
            f"{wanted.queue} was asked for offsets {wanted.start} to {wanted.end} (exclusive) and "
            f"has {low} to {high}"
        )

    def __reduce__(self) -> tuple[type[OffsetsGone], tuple[QueueRange, int, int]]:
        return type(self), (self.wanted, self.low, self.high)


#: Seconds for which a route is used without asking again.
ROUTE_LIFE = 30.0


class Leased(NamedTuple):
    """A connection, and whether it leads to a master."""

    connection: BlockingConnection
    is_master: bool


class DedupWindow(NamedTuple):
    """For how long, and for how many messages of a topic, a broker remembers ids."""

    seconds: float
    messages: int


class RangeConnections:
    """Connections of a process to a cluster, lent to one reader at a time. For one thread.

    Routes are parsed by the client's `route_of`, but asked for here: a reader has no event loop,
    and a second thread would compete with the decoding one for the interpreter lock.
    """

    def __init__(self, access: RangeAccess, *, clock: Clock | None = None) -> None:
        from orbitmq.client.engine import ProcessCheck  # noqa: PLC0415  # options need no engine

        self.access = access
        self._monotonic = (clock or SystemClock()).monotonic
        self._check_process = ProcessCheck("a connection to a broker")
        self._idle: dict[Address, list[BlockingConnection]] = {}
        self._routes: dict[str, tuple[float, TopicRoute]] = {}
        #: Whether a name server has ever answered.
        self._is_reached = False

    def check_reachable(self, topic: str = AUTO_CREATE_TOPIC) -> None:
        """Check that a name server has ever answered. Raises `NoNameServer`."""
        self._check_process()
        if not self._is_reached:
            with suppress(NoRoute, BrokerRefused):
                self._ask_route(topic)

    def check_topic(self, topic: str) -> None:
        """Raises `NoRoute`, with the most similar topic, or `NoNameServer`."""
        from orbitmq.names import most_similar  # noqa: PLC0415  # readers need none

        self._check_process()
        try:
            self._route(topic)
        except NoRoute as missing:
            answer, _ = self._ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
            similar = None
            if answer.code == ResponseCode.SUCCESS:
                similar = most_similar(topic, decode_body(TopicList, answer.body).topic_list)
            raise NoRoute(topic, missing.name_servers, similar=similar) from None

    def dedup_windows(self, topic: str) -> dict[str, DedupWindow | None]:
        """The windows of the brokers of a topic; None: it does not de-duplicate.

        Brokers that do not answer are left out. Raises `NoRoute`, `NoNameServer`.
        """
        self._check_process()
        windows: dict[str, DedupWindow | None] = {}
        # A heartbeat without a group needs no rights, and leaves nothing at the broker.
        body = encode_body(HeartbeatData(client_id="orbitmq-ranges"))
        for broker, addresses in self._route(topic).brokers.items():
            if MASTER not in addresses:
                continue
            with suppress(RemotingError, HeaderError):
                connection = self._connection(addresses[MASTER])
                answer = connection.ask(RequestCode.HEART_BEAT, body=body)
                self.release(connection)
                told = answer.header(HeartbeatResponse).dedup_window
                seconds, _, messages = (told or "").partition(":")
                windows[broker] = DedupWindow(float(seconds), int(messages)) if told else None
        return windows

    def lease(self, queue: Queue, *, attempt: int = 0) -> Leased:
        """A connection to the broker of a queue: its master, or at every other attempt a replica.

        Raises `ConnectFailed`, `NoRoute`, `NoNameServer` or `BrokerUnavailable`.
        """
        self._check_process()
        addresses = self._route(queue.topic).brokers.get(queue.broker)
        if not addresses:
            self.forget(queue.topic)
            raise BrokerUnavailable(queue.broker, f"the route of {queue.topic!r} does not name it")
        numbers = _in_turn(addresses)
        number = numbers[attempt % len(numbers)]
        return Leased(self._connection(addresses[number]), number == MASTER)

    def release(self, connection: BlockingConnection) -> None:
        """Keep a connection for later, or close it when an answer is still on its way."""
        if connection.is_fresh:
            self._idle.setdefault(connection.address, []).append(connection)
        else:
            connection.close()

    def forget(self, topic: str) -> None:
        """Ask for the route again when it is next needed: a broker may have moved."""
        self._routes.pop(topic, None)

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _connection(self, address: Address) -> BlockingConnection:
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if connection.is_fresh:
                return connection
            connection.close()
        access = self.access
        connection = BlockingConnection(
            address, timeout=access.timeout, credentials=access.credentials
        )
        connection.connect(None if access.tls is None else access.tls.context(), access.timeout)
        return connection

    def _route(self, topic: str) -> TopicRoute:
        known = self._routes.get(topic)
        if known is not None and self._monotonic() - known[0] < ROUTE_LIFE:
            return known[1]
        route = route_of(topic, self._ask_route(topic))
        self._routes[topic] = self._monotonic(), route
        return route

    def _ask_route(self, topic: str) -> TopicRouteData:
        header = GetRouteInfoRequest(topic=topic, accept_standard_json_only=True)
        answer, address = self._ask_name_server(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        if answer.code == ResponseCode.SUCCESS:
            return decode_body(TopicRouteData, answer.body)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            raise NoRoute(topic, self.access.name_servers)
        raise refused_by(answer, address, RequestCode.GET_ROUTEINFO_BY_TOPIC)

    def _ask_name_server(
        self, code: RequestCode, header: Header | None = None
    ) -> tuple[Command, Address]:
        """The answer of the first name server that gives one. Raises `NoNameServer`."""
        failures: list[tuple[Address, str]] = []
        for text in self.access.name_servers:
            address = parse_address(text)
            try:
                connection = self._connection(address)
                answer = connection.ask(code, header)
            except RemotingError as error:
                failures.append((address, str(error)))
                continue
            self.release(connection)
            self._is_reached = True
            return answer, address
        raise NoNameServer(failures)


def _in_turn(addresses: Mapping[int, Address]) -> list[int]:
    """Broker ids in the order of attempts: the master before each replica.

    A message that a replica lacks can only be at the master.
    """
    replicas = sorted(addresses.keys() - {MASTER})
    if MASTER not in addresses:
        return replicas
    return [number for each in replicas for number in (MASTER, each)] or [MASTER]
