"""Queues, their bounds and a group's offsets, for a planner of reads.

The caller blocks; an engine on a background thread asks all queues in parallel. Each method returns
a value or an error for every queue: "nothing there" and "no answer" are different.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from orbitmq import __version__
from orbitmq.client.consumer.members import GroupMembers
from orbitmq.client.consumer.progress import (
    BrokerProgress,
    end_offset,
    first_offset,
    look,
    message_at,
    offset_at,
)
from orbitmq.client.consumer.subscriptions import Subscription, Subscriptions
from orbitmq.client.engine import NOT_MINE, Engine, MemberHandler, NotMine
from orbitmq.client.loopthread import Life, LoopThread
from orbitmq.client.ranges.connections import RangeAccess, RangeFilter
from orbitmq.client.routes import Queue, TopicRoute, similar_topic
from orbitmq.clock import milliseconds
from orbitmq.errors import NoRoute, OrbitError
from orbitmq.message.stored import decode_messages
from orbitmq.names import DEAD_LETTER_PREFIX, RETRY_PREFIX, is_system_topic
from orbitmq.remoting.connection import Connection
from orbitmq.wire.bodies import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumerRunningInfo,
    ConsumeType,
    MessageModel,
    MessageQueue,
    ProcessQueueInfo,
    TopicList,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import GetConsumerRunningInfoRequest, PullMessageResponse
from orbitmq.wire.javajson import decode_body, encode_body

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class QueueResults(Generic[V]):
    """A value or an error for each queue."""

    values: dict[Queue, V] = field(default_factory=dict)
    #: Why there is no value.
    failures: dict[Queue, OrbitError] = field(default_factory=dict)
    #: Seconds that each of the failures took.
    waited: dict[Queue, float] = field(default_factory=dict)

    def or_raise(self) -> dict[Queue, V]:
        """The values of all queues; the first failure if there is one."""
        for failure in self.failures.values():
            raise failure
        return self.values


@dataclass(frozen=True, slots=True)
class TopicQueues:
    """The queues of topics."""

    queues: tuple[Queue, ...] = ()
    #: The topics without a route, and why.
    failures: dict[str, OrbitError] = field(default_factory=dict)

    def or_raise(self) -> tuple[Queue, ...]:
        """The queues of all topics; the first failure if there is one."""
        for failure in self.failures.values():
            raise failure
        return self.queues


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The result of a commit."""

    #: The queues whose offsets were not committed, and why.
    failures: dict[Queue, Exception] = field(default_factory=dict)
    #: Seconds that the broker of each of those took.
    waited: dict[Queue, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The messages of a queue: from `low` to `high` (exclusive)."""

    low: int
    high: int


class Sample(NamedTuple):
    """A message of a queue."""

    offset: int
    place: int  #: its offset in the commit log of its broker
    size: int


class RangeCluster(Life):
    """A cluster as a planner needs it. For one thread."""

    def __init__(
        self,
        access: RangeAccess,
        group: str,
        *,
        retries: int = 3,
        pause: float = 0.01,
    ) -> None:
        """A failed request is repeated `retries` times; the pause between doubles."""
        self._access = access
        self._group = group
        self._retries = retries
        self._pause = pause
        self._thread = LoopThread("orbitmq-planning")
        self._engine: Engine | None = None
        self._progress: BrokerProgress | None = None
        self._member: RangeMember | None = None

    def start(self) -> None:
        self._thread.start()
        self._thread.run(self._start())

    def stop(self) -> None:
        """Leave the group and close everything. May be called again."""
        if self._engine is not None:
            self._thread.run(self._engine.stop())
            self._engine = None
        self._thread.stop()

    async def _start(self) -> None:
        self._engine = Engine(self._access.settings())
        # A planner treats "no offset yet" differently from 0.
        self._progress = BrokerProgress(self._engine, self._group, strict_last=True)
        await self._engine.start()

    # ---- topics and queues

    def topics(self, pattern: str) -> tuple[str, ...]:
        """The topics that fully match a regular expression, without system topics."""
        matches = re.compile(pattern).fullmatch
        answer = self._thread.run(
            self._again(
                lambda engine: engine.ask_name_server(
                    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
                )
            )
        )
        names = decode_body(TopicList, answer.body).topic_list
        return tuple(sorted(name for name in names if matches(name) and _is_ordinary(name)))

    def queues(self, topics: Iterable[str], *, refresh: bool = False) -> tuple[Queue, ...]:
        """The queues that can be read. Raises `NoRoute` for an unknown topic."""
        return self.routed(topics, refresh=refresh).or_raise()

    def routed(self, topics: Iterable[str], *, refresh: bool = False) -> TopicQueues:
        """The queues that can be read, and an error for each topic without a route."""
        return self._thread.run(self._routed(tuple(topics), refresh))

    async def _routed(self, topics: tuple[str, ...], refresh: bool) -> TopicQueues:
        async def route(topic: str) -> TopicRoute | OrbitError:
            try:
                return await self._again(lambda engine: engine.routes.get(topic, refresh=refresh))
            except NoRoute as error:
                # A refreshed topic existed before, so its name is not mistyped.
                return error if refresh else await self._with_similar(error)
            except OrbitError as error:
                return error

        queues: set[Queue] = set()
        failures: dict[str, OrbitError] = {}
        for topic, answer in zip(topics, await asyncio.gather(*map(route, topics)), strict=True):
            if isinstance(answer, OrbitError):
                failures[topic] = answer
            else:
                queues.update(answer.subscribe_queues)
        return TopicQueues(tuple(sorted(queues)), failures)

    async def _with_similar(self, error: NoRoute) -> NoRoute:
        """The same error with the most similar topic."""
        similar = await similar_topic(self._running, error.topic)
        return NoRoute(error.topic, error.name_servers, similar=similar)

    # ---- offsets

    def bounds(self, queues: Iterable[Queue], *, patient: bool = True) -> QueueResults[Bounds]:
        """The bounds of queues; without retries unless `patient`."""

        async def ask(engine: Engine, queue: Queue) -> Bounds:
            low, high = await asyncio.gather(first_offset(engine, queue), end_offset(engine, queue))
            # Asked in parallel: the log may have been cut in between.
            return Bounds(max(0, min(low, high)), max(0, high))

        return self._of_all(queues, ask, patient=patient)

    def ends(self, queues: Iterable[Queue], *, patient: bool = True) -> QueueResults[int]:
        """The ends of queues: the offset of the next message."""
        return self._of_all(queues, end_offset, patient=patient)

    def at_times(
        self, times: Mapping[Queue, float], *, patient: bool = True
    ) -> QueueResults[int | None]:
        """The first offset stored at a time or later; None where there is none."""

        async def ask(engine: Engine, queue: Queue) -> int | None:
            return await first_at(engine, queue, times[queue], self._group)

        return self._of_all(times, ask, patient=patient)

    def stored_at(self, offsets: Mapping[Queue, int]) -> QueueResults[int | None]:
        """The store times of the messages at these offsets in ms; None where there is none.

        One message of each queue is pulled, without retries.
        """

        async def ask(engine: Engine, queue: Queue) -> int | None:
            found = await message_at(engine, self._group, queue, offsets[queue])
            return None if found is None else found.store_ms

        return self._of_all(offsets, ask, patient=False)

    def samples(self, offsets: Mapping[Queue, Iterable[int]]) -> QueueResults[list[Sample]]:
        """The messages at these offsets, without those that are gone.

        Each is pulled on its own, without retries.
        """

        async def ask(engine: Engine, queue: Queue) -> list[Sample]:
            pulls = [message_at(engine, self._group, queue, at) for at in offsets[queue]]
            found = await asyncio.gather(*pulls)
            return [
                Sample(each.queue_offset, each.physical_offset, each.size)
                for each in found
                if each is not None
            ]

        return self._of_all(offsets, ask, patient=False)

    # ---- the group

    def progress(
        self, queues: Iterable[Queue], *, patient: bool = True
    ) -> QueueResults[int | None]:
        """The offsets of the group; None where it has none yet."""

        async def ask(_engine: Engine, queue: Queue) -> int | None:
            return await self._offsets.stored(queue)

        return self._of_all(queues, ask, patient=patient)

    def report(self, positions: Mapping[Queue, int]) -> CommitResult:
        """Commit offsets of the group."""
        return self._thread.run(self._report(positions))

    def repeat(self, positions: Mapping[Queue, int]) -> CommitResult:
        """Commit again where a broker has a lower offset or none, because it lost the commit.

        Later commits of other members are not set back, nor is a pending reset: brokers refuse
        commits until it is followed.
        """
        return self._thread.run(self._repeat(positions))

    async def _report(self, positions: Mapping[Queue, int]) -> CommitResult:
        if self._member is not None:
            self._member.positions |= positions
        return await self._by_broker(positions, self._offsets.store)

    async def _repeat(self, positions: Mapping[Queue, int]) -> CommitResult:
        async def repeat(some: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
            held = await self._gather(
                tuple(some), lambda _, queue: self._offsets.stored(queue), patient=False
            )
            lost = {q: some[q] for q, at in held.values.items() if at is None or at < some[q]}
            return {**held.failures, **await self._offsets.store(lost)}

        return await self._by_broker(positions, repeat)

    async def _by_broker(
        self,
        positions: Mapping[Queue, int],
        tell: Callable[[Mapping[Queue, int]], Awaitable[Mapping[Queue, Exception]]],
    ) -> CommitResult:
        """Call `tell` for each broker in parallel, and measure the time of each."""
        now = asyncio.get_running_loop().time
        reported = CommitResult()

        async def one(some: Mapping[Queue, int]) -> None:
            since = now()
            failures = await tell(some)
            reported.failures.update(failures)
            reported.waited.update(dict.fromkeys(failures, now() - since))

        parts: dict[str, dict[Queue, int]] = {}
        for queue, at in positions.items():
            parts.setdefault(queue.broker, {})[queue] = at
        await asyncio.gather(*map(one, parts.values()))
        return reported

    def join(self, topics: Iterable[str], wanted: RangeFilter) -> None:
        """Join the group, or change its topics, so that brokers and tools show this reader."""
        self._thread.run(self._join(tuple(topics), wanted))

    async def _join(self, topics: tuple[str, ...], wanted: RangeFilter) -> None:
        engine = self._running
        for topic in topics:
            engine.routes.track(topic)
        if self._member is None:
            self._member = RangeMember(engine, self._group)
            self._member.subscribe(topics, wanted)
            engine.join(self._member)
        else:
            self._member.subscribe(topics, wanted)
        # Heartbeats go to the brokers of known routes; the others get the next one.
        await asyncio.gather(*map(engine.routes.get, topics), return_exceptions=True)
        await engine.heartbeat()

    def others(self, topic: str) -> tuple[str, ...]:
        """The client ids of the other members of the group."""
        return self._thread.run(self._others(topic))

    async def _others(self, topic: str) -> tuple[str, ...]:
        engine = self._running
        found = await GroupMembers(engine, self._group).of(topic)
        return tuple(sorted(each for each in found if each != engine.client_id))

    # ---- asking

    def _of_all(
        self,
        queues: Iterable[Queue],
        ask: Callable[[Engine, Queue], Awaitable[V]],
        *,
        patient: bool = True,
    ) -> QueueResults[V]:
        return self._thread.run(self._gather(tuple(queues), ask, patient=patient))

    async def _gather(
        self,
        queues: tuple[Queue, ...],
        ask: Callable[[Engine, Queue], Awaitable[V]],
        *,
        patient: bool,
    ) -> QueueResults[V]:
        now = asyncio.get_running_loop().time
        found: QueueResults[V] = QueueResults()

        async def one(queue: Queue) -> V | OrbitError:
            since = now()
            try:
                if not patient:
                    return await ask(self._running, queue)
                return await self._again(lambda engine: ask(engine, queue))
            except OrbitError as error:
                found.waited[queue] = now() - since
                return error

        await self._know_brokers(queues)
        for queue, answer in zip(queues, await asyncio.gather(*map(one, queues)), strict=True):
            if isinstance(answer, OrbitError):
                found.failures[queue] = answer
            else:
                found.values[queue] = answer
        return found

    async def _know_brokers(self, queues: tuple[Queue, ...]) -> None:
        """Look up routes; a broker that is not found fails with its queue."""
        topics = {queue.topic for queue in queues}
        await asyncio.gather(
            *(self._running.routes.get(topic) for topic in topics), return_exceptions=True
        )

    async def _again(self, ask: Callable[[Engine], Awaitable[V]]) -> V:
        """Ask, with retries of retriable errors."""
        pause = self._pause
        for _ in range(self._retries):
            try:
                return await ask(self._running)
            except OrbitError as error:
                if not error.retriable:
                    raise
                await asyncio.sleep(max(pause, getattr(error, "retry_in", 0.0)))
                pause *= 2
        return await ask(self._running)

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            self._thread.loop  # noqa: B018  # raises a better error
            raise OrbitError("the planner is not started")
        return self._engine

    @property
    def _offsets(self) -> BrokerProgress:
        assert self._progress is not None  # noqa: S101  # made with the engine
        return self._progress


def _is_ordinary(topic: str) -> bool:
    return not is_system_topic(topic) and not topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))


class RangeMember:
    """Makes a reader of ranges a member of its group, visible to brokers and to `orbitmq group`."""

    producer_group: str | None = None

    def __init__(self, engine: Engine, group: str) -> None:
        self._engine = engine
        self._group = group
        self._subscriptions = Subscriptions(engine.clock.now)
        self._started = engine.clock.now()
        #: The offsets of the group.
        self.positions: dict[Queue, int] = {}
        handlers: dict[RequestCode, MemberHandler] = {
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._tell_state,
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._ignore,
        }
        for code, handler in handlers.items():
            engine.serve(code, handler)

    def subscribe(self, topics: Iterable[str], wanted: RangeFilter) -> None:
        """Subscribe to these topics only, in this order."""
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
                "orbitmqVersion": __version__,
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
        """Other members do not matter: this reader has all queues."""


# Search by time. A broker of RocketMQ 4 returns the message nearest to the time, which may be
# older, the last one when all are older, and any of several in one millisecond. So its answer is
# only where an exact search begins: two pulls confirm it, otherwise steps double, then halve.

_OUTCOMES: Final = frozenset(
    map(
        int,
        (
            ResponseCode.SUCCESS,
            ResponseCode.PULL_NOT_FOUND,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
            ResponseCode.PULL_OFFSET_MOVED,
        ),
    )
)


async def first_at(engine: Engine, queue: Queue, time: float, group: str) -> int | None:
    """The first offset stored at a time or later; None when there is none."""
    guess, low, high = await asyncio.gather(
        offset_at(engine, queue, time), first_offset(engine, queue), end_offset(engine, queue)
    )
    wanted = milliseconds(time)

    async def is_young(offset: int) -> bool:
        return await _is_young(engine, queue, offset, wanted, group)

    found = await search(max(0, low), high, guess, is_young)
    return found if found < high else None


async def search(
    low: int, high: int, guess: int, is_young: Callable[[int], Awaitable[bool]]
) -> int:
    """The first young offset in [low, high), behind which all are young; `high` if none is.

    Invariant: everything below `low` is old, everything from `high` on is young.
    """
    guess = min(max(guess, low), high)
    step = 1
    while low < guess and await is_young(guess - 1):
        high = guess - 1
        guess = max(low, high - step)
        step *= 2
    low = max(low, guess)
    step = 1
    while low < high:
        probe = min(low + step, high) - 1
        if await is_young(probe):
            high = probe
            break
        low = probe + 1
        step *= 2
    while low < high:
        middle = (low + high) // 2
        if await is_young(middle):
            high = middle
        else:
            low = middle + 1
    return high


async def _is_young(engine: Engine, queue: Queue, offset: int, wanted: int, group: str) -> bool:
    header = look(group, queue, offset)
    answer = await engine.ask(
        engine.routes.master(queue.broker), RequestCode.PULL_MESSAGE, header, accept=_OUTCOMES
    )
    if answer.code == ResponseCode.SUCCESS:
        for message in decode_messages(answer.body):
            return message.store_ms >= wanted
    # The message has expired, or the queue was cut meanwhile.
    return offset >= answer.header(PullMessageResponse).max_offset
