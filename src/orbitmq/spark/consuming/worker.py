"""A Python worker of Spark that consumes: reads pieces of queues and calls their handlers.

A piece is given to the consumption of plain consumers as a queue that is owned for the time of
the task, so handlers, verdicts and failed messages are treated the same. After the time limit no
call begins. A task with a link to its driver follows its queues as a plain consumer does, for as
long as the driver renews the limit. One without reads its pieces, and in order a failing message
ends the work on its queue. Brokers are read one after the other, each for its share of the time,
so that a silent one does not cost the whole batch.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Final, Self

from orbitmq.client.consumer.dispatch import (
    BaseConsumption,
    Bindings,
    ConcurrentConsumption,
    OrderlyConsumption,
    Parts,
    WindowReceiver,
)
from orbitmq.client.consumer.locks import QueueLock, QueueLocks
from orbitmq.client.consumer.progress import MemoryProgress
from orbitmq.client.consumer.pull import Puller
from orbitmq.client.consumer.sendback import LazyProducer
from orbitmq.client.consumer.settings import FlowSettings, PullSettings
from orbitmq.client.consumer.statistics import Statistics
from orbitmq.client.consumer.subscriptions import Subscription, Subscriptions
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.ranges.connections import QueueRange, RangeFilter
from orbitmq.client.ranges.read import (
    Chunk,
    Missing,
    ProgressReset,
    RangeSettings,
    read_ranges,
)
from orbitmq.client.routes import Queue
from orbitmq.errors import NotRunning, OrbitError
from orbitmq.message.record import BATCH_MASK
from orbitmq.message.stored import decode_messages, without_inner_batches
from orbitmq.names import retry_topic
from orbitmq.spark.consuming.link import LinkRefused, TaskLink
from orbitmq.spark.consuming.pipeline import Definition
from orbitmq.spark.consuming.progress import PieceReport
from orbitmq.spark.consuming.queues import Piece
from orbitmq.spark.consuming.returns import (
    CountingSendBack,
    SendBackClient,
    SendBackCounts,
    SendBackResult,
)
from orbitmq.spark.internals import WorkerCache, connections_to, started

if TYPE_CHECKING:
    from orbitmq.client.consumer.dispatch import OrderedQueue
    from orbitmq.client.consumer.pull import Pulled
    from orbitmq.client.consumer.verdict import Outcome
    from orbitmq.client.consumer.window import HeldLock
    from orbitmq.client.ranges.connections import RangeAccess
    from orbitmq.spark.consuming.link import LinkOffer
    from orbitmq.spark.consuming.pipeline import PackedDefinition


#: Seconds that a broker has at least: enough to notice that the master is away and to ask a
#: replica. Less in order, where the locks need the master.
_LEAST_PATIENCE: Final = 4.0
_LEAST_IN_ORDER: Final = 0.1
#: In order, the part of its share that a silent broker gets; the rest is for handlers.
_PART_IN_ORDER: Final = 0.5


class Worker:
    """Handles pieces of queues for one pipeline. For one thread at a time."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._thread = LoopThread("orbitmq-consuming")
        self._parts: AsyncWorker | None = None

    def start(self) -> None:
        self._thread.start()
        try:
            self._parts = self._thread.run(AsyncWorker.started(self._definition))
        except BaseException:
            self._thread.stop()
            raise

    def stop(self) -> None:
        """Close everything; a handler that still runs is not waited for."""
        if self._parts is not None:
            self._thread.run(self._parts.stop())
            self._parts = None
        self._thread.stop()

    def handle(
        self,
        pieces: Sequence[tuple[int, Piece]],
        seconds: float,
        offer: LinkOffer | None = None,
        number: int = 0,
    ) -> list[PieceReport]:
        """Handle the messages of pieces; no call begins after `seconds`.

        With an offer the driver may renew that time, and the task follows the queues meanwhile. A
        driver that cannot be reached expects the task to handle its pieces alone.
        """
        if self._parts is None:
            raise NotRunning("this worker")
        task = self._thread.run(self._parts.begin(pieces, seconds))
        try:
            if offer is None or not self._thread.run(self._parts.follow(task, offer, number)):
                self._read_all(task, self._parts.subscriptions)
        except Exception:
            # A defect of this package. The process may live on, so no handler may be running.
            for work in task.items:
                work.owned.is_draining = True
            self._thread.run(self._parts.finish(task))
            raise
        return self._thread.run(self._parts.finish(task))

    # ---- reading, in the thread of the task

    def _read_all(self, task: TaskRun, subscriptions: Mapping[str, Subscription]) -> None:
        """Read and handle the pieces of a task."""
        places = by_topic_and_broker(task.items)
        for number, items in enumerate(places):
            patience = broker_patience(
                task.time_left,
                len(places) - number,
                most=self._definition.patience,
                ordered=self._definition.ordered,
            )
            self._read(task, subscriptions[items[0].piece.range.queue.topic], items, patience)

    def _read(
        self, task: TaskRun, subscription: Subscription, items: list[WorkItem], patience: float
    ) -> None:
        """Read and handle pieces of one broker; errors are noted in the items."""
        groups = deque([items])
        seen: set[Queue] = set()
        while groups and not task.is_over:
            some = groups.popleft()
            try:
                self._feed(task, subscription, some, patience)
            except ProgressReset as reset:
                _note_reset(some, reset, is_repeated=reset.queue in seen)
                seen.add(reset.queue)
                groups.appendleft(some)
            except OrbitError as error:
                for work in some:
                    if work.unread is not None:
                        work.error = f"{type(error).__name__}: {error}"
                single = _by_queue(some)
                if len(single) > 1 and not isinstance(error, BrokerUnavailable):
                    # The error is about one of these queues and does not say which.
                    groups.extend(single)
        for work in items:
            self._thread.run(task.flush(work))

    def _feed(
        self, task: TaskRun, subscription: Subscription, items: list[WorkItem], patience: float
    ) -> None:
        for chunk in self._chunks(subscription, items, patience, task.time_left):
            work = next(each for each in items if chunk_is_of(chunk, each))
            messages = self._messages(chunk, subscription)
            work.error = None
            self._thread.run(task.feed(work, messages, chunk))
            if task.is_over or not any(each.is_open for each in items):
                break

    def _chunks(
        self, subscription: Subscription, items: list[WorkItem], patience: float, time_left: float
    ) -> Iterator[Chunk]:
        return read_ranges(
            connections_to(self._definition.access),
            [work.unread for work in items if work.unread is not None],
            group=self._definition.wire_group,
            wanted=RangeFilter(subscription.expression, subscription.type),
            # Expired messages are skipped, as by every consumer.
            settings=RangeSettings(
                missing=Missing.SKIP,
                patience=patience,
                # Leaves time for the messages behind a gap.
                lag_patience=max(0.1, min(5.0, patience / 2, time_left / 2)),
                tells_resets=True,
            ),
        )

    def _messages(self, chunk: Chunk, subscription: Subscription) -> Sequence[ReceivedMessage]:
        definition = self._definition
        stored = [each for piece in chunk.pieces for each in decode_messages(piece)]
        if any(each.sys_flag & BATCH_MASK == BATCH_MASK for each in stored):
            stored = without_inner_batches(stored, chunk.start)
        return subscription.accepted(
            [
                ReceivedMessage(
                    each, chunk.queue, definition.wire_group, None, definition.namespace
                )
                for each in stored
                # A record with several messages comes with every pull that starts inside it.
                if chunk.start <= each.queue_offset < chunk.end
            ]
        )


