"""The consumer for programs without an event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from orbitmq.client.consumer.asyncconsumer import AsyncConsumer
from orbitmq.client.endingsignals import EndingSignals, Latch
from orbitmq.client.errors import AlreadyRunning, NotRunning, WrongUse
from orbitmq.client.identity import ProcessCheck
from orbitmq.client.loopthread import LoopThread

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
    from orbitmq.client.queue import Queue
    from orbitmq.client.settings import ClientSettings
    from orbitmq.wire.bodies.stats import ConsumerRunningInfo

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Consumer:
    """A member of a consumer group, with handlers for one topic or several.

    consumer = Consumer("billing", name_server="localhost:9876")

    @consumer.on("orders", tags="paid || refunded")
    def bill(message: ReceivedMessage) -> None: ...

    consumer.run()

    It works on a thread of its own; handlers run on others, or as tasks on that thread if they are
    `async def`. Its methods may be called from any thread but those that they would wait for.
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
        """As those of `AsyncConsumer`."""
        self._consumer = AsyncConsumer(
            group,
            name_server=name_server,
            client=client,
            model=model,
            ordered=ordered,
            consume_from=consume_from,
            workers=workers,
            batch_size=batch_size,
            max_retries=max_retries,
            middleware=middleware,
            strategy=strategy,
            progress=progress,
            strict_last=strict_last,
            consume=consume,
            flow=flow,
            pull=pull,
            rebalance=rebalance,
            locks=locks,
            on_assignment=on_assignment,
        )
        self.group = group
        self.options = self._consumer.options
        self._thread = LoopThread(f"orbitmq consumer {group}")
        self._check_process = ProcessCheck("this consumer", from_start=True)
        self._ended = Latch()
        # Guards the four below. Nothing is waited for under it, and a thread may come again: a
        # signal handler that stops the consumer can interrupt a start or a stop at any point.
        self._life = threading.RLock()
        self._is_starting = False
        self._is_running = False
        self._was_stopped = False
        self._is_being_stopped = False

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
        """As `AsyncConsumer.on`."""
        return self._consumer.on(
            topic,
            tags=tags,
            sql=sql,
            batch=batch,
            batch_size=batch_size,
            middleware=middleware,
        )

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
        """As `AsyncConsumer.listen`."""
        self._consumer.listen(
            topic, listener, tags=tags, sql=sql, batch_size=batch_size, middleware=middleware
        )

    def subscribe(
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
        """As `AsyncConsumer.subscribe`."""
        if not self._is_running:
            self.on(
                topic,
                tags=tags,
                sql=sql,
                batch=batch,
                batch_size=batch_size,
                middleware=middleware,
            )(handler)
            return
        self._thread.run(
            self._consumer.subscribe(
                topic,
                handler,
                tags=tags,
                sql=sql,
                batch=batch,
                batch_size=batch_size,
                middleware=middleware,
            )
        )

    def unsubscribe(self, topic: str) -> None:
        """As `AsyncConsumer.unsubscribe`."""
        self._thread.run(self._consumer.unsubscribe(topic))

    # ---- life

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
        """Begin to consume in the background. Returns when brokers know the consumer.

        Also when no name server can be reached: it is logged, and tried again until one can.
        Returns as well when it is stopped meanwhile.
        """
        self._check_process.begin()
        with self._life:
            if self._was_stopped:
                raise NotRunning("this consumer", was_stopped=True)
            if self._is_running or self._is_starting:
                raise AlreadyRunning("this consumer")
            self._is_starting = True
        try:
            self._start()
        finally:
            with self._life:
                self._is_starting = False

    def _start(self) -> None:
        self._thread.start()
        # A stop that came before this look did not see the thread; one that comes later does, and
        # lets the start end first.
        if self._was_stopped:
            self._thread.stop()
            return
        try:
            self._thread.run(self._consumer.start())
        except NotRunning:
            if not self._was_stopped:
                self._thread.stop()
                raise
        except BaseException:
            self._thread.stop()
            raise
        with self._life:
            self._is_running = not self._was_stopped

    def stop(self) -> None:
        """Let running handlers finish, report progress, leave the group. May be repeated.

        Also by signal handlers, whatever they interrupt, and by several threads: all wait for the
        same end. Not by what runs on its own thread, as `async def` handlers do: see `stop_soon`.
        """
        if not self._check_process.is_same:
            return
        if self._thread.is_current:
            # Before anything has changed: a stop elsewhere must still be possible.
            raise WrongUse(
                "a consumer cannot be stopped on its own thread, which would wait for itself: "
                "use stop_soon()"
            )
        self._consumer.check_may_stop()
        with self._life:
            is_mine = (self._is_running or self._is_starting) and not self._is_being_stopped
            self._is_being_stopped = self._is_being_stopped or is_mine
            self._was_stopped = True
            self._is_running = False
        try:
            self._wait_for_stop()
        finally:
            if is_mine:
                self._thread.stop()
        self._ended.set()

    def _wait_for_stop(self) -> None:
        """Begin to stop, or join who did; what is stopped already does not matter."""
        if self._thread.is_running:
            # The thread may be stopped at this moment by whoever began it.
            with suppress(NotRunning):
                self._thread.run(self._consumer.stop())

    def stop_soon(self) -> None:
        """Have `run` stop in order and return; from any thread.

        For handlers, which cannot wait for their own end.
        """
        self._ended.set()

    def run(self) -> None:
        """Consume until `stop` is called elsewhere, or SIGINT or SIGTERM comes.

        The first signal stops in order; another one, meanwhile, ends the program at once. Signals
        are left alone when this is not the main thread. Raises `AccessDenied` when brokers let
        this account read none of the topics: then nothing can arrive, whatever is waited for.
        """
        self._consumer.on_denied = self._ended.set
        with EndingSignals(self._ended) as signals, self:
            self._ended.wait()
            signals.restore()
        self._consumer.check_not_denied()

    # ---- while it runs

    @property
    def client_id(self) -> str:
        """The id that brokers know this member by, or knew."""
        return self._look(lambda: self._consumer.client_id)

    @property
    def queues(self) -> frozenset[Queue]:
        """The queues that are consumed here now, those of the retry topic as well."""
        return self._call(lambda: self._consumer.queues)

    def positions(self) -> dict[Queue, int]:
        """The offset up to which each queue is consumed."""
        return self._call(self._consumer.positions)

    def statistics(self) -> ConsumerStatistics:
        """What was consumed, how fast, and what went wrong; after the end, what it was then."""
        return self._look(self._consumer.statistics)

    def metrics(self) -> str:
        """The same in the text format of Prometheus, for the program's own metrics page."""
        return self._look(self._consumer.metrics)

    def running_info(self, *, with_stacks: bool = False) -> ConsumerRunningInfo:
        """What administration tools are shown."""
        return self._call(lambda: self._consumer.running_info(with_stacks=with_stacks))

    def pause(self) -> None:
        """Fetch nothing more until `resume`; queues stay with this member."""
        self._call(self._consumer.pause)

    def resume(self) -> None:
        """Fetch again."""
        self._call(self._consumer.resume)

    def resize(self, workers: int) -> None:
        """Call so many handlers at once, from now on."""
        self._call(lambda: self._consumer.resize(workers))

    @property
    def workers(self) -> int:
        """How many handlers are called at once at most."""
        return self._call(lambda: self._consumer.workers)

    def _look(self, function: Callable[[], T]) -> T:
        """Have something looked at where the consumer lives; after its end, here."""
        self._check_process()
        if self._thread.is_running and not self._thread.is_current:
            # The thread may be stopped at this moment.
            with suppress(NotRunning):
                return self._thread.run(_called(function))
        return function()

    def _call(self, function: Callable[[], T]) -> T:
        """Have something done where the consumer lives."""
        self._check_process()
        if not self._is_running:
            raise NotRunning("this consumer", was_stopped=self._was_stopped)
        # Nothing of this waits, so that handlers on that thread may ask for it as well.
        return function() if self._thread.is_current else self._thread.run(_called(function))


async def _called(function: Callable[[], T]) -> T:
    return function()
