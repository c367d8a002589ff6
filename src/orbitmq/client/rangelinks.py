"""The connections of one process to one cluster, kept for whoever reads next."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from orbitmq.client.errors import BrokerRefused, BrokerUnavailable, NoNameServer, NoRoute
from orbitmq.client.identity import ProcessCheck
from orbitmq.client.names import AUTO_CREATE_TOPIC
from orbitmq.client.queue import Queue
from orbitmq.client.rangeaccess import RangeAccess
from orbitmq.client.rangeconnection import RangeConnection
from orbitmq.clock import Clock, SystemClock
from orbitmq.remoting.address import Address, parse_address
from orbitmq.remoting.errors import RemotingError
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.route import TopicList, TopicRouteData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.namesrv import GetRouteInfoRequest

if TYPE_CHECKING:
    from orbitmq.wire.command import Command
    from orbitmq.wire.headers.base import Header

#: How long a route is believed without asking again, in seconds.
ROUTE_LIFE = 30.0
#: The id of the broker of a name that takes messages; the others have copies of what it took.
_MASTER: Final = 0


class Server(NamedTuple):
    """One of the processes that have the queues of a broker."""

    address: Address
    is_master: bool


class Lent(NamedTuple):
    """A connection, and whether it leads to a master."""

    connection: RangeConnection
    is_master: bool


class RangeLinks:
    """Lends connections, and knows where brokers are. For one thread at a time."""

    def __init__(self, access: RangeAccess, *, clock: Clock | None = None) -> None:
        self.access = access
        self._monotonic = (clock or SystemClock()).monotonic
        self._check_process = ProcessCheck("a connection to a broker")
        self._idle: dict[Address, list[RangeConnection]] = {}
        self._routes: dict[str, tuple[float, Mapping[str, tuple[Server, ...]]]] = {}
        #: Whether a name server has ever answered.
        self._is_reached = False

    def reach(self, topic: str = AUTO_CREATE_TOPIC) -> None:
        """Find out whether a name server answers, whatever it says. Raises `NoNameServer`.

        Once one has, nothing is asked: it may go away then, and those who work go on without it.
        """
        self._check_process()
        if not self._is_reached:
            with suppress(NoRoute, BrokerRefused):
                self._asked_route(topic)

    def check_topic(self, topic: str) -> None:
        """Raises `NoRoute`, with the topic that was perhaps meant, or `NoNameServer`."""
        from orbitmq.client.similartopics import most_similar  # noqa: PLC0415  # readers need none

        self._check_process()
        try:
            self._route(topic)
        except NoRoute as missing:
            answer, _ = self._ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
            similar = None
            if answer.code == ResponseCode.SUCCESS:
                similar = most_similar(topic, decode_body(TopicList, answer.body).topic_list)
            raise NoRoute(topic, missing.name_servers, similar=similar) from None

    def borrow(self, queue: Queue, *, attempt: int = 0) -> Lent:
        """A connection to the broker of a queue: its master, or at every other attempt a replica.

        Raises `ConnectFailed`, `NoRoute`, `NoNameServer` or `BrokerUnavailable`.
        """
        self._check_process()
        servers = self._route(queue.topic).get(queue.broker)
        if not servers:
            self.forget(queue.topic)
            raise BrokerUnavailable(queue.broker, f"the route of {queue.topic!r} does not name it")
        server = servers[attempt % len(servers)]
        return Lent(self._connection(server.address), server.is_master)

    def give_back(self, connection: RangeConnection) -> None:
        """Keep a connection for later, unless something is still on its way on it."""
        if connection.is_fresh:
            self._idle.setdefault(connection.address, []).append(connection)
        else:
            connection.close()

    def forget(self, topic: str) -> None:
        """Ask for the route anew when it is next needed: a broker may have moved."""
        self._routes.pop(topic, None)

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _connection(self, address: Address) -> RangeConnection:
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if connection.is_fresh:
                return connection
            connection.close()
        return RangeConnection(address, self.access)

    def _route(self, topic: str) -> Mapping[str, tuple[Server, ...]]:
        """The servers of every broker of a topic, in the order in which they are tried."""
        known = self._routes.get(topic)
        if known is not None and self._monotonic() - known[0] < ROUTE_LIFE:
            return known[1]
        route = self._asked_route(topic)
        brokers = {data.broker_name: _in_turn(data.broker_addrs) for data in route.broker_datas}
        self._routes[topic] = self._monotonic(), brokers
        return brokers

    def _asked_route(self, topic: str) -> TopicRouteData:
        header = GetRouteInfoRequest(topic=topic, accept_standard_json_only=True)
        answer, address = self._ask_name_server(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        if answer.code == ResponseCode.SUCCESS:
            return decode_body(TopicRouteData, answer.body)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            raise NoRoute(topic, self.access.name_servers)
        raise BrokerRefused(answer.code, answer.remark, address, RequestCode.GET_ROUTEINFO_BY_TOPIC)

    def _ask_name_server(
        self, code: RequestCode, header: Header | None = None
    ) -> tuple[Command, Address]:
        """What the first one says that answers, and which it is. Raises `NoNameServer`."""
        failures: list[tuple[Address, str]] = []
        for text in self.access.name_servers:
            address = parse_address(text)
            try:
                connection = self._connection(address)
                answer = connection.ask(code, header)
            except RemotingError as error:
                failures.append((address, str(error)))
                continue
            self.give_back(connection)
            self._is_reached = True
            return answer, address
        raise NoNameServer(failures)


def _in_turn(addresses: Mapping[int, str]) -> tuple[Server, ...]:
    """The master before each of its replicas: what one of those lacks, only the master may have."""
    servers = [
        Server(parse_address(addresses[number]), number == _MASTER) for number in sorted(addresses)
    ]
    master = [each for each in servers if each.is_master]
    replicas = [each for each in servers if not each.is_master]
    return tuple(server for each in replicas for server in (*master, each)) or tuple(master)
