"""The pull consumer's work on the event loop.

The consumer is in one of two modes, for life: it subscribes to topics, and shares their queues with
the other members of its group, or it is assigned queues by the application. Mixing them is an
error, because a queue would then have two owners.
"""

from __future__ import annotations

import asyncio
import copy
import enum
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from orbitmq.client.consumer.progress import (
    BrokerProgress,
    StartOffsets,
    end_offset,
    first_offset,
    offset_at,
    wire_name,
)
from orbitmq.client.consumer.pull import Puller, is_access_denied
from orbitmq.client.consumer.rebalance import Rebalancer
from orbitmq.client.consumer.subscriptions import Subscription, Subscriptions, check_subscriptions
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.engine import Engine
from orbitmq.client.errors import QueueNotAssigned
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.pullconsumer.cache import Cache
from orbitmq.client.routes import Queue
from orbitmq.errors import (
    BrokerRefused,
    NotRunning,
    OffsetOutOfRange,
    OrbitError,
    SettingError,
    WrongUse,
)
from orbitmq.parsing import Instant, Place, Position, epoch, whole
from orbitmq.wire.bodies import ConsumerData, ConsumeType, MessageModel

if TYPE_CHECKING:
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.rebalance import AssignmentListener
    from orbitmq.client.consumer.settings import RebalanceSettings
    from orbitmq.client.consumer.strategies import Strategy
    from orbitmq.client.engine import Periodic
    from orbitmq.client.pullconsumer.cache import CachedQueue, Chunk
    from orbitmq.client.pullconsumer.consumer import PollSettings
    from orbitmq.errors import AccessDenied


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
        begin: Position,
        rebalance: RebalanceSettings | None = None,
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
        self.cache = Cache(settings, lambda owned: self.puller.has_room(owned))  # noqa: PLW0108  # made later
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
            settings=rebalance,
            listener=listener,
            # Without automatic commits reading must not change the progress of a group.
            commits_start=settings.auto_commit,
            refusals=self.puller.refusals,
        )
        # A waiting poll checks again.
        self.puller.refusals.on_refused = self.cache.arrived.set
        self._assigning = Assigning(
            engine,
            self.puller,
            self.progress,
            StartOffsets(engine, self.progress, begin),
            self._settling,
            commits_start=settings.auto_commit,
        )
        self._mode: Mode | None = None
        self._planned: tuple[Queue, ...] = ()
        self._state = _State.NEW
        self._stopping: asyncio.Task[None] | None = None
        self._is_polling = False
        self._auto_commit: Periodic | None = None

    def consumer_data(self) -> ConsumerData:
        """The content of heartbeats; assigned queues are not part of it."""
        is_shared = self._mode is Mode.SUBSCRIBE
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.CONSUME_ACTIVELY,
            message_model=MessageModel.CLUSTERING,
            consume_from_where=wire_name(self._begin),
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
                raise WrongUse(f"{WHAT} is running already; one start is enough")
            raise NotRunning(WHAT, was_stopped=True)
        if self._owns_engine:
            await self.engine.start()
        try:
            await self._begin_work()
        except BaseException:
            await self.stop(settles=False)
            if self._owns_engine:
                await self.engine.stop()  # a concurrent stop may have missed it
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
        self.check_running()  # a concurrent stop
        settings = self.settings
        if settings.auto_commit:
            self._auto_commit = self.engine.every(
                settings.auto_commit_interval,
                self._commit_settled,
                name=f"automatic commits of {self.group}",
            )

    async def stop(self, *, settles: bool = True) -> None:
        """Release the queues and leave the group; with `settles` everything returned is done.

        All callers share one stop: the first one sets `settles`, all wait for the end, and the
        cancellation of a caller does not end it.
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
            # No caller may be waiting for it.
            log.exception(
                "a pull consumer of group %s did not stop gracefully",
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
            # Everything that polls returned of the released queues counts as done.
            self.cache.settle()
            self.engine.spawn(self._resubscribed(), f"unsubscribe {self.group}")

    async def _resubscribed(self) -> None:
        self.rebalancer.wake()
        await self.engine.heartbeat()
        try:
            await check_subscriptions(self.engine, self.group, self.subscriptions)
        except OrbitError as error:
            log.error("%s", error, extra={"group": self.group})  # noqa: TRY400  # the text is enough

    def plan(self, subscriptions: Iterable[Subscription], queues: Iterable[Queue]) -> None:
        """Set the queues that the start or `assign` assigns."""
        self._enter(Mode.ASSIGN)
        self._planned = tuple(dict.fromkeys(queues))
        for subscription in subscriptions:
            self._want(subscription)

    async def assign(self, subscriptions: Sequence[Subscription], queues: Sequence[Queue]) -> None:
        """Assign these queues now. A refusal changes nothing."""
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
        """Set the subscription to a topic, and pull its queues by the new filter.

        The answer of a pull that the broker holds would skip messages of the new filter, and cached
        messages were chosen by the old one. Each queue is therefore pulled again, from the first
        message that no poll has returned.
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
        """The assigned queues, in either mode."""
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
        timeout: float,  # noqa: ASYNC109  # then the result is empty
        *,
        least: int = 1,
    ) -> list[Chunk]:
        """The cached messages within the limits; waits up to `timeout` for `least` messages.

        Settles what earlier calls returned. Raises `AccessDenied` when it prevents all messages,
        and `NoNameServer`, `NoRoute` or `GroupRefused` when nothing was consumed because of it.
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
        """Raise the error that prevents messages, instead of returning none indefinitely.

        A temporary error is raised only until one of the topics was consumed: later errors are
        logged, because an empty poll may simply mean that there are no messages.
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
        """The denial that prevents all messages until the account is changed."""
        if self._mode is not Mode.ASSIGN:
            return self.rebalancer.denial
        queues: dict[str, list[Queue]] = {}
        for queue in self._planned:
            queues.setdefault(queue.topic, []).append(queue)
        return self.puller.refusals.denial(queues, self.owned)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Present problems that delay messages, a sentence each."""
        found = (*self.rebalancer.troubles, *self._assigning.troubles, *self.puller.troubles)
        return tuple(dict.fromkeys(found))

    def _topics(self) -> Iterable[str]:
        if self._mode is Mode.ASSIGN:
            return {queue.topic for queue in self._planned}
        return self.subscriptions.topics

    def chunks_now(self, messages: int) -> list[Chunk]:
        """As `next_chunks`, without waiting."""
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
            # A program that polls in a loop must not starve the pulls.
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
        """Continue from these offsets. Raises `QueueNotAssigned` or `OffsetOutOfRange`."""
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
        """Continue from an offset and discard the cached messages of the queue."""
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
        """Store the returned positions, or `offsets`, and return what was stored.

        An invalid position is refused before any is stored.
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
        # An explicit commit is always sent, also when the broker is believed to have it.
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


