"""Engines, members and scripted servers for tests of the client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from orbitmq.client.engine import Engine
from orbitmq.client.settings import ClientSettings, resolve
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher, Handler
from orbitmq.remoting.server import Server
from orbitmq.remoting.settings import Address, ChannelSettings, ServerSettings
from orbitmq.wire import bodies
from orbitmq.wire.codes import OUR_VERSION, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import GetRouteInfoRequest, UnregisterClientRequest
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.remoting import serving

#: Reconnects within milliseconds, so that a restart is seen soon.
QUICK_CHANNELS = ChannelSettings(first_pause=0.02, longest_pause=0.1, settled=0.0)


def quick_settings(name_server: str | Iterable[str], **changes: Any) -> ClientSettings:
    """Settings of a client that looks and says hello often."""
    quick: dict[str, Any] = {"channel": QUICK_CHANNELS, "client_ip": "127.0.0.1"}
    servers = name_server if isinstance(name_server, str) else tuple(name_server)
    return resolve(servers, ClientSettings(**(quick | changes)))


@contextlib.asynccontextmanager
async def running_engine(
    name_server: str | Iterable[str], *, stable: bool = False, **changes: Any
) -> AsyncIterator[Engine]:
    """An engine for the time of the block; `changes` are settings."""
    async with Engine(quick_settings(name_server, **changes), stable=stable) as engine:
        yield engine


def consumer_data(group: str, *topics: str) -> bodies.ConsumerData:
    """What brokers are told of a consumer that wants everything."""
    return bodies.ConsumerData(
        group_name=group,
        consume_type=bodies.ConsumeType.CONSUME_PASSIVELY,
        message_model=bodies.MessageModel.CLUSTERING,
        consume_from_where=bodies.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
        subscription_data_set=tuple(
            bodies.SubscriptionData(topic=topic, sub_string="*") for topic in topics
        ),
    )


@dataclass(eq=False)
class MemberStub:
    """A member of a client that only says who it is."""

    producer_group: str | None = None
    consumer: bodies.ConsumerData | None = None

    def consumer_data(self) -> bodies.ConsumerData | None:
        return self.consumer


def topic_route(
    brokers: Mapping[str, Mapping[int, Address]],
    *,
    queues: int = 4,
    perm: int = 6,
    order: str | None = None,
) -> bodies.TopicRouteData:
    """The route of a topic with as many queues on each of these brokers."""
    return bodies.TopicRouteData(
        broker_datas=tuple(
            bodies.BrokerData(
                broker_name=name,
                cluster="DefaultCluster",
                broker_addrs={number: str(address) for number, address in addresses.items()},
            )
            for name, addresses in brokers.items()
        ),
        queue_datas=tuple(
            bodies.QueueData(
                broker_name=name, perm=perm, read_queue_nums=queues, write_queue_nums=queues
            )
            for name in brokers
        ),
        order_topic_conf=order,
    )


@dataclass
class ScriptedNameServer:
    """A name server that answers what a test lays out: a route, raw bytes, or a refusal."""

    routes: dict[str, bodies.TopicRouteData | bytes] = field(default_factory=dict)
    #: Answers this instead of looking, while it is set.
    refusal: ResponseCode | None = None
    requests: list[GetRouteInfoRequest] = field(default_factory=list)
    server: Server | None = None

    @property
    def address(self) -> str:
        assert self.server is not None
        return str(self.server.address)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedNameServer]:
        async with serving({RequestCode.GET_ROUTEINFO_BY_TOPIC: self.answer_route}) as self.server:
            yield self

    def asked(self, topic: str) -> int:
        """How often a topic's route was asked for."""
        return sum(request.topic == topic for request in self.requests)

    def answer_route(self, _: Connection, request: Command) -> Command:
        wanted = request.header(GetRouteInfoRequest)
        self.requests.append(wanted)
        if self.refusal is not None:
            return request.answer(self.refusal, remark="not now")
        route = self.routes.get(wanted.topic)
        if route is None:
            return request.answer(ResponseCode.TOPIC_NOT_EXIST, remark="no such topic")
        body = route if isinstance(route, bytes) else encode_body(route)
        return request.answer(ResponseCode.SUCCESS, body=body)


@dataclass
class ScriptedBroker:
    """A broker that writes down who is there, in the order in which it hears of it."""

    handlers: dict[int, Handler] = field(default_factory=dict)
    #: The request codes of each connection, in the order of their arrival.
    arrivals: list[list[int]] = field(default_factory=list)
    heartbeats: list[bodies.HeartbeatData] = field(default_factory=list)
    leavings: list[UnregisterClientRequest] = field(default_factory=list)
    #: Heartbeats are not answered while this is set.
    is_mute: bool = False
    #: The protocol version that it says it has.
    version: int = OUR_VERSION
    server: Server | None = None

    @property
    def address(self) -> Address:
        assert self.server is not None
        return self.server.address

    @property
    def connections(self) -> list[Connection]:
        assert self.server is not None
        return list(self.server.connections)

    @contextlib.asynccontextmanager
    async def serving(
        self, settings: ServerSettings | None = None
    ) -> AsyncIterator[ScriptedBroker]:
        self._dispatcher = Dispatcher(
            {
                RequestCode.HEART_BEAT: self._heartbeat,
                RequestCode.UNREGISTER_CLIENT: self._leaving,
                **self.handlers,
            },
            before=self._note,
            opened=self._opened,
        )
        async with contextlib.AsyncExitStack() as self._stack:
            self.server = await self._stack.enter_async_context(serving(self._dispatcher, settings))
            yield self

    @contextlib.asynccontextmanager
    async def refusing(self) -> AsyncIterator[None]:
        """Refuse connections for the time of the block; later ones are served at the same port."""
        server = self.server
        assert server is not None
        await server.stop(grace=0)
        yield
        again = serving(self._dispatcher, ServerSettings(port=server.address.port))
        self.server = await self._stack.enter_async_context(again)

    def _opened(self, connection: Connection) -> None:
        codes: list[int] = []
        connection.context = codes
        self.arrivals.append(codes)

    def _note(self, connection: Connection, request: Command) -> None:
        connection.context.append(request.code)

    def _heartbeat(self, _: Connection, request: Command) -> Command | None:
        self.heartbeats.append(decode_body(bodies.HeartbeatData, bytes(request.body)))
        answer = request.answer(ResponseCode.SUCCESS)
        return None if self.is_mute else msgspec.structs.replace(answer, version=self.version)

    def _leaving(self, _: Connection, request: Command) -> Command:
        self.leavings.append(request.header(UnregisterClientRequest))
        return request.answer(ResponseCode.SUCCESS)
