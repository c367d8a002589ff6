"""`Consumer` and `AsyncConsumer`, and the group member that both are made of."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
)

from orbitmq.arguments import check_known, explained
from orbitmq.client.consumer.dispatch import (
    WORKERS_END,
    Bindings,
    ConcurrentConsumption,
    OrderlyConsumption,
    Parts,
    WindowReceiver,
)
from orbitmq.client.consumer.handlers import Binding, bind_handler, bind_listener
from orbitmq.client.consumer.handover import Draining, QueueSource
from orbitmq.client.consumer.locks import LockSettings, QueueLocks
from orbitmq.client.consumer.progress import (
    Beginning,
    BrokerProgress,
    LocalFileProgress,
    guarded,
    progress_path,
    wire_name,
)
from orbitmq.client.consumer.progress import (
    consume_from as beginning,
)
from orbitmq.client.consumer.pull import Puller, Refusals
from orbitmq.client.consumer.rebalance import Rebalancer
from orbitmq.client.consumer.resets import BrokerRequests
from orbitmq.client.consumer.sendback import LazyProducer, SendBack
from orbitmq.client.consumer.settings import (
    ConsumeSettings,
    FlowSettings,
    PullSettings,
    RebalanceSettings,
)
from orbitmq.client.consumer.statistics import (
    ConsumerStatistics,
    Statistics,
    describe,
    metrics_text,
    properties,
)
from orbitmq.client.consumer.strategies import Averagely, Strategy, strategy_named
from orbitmq.client.consumer.subscriptions import Subscription, Subscriptions, check_subscriptions
from orbitmq.client.consumer.workers import DirectCall, WorkerPool
from orbitmq.client.engine import AsyncLife, Engine, ProcessCheck
from orbitmq.client.loopthread import Life, LoopThread
from orbitmq.client.serialization import format_of
from orbitmq.client.settings import ClientSettings, resolve
from orbitmq.client.signals import GracefulExit, Latch, stop_requested, unless
from orbitmq.errors import NotRunning, SettingError, WrongUse
from orbitmq.names import check_group, retry_topic, wrap_group, wrap_topic
from orbitmq.parsing import Position, instance, switch
from orbitmq.wire.bodies import ConsumerData, ConsumeType, MessageModel

if TYPE_CHECKING:
    from orbitmq.client.consumer.handlers import HandlerFunction, ListenerFunction
    from orbitmq.client.consumer.parameters import Parameters
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.rebalance import AssignmentListener
    from orbitmq.client.consumer.window import OwnedQueue
    from orbitmq.client.message import ReceivedMessage
    from orbitmq.client.routes import Queue
    from orbitmq.client.serialization import Serializing
    from orbitmq.errors import AccessDenied
    from orbitmq.wire.bodies import ConsumerRunningInfo


F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class OptionArguments(TypedDict, total=False):
    """The options of a consumer beside its client: frequent ones, and objects with all others."""

    model: Literal["clustering", "broadcasting"]
    #: Consume each queue in order.
    ordered: bool
    #: Where a group without progress begins: "latest" (only messages from now on, the default),
    #: "earliest", a time ("2026-11-18T09:00", "-10m", a datetime), or an offset.
    consume_from: Beginning
    workers: int | None
    batch_size: int | None
    #: Attempts after the first: 16 by default, unless the group has another number at the broker;
    #: without a limit in order.
    max_retries: int | None
    strategy: Strategy | str
    #: A progress store of the application.
    progress: ProgressStore | None
    #: Begin at the end of a young topic as well, where brokers otherwise answer 0.
    strict_last: bool
    consume: ConsumeSettings | None
    flow: FlowSettings | None
    pull: PullSettings | None
    rebalance: RebalanceSettings | None
    locks: LockSettings | None
    #: Called with a topic, all its queues and the own ones whenever these change.
    on_assignment: AssignmentListener | None


class ConsumerArguments(OptionArguments, total=False):
    """The arguments of a consumer beside its group."""

    name_server: str | Iterable[str] | None
    client: ClientSettings | None
    #: Around all handlers, the outermost first.
    middleware: Sequence[object]
    #: What decodes bodies for handlers that take values: "json" (the default), "msgpack", an object
    #: with `dumps` and `loads`, or a pair of two such functions.
    serializer: Serializing


class ListenerArguments(TypedDict, total=False):
    """The options of a low-level listener."""

    #: A tag expression such as "paid || refunded", or a SQL92 condition; not both.
    tags: str | None
    sql: str | None
    batch_size: int | None
    middleware: Sequence[object]


class HandlerArguments(ListenerArguments, total=False):
    """The options of a handler."""

    #: Whether it takes a list of messages; by default its annotation decides.
    batch: bool | None
    #: The topic to which its results are sent, each before its message counts as done.
    publish: str | None


log = logging.getLogger(__name__)


class _Last(NamedTuple):
    """What is known of a consumer after its end."""

    client_id: str
    statistics: ConsumerStatistics


@explained()
class AsyncConsumer(AsyncLife):
    """A member of a consumer group, with handlers for one topic or several.

    consumer = AsyncConsumer("billing", name_server="localhost:9876")

    @consumer.on("orders", tags="paid || refunded")
    async def bill(message: ReceivedMessage) -> None: ...

    async with consumer:
        ...

    All members of a group subscribe to the same topics in the same way. Handlers may be `async def`
    or `def`; the latter run in threads. `verdict` explains what they return and raise.
    """

    def __init__(
        self,
        group: str,
        *,
        name_server: str | Iterable[str] | None = None,
        client: ClientSettings | None = None,
        middleware: Sequence[object] = (),
        serializer: Serializing = None,
        **options: Unpack[OptionArguments],
    ) -> None:
        self.group = checked_group(group)
        settings = resolve(name_server, client)
        self.options = checked_options(**options)
        self._settings = settings
        self._registrations = Registrations(
            group,
            namespace=settings.namespace,
            batch_size=self.options.consume.batch_size,
            middleware=middleware,
            serializer=serializer,
            in_order=self.options.ordered,
        )
        self._check_process = ProcessCheck("this consumer", from_start=True)
        self._engine: Engine | None = None
        self._core: ConsumerCore | None = None
        self._was_stopped = False
        #: Held by a start, and while a stop begins.
        self._life = asyncio.Lock()
        self._stopping: asyncio.Task[None] | None = None
        #: The state at the end.
        self._last: _Last | None = None
        self._ended: asyncio.Event | None = None
        #: Why nothing can arrive.
        self._denial: AccessDenied | None = None
        #: Called when that becomes known.
        self.on_denied: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- handlers

    def on(self, topic: str, **options: Unpack[HandlerArguments]) -> Callable[[F], F]:
        """Decorates the handler of a topic, or of the messages that match `tags` or `sql`.

        The annotation of its parameter decides what it is called with: the message, its body as
        `bytes` or `str`, or a `dict`, dataclass or model that is decoded from it. A second
        parameter annotated `ReceivedMessage` takes the message as well. One that is annotated as a
        list of these, or with `batch`, takes up to `batch_size` messages of one queue. With
        `publish`, what it returns is sent to that topic.
        """
        if callable(topic):
            raise SettingError('the decorator needs a topic: write @consumer.on("topic")')
        check_known(options, tuple(HandlerArguments.__annotations__))

        def register(function: F) -> F:
            self._check_not_started()
            self._registrations.handler(topic, function, **options)
            return function

        return register

    def listen(
        self, topic: str, listener: ListenerFunction, **options: Unpack[ListenerArguments]
    ) -> None:
        """Register a low-level `listener(messages, context)`, which must return a `Verdict`.

        As with Apache's listeners, None is a failure, and the context takes an ack index, a delay
        level, and in order whether and when to commit.
        """
        self._check_not_started()
        self._registrations.listener(topic, listener, **options)

    async def subscribe(
        self, topic: str, handler: HandlerFunction, **options: Unpack[HandlerArguments]
    ) -> None:
        """Consume a topic, or change its subscription; also while running."""
        registration = self._registrations.handler(topic, handler, replace=True, **options)
        if (core := self._live) is not None:
            await core.subscribe(registration)

    async def unsubscribe(self, topic: str) -> None:
        """Stop consuming a topic; running handler calls finish."""
        self._registrations.remove(topic)
        if (core := self._live) is not None:
            await core.unsubscribe(self._registrations.wire_topic(topic))

    # ---- start and stop

    async def start(self) -> None:
        """Begin to consume on the running loop. Returns when the brokers know the consumer.

        If no name server can be reached, the error is logged and the start is retried in the
        background.
        """
        self._check_process.begin()
        async with self._life:
            await self._start()

    async def _start(self) -> None:
        if self._was_stopped:
            raise NotRunning("this consumer", was_stopped=True)
        if self._core is not None:
            raise WrongUse("this consumer is running already; one start is enough")
        if not len(self._registrations):
            raise SettingError(
                f"consumer {self.group!r} has no handler; give it one with @consumer.on(topic)"
            )
        # A progress file is found again by the client id.
        is_stable = self.options.is_broadcasting and self.options.progress is None
        engine = Engine(self._settings, stable=is_stable)
        await engine.start()
        core: ConsumerCore | None = None
        try:
            group = wrap_group(self._settings.namespace, self.group)
            core = ConsumerCore(engine, group, self._registrations.all(), self.options)
            self._engine, self._core = engine, core
            self._ended, self._loop = asyncio.Event(), asyncio.get_running_loop()
            core.on_denied = self._denied
            await core.start()
        except BaseException:
            self._engine = self._core = None
            try:
                if core is not None:
                    await core.abandon()
            finally:
                await engine.stop()
            raise

    async def stop(self) -> None:
        """Finish running handlers, commit offsets, leave the group. May be repeated.

        Waits for running handlers, at most `RebalanceSettings.handover` seconds. If it is
        cancelled, the stop goes on; call it again to wait for its end.
        """
        self.check_may_stop()
        async with self._life:
            stopping = self._begin_stop()
        if stopping is not None:
            await asyncio.shield(stopping)

    def _begin_stop(self) -> asyncio.Task[None] | None:
        """Begin the stop, unless it is under way; None when there is nothing to stop."""
        self._was_stopped = True
        if self._stopping is None and self._engine is not None and self._core is not None:
            self._check_process()
            self._stopping = asyncio.get_running_loop().create_task(
                self._stop(self._engine, self._core), name=f"stop consumer {self.group}"
            )
        return self._stopping

    async def _stop(self, engine: Engine, core: ConsumerCore) -> None:
        try:
            await core.stop()
        except Exception:
            # The caller may have been cancelled.
            log.exception(
                "a consumer of group %s did not stop gracefully",
                self.group,
                extra={"group": self.group},
            )
            raise
        finally:
            self._last = _Last(engine.client_id, core.snapshot())
            try:
                await engine.stop()
            finally:
                self._engine = self._core = None
                if self._ended is not None:
                    self._ended.set()

    def _denied(self, denial: AccessDenied) -> None:
        """Nothing can arrive: end `run`."""
        self._denial = denial
        if self._ended is not None:
            self._ended.set()
        if self.on_denied is not None:
            self.on_denied()

    def check_not_denied(self) -> None:
        """Raise the reason if `run` ended because nothing can arrive."""
        if self._denial is not None:
            raise copy.copy(self._denial)

    def stop_soon(self) -> None:
        """Have `run` stop gracefully and return; from any thread.

        For handlers, which cannot wait for their own end.
        """
        if self._ended is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended.set)

    def check_may_stop(self) -> None:
        """Raise `WrongUse` in a handler, which would wait for its own end."""
        if self._core is not None and self._core.consumption.worker_pool.is_caller:
            raise WrongUse(
                "a handler cannot stop its consumer, which waits for its handlers: use stop_soon()"
            )

    async def run(self) -> None:
        """Consume until `stop` is called, the task is cancelled, or SIGINT or SIGTERM comes.

        Raises `AccessDenied` when brokers let this account read none of the topics, so that nothing
        can arrive.
        """
        with stop_requested() as requested:
            async with self:
                assert self._ended is not None  # noqa: S101  # made by `start`
                await unless(requested, self._ended.wait())
        self.check_not_denied()

    # ---- while it runs

    @property
    def client_id(self) -> str:
        """The id by which brokers know this member."""
        return self._begun.engine.client_id if self._last is None else self._last.client_id

    def assignment(self) -> frozenset[Queue]:
        """The owned queues, those of the retry topic included."""
        return frozenset(self._running.rebalancer.owned)

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        """All queues of a topic that can be read. Raises `NoRoute`."""
        routes = self._running.engine.routes
        return await routes.subscribe_queues(self._registrations.wire_topic(topic))

    def positions(self) -> dict[Queue, int]:
        """The offset up to which each queue is consumed."""
        return self._running.progress.positions()

    def statistics(self) -> ConsumerStatistics:
        """What was consumed, how fast, and what went wrong; after a stop, as it was then."""
        return self._begun.snapshot() if self._last is None else self._last.statistics

    def metrics(self) -> str:
        """The statistics in the text format of Prometheus, for the program's metrics page."""
        return metrics_text(self.group, self.client_id, self.statistics())

    def running_info(self, *, with_stacks: bool = False) -> ConsumerRunningInfo:
        """What administration tools show."""
        return self._running.running_info(with_stacks=with_stacks)

    def pause(self) -> None:
        """Fetch nothing until `resume`; queues stay with this member."""
        self._running.puller.pause()

    def resume(self) -> None:
        """Fetch again."""
        self._running.puller.resume()

    def resize(self, workers: int) -> None:
        """Change the number of handler calls at the same time."""
        self._running.consumption.worker_pool.resize(workers)

    @property
    def workers(self) -> int:
        """The largest number of handler calls at the same time."""
        return self._running.consumption.worker_pool.size

    @property
    def _begun(self) -> ConsumerCore:
        """The core, running or stopping: its state can be read."""
        self._check_process()
        if self._core is None:
            raise NotRunning("this consumer", was_stopped=self._was_stopped)
        return self._core

    @property
    def _running(self) -> ConsumerCore:
        self._check_process()
        core = self._live
        if core is None:
            raise NotRunning("this consumer", was_stopped=self._was_stopped)
        return core

    @property
    def _live(self) -> ConsumerCore | None:
        """The core, unless it is stopping."""
        return self._core if self._stopping is None else None

    def _check_not_started(self) -> None:
        self._check_process()
        if self._core is not None:
            raise WrongUse(
                "handlers are registered before the start; while it runs, use `subscribe`"
            )