def broker_patience(time_left: float, brokers: int, *, most: float, ordered: bool) -> float:
    """How many seconds a broker may be silent, by the number of brokers still to be read."""
    share = time_left / brokers
    if ordered:
        return min(most, max(_LEAST_IN_ORDER, share * _PART_IN_ORDER))
    return min(most, max(_LEAST_PATIENCE, share)) if brokers > 1 else most


def chunk_is_of(chunk: Chunk, work: WorkItem) -> bool:
    """Whether a chunk belongs to the piece of an item."""
    whole = work.piece.range
    return chunk.queue == whole.queue and whole.start <= chunk.start < whole.end


def by_topic_and_broker(items: Sequence[WorkItem]) -> list[list[WorkItem]]:
    """Items that can be read together; those of brokers that may be away come last."""

    def place(work: WorkItem) -> tuple[str, str]:
        queue = work.piece.range.queue
        return queue.topic, queue.broker

    places = [list(some) for _, some in groupby(items, key=place)]
    return sorted(places, key=lambda some: any(work.piece.is_doubtful for work in some))


def _by_queue(items: Sequence[WorkItem]) -> list[list[WorkItem]]:
    return [list(some) for _, some in groupby(items, key=lambda work: work.piece.range.queue)]


def _note_reset(items: Sequence[WorkItem], reset: ProgressReset, *, is_repeated: bool) -> None:
    """End the work on a queue whose offset was reset.

    Unless it starts at the new offset: the driver may have followed the reset before the pull.
    """
    affected = [work for work in items if work.piece.range.queue == reset.queue]
    if not is_repeated and any(work.piece.committed == reset.offset for work in affected):
        return
    for work in affected:
        work.owned.is_draining = True
        work.reset_to = reset.offset
        work.error = str(reset)