# ---- queues that the application assigns


#: Seconds between attempts to find the start offset of a queue.
_RETRY = 1.0


class Assigning:
    """Begins and ends the pulls of assigned queues. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        puller: Puller,
        progress: ProgressStore,
        starting: StartOffsets,
        settling: Settling,
        *,
        commits_start: bool,
    ) -> None:
        """`commits_start`: the start offset of a queue without progress becomes its progress."""
        self._engine = engine
        self._puller = puller
        self._progress = progress
        self._settling = settling
        self._start = starting.begin if commits_start else starting.offset
        self._owned: dict[Queue, OwnedQueue] = {}
        self._wanted: set[Queue] = set()
        #: Why wanted queues could not be started so far.
        self._problems: dict[Queue, OrbitError] = {}
        self._tracked: set[str] = set()
        #: Held while the assignment changes: calls may overlap.
        self._changing = asyncio.Lock()
        self._is_stopped = False

    @property
    def owned(self) -> Mapping[Queue, OwnedQueue]:
        return self._owned

    async def check(self, queues: Iterable[Queue]) -> None:
        """Check that queues exist. Raises `NoRoute`, or `SettingError` for an unknown queue."""
        wanted = set(queues)
        for topic in {queue.topic for queue in wanted}:
            known = await self._engine.routes.subscribe_queues(topic)
            for queue in wanted:
                if queue.topic == topic and queue not in known:
                    named = ", ".join(str(each) for each in known) or "none that can be read"
                    raise SettingError(f"topic {topic!r} has no queue {queue}; it has {named}")

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why queues could not be started; the first one, as the reason is usually shared."""
        return tuple(
            f"{queue} cannot be started: {problem}"
            for queue, problem in self._problems.items()
            if not is_access_denied(problem)
        )[:1]

    def check_begun(self, queue: Queue) -> None:
        """Raise the reason why a wanted queue could not be started so far."""
        if queue in self._wanted and (problem := self._problems.get(queue)) is not None:
            raise copy.copy(self._puller.refusals.of_all([queue]) or problem)

    async def assign(self, queues: Iterable[Queue]) -> None:
        """Assign exactly these checked queues.

        A queue whose start offset is not known yet is started later.
        """
        wanted = set(queues)
        async with self._changing:
            if self._is_stopped:
                return
            self._track({queue.topic for queue in wanted})
            self._wanted = wanted
            for queue in self._problems.keys() - wanted:
                del self._problems[queue]
                self._puller.refusals.given_up(queue)
            gone = [owned for queue, owned in self._owned.items() if queue not in wanted]
            await self._end(gone)
            new = [queue for queue in wanted if queue not in self._owned]
            if not self._is_stopped:
                await asyncio.gather(*map(self._begin, new))

    def _track(self, topics: set[str]) -> None:
        for topic in topics - self._tracked:
            self._engine.routes.track(topic)
        for topic in self._tracked - topics:
            self._engine.routes.untrack(topic)
        self._tracked = topics

    async def _begin(self, queue: Queue) -> None:
        try:
            offset = await self._start(queue)
        except OrbitError as error:
            refusals = self._puller.refusals
            if not (isinstance(error, BrokerRefused) and refusals.refused(queue, error)):
                log.warning(
                    "the start offset of %s is not known: %s",
                    queue,
                    error,
                    extra={"queue": str(queue)},
                )
            self._problems[queue] = error
            self._engine.spawn(self._begin_later(queue), f"begin {queue}")
            return
        self._problems.pop(queue, None)
        self._puller.refusals.given_up(queue)
        if queue in self._wanted and queue not in self._owned:
            now = self._engine.clock.monotonic()
            owned = self._owned[queue] = OwnedQueue(queue, offset, now=now)
            self._puller.begin(owned)

    async def _begin_later(self, queue: Queue) -> None:
        await asyncio.sleep(_RETRY)
        if queue in self._wanted and queue not in self._owned:
            await self._begin(queue)

    async def _end(self, gone: list[OwnedQueue]) -> None:
        """Release queues and report their progress.

        One report for all queues: a silent broker is waited for once.
        """
        for owned in gone:
            owned.is_draining = True
            self._puller.end(owned)
        try:
            # No other member waits for assigned queues.
            await asyncio.gather(*(self._settling.drain(owned, 0.0) for owned in gone))
        finally:
            # Also when cancelled: a queue that is not pulled must not look assigned.
            for owned in gone:
                owned.drop()
                del self._owned[owned.queue]
        try:
            await self._progress.persist([owned.queue for owned in gone])
        except OrbitError as error:
            log.warning("progress in assigned queues not reported: %s", error)
        finally:
            for owned in gone:
                self._progress.forget(owned.queue)

    async def stop(self) -> None:
        """Release all queues; later assignments have no effect."""
        self._is_stopped = True
        self._wanted = set()
        async with self._changing:
            # A concurrent assignment may have set others meanwhile.
            self._wanted = set()
            await self._end(list(self._owned.values()))
            self._track(set())