# ---- the blocking face


P = ParamSpec("P")


def _now(
    method: Callable[Concatenate[AsyncConsumer, P], T],
) -> Callable[Concatenate[Consumer, P], T]:
    """A method that does not wait, called on the consumer's thread."""

    @functools.wraps(method)
    def blocking(self: Consumer, /, *args: P.args, **options: P.kwargs) -> T:
        return self._do(lambda: method(self._consumer, *args, **options))

    return blocking


@explained()
class Consumer(Life):
    """A member of a consumer group, with handlers for one topic or several.

    consumer = Consumer("billing", name_server="localhost:9876")

    @consumer.on("orders", tags="paid || refunded")
    def bill(message: ReceivedMessage) -> None: ...

    consumer.run()

    It works on a thread of its own. `def` handlers run on worker threads, `async def` handlers as
    tasks on its thread. Methods may be called from any thread, except by handlers they wait for.
    """

    def __init__(self, group: str, **options: Unpack[ConsumerArguments]) -> None:
        self._consumer = AsyncConsumer(group, **options)
        self.group = group
        self.options = self._consumer.options
        self._thread = LoopThread(f"orbitmq consumer {group}")
        self._check_process = ProcessCheck("this consumer", from_start=True)
        self._ended = Latch()
        self._was_stopped = False

    # ---- handlers

    def on(self, topic: str, **options: Unpack[HandlerArguments]) -> Callable[[F], F]:
        """As `AsyncConsumer.on`."""
        return self._consumer.on(topic, **options)

    def listen(
        self, topic: str, listener: ListenerFunction, **options: Unpack[ListenerArguments]
    ) -> None:
        """As `AsyncConsumer.listen`."""
        self._consumer.listen(topic, listener, **options)

    def subscribe(
        self, topic: str, handler: HandlerFunction, **options: Unpack[HandlerArguments]
    ) -> None:
        """As `AsyncConsumer.subscribe`."""
        if self._thread.is_running:
            self._thread.run(self._consumer.subscribe(topic, handler, **options))
        else:
            self.on(topic, **options)(handler)

    def unsubscribe(self, topic: str) -> None:
        """As `AsyncConsumer.unsubscribe`."""
        self._thread.run(self._consumer.unsubscribe(topic))

    # ---- start and stop

    def start(self) -> None:
        """Begin to consume in the background. Returns when the brokers know the consumer.

        If no name server can be reached, the error is logged and the start is retried in the
        background. Returns as well when the consumer is stopped meanwhile.
        """
        self._check_process.begin()
        if self._was_stopped:
            raise NotRunning("this consumer", was_stopped=True)
        self._thread.start()
        self._start()

    def _start(self) -> None:
        # A stop before this check has not seen the thread; a later one waits for the start.
        if self._was_stopped:
            self._thread.stop()
            return
        try:
            self._thread.run(self._consumer.start())
        except WrongUse:
            raise  # it is running
        except BaseException as error:
            was_stopped = isinstance(error, NotRunning) and self._was_stopped
            self._thread.stop()
            if not was_stopped:
                raise

    def stop(self) -> None:
        """Finish running handlers, commit offsets, leave the group. May be repeated.

        Signal handlers and several threads may call it; all wait for the same end. `async def`
        handlers run on the consumer's own thread and must use `stop_soon`.
        """
        if not self._check_process.is_same:
            return
        if self._thread.is_current:
            # Before any state changes: a stop elsewhere must still be possible.
            raise WrongUse(
                "a consumer cannot be stopped on its own thread, which would wait for itself: "
                "use stop_soon()"
            )
        self._consumer.check_may_stop()
        self._was_stopped = True
        try:
            if self._thread.is_running:
                # Another caller may be stopping the thread.
                with suppress(NotRunning):
                    self._thread.run(self._consumer.stop())
        finally:
            self._thread.stop()
        self._ended.set()

    def stop_soon(self) -> None:
        """Have `run` stop gracefully and return; from any thread.

        For handlers, which cannot wait for their own end.
        """
        self._ended.set()

    def run(self) -> None:
        """Consume until `stop` is called elsewhere, or SIGINT or SIGTERM comes.

        The first signal stops gracefully; a second one ends the program immediately. Signals are
        left alone outside of the main thread. Raises `AccessDenied` when brokers let this account
        read none of the topics, so that nothing can arrive.
        """
        self._consumer.on_denied = self._ended.set
        with GracefulExit(self._ended.set), self:
            self._ended.wait()
        self._consumer.check_not_denied()

    # ---- while it runs

    assignment = _now(AsyncConsumer.assignment)
    positions = _now(AsyncConsumer.positions)
    statistics = _now(AsyncConsumer.statistics)
    metrics = _now(AsyncConsumer.metrics)
    running_info = _now(AsyncConsumer.running_info)
    pause = _now(AsyncConsumer.pause)
    resume = _now(AsyncConsumer.resume)
    resize = _now(AsyncConsumer.resize)

    def queues(self, topic: str) -> tuple[Queue, ...]:
        """All queues of a topic that can be read. Raises `NoRoute`."""
        return self._thread.run(self._consumer.queues(topic))

    @property
    def client_id(self) -> str:
        """The id by which brokers know this member."""
        return self._do(lambda: self._consumer.client_id)

    @property
    def workers(self) -> int:
        """The largest number of handler calls at the same time."""
        return self._do(lambda: self._consumer.workers)

    def _do(self, function: Callable[[], T]) -> T:
        """Evaluate a function on the consumer's thread; where there is none, here."""
        self._check_process()
        if self._thread.is_running and not self._thread.is_current:
            # The thread may be stopping.
            with suppress(NotRunning):
                return self._thread.run(_called(function))
        return function()


