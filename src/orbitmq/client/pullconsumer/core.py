"""What both faces of the pull consumer do, on the event loop.

The consumer is in one of two modes, for life: it subscribes to topics, and shares their queues with
the other members of its group, or it is assigned queues by the application. Mixing them is an
error, because a queue would then have two owners.
"""

from __future__ import annotations

import asyncio
import copy
import enum
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from orbitmq.client.checks import whole
from orbitmq.client.consumer.brokerprogress import BrokerProgress
from orbitmq.client.consumer.pulling import Puller
from orbitmq.client.consumer.rebalancing import Rebalancer
from orbitmq.client.consumer.starting import ConsumeFrom, Starting, end_offset, first_offset
from orbitmq.client.consumer.subscription import Subscription, Subscriptions
from orbitmq.client.consumer.subscriptioncheck import check_subscriptions
from orbitmq.client.errors import AlreadyRunning, NotRunning, WrongUse
from orbitmq.client.pullconsumer.assigning import Assigning
from orbitmq.client.pullconsumer.cache import Cache
from orbitmq.client.pullconsumer.committing import check_positions
from orbitmq.client.pullconsumer.draining import Settling
from orbitmq.client.pullconsumer.errors import OffsetOutOfRange, QueueNotAssigned
from orbitmq.errors import OrbitError
from orbitmq.wire.bodies.membership import ConsumerData, ConsumeType, MessageModel

if TYPE_CHECKING:
    from orbitmq.client.consumer.allocation import Strategy
    from orbitmq.client.consumer.assignmentnews import AssignmentListener
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
    from orbitmq.client.engine import Engine
    from orbitmq.client.errors import AccessDenied
    from orbitmq.client.periodic import Periodic
    from orbitmq.client.pullconsumer.chunks import Chunk
    from orbitmq.client.pullconsumer.settings import PollSettings
    from orbitmq.client.queue import Queue

log = logging.getLogger(__name__)

WHAT = "this pull consumer"
ONE_AT_A_TIME = (
    "a pull consumer is polled by one caller at a time: what a poll returns counts as done with "
    "the next one; make a consumer for each"
)


class Mode(enum.Enum):
    """How the consumer comes to its queues."""

    SUBSCRIBE = "subscribe"
    ASSIGN = "assign"


class _State(enum.Enum):
    NEW = enum.auto()
    RUNNING = enum.auto()
    STOPPED = enum.auto()


