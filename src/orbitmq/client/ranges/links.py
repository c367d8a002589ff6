"""How a cluster is reached, as a value that travels: a driver makes it, its workers use it."""

from __future__ import annotations

import itertools
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from orbitmq.client.consumer.pull import Subscription, Subscriptions
from orbitmq.client.engine import NOT_MINE, Engine, MemberHandler, NotMine, ProcessCheck
from orbitmq.client.errors import BrokerUnavailable, NoNameServer, refused_by
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.clock import Clock, SystemClock, milliseconds
from orbitmq.errors import BrokerRefused, ClientError, NoRoute, SettingError
from orbitmq.names import AUTO_CREATE_TOPIC
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import (
    Address,
    ConnectFailed,
    ConnectionLost,
    RemotingError,
    RequestTimedOut,
    parse_address,
)
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
from orbitmq.wire.codes import DEFAULT_LIMITS, FrameError, RequestCode, ResponseCode, WireLimits
from orbitmq.wire.command import Command, Credentials, decode_command, encode_command, sign
from orbitmq.wire.frame import PREFIX_SIZE, Frame, other_protocol
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


# A connection for a thread that has nothing else to do than to wait for answers.
#
# A worker of Spark decodes what it pulls in the thread that pulls it. An event loop in a second
# thread would have to wait for the interpreter lock after every read while the first one decodes;
# reading in place costs no hand-over, and what the broker sends meanwhile waits in the socket. So
# this connection blocks: it sends requests ahead, and reads answers when the caller wants one.


#: Small answers are cut out of this buffer, large ones are read past it.
_BUFFER: Final = 64 * 1024
#: Received when an answer begins that is likely to be a large one: most of it is not to be moved.
_BEGINNING: Final = 512
_unpack_prefix = struct.Struct(">iI").unpack
_HEADER_LENGTH: Final = 0xFFFFFF

#: Gives memory for a body of this size.
Room: TypeAlias = Callable[[int], memoryview]


class RangeConnection:
    """One blocking connection. Answers may come in another order than the requests went."""

    def __init__(self, address: Address, access: RangeAccess) -> None:
        """Raises `ConnectFailed`, also for a failed handshake."""
        self.address = address
        self._credentials = access.credentials
        self._timeout = access.timeout
        self._limits: WireLimits = DEFAULT_LIMITS
        self._opaques = itertools.count(1)
        #: Requests that were sent and not answered.
        self.unanswered = 0
        self.is_open = True
        self._socket = _connected(address, access)
        self._input = _Input(self._socket)

    def ask(self, code: int, header: Header | None = None) -> Command:
        """Ask and wait for the answer, with nothing else on its way."""
        opaque = self.next_opaque()
        request = Command.request(code, header, opaque=opaque)
        if self._credentials is not None:
            request = sign(request, self._credentials)
        self.send(encode_command(request, limits=self._limits), 1)
        while (answer := self.receive()).opaque != opaque:
            pass
        return answer

    def next_opaque(self) -> int:
        """A number for a request that is made elsewhere."""
        return next(self._opaques) & 0x7FFFFFFF

    def send(self, encoded: bytes, count: int) -> None:
        """Send so many encoded requests at once. Raises `ConnectionLost`."""
        self._check_open()
        self.unanswered += count
        try:
            self._socket.sendall(encoded)
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error

    def receive(self, room: Room | None = None) -> Command:
        """The next answer, with its body in memory of its own, or where `room` says.

        Raises `ConnectionLost`, or `RequestTimedOut` when nothing comes.
        """
        self._check_open()
        while True:
            try:
                command = decode_command(self._frame(room), self._limits)
            except TimeoutError as error:
                self.close()
                raise RequestTimedOut(self.address, 0, self._timeout) from error
            except (OSError, ValueError) as error:
                raise self._lost(str(error)) from error
            except FrameError as error:
                raise self._lost(f"it sent bytes that are no answer: {error}") from error
            if command.is_response:
                self.unanswered -= 1
                return command

    @property
    def is_fresh(self) -> bool:
        """Whether it can be used for something new: open, with nothing on its way.

        A socket that can be read though nothing was asked has been closed by the other side.
        """
        if not self.is_open or self.unanswered:
            return False
        readable, _, _ = select.select([self._socket], [], [], 0)
        return not readable

    def close(self) -> None:
        """Close it; what is on its way is lost."""
        self.is_open = False
        self._socket.close()

    def _frame(self, room: Room | None) -> Frame:
        total, mark = _unpack_prefix(self._exactly(PREFIX_SIZE))
        header_size = mark & _HEADER_LENGTH
        limits = self._limits
        if not 4 + header_size <= total <= limits.frame or header_size > limits.header:
            raise FrameError(
                other_protocol(total) or f"a frame of {total} bytes with a header of {header_size}"
            )
        header = self._exactly(header_size)
        size = total - 4 - header_size
        if not size or (room is None and size <= _BUFFER):
            return Frame(mark >> 24, header, self._exactly(size))
        body = memoryview(bytearray(size)) if room is None else room(size)
        if not self._input.read_into(body):
            raise self._lost("closed by the peer")
        return Frame(mark >> 24, header, body)

    def _exactly(self, size: int) -> bytes:
        data = self._input.read(size)
        if data is None:
            raise self._lost("closed by the peer")
        return data

    def _check_open(self) -> None:
        if not self.is_open:
            raise ConnectionLost(self.address, "closed here")

    def _lost(self, reason: str) -> ConnectionLost:
        self.close()
        return ConnectionLost(self.address, reason)


