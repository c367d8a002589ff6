"""What tests of pulling share: a puller on a running engine, and a broker with a script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec

from orbitmq.client.consumer.dispatch import WindowReceiver
from orbitmq.client.consumer.progress import BrokerProgress, MemoryProgress, TrackedProgress
from orbitmq.client.consumer.pull import Puller
from orbitmq.client.consumer.settings import FlowSettings, PullSettings
from orbitmq.client.consumer.subscriptions import Subscription, Subscriptions
from orbitmq.client.consumer.window import HeldLock, OwnedQueue
from orbitmq.client.engine import Engine
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.message.stored import StoredMessage
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Dispatcher, Result
from orbitmq.remoting.server import Server
from orbitmq.wire.bodies import ConsumerData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import OffsetResponse, PullMessageRequest, PullMessageResponse
from orbitmq.wire.javajson import encode_body
from tests.support.client import consumer_data, topic_route

GROUP = "billing"
TOPIC = "orders"
#: Waits of a test, not of a user.
FAST = PullSettings(hold=1.0, timeout=5.0, error_delay=0.02, paused_delay=0.02, flow_delay=0.005)


class Taker:
    """Takes what a puller brings; finishes it at once, or leaves that to the test."""

    def __init__(self, *, finishes: bool = True) -> None:
        self.finishes = finishes
        self.messages: list[ReceivedMessage] = []
        self.progress: TrackedProgress | None = None

    def accept(self, owned: OwnedQueue, messages: list[ReceivedMessage]) -> None:
        self.messages += messages
        if self.finishes:
            self.finish(owned, [message.queue_offset for message in messages])

    def finish(self, owned: OwnedQueue, offsets: Iterable[int]) -> None:
        owned.window.finish(offsets)
        position = owned.window.commit_offset
        if self.progress is not None and position is not None:
            self.progress.update(owned.queue, position)

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        return True

    is_in_order = False

    def in_hand(self, owned: OwnedQueue) -> int:
        return 0

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    @property
    def offsets(self) -> list[int]:
        return [message.queue_offset for message in self.messages]


class Pulling:
    """A member of a group that pulls queues which the test gives it."""

    producer_group = None

    def __init__(
        self,
        engine: Engine,
        *,
        taker: Taker | None = None,
        settings: PullSettings = FAST,
        flow: FlowSettings | None = None,
        is_orderly: bool = False,
        reports_to_broker: bool = False,
        **puller: Any,
    ) -> None:
        self.engine = engine
        self.taker = taker or Taker()
        self.progress: TrackedProgress = (
            BrokerProgress(engine, GROUP) if reports_to_broker else MemoryProgress()
        )
        self.taker.progress = self.progress
        self.subscriptions = Subscriptions(engine.clock.now)
        self.rebuilt: list[OwnedQueue] = []
        receiver = WindowReceiver(
            self.progress, self.taker, flow=flow, is_orderly=is_orderly, group=GROUP
        )
        self.puller = Puller(
            engine,
            GROUP,
            self.subscriptions,
            self.progress,
            receiver,
            settings,
            rebuild=self.rebuilt.append,
            **puller,
        )

    def consumer_data(self) -> ConsumerData:
        told = self.subscriptions.to_data()
        return msgspec.structs.replace(consumer_data(GROUP), subscription_data_set=told)

    async def subscribe(self, subscription: Subscription) -> None:
        self.subscriptions.put(subscription)
        self.engine.routes.track(subscription.topic)
        await self.engine.routes.get(subscription.topic)
        await self.engine.heartbeat()

    def own(self, queue: Queue, offset: int = 0, *, lock: HeldLock | None = None) -> OwnedQueue:
        owned = OwnedQueue(queue, offset, now=self.engine.clock.monotonic(), lock=lock)
        self.puller.begin(owned)
        return owned


@asynccontextmanager
async def pulling(
    name_server: str, subscription: Subscription | None = None, **kinds: Any
) -> AsyncIterator[Pulling]:
    """A puller on an engine of its own, subscribed to a topic."""
    settings = ClientSettings(
        name_servers=(name_server,),
        credentials=kinds.pop("credentials", None),
        request_timeout=10.0,
        stop_timeout=1.0,
    )
    async with Engine(settings) as engine:
        member = Pulling(engine, **kinds)
        engine.join(member)
        await member.subscribe(subscription or Subscription.by_tags(TOPIC))
        try:
            yield member
        finally:
            member.puller.stop()


#: Gives the answer to a pull, or None to hold it for ever.
Script = Callable[[PullMessageRequest], "Found | Command | int | None"]


class Found:
    """The answer to a pull that is served."""

    def __init__(
        self,
        next_offset: int,
        body: bytes = b"",
        *,
        code: int = ResponseCode.SUCCESS,
        suggested: int = 0,
        min_offset: int = 0,
        max_offset: int = 1000,
        remark: str | None = None,
        **fields: Any,
    ) -> None:
        self.code = code
        self.body = body
        self.remark = remark
        self.header = PullMessageResponse(
            suggest_which_broker_id=suggested,
            next_begin_offset=next_offset,
            min_offset=min_offset,
            max_offset=max_offset,
            **fields,
        )


class ScriptedBroker:
    """A name server and a broker in one, whose answers to pulls the test writes."""

    def __init__(self, script: Script, *, queues: int = 4, slave: Script | None = None) -> None:
        self.script = script
        self.slave_script = slave
        self.queues = queues
        self.pulls: list[PullMessageRequest] = []
        self.slave_pulls: list[PullMessageRequest] = []
        self._held: list[tuple[Connection, Command]] = []
        self.heartbeats = 0
        self._server = Server(Dispatcher(self._handlers(self._pull)))
        self._slave = Server(Dispatcher(self._handlers(self._pull_slave)))

    async def __aenter__(self) -> Self:
        await self._server.start()
        await self._slave.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace=0)
        await self._slave.stop(grace=0)

    @property
    def name_server(self) -> str:
        return str(self._server.address)

    def _handlers(
        self, pull: Callable[[Connection, Command], Result]
    ) -> Mapping[int, Callable[[Connection, Command], Result]]:
        return {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.HEART_BEAT: self._heartbeat,
            RequestCode.UNREGISTER_CLIENT: _yes,
            RequestCode.QUERY_CONSUMER_OFFSET: _no_progress,
            RequestCode.UPDATE_CONSUMER_OFFSET: _yes,
            RequestCode.GET_MIN_OFFSET: _zero,
            RequestCode.PULL_MESSAGE: pull,
            RequestCode.LITE_PULL_MESSAGE: pull,
        }

    def _route(self, _: Connection, request: Command) -> Command:
        addresses = {0: self._server.address}
        if self.slave_script is not None:
            addresses[1] = self._slave.address
        route = topic_route({"broker-a": addresses}, queues=self.queues)
        return request.answer(0, body=encode_body(route))

    def _heartbeat(self, _: Connection, request: Command) -> Command:
        self.heartbeats += 1
        return request.answer(0)

    def answer_held(self, answer: Found) -> None:
        """Answer the pulls that the script held."""
        held, self._held = self._held, []
        for connection, request in held:
            connection.reply(request, _answered(request, answer))

    def _pull(self, connection: Connection, request: Command) -> Result:
        pull = request.header(PullMessageRequest)
        self.pulls.append(pull)
        answer = _answer(request, self.script(pull))
        if answer is LATER:
            self._held.append((connection, request))
        return answer

    def _pull_slave(self, _: Connection, request: Command) -> Result:
        assert self.slave_script is not None
        pull = request.header(PullMessageRequest)
        self.slave_pulls.append(pull)
        return _answer(request, self.slave_script(pull))


def _answered(request: Command, found: Found) -> Command:
    return request.answer(found.code, found.header, remark=found.remark, body=found.body)


def _yes(_: Connection, request: Command) -> Command:
    return request.answer(ResponseCode.SUCCESS)


def _no_progress(_: Connection, request: Command) -> Command:
    return request.answer(ResponseCode.QUERY_NOT_FOUND)


def _zero(_: Connection, request: Command) -> Command:
    return request.answer(ResponseCode.SUCCESS, OffsetResponse(offset=0))


@asynccontextmanager
async def scripted(
    script: Script,
    subscription: Subscription | None = None,
    *,
    slave: Script | None = None,
    **kinds: Any,
) -> AsyncIterator[tuple[ScriptedBroker, Pulling]]:
    """A scripted broker, and a puller that knows it."""
    async with (
        ScriptedBroker(script, slave=slave) as broker,
        pulling(broker.name_server, subscription, **kinds) as member,
    ):
        yield broker, member


def _answer(request: Command, wanted: Found | Command | int | None) -> Result:
    if wanted is None:
        return LATER
    if isinstance(wanted, Found):
        return _answered(request, wanted)
    if isinstance(wanted, int):
        return request.answer(wanted, remark="the test says so")
    return wanted


def record(offset: int, body: bytes = b"hello", **fields: Any) -> bytes:
    """One stored message."""
    return StoredMessage.build(
        topic=TOPIC, stored_body=body, queue_offset=offset, **fields
    ).encode()


def records(*offsets: int) -> bytes:
    return b"".join(record(offset) for offset in offsets)
