"""The consumer for programs with an event loop."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

from orbitmq.client.consumer.core import ConsumerCore
from orbitmq.client.consumer.metricstext import metrics_text
from orbitmq.client.consumer.options import checked_group, checked_options
from orbitmq.client.consumer.registering import Registrations
from orbitmq.client.endingsignals import LoopEndingSignals
from orbitmq.client.engine import Engine
from orbitmq.client.errors import AlreadyRunning, NotRunning, SettingError, WrongUse
from orbitmq.client.identity import ProcessCheck
from orbitmq.client.namespaces import wrap_group
from orbitmq.client.settings import ClientSettings, resolve

if TYPE_CHECKING:
    from orbitmq.client.consumer.allocation import Strategy
    from orbitmq.client.consumer.assignmentnews import AssignmentListener
    from orbitmq.client.consumer.flowcontrol import FlowSettings
    from orbitmq.client.consumer.handlers import HandlerFunction, ListenerFunction
    from orbitmq.client.consumer.locks import LockSettings
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.pullsettings import PullSettings
    from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
    from orbitmq.client.consumer.settings import ConsumeSettings
    from orbitmq.client.consumer.starting import Beginning
    from orbitmq.client.consumer.statistics import ConsumerStatistics
    from orbitmq.client.errors import AccessDenied
    from orbitmq.client.queue import Queue
    from orbitmq.wire.bodies.stats import ConsumerRunningInfo

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class _Last(NamedTuple):
    """What can be said of a consumer that is over."""

    client_id: str
    statistics: ConsumerStatistics


class AsyncConsumer:
    """A member of a consumer group, with handlers for one topic or several.

    consumer = AsyncConsumer("billing", name_server="localhost:9876")

    @consumer.on("orders", tags="paid || refunded")
    async def bill(message: ReceivedMessage) -> None: ...

    async with consumer:
        ...

    All members of a group subscribe to the same topics in the same way. Handlers may be `async def`
    or `def`; the latter run in threads. What they return and raise: see `verdict`.
    """

    def __init__(
        self,
        group: str,
        *,
        name_server: str | Iterable[str] | None = None,
        client: ClientSettings | None = None,
        model: Literal["clustering", "broadcasting"] = "clustering",
        ordered: bool = False,
        consume_from: Beginning = "last",
        workers: int | None = None,
        batch_size: int | None = None,
        max_retries: int | None = None,
        middleware: Sequence[object] = (),
        strategy: Strategy | str = "AVG",
        progress: ProgressStore | None = None,
        strict_last: bool = False,
        consume: ConsumeSettings | None = None,
        flow: FlowSettings | None = None,
        pull: PullSettings | None = None,
        rebalance: RebalanceSettings | None = None,
        locks: LockSettings | None = None,
        on_assignment: AssignmentListener | None = None,
    ) -> None:
        """The settings that most people change, and objects with all the others.

        `consume_from` is where a group without progress begins: "last" (only what comes from now
        on), "first", or a time; it has no effect on a group that has some. `ordered` consumes each
        queue in order. `max_retries` are attempts after the first, 16 unless the group has another
        number at the broker; in order there is no limit by default. `on_assignment` is called with
        a topic, all its queues and the own ones whenever these change.
        """
        self.group = checked_group(group)
        settings = resolve(name_server, client)
        self.options = checked_options(
            model=model,
            ordered=ordered,
            consume_from=consume_from,
            strategy=strategy,
            progress=progress,
            strict_last=strict_last,
            workers=workers,
            batch_size=batch_size,
            max_retries=max_retries,
            consume=consume,
            flow=flow,
            pull=pull,
            rebalance=rebalance,
            locks=locks,
            on_assignment=on_assignment,
        )
        self._settings = settings
        self._registrations = Registrations(
            group,
            namespace=settings.namespace,
            batch_size=self.options.consume.batch_size,
            middleware=middleware,
            in_order=self.options.ordered,
        )
        self._check_process = ProcessCheck("this consumer", from_start=True)
        self._engine: Engine | None = None
        self._core: ConsumerCore | None = None
        self._was_stopped = False
        #: Under it a start goes on, or a stop begins.
        self._life = asyncio.Lock()
        self._stopping: asyncio.Task[None] | None = None
        #: What was the case at the end.
        self._last: _Last | None = None
        self._ended: asyncio.Event | None = None
        #: Why nothing could arrive any more.
        self._denial: AccessDenied | None = None
        #: Called when it is known.
        self.on_denied: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- handlers

    def on(
        self,
        topic: str,
        *,
        tags: str | None = None,
        sql: str | None = None,
        batch: bool | None = None,
        batch_size: int | None = None,
        middleware: Sequence[object] = (),
    ) -> Callable[[F], F]:
        """Decorates the handler of a topic, or of those messages that `tags` or `sql` choose.

        A handler whose parameter is annotated as a list of messages, or with `batch`, is called
        with up to `batch_size` messages of one queue.
        """
        if callable(topic):
            raise SettingError('the decorator needs a topic: write @consumer.on("topic")')

        def register(function: F) -> F:
            self._check_not_started()
            self._registrations.handler(
                topic,
                function,
                tags=tags,
                sql=sql,
                batch=batch,
                batch_size=batch_size,
                middleware=middleware,
            )
            return function

        return register

    def listen(
        self,
        topic: str,
        listener: ListenerFunction,
        *,
        tags: str | None = None,
        sql: str | None = None,
        batch_size: int | None = None,
        middleware: Sequence[object] = (),
    ) -> None:
        """The low-level way: `listener(messages, context)` must return a `Verdict`.

        As with Apache's listeners, None is a failure, and the context takes an ack index, a delay
        level, and in order whether and when to commit.
        """
        self._check_not_started()
        self._registrations.listener(
            topic, listener, tags=tags, sql=sql, batch_size=batch_size, middleware=middleware
        )

    async def subscribe(
        self,
        topic: str,
        handler: HandlerFunction,
        *,
        tags: str | None = None,
        sql: str | None = None,
        batch: bool | None = None,
        batch_size: int | None = None,
        middleware: Sequence[object] = (),
    ) -> None:
        """Consume a topic from now on, or other messages of it; while running as well."""
        registration = self._registrations.handler(
            topic,
            handler,
            tags=tags,
            sql=sql,
            batch=batch,
            batch_size=batch_size,
            middleware=middleware,
            replace=True,
        )
        if (core := self._live) is not None:
            await core.subscribe(registration)

    async def unsubscribe(self, topic: str) -> None:
        """Consume a topic no more; what its handler is at is finished."""
        self._registrations.remove(topic)
        if (core := self._live) is not None:
            await core.unsubscribe(self._registrations.wire_topic(topic))

    # ---- life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begin to consume, on the running loop. Returns when brokers know the consumer.

        Also when no name server can be reached: it is logged, and tried again until one can.
        """
        self._check_process.begin()
        async with self._life:
            await self._start()

    async def _start(self) -> None:
        if self._was_stopped:
            raise NotRunning("this consumer", was_stopped=True)
        if self._core is not None:
            raise AlreadyRunning("this consumer")
        if not len(self._registrations):
            raise SettingError(
                f"consumer {self.group!r} has no handler; give it one with @consumer.on(topic)"
            )
        # Progress in a file is found again by the id.
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
        """Let running handlers finish, report progress, leave the group. May be repeated.

        Takes as long as the handlers that run, up to `RebalanceSettings.handover` seconds. When
        this is cancelled, the stop goes on; call it again to wait for its end.
        """
        self.check_may_stop()
        async with self._life:
            stopping = self._begin_stop()
        if stopping is not None:
            await asyncio.shield(stopping)

    def _begin_stop(self) -> asyncio.Task[None] | None:
        """The stop under way, begun here if nobody has; None when nothing is to be stopped."""
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
            # Maybe nobody waits for it any more.
            log.exception(
                "a consumer of group %s did not stop in order",
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
        """Nothing can arrive: `run` need not wait any more."""
        self._denial = denial
        if self._ended is not None:
            self._ended.set()
        if self.on_denied is not None:
            self.on_denied()

    def check_not_denied(self) -> None:
        """Raise why nothing could arrive, if that has ended `run`."""
        if self._denial is not None:
            raise copy.copy(self._denial)

    def stop_soon(self) -> None:
        """Have `run` stop in order and return; from any thread.

        For handlers, which cannot wait for their own end.
        """
        if self._ended is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended.set)

    def check_may_stop(self) -> None:
        """Refuse to let a handler wait for its own end."""
        if self._core is not None and self._core.consumption.crew.is_caller:
            raise WrongUse(
                "a handler cannot stop its consumer, which waits for its handlers: use stop_soon()"
            )

    async def run(self) -> None:
        """Consume until `stop` is called, the task is cancelled, or SIGINT or SIGTERM comes.

        Raises `AccessDenied` when brokers let this account read none of the topics: then nothing
        can arrive, whatever is waited for.
        """
        with LoopEndingSignals() as signals:
            async with self:
                assert self._ended is not None  # noqa: S101  # made by `start`
                await signals.or_event(self._ended)
                # The next signal ends the program at once.
                signals.restore()
        self.check_not_denied()

    # ---- while it runs

    @property
    def client_id(self) -> str:
        """The id that brokers know this member by, or knew."""
        return self._begun.engine.client_id if self._last is None else self._last.client_id

    @property
    def queues(self) -> frozenset[Queue]:
        """The queues that are consumed here now, those of the retry topic as well."""
        return frozenset(self._running.rebalancer.owned)

    def positions(self) -> dict[Queue, int]:
        """The offset up to which each queue is consumed."""
        return self._running.progress.positions()

    def statistics(self) -> ConsumerStatistics:
        """What was consumed, how fast, and what went wrong; after the end, what it was then."""
        return self._begun.snapshot() if self._last is None else self._last.statistics

    def metrics(self) -> str:
        """The same in the text format of Prometheus, for the program's own metrics page."""
        return metrics_text(self.group, self.client_id, self.statistics())

    def running_info(self, *, with_stacks: bool = False) -> ConsumerRunningInfo:
        """What administration tools are shown."""
        return self._running.running_info(with_stacks=with_stacks)

    def pause(self) -> None:
        """Fetch nothing more until `resume`; queues stay with this member."""
        self._running.puller.pause()

    def resume(self) -> None:
        """Fetch again."""
        self._running.puller.resume()

    def resize(self, workers: int) -> None:
        """Call so many handlers at once, from now on."""
        self._running.consumption.crew.resize(workers)

    @property
    def workers(self) -> int:
        """How many handlers are called at once at most."""
        return self._running.consumption.crew.size

    @property
    def _begun(self) -> ConsumerCore:
        """What runs, or is about to stop: it can be looked at."""
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
        """What runs, and is not about to stop."""
        return self._core if self._stopping is None else None

    def _check_not_started(self) -> None:
        self._check_process()
        if self._core is not None:
            raise WrongUse(
                "handlers are registered before the start; while it runs, use `subscribe`"
            )