class _Input:
    """What comes from a socket, in pieces of the sizes that are asked for.

    A large piece is received where it will stay. (A buffered file would do the same by way of
    memory that is new for each piece, which costs more than all the rest.)
    """

    __slots__ = ("_ahead", "_at", "_buffer", "_end", "_socket", "_view")

    def __init__(self, source: socket.socket) -> None:
        self._socket = source
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        #: What was received and not read yet lies between these.
        self._at = self._end = 0
        #: How much is received at most beyond what is asked for.
        self._ahead = _BUFFER

    def read(self, size: int) -> bytes | None:
        """The next `size` bytes, no more than the buffer has; None if the other side has ended."""
        if self._end - self._at < size and not self._fill(size):
            return None
        at, self._at = self._at, self._at + size
        return bytes(self._view[at : self._at])

    def read_into(self, view: memoryview) -> bool:
        """Fill `view` with what comes next; false if the other side has ended before."""
        size = len(view)
        got = min(self._end - self._at, size)
        view[:got] = self._view[self._at : self._at + got]
        self._at += got
        self._ahead = _BEGINNING if size > _BUFFER else _BUFFER
        while got < size:
            came = self._socket.recv_into(view[got:])
            if not came:
                return False
            got += came
        return True

    def _fill(self, size: int) -> bool:
        """Receive until so much is there."""
        rest = self._end - self._at
        self._buffer[:rest] = self._buffer[self._at : self._end]
        self._at, self._end = 0, rest
        most = max(size, self._ahead)
        while self._end < size:
            came = self._socket.recv_into(self._view[self._end : most])
            if not came:
                return False
            self._end += came
        return True


def _connected(address: Address, access: RangeAccess) -> socket.socket:
    try:
        plain = socket.create_connection(address, timeout=access.timeout)
    except OSError as error:
        raise ConnectFailed(address, error.strerror or str(error)) from error
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if access.tls is None:
            return plain
        return access.tls.context().wrap_socket(plain, server_hostname=address.host)
    except (OSError, ssl.SSLError) as error:
        plain.close()
        raise ConnectFailed(address, error.strerror or str(error)) from error
    except BaseException:
        plain.close()
        raise