class PullCore:
    """A pull consumer without a face. A member of its engine; belongs to the event loop."""

    producer_group = None

    def __init__(
        self,
        engine: Engine,
        group: str,
        settings: PollSettings,
        *,
        owns_engine: bool,
        strategy: Strategy,
        begin: ConsumeFrom,
        rebalancing: RebalanceSettings | None = None,
        listener: AssignmentListener | None = None,
    ) -> None:
        """`group` is as brokers know it."""
        self.engine = engine
        self.group = group
        self.settings = settings
        self.subscriptions = Subscriptions(engine.clock.now)
        self.progress = BrokerProgress(engine, group)
        self._owns_engine = owns_engine
        self._begin = begin
        self.cache = Cache(settings, self._has_room)
        self.puller = Puller(
            engine,
            group,
            self.subscriptions,
            self.progress,
            self.cache,
            settings.pull,
            is_polled=True,
        )
        self._settling = Settling(self.cache, self.progress, is_automatic=settings.auto_commit)
        self.rebalancer = Rebalancer(
            engine,
            group,
            lambda: self.subscriptions.topics if self._mode is Mode.SUBSCRIBE else (),
            progress=self.progress,
            puller=self.puller,
            consumption=self._settling,
            strategy=strategy,
            consume_from=begin,
            settings=rebalancing,
            listener=listener,
            # Who commits by hand has no progress before: to look must not change a group.
            puts_start_by=settings.auto_commit,
            refusals=self.puller.refusals,
        )
        # A poll that waits looks again.
        self.puller.refusals.on_refused = self.cache.arrived.set
        self._assigning = Assigning(
            engine,
            self.puller,
            self.progress,
            Starting(engine, self.progress, begin),
            self._settling,
            puts_start_by=settings.auto_commit,
        )
        self._mode: Mode | None = None
        self._planned: tuple[Queue, ...] = ()
        self._state = _State.NEW
        self._stopping: asyncio.Task[None] | None = None
        self._is_polling = False
        self._auto_commit: Periodic | None = None

    def _has_room(self, owned: OwnedQueue) -> None:
        self.puller.has_room(owned)

    def consumer_data(self) -> ConsumerData:
        """What brokers are told; assigned queues are nobody's business but ours."""
        is_shared = self._mode is Mode.SUBSCRIBE
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.CONSUME_ACTIVELY,
            message_model=MessageModel.CLUSTERING,
            consume_from_where=self._begin.wire_name,
            subscription_data_set=self.subscriptions.to_data() if is_shared else (),
        )

    # ---- life

    @property
    def is_running(self) -> bool:
        return self._state is _State.RUNNING

    def check_running(self) -> None:
        """Raise `NotRunning` unless it is."""
        if self._state is not _State.RUNNING:
            raise NotRunning(WHAT, was_stopped=self._state is _State.STOPPED)

    async def start(self) -> None:
        if self._state is not _State.NEW:
            if self.is_running:
                raise AlreadyRunning(WHAT)
            raise NotRunning(WHAT, was_stopped=True)
        if self._owns_engine:
            await self.engine.start()
        try:
            await self._begin_work()
        except BaseException:
            await self.stop(settles=False)
            if self._owns_engine:
                await self.engine.stop()  # a stop in the middle of the start came too early for it
            raise

    async def _begin_work(self) -> None:
        await self.progress.load()
        if self._state is _State.STOPPED:
            raise NotRunning(WHAT, was_stopped=True)
        self.engine.join(self)
        self._state = _State.RUNNING
        await check_subscriptions(self.engine, self.group, self.subscriptions)
        await self.rebalancer.start()
        if self._mode is Mode.ASSIGN:
            await self._assigning.check(self._planned)
            await self._assigning.assign(self._planned)
        self.check_running()  # it may have been stopped meanwhile
        settings = self.settings
        if settings.auto_commit:
            self._auto_commit = self.engine.every(
                settings.auto_commit_interval,
                self._commit_settled,
                name=f"automatic commits of {self.group}",
            )

    async def stop(self, *, settles: bool = True) -> None:
        """Give the queues up and leave the group; with `settles` everything returned is done.

        There is one stop, whoever asks for it: the first caller says what is done, all of them wait
        for its end, and it goes on when one of them is cancelled.
        """
        if self._stopping is None:
            was_running = self.is_running
            self._state = _State.STOPPED
            self.cache.arrived.set()
            self._stopping = asyncio.get_running_loop().create_task(
                self._stop(was_running=was_running, settles=settles),
                name=f"stop pull consumer {self.group}",
            )
        await asyncio.shield(self._stopping)

    async def _stop(self, *, was_running: bool, settles: bool) -> None:
        try:
            if was_running and self.engine.is_running:
                await self._leave(settles=settles)
        except Exception:
            # Maybe nobody waits for it any more.
            log.exception(
                "a pull consumer of group %s did not stop in order",
                self.group,
                extra={"group": self.group},
            )
            raise
        finally:
            self.puller.stop()
            if self._owns_engine:
                await self.engine.stop()

    async def _leave(self, *, settles: bool) -> None:
        if self._auto_commit is not None:
            self._auto_commit.stop()
        if settles:
            self.cache.settle()
        self._settling.end()
        await self._assigning.stop()
        await self.rebalancer.stop()
        await self.engine.leave(self)

    # ---- which queues

    def subscribe(self, subscription: Subscription) -> None:
        self._enter(Mode.SUBSCRIBE)
        self._want(subscription)
        if self.is_running:
            self.engine.spawn(self._resubscribed(), f"subscribe {self.group}")

    def unsubscribe(self, topic: str) -> None:
        self._enter(Mode.SUBSCRIBE)
        if self.subscriptions.remove(topic) and self.is_running:
            # Who gives queues up has done with what they gave.
            self.cache.settle()
            self.engine.spawn(self._resubscribed(), f"unsubscribe {self.group}")

    async def _resubscribed(self) -> None:
        self.rebalancer.wake()
        await self.engine.heartbeat()
        try:
            await check_subscriptions(self.engine, self.group, self.subscriptions)
        except OrbitError as error:
            log.error("%s", error, extra={"group": self.group})  # noqa: TRY400  # says it all

    def plan(self, subscriptions: Iterable[Subscription], queues: Iterable[Queue]) -> None:
        """Be assigned these queues, with the start or by `assign`."""
        self._enter(Mode.ASSIGN)
        self._planned = tuple(dict.fromkeys(queues))
        for subscription in subscriptions:
            self._want(subscription)

    async def assign(self, subscriptions: Sequence[Subscription], queues: Sequence[Queue]) -> None:
        """Be assigned these queues, now. What is refused changes nothing."""
        self._enter(Mode.ASSIGN)
        if self.is_running:
            await check_subscriptions(self.engine, self.group, subscriptions)
            await self._assigning.check(queues)
            # As with `unsubscribe`.
            self.cache.settle()
        self.plan(subscriptions, queues)
        if self.is_running:
            await self._assigning.assign(self._planned)

    def _want(self, subscription: Subscription) -> None:
        """Note what is wanted of a topic, and ask for that in the queues that are pulled.

        What is held at the broker still waits for what was wanted before, and its answer would lead
        behind what is wanted now; what is cached was chosen by the old filter. So each queue is
        pulled anew, from the first message that no poll has returned.
        """
        before = self.subscriptions.get(subscription.topic)
        said = self.subscriptions.put(subscription)
        if before is not None and before.is_same_filter(said):
            return
        for owned in self.puller.queues:
            if owned.queue.topic == said.topic and not owned.is_draining:
                owned.next_offset = self.cache.rewind(owned)
                self.puller.restart(owned)

    def _enter(self, mode: Mode) -> None:
        if self._state is _State.STOPPED:
            raise NotRunning(WHAT, was_stopped=True)
        if self._mode not in (None, mode):
            raise WrongUse(
                f"a pull consumer either subscribes or is assigned queues; this one has called "
                f"{self._mode.value}() and cannot {mode.value}() as well: make another consumer"
            )
        self._mode = mode

    @property
    def owned(self) -> Mapping[Queue, OwnedQueue]:
        """The assigned queues, however they came to be."""
        return self._assigning.owned if self._mode is Mode.ASSIGN else self.rebalancer.owned

    def assigned(self, queue: Queue) -> OwnedQueue:
        """An assigned queue; raises `QueueNotAssigned`."""
        self.check_running()
        owned = self.owned.get(queue)
        if owned is None or owned.is_dropped:
            if self._mode is Mode.ASSIGN:
                self._assigning.check_begun(queue)
            raise QueueNotAssigned(queue)
        return owned

    # ---- polling

    async def next_chunks(
        self,
        messages: int,
        size: int | None,
        timeout: float,  # noqa: ASYNC109  # when it has passed there is simply nothing
        *,
        least: int = 1,
    ) -> list[Chunk]:
        """What is there, at most so much; waits for `least` messages, at most `timeout`.

        What earlier calls returned is settled by this one. Raises `AccessDenied` when that is why
        nothing can come any more, and `NoNameServer`, `NoRoute` or `GroupRefused` when that is why
        nothing was ever consumed.
        """
        self._begin_poll()
        cache = self.cache
        if not cache.has(least):
            self._is_polling = True
            try:
                await self._wait(least, timeout)
            finally:
                self._is_polling = False
        if not self.is_running:
            return []
        chunks = cache.take(messages, size)
        if not chunks:
            self._check_not_hindered()
        return chunks

    def _check_not_hindered(self) -> None:
        """Say what keeps this consumer from its messages, instead of giving it none for ever.

        What may pass only if it never got to any: once one of its topics was consumed, there may
        simply be none, and what is wrong with the others, or now, is in the log.
        """
        if (denial := self.denial) is not None:
            raise copy.copy(denial)
        if any(map(self.puller.refusals.was_served, self._topics())):
            return
        error = self.puller.refusal or self.rebalancer.obstacle
        if error is not None:
            raise copy.copy(error)  # each call adds its traceback

    @property
    def denial(self) -> AccessDenied | None:
        """Why nothing can come until an account is changed."""
        if self._mode is not Mode.ASSIGN:
            return self.rebalancer.denial
        queues: dict[str, list[Queue]] = {}
        for queue in self._planned:
            queues.setdefault(queue.topic, []).append(queue)
        return self.puller.refusals.denial(queues, self.owned)

    @property
    def troubles(self) -> tuple[str, ...]:
        """What keeps messages away now, a sentence each."""
        found = (*self.rebalancer.troubles, *self._assigning.troubles, *self.puller.troubles)
        return tuple(dict.fromkeys(found))

    def _topics(self) -> Iterable[str]:
        if self._mode is Mode.ASSIGN:
            return {queue.topic for queue in self._planned}
        return self.subscriptions.topics

    def chunks_now(self, messages: int) -> list[Chunk]:
        """The same, as far as it does not need to be waited for."""
        self._begin_poll()
        return self.cache.take(messages)

    def _begin_poll(self) -> None:
        self.check_running()
        if self._mode is None:
            raise WrongUse(
                "this pull consumer has nothing to poll; call subscribe(topic) or assign(queues) "
                "first"
            )
        if self._is_polling:
            raise WrongUse(ONE_AT_A_TIME)
        self.cache.settle()

    async def _wait(self, least: int, timeout: float) -> None:  # noqa: ASYNC109
        if timeout <= 0:
            # Others get their turn: a program that polls in a circle must not starve the pulls.
            await asyncio.sleep(0)
            return
        cache = self.cache
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.is_running and not cache.has(least) and self.denial is None:
                    cache.arrived.clear()
                    await cache.arrived.wait()

    # ---- positions

    def position(self, queue: Queue) -> int:
        return self.cache.of(self.assigned(queue)).returned

    async def seek(self, offsets: Mapping[Queue, int]) -> None:
        """Go on from these offsets. Raises `QueueNotAssigned` or `OffsetOutOfRange`."""
        for queue, offset in offsets.items():
            whole(offset, "an offset to seek", least=0)
            self.assigned(queue)
        await asyncio.gather(*(self._check_range(*each) for each in offsets.items()))
        for queue, offset in offsets.items():
            self.place(self.assigned(queue), offset)

    async def _check_range(self, queue: Queue, offset: int) -> None:
        first, end = await asyncio.gather(
            first_offset(self.engine, queue), end_offset(self.engine, queue)
        )
        if not first <= offset <= end:
            raise OffsetOutOfRange(queue, offset, first, end)

    def place(self, owned: OwnedQueue, offset: int) -> None:
        """Go on from here; what was fetched of the queue is forgotten."""
        self.cache.place(owned, offset)
        owned.next_offset = offset
        self.puller.restart(owned)

    def pause(self, queues: Iterable[Queue]) -> None:
        for owned in [self.assigned(queue) for queue in queues]:
            owned.is_paused = True

    def resume(self, queues: Iterable[Queue]) -> None:
        for owned in [self.assigned(queue) for queue in queues]:
            owned.is_paused = False
            self.cache.resumed(owned)
            self.puller.wake(owned)

    # ---- commits

    async def commit(self, offsets: Mapping[Queue, int] | None = None) -> dict[Queue, int]:
        """Store positions: what polls have returned, or `offsets`. Returns what was stored.

        All of them or none: positions that cannot be are refused before one is stored.
        """
        self.check_running()
        if offsets is None:
            offsets = {queue.owned.queue: queue.returned for queue in self.cache.queues}
        positions = dict(offsets)
        await check_positions(self, positions)
        for queue, owned in [(queue, self.assigned(queue)) for queue in positions]:
            self.cache.of(owned).settled = positions[queue]
            self.progress.update(queue, positions[queue], increase_only=False)
        self.cache.settled.set()
        # Whoever asks for it gets an answer of the broker, not what we believe.
        self.progress.insist(positions)
        await self.progress.persist(positions)
        return positions

    async def _commit_settled(self) -> None:
        self._settling.note()
        try:
            await self.progress.persist(list(self.owned))
        except OrbitError as error:
            log.warning(
                "automatic commit of group %s failed: %s",
                self.group,
                error,
                extra={"group": self.group},
            )