# ---- commits


#: What may be committed: positions, or the last message that is done.
Commits: TypeAlias = Mapping[Queue, int] | ReceivedMessage | Iterable[ReceivedMessage]


def positions_of(done: Commits) -> Mapping[Queue, int]:
    """The offset of the next message to consume, of each queue. Raises `SettingError`."""
    if isinstance(done, Mapping):
        return done
    if not isinstance(done, ReceivedMessage | Iterable):
        raise SettingError(f"commit takes offsets by queue, or messages, got {done!r}")
    messages = [done] if isinstance(done, ReceivedMessage) else list(done)
    positions: dict[Queue, int] = {}
    for message in messages:
        if not isinstance(message, ReceivedMessage):
            raise SettingError(f"commit takes offsets by queue, or messages, got {message!r}")
        queue = message.queue
        positions[queue] = max(positions.get(queue, 0), message.queue_offset + 1)
    return positions


async def check_positions(core: PullCore, positions: Mapping[Queue, int]) -> None:
    """Refuse invalid positions, and those beyond the end, which would skip later messages.

    Brokers are asked only when the pulls have not seen the offset.
    """
    unknown: dict[Queue, int] = {}
    for queue, offset in positions.items():
        whole(offset, "an offset to commit", least=0)
        owned = core.assigned(queue)
        if offset > max(core.cache.of(owned).returned, owned.max_offset or 0):
            unknown[queue] = offset
    for queue, offset in unknown.items():
        end = await end_offset(core.engine, queue)
        if offset > end:
            raise OffsetOutOfRange(queue, offset, await first_offset(core.engine, queue), end)