async def _called(function: Callable[[], T]) -> T:
    return function()


# ---- members of a group


class GroupMember(ABC):
    """What both kinds of members share: heartbeats, running info, resets. On its engine's loop."""

    producer_group: str | None = None
    progress: ProgressStore
    rebalancer: Rebalancer
    worker_pool: WorkerPool

    def __init__(
        self,
        engine: Engine,
        group: str,
        registrations: Sequence[Registration],
        options: ConsumerOptions,
    ) -> None:
        """Needs a running engine; `group` is the name that brokers know."""
        self.engine = engine
        self.group = group
        self.options = options
        self.is_ordered = options.ordered
        self.subscriptions = Subscriptions(engine.clock.now)
        for registration in registrations:
            self.subscriptions.put(registration.subscription)
        if not options.is_broadcasting:
            self.subscriptions.put(Subscription(retry_topic(group)))
        self._producer = LazyProducer(engine)
        self.bindings = Bindings(
            {registration.topic: registration.binding for registration in registrations},
            group,
            self._producer,
        )
        self.statistics = Statistics(engine.clock.monotonic)
        self._started_at = engine.clock.now()

    async def consume_directly(self, message: ReceivedMessage) -> DirectCall:
        """Call a handler once, with a message that an administrator chose."""
        binding = self.bindings.of_message(message)
        return await self.worker_pool.call_directly(binding, message, self.engine.clock.monotonic)

    @abstractmethod
    def running_info(self, *, with_stacks: bool = False) -> ConsumerRunningInfo:
        """The state of the member, for tools."""

    def consumer_data(self) -> ConsumerData:
        """The content of heartbeats."""
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.CONSUME_PASSIVELY,
            message_model=self.options.model,
            consume_from_where=wire_name(self.options.consume_from),
            subscription_data_set=self.subscriptions.to_data(),
        )

    async def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Go on from other offsets; returns when they are committed.

        A queue begins again when its running handler calls have ended; concurrent consumption waits
        for them as long as for a hand-over, orderly consumption without a limit.
        """
        await self.rebalancer.reset(offsets)

    def _described(self, *, workers: int, stacks: str | None = None) -> ConsumerRunningInfo:
        settings = properties(
            self.group,
            self.options,
            self.engine.settings.name_servers,
            started_at=self._started_at,
            workers=workers,
        )
        info = self.rebalancer.running_info()
        return describe(info, settings, self.subscriptions, self.statistics, stacks=stacks)

    def _log_start(self, what: str) -> None:
        log.info(
            "%s started: group %s as %s, topics %s",
            what,
            self.group,
            self.engine.client_id,
            ", ".join(sorted(self.subscriptions.topics)),
            extra={"group": self.group, "client": self.engine.client_id},
        )

    def _log_stop(self, what: str) -> None:
        log.info(
            "%s stopped: group %s as %s",
            what,
            self.group,
            self.engine.client_id,
            extra={"group": self.group, "client": self.engine.client_id},
        )


class ConsumerCore(GroupMember):
    """One member of a consumer group, with all its parts. On its engine's loop; started once.

        heartbeat -> rebalance -> pull -> window -> handlers -> verdict -> progress
                         ^                                  \\-> send back -> delay -> retry topic

    A start loads progress, starts workers, registers at the brokers and acquires queues. A stop is
    the reverse: brokers learn last that the member is gone, after all offsets are committed.
    """

    def __init__(
        self,
        engine: Engine,
        group: str,
        registrations: Sequence[Registration],
        options: ConsumerOptions,
    ) -> None:
        """Needs a running engine; `group` is the name that brokers know."""
        super().__init__(engine, group, registrations, options)
        own = options.progress
        self._kept = self._default_progress() if own is None else own
        self.progress: ProgressStore = self._kept if own is None else guarded(own)
        self.consumption = self._consumption()
        self.worker_pool = self.consumption.worker_pool
        self.puller = Puller(
            engine,
            group,
            self.subscriptions,
            self.progress,
            WindowReceiver(
                self.progress,
                self.consumption,
                flow=options.flow,
                is_orderly=options.ordered,
                group=self.group,
                namespace=engine.settings.namespace,
            ),
            options.pull,
            is_broadcasting=options.is_broadcasting,
            keeps_resets=isinstance(self.progress, BrokerProgress),
            count=self.statistics.pulled,
        )
        self.statistics.catch_up = self.puller.note_found
        self.consumption.has_room = self._has_room
        self.locks = QueueLocks(engine, group, options.locks) if self._needs_locks else None
        self.rebalancer = Rebalancer(
            engine,
            group,
            lambda: self.subscriptions.topics,
            progress=self.progress,
            puller=self.puller,
            consumption=self.consumption,
            strategy=options.strategy,
            consume_from=options.consume_from,
            is_broadcasting=options.is_broadcasting,
            locks=self.locks,
            settings=options.rebalance,
            listener=options.on_assignment,
            refusals=self.puller.refusals,
        )
        self.puller.rebuild = self.rebalancer.rebuild
        #: Called when brokers deny this account everything, so that nothing can arrive.
        self.on_denied: Callable[[AccessDenied], None] | None = None
        self._look: asyncio.Handle | None = None
        self.puller.refusals.on_refused = self._refused
        self._requests = BrokerRequests(engine, self)

    @property
    def _needs_locks(self) -> bool:
        return self.options.ordered and not self.options.is_broadcasting

    def _default_progress(self) -> ProgressStore:
        if self.options.is_broadcasting:
            return LocalFileProgress(progress_path(self.group, self.engine.client_id))
        return BrokerProgress(self.engine, self.group, strict_last=self.options.strict_last)

    def _consumption(self) -> ConcurrentConsumption | OrderlyConsumption:
        options = self.options
        sending_back = None
        if not options.is_broadcasting:
            sending_back = SendBack(
                self.engine,
                self.group,
                self._producer,
                max_retries=options.consume.max_retries,
                timeout=options.consume.send_back_timeout,
            )
        parts = Parts(
            self.engine,
            self.group,
            self.bindings,
            self.progress,
            sending_back,
            options.consume,
            self.statistics,
        )
        if options.ordered:
            return OrderlyConsumption(parts, lapsed=self._lock_lapsed)
        return ConcurrentConsumption(parts)

    # ---- start and stop

    async def start(self) -> None:
        """Returns when the brokers know the consumer and it has begun to acquire queues."""
        await self.progress.load()
        await check_subscriptions(self.engine, self.group, self.subscriptions)
        await self.consumption.start()
        self.engine.join(self)
        self._requests.start()
        await self.rebalancer.start()
        self._log_start("consumer")

    async def stop(self) -> None:
        """Give everything back, within a limited time."""
        async with AsyncExitStack() as rest:
            # In reverse order; each step runs whatever happened to those before.
            rest.push_async_callback(self.abandon)
            rest.push_async_callback(self.engine.leave, self)
            rest.callback(self._requests.stop)
            rest.callback(self.puller.stop)
            await self.rebalancer.stop()
        self._log_stop("consumer")

    async def abandon(self) -> None:
        """End the local parts: workers, inner producer, lock of a progress file."""
        try:
            await self.consumption.stop()
            await self._producer.stop()
        finally:
            if isinstance(self._kept, LocalFileProgress):
                self._kept.close()

    # ---- while it runs

    async def subscribe(self, registration: Registration) -> None:
        """Consume one more topic, or change a subscription. Raises `SubscriptionRefused`."""
        await check_subscriptions(self.engine, self.group, [registration.subscription])
        self.bindings.put(registration.topic, registration.binding)
        self.subscriptions.put(registration.subscription)
        await self._announce_subscriptions()
        for owned in self.puller.queues:
            if owned.queue.topic == registration.topic:
                # The pull that the broker holds has the old subscription.
                self.puller.restart(owned)

    async def unsubscribe(self, topic: str) -> None:
        """Stop consuming a topic; its queues are released gracefully."""
        if self.subscriptions.remove(topic):
            await self._announce_subscriptions()

    async def _announce_subscriptions(self) -> None:
        await self.engine.heartbeat()
        self.rebalancer.wake()

    def running_info(self, *, with_stacks: bool = False) -> ConsumerRunningInfo:
        """The state of the consumer, for tools."""
        worker_pool = self.worker_pool
        return self._described(
            workers=worker_pool.size, stacks=worker_pool.stacks() if with_stacks else None
        )

    def snapshot(self) -> ConsumerStatistics:
        # Pulls and rebalancing may report the same trouble.
        troubles = dict.fromkeys((*self.rebalancer.troubles, *self.puller.troubles))
        return self.statistics.snapshot(tuple(troubles), self.puller.counts())

    def _refused(self) -> None:
        """Check once for all queues whose refusals have just arrived."""
        if self._look is None:
            self._look = asyncio.get_running_loop().call_soon(self._look_for_denial)

    def _look_for_denial(self) -> None:
        self._look = None
        denial = self.rebalancer.denial
        if denial is not None and self.on_denied is not None:
            self.on_denied(denial)

    def _has_room(self, owned: OwnedQueue) -> None:
        """Messages of a queue were finished."""
        self.puller.has_room(owned)
        if not len(owned.window):
            self.rebalancer.committer.became_empty()

    def _lock_lapsed(self, owned: OwnedQueue) -> None:
        """Acquire a queue again, and check the other locks now: they may have lapsed, too."""
        self.rebalancer.lock_lapsed(owned)
        if self.locks is not None:
            self.engine.spawn(self.locks.renew(), f"look at locks of {self.group}")


class MessageHandling(QueueSource, Draining, Protocol):
    """Consumption in other processes. Everything is called on the event loop."""

    refusals: Refusals


class DelegatedMember(GroupMember):
    """A group member whose messages are handled elsewhere, as by Spark's workers.

    It sends heartbeats, owns and hands over queues, holds order locks, commits offsets and answers
    brokers. `hands` handles the messages. Belongs to its engine's loop; started once.
    """

    def __init__(
        self,
        engine: Engine,
        group: str,
        registrations: Sequence[Registration],
        options: ConsumerOptions,
        hands: MessageHandling,
    ) -> None:
        """Needs a running engine; `group` is the name that brokers know."""
        super().__init__(engine, group, registrations, options)
        self.progress: ProgressStore = BrokerProgress(
            engine, group, strict_last=options.strict_last
        )
        self.locks = QueueLocks(engine, group, options.locks) if options.ordered else None
        #: Only for calls that administrators ask for.
        self.worker_pool = WorkerPool(options.consume.workers, lambda _: None, group=group)
        #: Topics of which a first round is done.
        self._seen: set[str] = set()
        self.rebalancer = Rebalancer(
            engine,
            group,
            lambda: self.subscriptions.topics,
            progress=self.progress,
            puller=hands,
            consumption=hands,
            strategy=options.strategy,
            consume_from=options.consume_from,
            locks=self.locks,
            settings=options.rebalance,
            refusals=hands.refusals,
            listener=self._assigned,
        )
        self._requests = BrokerRequests(engine, self)

    # ---- start and stop

    async def start(self) -> None:
        """Returns when the brokers know the member and it has begun to acquire queues."""
        await self.progress.load()
        await check_subscriptions(self.engine, self.group, self.subscriptions)
        self.engine.join(self)
        self._requests.start()
        await self.rebalancer.start()
        self._log_start("member")

    async def stop(self) -> None:
        """Give everything back, within a limited time; handled messages are committed first."""
        await self.rebalancer.stop()
        self._requests.stop()
        await self.engine.leave(self)
        await self.worker_pool.stop(WORKERS_END)
        await self._producer.stop()
        self._log_stop("member")

    # ---- while it runs

    @property
    def is_settled(self) -> bool:
        """Whether it owns its whole share, as far as that can be known."""
        if self.rebalancer.claimed:
            return False
        # A retry topic is created at its first use.
        return self._seen >= set(self.subscriptions.topics) - {retry_topic(self.group)}

    def _assigned(
        self, topic: str, queues: tuple[Queue, ...], own: tuple[Queue, ...]
    ) -> Awaitable[None] | None:
        self._seen.add(topic)
        listener = self.options.on_assignment
        return None if listener is None else listener(topic, queues, own)

    def running_info(self, *, with_stacks: bool = False) -> ConsumerRunningInfo:
        """The state of the member. It has no stacks: handlers run elsewhere."""
        return self._described(workers=self.options.consume.workers)


# ---- registered handlers


@dataclass(frozen=True, slots=True)
class Registration:
    """A subscription and its handler."""

    subscription: Subscription
    binding: Binding

    @property
    def topic(self) -> str:
        """The name that brokers know."""
        return self.subscription.topic


class _BindingArguments(TypedDict):
    batch_size: int | None
    middleware: Sequence[object]


class Registrations:
    """The handlers of a consumer, one for each topic."""

    def __init__(
        self,
        group: str,
        *,
        namespace: str | None = None,
        batch_size: int | None = None,
        middleware: Sequence[object] = (),
        serializer: Serializing = None,
        in_order: bool = False,
    ) -> None:
        """`batch_size`, `middleware` and `serializer` apply to all handlers.

        With `in_order` listeners may commit by themselves.
        """
        self._group = group
        self._namespace = namespace
        self._batch_size = batch_size
        self._in_order = in_order
        self._middleware = _several(middleware)
        format_of(serializer)  # raises
        self._serializer = serializer
        self._by_topic: dict[str, Registration] = {}

    def __len__(self) -> int:
        return len(self._by_topic)

    def all(self) -> tuple[Registration, ...]:
        return tuple(self._by_topic.values())

    def wire_topic(self, topic: str) -> str:
        return wrap_topic(self._namespace, topic)

    def handler(
        self,
        topic: str,
        function: HandlerFunction,
        *,
        replace: bool = False,
        parameters: Parameters | None = None,
        **options: Unpack[HandlerArguments],
    ) -> Registration:
        """Register a handler of a topic; `parameters` as for `bind_handler`."""
        check_known(options, tuple(HandlerArguments.__annotations__))
        batch = options.get("batch")
        common = self._common(options)
        binding = bind_handler(
            function,
            group=self._group,
            batch=batch,
            serializer=self._serializer,
            publish=options.get("publish"),
            parameters=parameters,
            **common,
        )
        return self._put(topic, binding, options, replace=replace)

    def listener(
        self, topic: str, function: ListenerFunction, **options: Unpack[ListenerArguments]
    ) -> Registration:
        """Register a low-level listener of a topic."""
        check_known(options, tuple(ListenerArguments.__annotations__))
        common = self._common(options)
        binding = bind_listener(function, group=self._group, in_order=self._in_order, **common)
        return self._put(topic, binding, options)

    def _common(self, options: ListenerArguments) -> _BindingArguments:
        size = options.get("batch_size")
        middleware = _several(options.get("middleware", ()))
        return {
            "batch_size": self._batch_size if size is None else size,
            "middleware": (*self._middleware, *middleware),
        }

    def remove(self, topic: str) -> Registration | None:
        """Remove the handler of a topic."""
        return self._by_topic.pop(self.wire_topic(topic), None)

    def _put(
        self, topic: str, binding: Binding, options: ListenerArguments, *, replace: bool = False
    ) -> Registration:
        tags, sql = options.get("tags"), options.get("sql")
        if tags is not None and sql is not None:
            raise SettingError(f"give topic {topic!r} tags or a SQL92 condition, not both")
        wire_topic = self.wire_topic(topic)
        subscription = (
            Subscription.by_tags(wire_topic, tags)
            if sql is None
            else Subscription.by_sql(wire_topic, sql)
        )
        if wire_topic in self._by_topic and not replace:
            raise SettingError(
                f"topic {topic!r} has a handler already, {self._by_topic[wire_topic].binding.name};"
                " a consumer has one for each topic"
            )
        registration = Registration(subscription, binding)
        self._by_topic[wire_topic] = registration
        return registration


def _several(middleware: Sequence[object]) -> tuple[object, ...]:
    if not isinstance(middleware, Iterable):
        raise SettingError(f"middleware must be a list, got {middleware!r}: write [{middleware!r}]")
    return tuple(middleware)


# ---- options


#: Reserved by Apache's clients: the name of a group that was not given one.
_NO_GROUP: Final = "DEFAULT_CONSUMER"
_MODELS: Final = {model.value.lower(): model for model in MessageModel}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """All settings of a consumer except its group, handlers and client."""

    model: MessageModel = MessageModel.CLUSTERING
    ordered: bool = False
    consume_from: Position = Position.LATEST
    strategy: Strategy = field(default_factory=Averagely)
    #: The application's own store; None: the broker, or a local file for broadcasting.
    progress: ProgressStore | None = None
    #: Begin at the end of a young topic as well, where brokers otherwise answer 0.
    strict_last: bool = False
    consume: ConsumeSettings = field(default_factory=ConsumeSettings)
    flow: FlowSettings = field(default_factory=FlowSettings)
    pull: PullSettings = field(default_factory=PullSettings)
    rebalance: RebalanceSettings = field(default_factory=RebalanceSettings)
    locks: LockSettings = field(default_factory=LockSettings)
    on_assignment: AssignmentListener | None = None

    @property
    def is_broadcasting(self) -> bool:
        return self.model is MessageModel.BROADCASTING


def checked_options(**arguments: Unpack[OptionArguments]) -> ConsumerOptions:
    """The checked options. Raises `SettingError`; separate numbers override those in `consume`."""
    check_known(arguments, tuple(OptionArguments.__annotations__))
    options: dict[str, Any] = {**arguments}
    for name, check in _CHECKS.items():
        if name in options:
            options[name] = check(options[name])
    numbers = {name: options.pop(name, None) for name in ("workers", "batch_size", "max_retries")}
    given = {name: value for name, value in numbers.items() if value is not None}
    for name, kind in _PARTS.items():
        part = options.get(name)
        options[name] = kind() if part is None else instance(part, name, kind)
    return ConsumerOptions(**options | {"consume": replace(options["consume"], **given)})


def checked_group(group: str) -> str:
    """A checked group name. Raises `SettingError`."""
    if check_group(group) == _NO_GROUP:
        raise SettingError(f"group {_NO_GROUP} is reserved; give your consumers a name")
    return group


def _model(model: str) -> MessageModel:
    try:
        return _MODELS[model.lower()]
    except (KeyError, AttributeError):
        raise SettingError(
            f"model must be one of {', '.join(sorted(_MODELS))}, got {model!r}"
        ) from None


#: How options are checked and converted.
_CHECKS: Final[Mapping[str, Callable[[Any], object]]] = {
    "model": _model,
    "ordered": lambda value: switch(value, "ordered"),
    "consume_from": beginning,
    "strategy": strategy_named,
    "strict_last": lambda value: switch(value, "strict_last"),
}
#: The options that are settings with numbers of their own.
_PARTS: Final[Mapping[str, type[Any]]] = {
    "consume": ConsumeSettings,
    "flow": FlowSettings,
    "pull": PullSettings,
    "rebalance": RebalanceSettings,
    "locks": LockSettings,
}