log = logging.getLogger(__name__)

#: Seconds to wait for a running call beyond the handlers' own time limit.
_GRACE: Final = 30.0
#: Seconds between two reports of a task that follows its queues, which renew its time limit.
REPORT_EVERY: Final = 0.25


class AsyncWorker:
    """A worker's handlers, connections and order locks. Belongs to its event loop."""

    def __init__(self, definition: Definition, engine: Engine, lock_engine: Engine | None) -> None:
        self._definition = definition
        self._engine = engine
        self._lock_engine = lock_engine
        group, registrations = definition.wire_group, definition.registrations()
        self.subscriptions = {each.topic: each.subscription for each in registrations}
        self.subscriptions[retry_topic(group)] = Subscription(retry_topic(group))
        self._returns = CountingSendBack(
            engine,
            group,
            max_retries=definition.consume.max_retries,
            timeout=definition.consume.send_back_timeout,
        )
        self._producer = LazyProducer(engine)
        parts = Parts(
            engine,
            group,
            Bindings({each.topic: each.binding for each in registrations}, group, self._producer),
            # The driver commits; the offset of a piece is read from its window.
            MemoryProgress(),
            self._returns,
            definition.consume,
            Statistics(engine.clock.monotonic),
        )
        kind = OrderlyInTask if definition.ordered else ConcurrentInTask
        self._consumption: OrderlyInTask | ConcurrentInTask = kind(parts)

    @classmethod
    async def started(cls, definition: Definition) -> Self:
        """A worker that is ready for the first task."""
        engine = Engine(definition.access.settings())
        await engine.start()
        lock_engine = None
        if definition.ordered:
            # With the driver's client id: the broker granted it the locks.
            address, _, instance = definition.client_id.partition("@")
            settings = definition.access.settings(instance=instance)
            lock_engine = Engine(replace(settings, client_ip=address))
            await lock_engine.start()
        parts = cls(definition, engine, lock_engine)
        await parts._consumption.start()
        return parts

    async def stop(self) -> None:
        await self._consumption.stop()
        await self._producer.stop()
        await self._engine.stop()
        if self._lock_engine is not None:
            await self._lock_engine.stop()

    async def begin(self, pieces: Sequence[tuple[int, Piece]], seconds: float) -> TaskRun:
        """Prepare a task that begins no call after `seconds`."""
        deadline = asyncio.get_running_loop().time() + seconds
        await self._know_brokers({piece.range.queue.topic for _, piece in pieces})
        locks, held = await self._locked([piece.range.queue for _, piece in pieces])
        now = self._engine.clock.monotonic()
        items = [
            WorkItem.of(place, piece, now=now, lock=held.get(piece.range.queue))
            for place, piece in sorted(pieces, key=lambda each: each[1].range)
        ]
        for work in items:
            if locks is not None and work.piece.range.queue not in held:
                work.owned.is_draining = True
                work.error = "the driver no longer holds the order lock of the queue"
        self._returns.forget()
        return TaskRun(
            self._consumption,
            self._returns,
            items,
            locks,
            deadline=deadline,
            most_bytes=self._definition.bytes_in_task,
            drain=self._definition.consume.timeout + _GRACE,
        )

    async def follow(self, task: TaskRun, offer: LinkOffer, number: int) -> bool:
        """Handle messages as they arrive; False when the driver cannot be reached."""
        try:
            link = await TaskLink.connected(offer, number)
        except LinkRefused as error:
            log.info("%s", error, extra={"group": self._definition.group})
            return True
        except OSError as error:  # includes timeouts
            log.warning(
                "the driver cannot be reached at %s:%d, so no message is handled as it arrives: %s",
                offer.host,
                offer.port,
                str(error) or type(error).__name__,
                extra={"group": self._definition.group},
            )
            return False
        definition = self._definition
        subscriptions = Subscriptions(self._engine.clock.now)
        for each in self.subscriptions.values():
            subscriptions.put(each)
        room = max(1, definition.bytes_in_task // max(1, len(task.items)))
        progress = MemoryProgress()
        puller = TaskPuller(
            task,
            self._engine,
            definition.wire_group,
            subscriptions,
            progress,
            TaskReceiver(
                progress,
                task,
                flow=FlowSettings(max_cached_bytes=min(room, FlowSettings().max_cached_bytes)),
                is_orderly=definition.ordered,
                group=definition.wire_group,
                namespace=definition.namespace,
            ),
            PullSettings(post_subscription=True),
            # Pulls of a broadcast carry no offset to commit, which is the driver's to do.
            is_broadcasting=True,
            keeps_resets=True,
        )
        await task.follow(puller, link)
        return True

    async def finish(self, task: TaskRun) -> list[PieceReport]:
        """Wait for the handlers, and report."""
        try:
            return await task.finish()
        finally:
            if task.locks is not None:
                # Not released: they belong to the driver, which continues with the queues.
                task.locks.stop()

    async def _know_brokers(self, topics: set[str]) -> None:
        """Look up the routes by which failed messages find their brokers."""
        routes = [self._engine.routes.get(topic) for topic in sorted(topics)]
        if self._lock_engine is not None:
            routes += [self._lock_engine.routes.get(topic) for topic in sorted(topics)]
        for found in await asyncio.gather(*routes, return_exceptions=True):
            if isinstance(found, OrbitError):
                log.warning("a route cannot be had: %s", found)
            elif isinstance(found, BaseException):
                raise found

    async def _locked(
        self, queues: list[Queue]
    ) -> tuple[QueueLocks | None, dict[Queue, QueueLock]]:
        """The order locks of queues, renewed while the task runs.

        No other member gets a queue while its handler is called, even if the driver is lost. A task
        that starts after the driver lost a queue is refused the lock and does nothing.
        """
        if self._lock_engine is None:
            return None, {}
        locks = QueueLocks(self._lock_engine, self._definition.wire_group)
        held = await locks.acquire(queues)
        locks.start()
        return locks, held


@dataclass(slots=True)
class QueueProblems:
    """What failed with the messages of a queue in this task."""

    reason: str | None = None  #: of the last failure
    held: int = 0  #: times that middleware kept a message from its handler
    failed: int = 0  #: in order, most failed messages stay in place and are not sent back
    #: In order: the pause after the last failure, and when it ends.
    pause: float | None = None
    paused_until: float = float("-inf")


class _RecordsProblems(BaseConsumption):
    """Consumption that records failures."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.problems: defaultdict[OwnedQueue, QueueProblems] = defaultdict(QueueProblems)

    def _log_failure(self, owned: OwnedQueue, outcome: Outcome, handler: str) -> None:
        super()._log_failure(owned, outcome, handler)
        problems = self.problems[owned]
        if outcome.failure is not None and outcome.failure.reason:
            problems.reason = outcome.failure.reason
        problems.held += len(outcome.held)
        problems.failed += len(outcome.tried)


class ConcurrentInTask(_RecordsProblems, ConcurrentConsumption):
    """Concurrent consumption in a task."""

    follows = False


class OrderlyInTask(_RecordsProblems, OrderlyConsumption):
    """Orderly consumption in which a failure ends the work on its queue, unless it follows it."""

    #: Whether the running task follows its queues.
    follows = False

    def _pause(self, line: OrderedQueue, seconds: float) -> None:
        owned = line.owned
        problems = self.problems[owned]
        problems.pause, problems.paused_until = seconds, self._monotonic() + seconds
        if self.follows:
            super()._pause(line, seconds)
            return
        owned.is_draining = True
        self._close(line)
        self.has_room(owned)

    def _lost_lock(self, line: OrderedQueue) -> None:
        super()._lost_lock(line)
        self.problems[line.owned].reason = "the order lock of the queue was lost"
        line.owned.is_draining = True


@dataclass(slots=True, eq=False)
class WorkItem:
    """A piece of a task, and how far it is read and handled."""

    place: int
    piece: Piece
    owned: OwnedQueue
    #: Everything below was read, and everything below was given to the handlers.
    fetched: int
    given: int
    #: Read, not given to the handlers yet.
    waiting: list[ReceivedMessage] = field(default_factory=list)
    waiting_bytes: int = 0
    #: Offsets without a message below `fetched`, and below `given`.
    waiting_missing: int = 0
    missing: int = 0
    fed: int = 0  #: messages that were given to the handlers
    error: str | None = None  #: why the rest was not read
    reset_to: int | None = None  #: the offset to which an administrator reset the group
    follows: bool = False  #: whether messages beyond the piece are handled, too
    results: SendBackCounts = field(default_factory=SendBackCounts)
    reported: PieceReport | None = None  #: the last report to the driver, with all counts

    @classmethod
    def of(cls, place: int, piece: Piece, *, now: float, lock: HeldLock | None) -> WorkItem:
        start = piece.range.start
        owned = OwnedQueue(piece.range.queue, start, now=now, lock=lock)
        return cls(place, piece, owned, start, start)

    @property
    def is_open(self) -> bool:
        """Whether handlers may still be called for it."""
        return not self.owned.is_draining

    @property
    def reach(self) -> QueueRange:
        """The messages that may be handled."""
        whole = self.piece.range
        return replace(whole, end=sys.maxsize) if self.follows else whole

    @property
    def unread(self) -> QueueRange | None:
        """The range that is still to be read."""
        whole = self.piece.range
        if not self.is_open or self.fetched >= whole.end:
            return None
        return QueueRange(whole.queue, self.fetched, whole.end)


class TaskRun:
    """One task's calls of handlers. Belongs to the event loop of its process."""

    def __init__(
        self,
        consumption: ConcurrentInTask | OrderlyInTask,
        returns: CountingSendBack,
        items: list[WorkItem],
        locks: QueueLocks | None,
        *,
        deadline: float,
        most_bytes: int,
        drain: float,
    ) -> None:
        """No call begins after `deadline` of the loop's clock; running ones get `drain` seconds."""
        self._consumption = consumption
        self._returns = returns
        self.items = items
        self.locks = locks
        self._deadline = deadline
        self._most_bytes = most_bytes
        self._drain = drain
        self._now = asyncio.get_running_loop().time
        self._lease = deadline - self._now()
        self._moved = asyncio.Event()
        #: Set when the driver has ended a task that follows its queues.
        self._is_ended = asyncio.Event()
        self._by_queue = {work.owned: work for work in items}
        consumption.has_room = self._has_room
        consumption.follows = False

    @property
    def is_over(self) -> bool:
        """Whether no further call may begin."""
        return self.time_left <= 0.0

    @property
    def time_left(self) -> float:
        """Seconds until then."""
        return max(0.0, self._deadline - self._now())

    async def feed(self, work: WorkItem, messages: Sequence[ReceivedMessage], chunk: Chunk) -> None:
        """Take messages of a piece; `flush` hands them to the handlers."""
        # An empty range, as of a gap, counts even after the deadline.
        if not work.is_open or (messages and self.is_over):
            return
        work.waiting += messages
        work.waiting_bytes += sum(message.size for message in messages)
        work.waiting_missing += chunk.missing
        work.fetched = chunk.end
        if work.waiting_bytes > self._most_bytes:
            await self.flush(work)

    async def flush(self, work: WorkItem) -> None:
        """Hand the messages of a piece to the handlers after those before are done.

        They get a whole piece, because the calls of one hand-over begin in order: at the deadline
        nothing unfinished lies in front of something finished. In order no call begins after the
        deadline, when a second attempt may run; otherwise a late call beats a wasted read.
        """
        window = work.owned.window
        while work.is_open and len(window) and await self._some_time():
            pass
        is_too_late = self.is_over and isinstance(self._consumption, OrderlyInTask)
        if not work.is_open or len(window) or is_too_late:
            return
        messages, work.waiting, work.waiting_bytes = work.waiting, [], 0
        messages = _with_attempts(messages, work.piece.attempts)
        work.given, work.missing = work.fetched, work.waiting_missing
        new = window.add(messages, work.given)
        work.fed += len(new)
        if new:
            self._consumption.accept(work.owned, new)

    # ---- following queues

    async def follow(self, puller: Puller, link: TaskLink) -> None:
        """Handle messages as they arrive, until the driver ends it or renews the time no more."""
        self._consumption.has_room = puller.has_room
        self._consumption.follows = True
        link.listen(self._renewed, self._end)
        for work in self.items:
            if work.is_open:
                work.follows = True
                puller.begin(work.owned)
        try:
            while not self.is_over and any(work.is_open for work in self.items):
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(REPORT_EVERY, self.time_left)):
                        await self._is_ended.wait()
                if not self._is_ended.is_set():
                    link.report(self._news())
        finally:
            self._end()
            puller.stop()
            await link.close()

    def _renewed(self, since: float) -> None:
        if not self._is_ended.is_set():
            self._deadline = max(self._deadline, since + self._lease)

    def _end(self) -> None:
        self._deadline = min(self._deadline, self._now())
        self._is_ended.set()
        for work in self.items:
            # Now: the last answer of the driver is still waited for.
            work.owned.is_draining = True

    def _news(self) -> list[PieceReport]:
        """What has changed since the last call."""
        found = []
        for work in self.items:
            report = replace(self._report(work), pause=None, has_ended=not work.is_open)
            if report != work.reported:
                found.append(self._since(work, report))
                work.reported = report
        return found

    def accept(self, owned: OwnedQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Have messages handled, which are in the window of their queue already."""
        self._by_queue[owned].fed += len(messages)
        self._consumption.accept(owned, messages)

    def attempts(self, owned: OwnedQueue) -> Mapping[int, int]:
        """In order: the attempts of messages before this task."""
        return self._by_queue[owned].piece.attempts

    def is_moved(self, owned: OwnedQueue, *, is_reset: bool) -> None:
        """A queue cannot go on at its offset: the driver must decide."""
        work = self._by_queue[owned]
        work.reset_to = owned.next_offset if is_reset else None
        work.error = f"the broker goes on from {owned.next_offset} in {owned.queue}"

    # ---- the end

    async def finish(self) -> list[PieceReport]:
        """Wait until everything is handled or the deadline passes, then for running calls."""
        items = self.items
        while any(work.is_open and len(work.owned.window) for work in items):
            if not await self._some_time():
                break
        await asyncio.gather(*(self._consumption.drain(work.owned, self._drain) for work in items))
        reports = [self._since(work, self._report(work)) for work in items]
        for work in items:
            # Calls that still run no longer count.
            work.owned.drop()
            self._consumption.problems.pop(work.owned, None)
        return reports

    def _since(self, work: WorkItem, report: PieceReport) -> PieceReport:
        return report if work.reported is None else report.since(work.reported)

    def _report(self, work: WorkItem) -> PieceReport:
        """The state of a piece, with all counts of this task."""
        owned, whole = work.owned, work.reach
        reached = owned.window.commit_offset
        left = owned.window.unfinished
        given = owned.next_offset if work.follows else work.given
        tally = work.results
        tally.add(self._returns.tally(whole, owned.window))
        results = tally.results
        retried, dead = results[SendBackResult.RETRIED], results[SendBackResult.DEAD]
        held, kept = results[SendBackResult.HELD], results[SendBackResult.KEPT]
        problems = self._consumption.problems[owned]
        return PieceReport(
            place=work.place,
            finished=whole.start if reached is None else max(whole.start, min(reached, whole.end)),
            # A queue whose offset is moved has no end that counts.
            beyond=()
            if owned.is_dropped
            else _behind([message.queue_offset for message in left], given),
            done=max(0, work.fed - len(left) - retried - dead - held),
            retried=retried,
            dead=dead,
            kept=kept,
            held=held + problems.held,
            # Nearly all are in both. Calls that took too long were sent back only.
            failed=max(tally.failed, problems.failed),
            attempts=self._attempts(left),
            pause=self._pause_of(work, problems),
            error=work.error or tally.reason or problems.reason,
            reset_to=work.reset_to,
            missing=work.missing,
        )

    def _pause_of(self, work: WorkItem, problems: QueueProblems) -> float | None:
        if not work.follows:
            return problems.pause
        left = problems.paused_until - self._now()
        return left if left > 0 else None

    def _attempts(self, left: Sequence[ReceivedMessage]) -> dict[int, int]:
        """In order: attempts of unfinished messages that the broker does not know."""
        if not isinstance(self._consumption, OrderlyInTask):
            return {}
        return {
            each.queue_offset: each.reconsume_times
            for each in left
            if each.reconsume_times != each.stored.reconsume_times
        }

    async def _some_time(self) -> bool:
        """Wait until a message is done; False at the deadline."""
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._moved.wait()
        except TimeoutError:
            return False
        self._moved.clear()
        return True

    def _has_room(self, _: OwnedQueue) -> None:
        self._moved.set()


class TaskPuller(Puller):
    """Pulls the queues of a task. Where an offset is reset or gone, the driver decides."""

    def __init__(self, task: TaskRun, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._task = task

    def correct(self, owned: OwnedQueue, *, is_reset: bool = False, has_lost: bool = False) -> None:
        """End the work on a queue."""
        self._task.is_moved(owned, is_reset=is_reset)


class TaskReceiver(WindowReceiver):
    """Gives what is pulled to a task."""

    def __init__(self, progress: MemoryProgress, task: TaskRun, **options: Any) -> None:
        super().__init__(progress, task, **options)
        self._task = task

    def decoded(self, owned: OwnedQueue, pulled: Pulled) -> list[ReceivedMessage]:
        """The messages of a pull, with the attempts of earlier tasks."""
        return _with_attempts(super().decoded(owned, pulled), self._task.attempts(owned))


def _with_attempts(
    messages: list[ReceivedMessage], tried: Mapping[int, int]
) -> list[ReceivedMessage]:
    """In order: messages with the attempts that the broker does not know."""
    if not tried:
        return messages
    return [
        each.with_reconsume_times(tried.get(each.queue_offset, each.reconsume_times))
        for each in messages
    ]


def _behind(unfinished: Sequence[int], given: int) -> tuple[int, ...]:
    """The finished ranges between unfinished offsets: start, end, start, end."""
    return tuple(
        bound
        for one, following in pairwise([*unfinished, given])
        if following > one + 1
        for bound in (one + 1, following)
    )


# Kept between tasks, so that what a handler made once (a database client, say) is there again.

workers: Final[WorkerCache[Worker]] = WorkerCache(lambda worker: worker.stop())
send_back_clients: Final[WorkerCache[SendBackClient]] = WorkerCache(lambda client: client.stop())


def worker_for(packed: PackedDefinition) -> Worker:
    """The consumer of this process for a pipeline."""

    return workers.get(packed.digest, lambda: started(Worker(packed.unpack())))


def send_back_client(access: RangeAccess, group: str, max_retries: int | None) -> SendBackClient:
    """The client of this process that sends failed messages of a group back."""

    key = (access, group, max_retries)
    return send_back_clients.get(key, lambda: started(SendBackClient(*key)))
