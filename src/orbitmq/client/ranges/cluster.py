"""What somebody who plans reads asks of a cluster: queues, their bounds, and a group's progress.

Blocking, for a thread that has no event loop; an engine on a background thread does the asking, all
queues side by side. Every method says of each queue what is known or why it is not: "there is
nothing" and "nobody answered" are different things to a planner.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from orbitmq.client.consumer.members import GroupMembers
from orbitmq.client.consumer.progress import (
    BrokerProgress,
    end_offset,
    first_offset,
    look,
    message_at,
    offset_at,
)
from orbitmq.client.engine import Engine
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.ranges.links import RangeAccess, RangeFilter, RangeMember
from orbitmq.client.routes import Queue, TopicRoute, similar_topic
from orbitmq.clock import milliseconds
from orbitmq.errors import NoRoute, OrbitError
from orbitmq.message.stored import decode_messages
from orbitmq.names import DEAD_LETTER_PREFIX, RETRY_PREFIX, is_system_topic
from orbitmq.wire.bodies import TopicList
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import PullMessageResponse
from orbitmq.wire.javajson import decode_body

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class QueueResults(Generic[V]):
    """What brokers said about queues."""

    values: dict[Queue, V] = field(default_factory=dict)
    #: The queues that nobody could say anything about, and why.
    failures: dict[Queue, OrbitError] = field(default_factory=dict)
    #: How long each of those kept us waiting, in seconds; they were asked side by side.
    waited: dict[Queue, float] = field(default_factory=dict)

    def or_raise(self) -> dict[Queue, V]:
        """The values of all queues; the first failure if there is one."""
        for failure in self.failures.values():
            raise failure
        return self.values


@dataclass(frozen=True, slots=True)
class TopicQueues:
    """The queues of topics, as far as they are known."""

    queues: tuple[Queue, ...] = ()
    #: The topics that nobody could say anything about, and why.
    failures: dict[str, OrbitError] = field(default_factory=dict)

    def or_raise(self) -> tuple[Queue, ...]:
        """The queues of all topics; the first failure if there is one."""
        for failure in self.failures.values():
            raise failure
        return self.queues


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a report of progress."""

    #: The queues whose brokers did not take it, and why.
    failures: dict[Queue, Exception] = field(default_factory=dict)
    #: How long the broker of each of those kept us waiting, in seconds.
    waited: dict[Queue, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The messages that a queue has: from `low` up to, and without, `high`."""

    low: int
    high: int


class RangeCluster:
    """A cluster, as a planner sees it."""

    def __init__(
        self,
        access: RangeAccess,
        group: str,
        *,
        retries: int = 3,
        pause: float = 0.01,
    ) -> None:
        """A question that fails is asked `retries` times more; the pause between doubles."""
        self._access = access
        self._group = group
        self._retries = retries
        self._pause = pause
        self._thread = LoopThread("orbitmq-planning")
        self._engine: Engine | None = None
        self._progress: BrokerProgress | None = None
        self._member: RangeMember | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

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
        # "Nothing yet" must be told from 0: a planner has a rule of its own for it.
        self._progress = BrokerProgress(self._engine, self._group, strict_last=True)
        await self._engine.start()

    # ---- topics and queues

    def topics(self, pattern: str) -> tuple[str, ...]:
        """The topics whose whole name a regular expression matches; not those of the system."""
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
        """The queues that can be read. Raises `NoRoute` for a topic that nobody has."""
        return self.routed(topics, refresh=refresh).or_raise()

    def routed(self, topics: Iterable[str], *, refresh: bool = False) -> TopicQueues:
        """The queues that can be read; what is wrong with one topic is nothing to the others."""
        return self._thread.run(self._routed(tuple(topics), refresh))

    async def _routed(self, topics: tuple[str, ...], refresh: bool) -> TopicQueues:
        async def route(topic: str) -> TopicRoute | OrbitError:
            try:
                return await self._again(lambda engine: engine.routes.get(topic, refresh=refresh))
            except NoRoute as error:
                # Asked again, it is a topic that was there, and its name no slip.
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
        """The same error, with the topic that was perhaps meant."""
        similar = await similar_topic(self._running, error.topic)
        return NoRoute(error.topic, error.name_servers, similar=similar)

    # ---- offsets

    def bounds(self, queues: Iterable[Queue], *, patient: bool = True) -> QueueResults[Bounds]:
        """Where queues begin and end; not `patient`: what does not answer is not asked again."""

        async def ask(engine: Engine, queue: Queue) -> Bounds:
            low, high = await asyncio.gather(first_offset(engine, queue), end_offset(engine, queue))
            # Both were asked at the same time, and the log may have been cut in between.
            return Bounds(max(0, min(low, high)), max(0, high))

        return self._of_all(queues, ask, patient=patient)

    def ends(self, queues: Iterable[Queue], *, patient: bool = True) -> QueueResults[int]:
        """Where queues end: the offset that the next message will get."""
        return self._of_all(queues, end_offset, patient=patient)

    def at_times(
        self, times: Mapping[Queue, float], *, patient: bool = True
    ) -> QueueResults[int | None]:
        """The first message stored at a time or later; None where no message is that young."""

        async def ask(engine: Engine, queue: Queue) -> int | None:
            return await first_at(engine, queue, times[queue], self._group)

        return self._of_all(times, ask, patient=patient)

    def stored_at(self, offsets: Mapping[Queue, int]) -> QueueResults[int | None]:
        """When the messages at these offsets were stored, in ms; None where there is none.

        Of each queue one message is pulled, once: what does not answer is not asked again.
        """

        async def ask(engine: Engine, queue: Queue) -> int | None:
            found = await message_at(engine, self._group, queue, offsets[queue])
            return None if found is None else found.store_ms

        return self._of_all(offsets, ask, patient=False)

    # ---- the group

    def progress(
        self, queues: Iterable[Queue], *, patient: bool = True
    ) -> QueueResults[int | None]:
        """Where the group stands; None where it stands nowhere yet."""

        async def ask(_engine: Engine, queue: Queue) -> int | None:
            return await self._kept.stored(queue)

        return self._of_all(queues, ask, patient=patient)

    def report(self, positions: Mapping[Queue, int]) -> CommitResult:
        """Tell brokers where the group stands."""
        return self._thread.run(self._report(positions))

    def repeat(self, positions: Mapping[Queue, int]) -> CommitResult:
        """Tell brokers once more what they have taken, where they have less or nothing.

        One that has lost it is told again. What others of the group have reported since then is
        not set back, nor is an administrator's reset that is still to be taken: as long as it is,
        brokers take no report.
        """
        return self._thread.run(self._repeat(positions))

    async def _report(self, positions: Mapping[Queue, int]) -> CommitResult:
        if self._member is not None:
            self._member.positions |= positions
        return await self._by_broker(positions, self._kept.store)

    async def _repeat(self, positions: Mapping[Queue, int]) -> CommitResult:
        async def repeat(some: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
            held = await self._gather(
                tuple(some), lambda _, queue: self._kept.stored(queue), patient=False
            )
            lost = {q: some[q] for q, at in held.values.items() if at is None or at < some[q]}
            return {**held.failures, **await self._kept.store(lost)}

        return await self._by_broker(positions, repeat)

    async def _by_broker(
        self,
        positions: Mapping[Queue, int],
        tell: Callable[[Mapping[Queue, int]], Awaitable[Mapping[Queue, Exception]]],
    ) -> CommitResult:
        """Tell all brokers side by side, and see how long each takes."""
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
        """Be a member of the group, so that brokers and people see who reads; or change topics."""
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
        # Who is told is known by the routes. Of what cannot be asked now, with the next heartbeat.
        await asyncio.gather(*map(engine.routes.get, topics), return_exceptions=True)
        await engine.heartbeat()

    def others(self, topic: str) -> tuple[str, ...]:
        """The ids of the other members of the group. Raises when nobody can say."""
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
        """Brokers are found by the routes of topics; what is not found shows with its queue."""
        topics = {queue.topic for queue in queues}
        await asyncio.gather(
            *(self._running.routes.get(topic) for topic in topics), return_exceptions=True
        )

    async def _again(self, ask: Callable[[Engine], Awaitable[V]]) -> V:
        """Ask, and when it fails in a way that may pass, again."""
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
            self._thread.loop  # noqa: B018  # says what is wrong
            raise OrbitError("the planner is not started")
        return self._engine

    @property
    def _kept(self) -> BrokerProgress:
        assert self._progress is not None  # noqa: S101  # made with the engine
        return self._progress


def _is_ordinary(topic: str) -> bool:
    return not is_system_topic(topic) and not topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))


# The first message of a queue that was stored at a time or later, exactly.
#
# Brokers search by time, but not all of them for the same message. Those of RocketMQ 4 give the one
# nearest to the time, which may be older, give the last one when all are older, and of several
# stored in the same millisecond any. What a broker says is therefore only where the search begins:
# two looks confirm it where it is right, and where it is not, the right place is found from there
# by steps that double, and by halves.


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
    """The first message stored at a time or later; None when no message is that young."""
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
    """The first offset in [low, high) that is young, as all behind it are; `high` if none is.

    Throughout, everything before `low` is known to be old, and everything from `high` on young.
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
    # Nothing is there any more: it has expired, or the end has been cut off meanwhile.
    return offset >= answer.header(PullMessageResponse).max_offset
