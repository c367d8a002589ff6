"""A group of consumers in one process, each with an engine of its own, and a ledger.

Everything is real but the handlers: brokers, sockets, pulls, progress and the rebalancer. The
ledger sees the moment in which a member begins a queue, and whether another one still holds it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from orbitmq.broker.broker import Broker
from orbitmq.client.consumer.dispatch import WindowReceiver
from orbitmq.client.consumer.locks import LockSettings, QueueLocks
from orbitmq.client.consumer.members import CLAIMS, LEAVING, queues_text
from orbitmq.client.consumer.progress import BrokerProgress, ProgressStore, wire_name
from orbitmq.client.consumer.pull import Puller
from orbitmq.client.consumer.rebalance import Rebalancer
from orbitmq.client.consumer.settings import PullSettings, RebalanceSettings
from orbitmq.client.consumer.strategies import Averagely, share
from orbitmq.client.consumer.subscriptions import Subscription, Subscriptions
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.engine import Engine
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.parsing import Position
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.dispatch import Handler as ServerHandler
from orbitmq.wire import bodies
from orbitmq.wire.codes import Language, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import GetMaxOffsetRequest
from orbitmq.wire.javajson import encode_body
from tests.support.broker import RawClient
from tests.support.client import quick_settings

GROUP = "billing"
TOPIC = "orders"
#: Waits of a test are short; rounds are not: what a test sees within seconds came from news.
QUICK = RebalanceSettings(interval=60.0, retry=0.2, persist=60.0, return_grace=1.0)
PULLS = PullSettings(hold=1.0, timeout=5.0, error_delay=0.05, flow_delay=0.01)

Handler = Callable[["Consumer", ReceivedMessage], Awaitable[None]]


@dataclass
class Begun:
    """A member began a queue."""

    queue: Queue
    client_id: str
    offset: int
    at: float
    #: How many messages of the queue had been consumed by then.
    done: int


@dataclass
class Ledger:
    """What the members of a group did."""

    members: list[Consumer] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    #: How often the handler finished each message.
    consumed: Counter[tuple[Queue, int]] = field(default_factory=Counter)
    #: Messages that a handler has in hand: no message may be in two.
    running: Counter[tuple[Queue, int]] = field(default_factory=Counter)
    overlaps: list[str] = field(default_factory=list)
    times: dict[Queue, list[float]] = field(default_factory=dict)

    def begins(self, consumer: Consumer, owned: OwnedQueue) -> None:
        others = tuple(
            other.client_id
            for other in self.members
            if other is not consumer and other.is_holding(owned.queue)
        )
        if others:
            self.overlaps.append(f"{consumer.client_id} began {owned.queue}, held by {others}")
        self.begun.append(
            Begun(
                owned.queue,
                consumer.client_id,
                owned.next_offset,
                asyncio.get_running_loop().time(),
                sum(queue == owned.queue for queue, _ in self.consumed),
            )
        )

    def takes(self, message: ReceivedMessage) -> None:
        where = (message.queue, message.queue_offset)
        self.running[where] += 1
        if self.running[where] > 1:
            self.overlaps.append(f"{where} is in two hands")

    def ends(self, message: ReceivedMessage, *, is_finished: bool) -> None:
        where = (message.queue, message.queue_offset)
        self.running[where] -= 1
        if is_finished:
            self.consumed[where] += 1
            now = asyncio.get_running_loop().time()
            self.times.setdefault(message.queue, []).append(now)

    @property
    def duplicates(self) -> dict[tuple[Queue, int], int]:
        return {where: times for where, times in self.consumed.items() if times > 1}

    def owners(self) -> dict[Queue, list[str]]:
        """The owners of each queue now."""
        held: dict[Queue, list[str]] = {}
        for member in self.members:
            if member.is_alive:
                for queue in member.rebalancer.owned:
                    held.setdefault(queue, []).append(member.client_id)
        return held

    def is_settled(self, queues: Iterable[Queue]) -> bool:
        """Whether all members have exactly their shares, and nothing is on its way."""
        living = [member for member in self.members if member.is_alive]
        ids = [member.client_id for member in living]
        return all(
            member.owned == set(share(Averagely(), queues, ids, member.client_id))
            and not member.rebalancer.claimed
            and not any(owned.is_draining for owned in member.rebalancer.owned.values())
            for member in living
        )


class _WatchedPuller(Puller):
    """Tells the ledger when a queue is begun."""

    ledger: Ledger
    consumer: Consumer

    def begin(self, owned: OwnedQueue) -> None:
        self.ledger.begins(self.consumer, owned)
        super().begin(owned)


class Consumer:
    """A member of the group; its handler calls are tasks."""

    producer_group = None
    is_in_order = False

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        *,
        topics: Iterable[str] = (TOPIC,),
        handler: Handler | None = None,
        progress: ProgressStore | None = None,
        settings: RebalanceSettings = QUICK,
        consume_from: Position = Position.FIRST,
        is_orderly: bool = False,
        is_broadcasting: bool = False,
        pulls_report: bool = True,
        locks: LockSettings | None = None,
        group: str = GROUP,
        **rebalancer: Any,
    ) -> None:
        self.engine = engine
        self.ledger = ledger
        self.group = group
        self.is_alive = True
        self.is_broadcasting = is_broadcasting
        self._handler = handler
        self._calls: dict[OwnedQueue, set[asyncio.Task[None]]] = {}
        self.progress: ProgressStore = progress or BrokerProgress(engine, group)
        self.subscriptions = Subscriptions(engine.clock.now)
        for topic in topics:
            self.subscriptions.put(Subscription.by_tags(topic))
        receiver = WindowReceiver(self.progress, self, group=group)
        self.puller = _WatchedPuller(
            engine,
            group,
            self.subscriptions,
            self.progress,
            receiver,
            PULLS,
            # Pulls carry progress unless it is nobody else's.
            is_broadcasting=is_broadcasting or not pulls_report,
        )
        self.puller.ledger = ledger
        self.puller.consumer = self
        self.locks = QueueLocks(engine, group, locks) if is_orderly else None
        self.rebalancer = Rebalancer(
            engine,
            group,
            lambda: self.subscriptions.topics,
            progress=self.progress,
            puller=self.puller,
            consumption=self,
            consume_from=consume_from,
            is_broadcasting=is_broadcasting,
            locks=self.locks,
            settings=settings,
            **rebalancer,
        )
        self.puller.rebuild = self.rebalancer.rebuild

    @property
    def client_id(self) -> str:
        return self.engine.client_id

    @property
    def owned(self) -> set[Queue]:
        return set(self.rebalancer.owned)

    def is_holding(self, queue: Queue) -> bool:
        return self.is_alive and queue in self.rebalancer.owned

    def consumer_data(self) -> bodies.ConsumerData:
        model = (
            bodies.MessageModel.BROADCASTING
            if self.is_broadcasting
            else bodies.MessageModel.CLUSTERING
        )
        return bodies.ConsumerData(
            group_name=self.group,
            consume_type=bodies.ConsumeType.CONSUME_PASSIVELY,
            message_model=model,
            consume_from_where=wire_name(Position.EARLIEST),
            subscription_data_set=self.subscriptions.to_data(),
        )

    async def start(self) -> None:
        self.ledger.members.append(self)
        self.engine.join(self)
        await self.progress.load()
        await self.rebalancer.start()

    async def stop(self) -> None:
        """Leave gracefully."""
        if not self.is_alive:
            return
        await self.rebalancer.stop()
        self.puller.stop()
        await self.engine.leave(self)
        self.is_alive = False
        await self.engine.stop()

    async def kill(self) -> None:
        """End as a process that is killed: connections close without a message."""
        self.is_alive = False
        self.puller.stop()
        for calls in self._calls.values():
            for call in calls:
                call.cancel()
        await self.engine.abort()

    # ---- consumption

    def accept(self, owned: OwnedQueue, messages: list[ReceivedMessage]) -> None:
        calls = self._calls.setdefault(owned, set())
        for message in messages:
            call = asyncio.get_running_loop().create_task(self._consume(owned, message))
            calls.add(call)
            call.add_done_callback(calls.discard)

    async def _consume(self, owned: OwnedQueue, message: ReceivedMessage) -> None:
        if owned.is_draining or owned.is_dropped:
            return
        owned.running += 1
        self.ledger.takes(message)
        try:
            if self._handler is not None:
                await self._handler(self, message)
        except asyncio.CancelledError:
            self.ledger.ends(message, is_finished=False)
            raise
        finally:
            owned.running -= 1
        self.ledger.ends(message, is_finished=True)
        if not owned.is_dropped:
            owned.window.finish([message.queue_offset])
            position = owned.window.commit_offset
            if position is not None:
                self.progress.update(owned.queue, position)

    def in_hand(self, owned: OwnedQueue) -> int:
        return owned.running

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        calls = self._calls.get(owned)
        if calls:
            await asyncio.wait(calls, timeout=timeout)
        return not calls


class Group:
    """The members of a group, started and ended by a test."""

    def __init__(self, name_server: str, ledger: Ledger | None = None, **defaults: Any) -> None:
        self.ledger = ledger or Ledger()
        self._name_server = name_server
        self._defaults = defaults
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def join(self, **changes: Any) -> Consumer:
        """Add a member."""
        given = self._defaults | changes
        client = {"route_refresh": 60.0} | given.pop("client", {})
        settings = quick_settings(self._name_server, **client)
        engine = Engine(settings, chance=given.pop("chance", None))
        await engine.start()
        if (progress_of := given.pop("progress_of", None)) is not None:
            given["progress"] = progress_of(engine)
        consumer = Consumer(engine, self.ledger, **given)
        self._stack.push_async_callback(engine.stop)
        self._stack.push_async_callback(consumer.stop)
        await consumer.start()
        return consumer

    async def end(self) -> None:
        """All members leave."""
        await asyncio.gather(*(member.stop() for member in self.living))

    @property
    def living(self) -> list[Consumer]:
        return [member for member in self.ledger.members if member.is_alive]


def usual_handler(broker: Broker, code: int) -> Any:
    """What a broker answers a request with."""
    dispatcher = broker.dispatcher
    assert dispatcher is not None
    return dispatcher.handlers[code]


@contextmanager
def answering(broker: Broker, code: int, handler: ServerHandler) -> Iterator[None]:
    """Have a broker answer a request with `handler` for the time of the block."""
    usual = usual_handler(broker, code)
    dispatcher = broker.dispatcher
    assert dispatcher is not None
    dispatcher.serve(code, handler)
    try:
        yield
    finally:
        dispatcher.serve(code, usual)


@contextmanager
def slipping_in(broker: Broker, topic: str) -> Iterator[None]:
    """Store a message in queue 0 behind the first answer about its offsets, before it is sent."""
    answered: list[int] = []

    def interposed(code: int) -> AbstractContextManager[None]:
        usual = usual_handler(broker, code)

        async def answer(connection: Connection, request: Command) -> Command:
            try:
                answer: Command = usual(connection, request)
            finally:
                if request.header(GetMaxOffsetRequest).topic == topic:
                    answered.append(code)
                    if len(answered) == 1:
                        client = await RawClient.open(broker)
                        await client.stored(topic, b"slipped in")
                        await client.close()
            return answer

        return answering(broker, code, answer)

    # In whatever order they are asked.
    with interposed(RequestCode.QUERY_CONSUMER_OFFSET), interposed(RequestCode.GET_MAX_OFFSET):
        yield


def refusing(broker: Broker, code: int) -> AbstractContextManager[None]:
    """Have a broker refuse a request for the time of the block."""

    def refuse(_: Connection, request: Command) -> Command:
        return request.answer(ResponseCode.SYSTEM_ERROR, remark="the test says so")

    return answering(broker, code, refuse)


class OtherMember:
    """A member of the group in some other language: it answers what a test lets it."""

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        #: The queues that it reports; None: it does not answer.
        self.holds: set[Queue] | None = set()
        self.claims: set[Queue] = set()
        #: The queues that it reports as being released.
        self.leaves: set[Queue] = set()
        self.questions = 0
        #: Requests that a Java client answers from memory.
        self.harmless_questions = 0
        self._connection: Connection | None = None

    async def join(self, broker: Broker, *topics: str, language: Language = Language.OTHER) -> None:
        owner = Dispatcher(
            {
                RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: lambda *_: None,
                RequestCode.GET_CONSUMER_RUNNING_INFO: self._tell,
                RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._tell_positions,
            }
        )
        self._connection = await connect(
            broker.address,
            owner=owner,
            prepare=lambda request: msgspec.structs.replace(request, language=language),
        )
        client = RawClient(self._connection, [])
        subscriptions = [bodies.SubscriptionData(topic=topic, sub_string="*") for topic in topics]
        answer = await client.heartbeat(self.client_id, *subscriptions, group=GROUP)
        assert answer.code == 0

    async def leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
            await self._connection.wait_closed()

    def _tell_positions(self, _: Connection, request: Command) -> Command | None:
        self.harmless_questions += 1
        if self.holds is None:
            return None
        table = dict.fromkeys(map(_on_the_wire, self.holds), 0)
        body = encode_body(bodies.ConsumerStatus(message_queue_table=table))
        return request.answer(ResponseCode.SUCCESS, body=body)

    def _tell(self, _: Connection, request: Command) -> Command | None:
        self.questions += 1
        if self.holds is None:
            return None
        table = dict.fromkeys(map(_on_the_wire, self.holds), bodies.ProcessQueueInfo())
        named = {CLAIMS: self.claims, LEAVING: self.leaves}
        properties = {name: queues_text(queues) for name, queues in named.items() if queues}
        body = encode_body(bodies.ConsumerRunningInfo(mq_table=table, properties=properties))
        return request.answer(ResponseCode.SUCCESS, body=body)


def _on_the_wire(queue: Queue) -> bodies.MessageQueue:
    return bodies.MessageQueue(topic=queue.topic, broker_name=queue.broker, queue_id=queue.id)
