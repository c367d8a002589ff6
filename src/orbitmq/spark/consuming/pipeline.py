"""A consumer group on Spark, as the application sees it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from orbitmq.client.consumer.allocation import Strategy, strategy_named
from orbitmq.client.consumer.locks import LockSettings
from orbitmq.client.consumer.options import ConsumerOptions
from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
from orbitmq.client.consumer.registering import Registrations
from orbitmq.client.consumer.settings import ConsumeSettings
from orbitmq.client.consumer.starting import Beginning
from orbitmq.client.consumer.starting import consume_from as beginning
from orbitmq.client.endingsignals import EndingSignals
from orbitmq.client.errors import NotRunning, SettingError, WrongUse
from orbitmq.client.identity import ProcessCheck
from orbitmq.client.names import check_group
from orbitmq.spark.consuming.batching import Batching
from orbitmq.spark.consuming.consolereports import link_to, reported
from orbitmq.spark.consuming.definition import Handled
from orbitmq.spark.consuming.driver import Driver
from orbitmq.spark.consuming.reaching import reach
from orbitmq.spark.consuming.reports import BatchReport, PipelineProgress, PipelineState
from orbitmq.spark.consuming.settings import BatchSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from orbitmq.client.consumer.assignmentnews import AssignmentListener
    from orbitmq.client.consumer.handlers import ListenerFunction
    from orbitmq.client.queue import Queue
    from orbitmq.client.rangeaccess import ClientTls, Credentials
    from orbitmq.spark.consolelink import ConsoleLink

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

#: Seconds after which nothing is ever given up.
_NEVER = 1e9


def consume(
    spark: SparkSession,
    group: str,
    *,
    name_server: str | Iterable[str] | None = None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
    namespace: str | None = None,
    ordered: bool = False,
    consume_from: Beginning = "last",
    workers: int | None = None,
    batch_size: int | None = None,
    max_retries: int | None = None,
    middleware: Sequence[object] = (),
    strategy: Strategy | str = "AVG",
    strict_last: bool = False,
    batch: BatchSettings | None = None,
    consume: ConsumeSettings | None = None,
    rebalance: RebalanceSettings | None = None,
    locks: LockSettings | None = None,
    on_batch: Callable[[BatchReport], object] | None = None,
    on_assignment: AssignmentListener | None = None,
    console: str | None = None,
) -> ConsumePipeline:
    """A consumer group that runs on Spark; give it handlers, and start it.

    run = consume(spark, "billing", name_server="localhost:9876")

    @run.on("orders", tags="paid || refunded")
    def bill(message: ReceivedMessage) -> None: ...

    run.run()

    Everything means what it means for a `Consumer`, and a handler may be used with both. Handlers
    run in Spark's workers: `workers` calls at once in each task. `batch` says how much is done in
    one Spark job. `on_batch` is called in the driver after every batch. `console` is the address
    of a console that is told how it goes, by default the one that ORBITMQ_CONSOLE names.
    """
    settings = consume or ConsumeSettings()
    changes = {"workers": workers, "batch_size": batch_size, "max_retries": max_retries}
    settings = replace(settings, **{name: n for name, n in changes.items() if n is not None})
    return ConsumePipeline(
        Driver(
            group=check_group(group),
            namespace=namespace,
            access=reach(name_server, credentials, tls),
            middleware=tuple(middleware),
            options=ConsumerOptions(
                ordered=ordered,
                consume_from=beginning(consume_from),
                strategy=strategy_named(strategy),
                strict_last=strict_last,
                consume=settings,
                # Queues are looked at between batches, and a batch may take long.
                rebalance=replace(rebalance or RebalanceSettings(), stalled=_NEVER),
                locks=locks or LockSettings(),
                on_assignment=on_assignment,
            ),
            batch=batch or BatchSettings(),
        ),
        spark,
        on_batch,
        link_to(console),
    )


class ConsumePipeline:
    """A consumer group on Spark. Made by `consume`; methods may be called from any thread."""

    def __init__(
        self,
        driver: Driver,
        spark: SparkSession,
        on_batch: Callable[[BatchReport], object] | None = None,
        link: ConsoleLink | None = None,
    ) -> None:
        self._driver = driver
        self._link = link
        self._on_batch = on_batch
        self._owns_link = link is not None
        self._batching = Batching(spark, driver, self._batch_done)
        self._registrations = Registrations(
            driver.group,
            namespace=driver.namespace,
            batch_size=driver.options.consume.batch_size,
            middleware=driver.middleware,
        )
        self._handled: list[Handled] = []
        self._ended = threading.Event()
        self._life = threading.Lock()
        self._state = PipelineState.NEW
        self._check_process = ProcessCheck("this pipeline")

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
        """Decorates the handler of a topic; as `Consumer.on`."""

        def register(function: F) -> F:
            self._add(
                Handled(
                    topic=topic,
                    function=function,
                    tags=tags,
                    sql=sql,
                    batch=batch,
                    batch_size=batch_size,
                    middleware=tuple(middleware),
                )
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

        In order, what it has not committed at the end of a batch comes again in the next one.
        """
        self._add(
            Handled(
                topic=topic,
                function=listener,
                tags=tags,
                sql=sql,
                batch_size=batch_size,
                middleware=tuple(middleware),
                is_listener=True,
            )
        )

    def _add(self, handled: Handled) -> None:
        if self._state is not PipelineState.NEW:
            raise WrongUse("handlers are registered before the start")
        handled.register(self._registrations)
        self._handled.append(handled)

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
        """Join the group, and begin to consume in the background."""
        self._check_process()
        with self._life:
            if self._state is not PipelineState.NEW:
                was_stopped = self._state is not PipelineState.RUNNING
                raise NotRunning("this pipeline", was_stopped=was_stopped)
            if not self._handled:
                raise SettingError(
                    f"the pipeline of group {self._driver.group!r} has no handler; "
                    "give it one with @run.on(topic)"
                )
            self._batching.check()
            self._driver.start(self._handled)
            self._batching.start(self._ended)
            self._state = PipelineState.RUNNING
            self._tell_console()

    def stop(self) -> None:
        """Let the running batch finish, report progress, leave the group. May be repeated.

        A batch that takes longer than `BatchSettings.stop` is cancelled; it comes again.
        """
        if not self._check_process.is_same:
            return
        if self._batching.is_caller:
            raise WrongUse("a batch's listener cannot stop its pipeline: use stop_soon()")
        with self._life:
            if self._state is PipelineState.RUNNING:
                self._state = PipelineState.STOPPING
                self._batching.stop()
                self._driver.stop()
            if self._state is not PipelineState.STOPPED:
                failed = self._batching.failure is not None
                self._state = PipelineState.FAILED if failed else PipelineState.STOPPED
            if self._link is not None and self._owns_link:
                self._link.stop()
            elif self._link is not None:
                self._link.news()
        self._ended.set()

    def stop_soon(self) -> None:
        """Have `run` stop in order and return; from any thread."""
        self._ended.set()

    def run(self) -> None:
        """Consume until `stop` is called elsewhere, or SIGINT or SIGTERM comes.

        Raises `PipelineFailed` when Spark cannot run its jobs.
        """
        with EndingSignals(self._ended) as signals, self:
            self._ended.wait()
            signals.restore()
        self._batching.raise_failure()

    def report_to(self, link: ConsoleLink) -> None:
        """Tell a console how it goes over this link, which stays the caller's.

        One that was told of a console by itself, or by the environment, goes on with that one.
        """
        with self._life:
            if self._link is None:
                self._link = link
                self._tell_console()

    def _tell_console(self) -> None:
        if self._link is not None and self._state is PipelineState.RUNNING:
            self._link.watch(self._driver.group, lambda: reported(self.progress()))

    def _batch_done(self, report: BatchReport) -> None:
        if self._link is not None:
            self._link.news()
        if self._on_batch is not None:
            self._on_batch(report)

    # ---- while it runs

    def until_idle(self, timeout: float | None = None) -> bool:
        """Wait until everything that is there now is handled; False when that took too long.

        Messages that wait for their next attempt are not there yet. Raises `PipelineFailed`.
        """
        if self._state is not PipelineState.RUNNING:
            raise NotRunning("this pipeline", was_stopped=self._state is not PipelineState.NEW)
        return self._batching.until_idle(timeout)

    @property
    def state(self) -> PipelineState:
        if self._state is PipelineState.RUNNING and self._batching.failure is not None:
            return PipelineState.FAILED
        return self._state

    @property
    def client_id(self) -> str:
        """The id that brokers know this member by."""
        if (found := self._driver.client_id) is None:
            raise NotRunning("this pipeline", was_stopped=self._state is not PipelineState.NEW)
        return found

    @property
    def queues(self) -> frozenset[Queue]:
        """The queues that are consumed here now, those of the retry topic as well."""
        return self._driver.queues()

    def progress(self) -> PipelineProgress:
        """Where it stands: batches, counts, lag, the last error."""
        return self._batching.progress(self.state)
