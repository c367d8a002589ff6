"""How a cluster is reached, as a value that travels: a driver makes it, its workers use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from orbitmq.client.consumer.pull import Subscription, Subscriptions
from orbitmq.client.engine import NOT_MINE, Engine, MemberHandler, NotMine, ProcessCheck
from orbitmq.client.errors import BrokerUnavailable, NoNameServer, refused_by
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.clock import Clock, SystemClock, milliseconds
from orbitmq.errors import BrokerRefused, ClientError, NoRoute, SettingError
from orbitmq.names import AUTO_CREATE_TOPIC
from orbitmq.remoting.blocking import BlockingConnection
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import Address, RemotingError, parse_address
from orbitmq.remoting.tls import ClientTls
from orbitmq.wire.bodies import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumerRunningInfo,
    ConsumeType,
    MessageModel,
    MessageQueue,
    ProcessQueueInfo,
    TopicList,
    TopicRouteData,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command, Credentials
from orbitmq.wire.headers import GetConsumerRunningInfoRequest, GetRouteInfoRequest, Header
from orbitmq.wire.javajson import decode_body, encode_body

__all__ = ["ClientTls", "Credentials"]  # offered to packages that may not import them themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeAccess:
    """The name servers of a cluster, and what it asks of its clients. Equal ones share sockets."""

    name_servers: tuple[str, ...]
    credentials: Credentials | None = field(default=None, repr=False)
    tls: ClientTls | None = None
    timeout: float = 3.0  #: seconds without a byte after which a request or answer is given up

    def settings(self, *, instance: str | None = None) -> ClientSettings:
        """The same for an engine."""
        return ClientSettings(
            name_servers=self.name_servers,
            credentials=self.credentials,
            tls=None if self.tls is None else self.tls.context(),
            instance=instance,
            request_timeout=self.timeout,
            # Whoever ends the process of a planner does not wait longer.
            stop_timeout=1.0,
        )


# Stretches of a queue, and what is said when one is not there.


#: The filter that lets every message pass.
EVERYTHING: Final = "*"


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """The messages of a queue from `start` up to, and without, `end`."""

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
    """Which messages of a range are wanted; the broker leaves the others out."""

    expression: str = EVERYTHING
    #: `TAG` or `SQL92`.
    kind: str = "TAG"

    @property
    def passes_all(self) -> bool:
        return self.kind == "TAG" and self.expression in ("", EVERYTHING)


class OffsetsGone(ClientError):
    """Messages that are wanted are not at the broker any more, or not yet."""

    def __init__(self, wanted: QueueRange, low: int, high: int) -> None:
        self.wanted = wanted
        #: What the broker has: from `low` up to, and without, `high`.
        self.low = low
        self.high = high
        super().__init__(
            f"{wanted.queue} was asked for offsets {wanted.start} to {wanted.end} (exclusive) and "
            f"has {low} to {high}"
        )

    def __reduce__(self) -> tuple[type[OffsetsGone], tuple[QueueRange, int, int]]:
        return type(self), (self.wanted, self.low, self.high)


# The connections of one process to one cluster, kept for whoever reads next.


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

    connection: BlockingConnection
    is_master: bool


class RangeLinks:
    """Lends connections, and knows where brokers are. For one thread at a time."""

    def __init__(self, access: RangeAccess, *, clock: Clock | None = None) -> None:
        self.access = access
        self._monotonic = (clock or SystemClock()).monotonic
        self._check_process = ProcessCheck("a connection to a broker")
        self._idle: dict[Address, list[BlockingConnection]] = {}
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

    def give_back(self, connection: BlockingConnection) -> None:
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
        raise refused_by(answer, address, RequestCode.GET_ROUTEINFO_BY_TOPIC)

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


# A reader of ranges as a member of its group: seen by brokers and by the people who watch them.


class RangeMember:
    """Says in heartbeats what the group wants, and when asked, where it stands."""

    producer_group: str | None = None

    def __init__(self, engine: Engine, group: str) -> None:
        self._engine = engine
        self._group = group
        self._subscriptions = Subscriptions(engine.clock.now)
        self._started = engine.clock.now()
        #: Where the group stands.
        self.positions: dict[Queue, int] = {}
        handlers: dict[RequestCode, MemberHandler] = {
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._tell_state,
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._ignore,
        }
        for code, handler in handlers.items():
            engine.serve(code, handler)

    def subscribe(self, topics: Iterable[str], wanted: RangeFilter) -> None:
        """Want these topics, and no others any more; brokers are told of them in this order."""
        topics = dict.fromkeys(topics)
        for topic in self._subscriptions.topics:
            if topic not in topics:
                self._subscriptions.remove(topic)
        for topic in topics:
            if topic in self._subscriptions:
                continue
            if wanted.kind == "TAG":
                self._subscriptions.put(Subscription.by_tags(topic, wanted.expression))
            else:
                self._subscriptions.put(Subscription.by_sql(topic, wanted.expression))

    def consumer_data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self._group,
            consume_type=ConsumeType.CONSUME_ACTIVELY,
            message_model=MessageModel.CLUSTERING,
            consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
            subscription_data_set=self._subscriptions.to_data(),
        )

    def _tell_state(self, _connection: Connection, request: Command) -> Command | NotMine:
        header = request.header(GetConsumerRunningInfoRequest)
        if header.consumer_group != self._group:
            return NOT_MINE
        info = ConsumerRunningInfo(
            properties={
                "PROP_CONSUME_TYPE": ConsumeType.CONSUME_ACTIVELY.value,
                "PROP_CONSUMER_START_TIMESTAMP": str(milliseconds(self._started)),
                "PROP_CLIENT_VERSION": "orbitmq-spark",
            },
            subscription_set=self._subscriptions.to_data(),
            mq_table={
                MessageQueue(
                    topic=queue.topic, broker_name=queue.broker, queue_id=queue.id
                ): ProcessQueueInfo(commit_offset=offset)
                for queue, offset in self.positions.items()
            },
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(info))

    def _ignore(self, _connection: Connection, _request: Command) -> None:
        """Who else is in the group changes nothing: all queues are read here."""