class Trouble:
    """Whether an error occurred between the last poll and the stop.

    The stop may be called in `except` or `finally`, while the error is handled. An error that was
    handled already when the messages were taken does not count.
    """

    __slots__ = ("_earlier",)

    def __init__(self) -> None:
        self._earlier: BaseException | None = None

    def note(self) -> None:
        """Called before messages are taken: an error that is handled now is an earlier one."""
        self._earlier = sys.exc_info()[1]

    @property
    def is_there(self) -> bool:
        """Whether an error is handled now that was not handled then."""
        error = sys.exc_info()[1]
        return error is not None and error is not self._earlier


# ---- hand-over of a queue
#
# A queue that another member waits for is kept until the application has finished its messages:
# until its next poll, or without automatic commits until its commit. The time is bounded; messages
# that are not finished by then are delivered again.


class Settling:
    """Turns what polls returned into progress."""

    is_in_order = False

    def __init__(self, cache: Cache, progress: ProgressStore, *, is_automatic: bool) -> None:
        self._cache = cache
        self._progress = progress
        self._is_automatic = is_automatic
        self._is_ending = False

    def note(self) -> None:
        """Take what is settled as progress, if commits are automatic."""
        if self._is_automatic:
            for queue in self._cache.queues:
                self._note(queue)

    def end(self) -> None:
        """No poll and no commit will follow: drains no longer wait."""
        self._is_ending = True
        self._cache.settled.set()

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Stop returning messages of a queue and wait until the returned ones are done."""
        self._cache.clear(owned)
        queue = self._cache.of(owned)
        try:
            async with asyncio.timeout(timeout):
                while not self._is_done(queue):
                    self._cache.settled.clear()
                    await self._cache.settled.wait()
        except TimeoutError:
            return False
        else:
            return True
        finally:
            if self._is_automatic:
                self._note(queue)
            self._cache.forget(owned)

    def in_hand(self, owned: OwnedQueue) -> int:
        """None: what was returned is not known to be in work."""
        return 0

    def _is_done(self, queue: CachedQueue) -> bool:
        if self._is_ending:
            return True
        if self._is_automatic:
            return queue.settled == queue.returned
        position = self._progress.read(queue.owned.queue)
        return queue.given is None or (position is not None and position >= queue.given)

    def _note(self, queue: CachedQueue) -> None:
        self._progress.update(queue.owned.queue, queue.settled, increase_only=False)


# ---- offsets and lag


#: Asks a broker for an offset of a queue.
Find: TypeAlias = Callable[[Engine, Queue], Awaitable[int]]

FIRST: Find = first_offset
END: Find = end_offset


def at_position(to: Position) -> Find:
    """Where a position is in each queue, within the queue's bounds."""
    if to.offset is not None:
        wanted = to.offset

        async def within(engine: Engine, queue: Queue) -> int:
            first, end = await first_offset(engine, queue), await end_offset(engine, queue)
            return min(max(wanted, first), end)

        return within
    if to.time is not None:
        return at_time(to.time)
    return FIRST if to.place is Place.EARLIEST else END


def at_time(time: Instant) -> Find:
    """The first message stored at or after a time; the end without one."""
    at = epoch(time, "time")
    return lambda engine, queue: offset_at(engine, queue, at)


async def find_offsets(core: PullCore, queues: Iterable[Queue], find: Find) -> dict[Queue, int]:
    """An offset of each queue from its broker. Raises when a broker does not answer."""
    core.check_running()
    asked = tuple(queues)
    for topic in {queue.topic for queue in asked}:
        await core.engine.routes.get(topic)
    offsets = await asyncio.gather(*(find(core.engine, queue) for queue in asked))
    return dict(zip(asked, offsets, strict=True))


def lags(core: PullCore) -> dict[Queue, int]:
    """Messages in the assigned queues that were not returned, as of the last pulls."""
    return {
        queue.owned.queue: max(0, queue.owned.max_offset - queue.returned)
        for queue in core.cache.queues
        if queue.owned.max_offset is not None and not queue.owned.is_draining
    }
