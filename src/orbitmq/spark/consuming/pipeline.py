"""A consumer group on Spark: the application's `ConsumePipeline` and its `Driver`.

The driver is a member of the group on a thread of its own. It owns queues, plans batches and
commits offsets; tasks handle the messages. See docs/internals/spark-groups.md.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from orbitmq.arguments import explained_function, warn_deprecated
from orbitmq.client.consumer.consumer import (
    ConsumerOptions,
    DelegatedMember,
    Registration,
    Registrations,
)
from orbitmq.client.consumer.locks import LockSettings
from orbitmq.client.consumer.parameters import Parameters, parameters_of
from orbitmq.client.consumer.progress import Beginning
from orbitmq.client.consumer.progress import consume_from as beginning
from orbitmq.client.consumer.settings import ConsumeSettings, RebalanceSettings
from orbitmq.client.consumer.strategies import Strategy, strategy_named
from orbitmq.client.engine import Engine, ProcessCheck
from orbitmq.client.loopthread import Life, LoopThread
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.ranges.connections import ClientTls, Credentials, RangeAccess
from orbitmq.client.serialization import before_pickling, is_by_value, structs_in
from orbitmq.client.settings import resolve
from orbitmq.client.signals import GracefulExit
from orbitmq.errors import NotRunning, SettingError, WrongUse
from orbitmq.names import check_group, wrap_group
from orbitmq.parsing import Fields
from orbitmq.spark.consuming.batches import BatchLoop, link_host
from orbitmq.spark.consuming.link import DriverLink, LinkOffer
from orbitmq.spark.consuming.progress import BatchReport, PipelineProgress, PipelineState
from orbitmq.spark.consuming.queues import BatchPlan, OwnedQueues
from orbitmq.spark.health import link_to, reported
from orbitmq.spark.internals import cloudpickle
from orbitmq.spark.options import access_to

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from orbitmq.client.consumer.handlers import ListenerFunction
    from orbitmq.client.consumer.rebalance import AssignmentListener
    from orbitmq.client.routes import Queue
    from orbitmq.client.serialization import Serializing
    from orbitmq.errors import AccessDenied
    from orbitmq.spark.consolelink import ConsoleLink
    from orbitmq.spark.consuming.progress import PieceReport


log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

#: Seconds that never pass.
_NEVER = 1e9


@explained_function
def consume(
    spark: SparkSession,
    group: str,
    *,
    name_server: str | Iterable[str] | None = None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
    namespace: str | None = None,
    ordered: bool = False,
    consume_from: Beginning = "latest",
    workers: int | None = None,
    batch_size: int | None = None,
    max_retries: int | None = None,
    middleware: Sequence[object] = (),
    serializer: Serializing = None,
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

    Parameters mean the same as for a `Consumer`, and a handler may be used with both. Handlers run
    in Spark's workers, `workers` calls in parallel in each task. `batch` limits the work of one
    Spark job. `on_batch` is called in the driver after every batch, and twice a second while a job
    handles messages as they arrive. `console` is the address of a console that receives progress,
    by default that of ORBITMQ_CONSOLE.
    """
    settings = consume or ConsumeSettings()
    changes = {"workers": workers, "batch_size": batch_size, "max_retries": max_retries}
    settings = replace(settings, **{name: n for name, n in changes.items() if n is not None})
    return ConsumePipeline(
        Driver(
            group=check_group(group),
            namespace=namespace,
            access=resolve_access(name_server, credentials, tls),
            middleware=tuple(middleware),
            serializer=serializer,
            options=ConsumerOptions(
                ordered=ordered,
                consume_from=beginning(consume_from),
                strategy=strategy_named(strategy),
                strict_last=strict_last,
                consume=settings,
                # Queues are pulled between batches only, and a batch may take long.
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


class ConsumePipeline(Life):
    """A consumer group on Spark. Made by `consume`; thread-safe."""

    def __init__(
        self,
        driver: Driver,
        spark: SparkSession,
        on_batch: Callable[[BatchReport], object] | None = None,
        link: ConsoleLink | None = None,
    ) -> None:
        self._driver = driver
        self._spark = spark
        self._link = link
        self._on_batch = on_batch
        self._owns_link = link is not None
        self._batches = BatchLoop(spark, driver, self._batch_done)
        self._registrations = Registrations(
            driver.group,
            namespace=driver.namespace,
            batch_size=driver.options.consume.batch_size,
            middleware=driver.middleware,
            serializer=driver.serializer,
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
        publish: str | None = None,
    ) -> Callable[[F], F]:
        """Decorates the handler of a topic; as `Consumer.on`."""

        options = {"tags": tags, "sql": sql, "batch": batch, "batch_size": batch_size}

        def register(function: F) -> F:
            found: dict[str, Any] = {**options, "middleware": tuple(middleware), "publish": publish}
            found["parameters"] = portable_parameters(function, batch=batch)
            self._add(Handled(topic, function, found))
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
        """Low-level: `listener(messages, context)` must return a `Verdict`.

        In order, messages that are not committed at the end of a batch come again in the next one.
        """
        options = {"tags": tags, "sql": sql, "batch_size": batch_size}
        found = {**options, "middleware": tuple(middleware)}
        self._add(Handled(topic, listener, found, is_listener=True))

    def _add(self, handled: Handled) -> None:
        if self._state is not PipelineState.NEW:
            raise WrongUse("handlers are registered before the start")
        handled.register(self._registrations)
        self._handled.append(handled)

    # ---- life

    def start(self) -> None:
        """Join the group and consume in the background."""
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
            self._batches.check()
            follows = self._driver.batch.follow is not None
            self._driver.start(self._handled, link_host(self._spark) if follows else None)
            self._batches.start(self._ended)
            self._state = PipelineState.RUNNING
            self._tell_console()

    def stop(self) -> None:
        """Finish the running batch, commit offsets and leave the group. May be repeated.

        A batch that takes longer than `BatchSettings.stop` is cancelled; its messages come again.
        """
        if not self._check_process.is_same:
            return
        if self._batches.is_caller:
            raise WrongUse("a batch's listener cannot stop its pipeline: use stop_soon()")
        with self._life:
            if self._state is PipelineState.RUNNING:
                self._state = PipelineState.STOPPING
                self._batches.stop()
                self._driver.stop()
            if self._state is not PipelineState.STOPPED:
                failed = self._batches.failure is not None
                self._state = PipelineState.FAILED if failed else PipelineState.STOPPED
            if self._link is not None and self._owns_link:
                self._link.stop()
            elif self._link is not None:
                self._link.news()
        self._ended.set()

    def stop_soon(self) -> None:
        """Make `run` stop gracefully and return; from any thread."""
        self._ended.set()

    def run(self) -> None:
        """Consume until `stop` or `stop_soon` is called, or SIGINT or SIGTERM arrives.

        Raises `PipelineFailed` when Spark cannot run its jobs, and `AccessDenied` when a wrong key
        or a missing permission prevents all reading.
        """
        with GracefulExit(self._ended.set), self:
            self._ended.wait()
        self._batches.raise_failure()

    def report_to(self, link: ConsoleLink) -> None:
        """Report progress over the caller's link, unless the pipeline has a console of its own."""
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
        """Wait until all present messages are handled; False on timeout.

        Messages that wait for their next attempt do not count. Raises the same as `run`.
        """
        if self._state is not PipelineState.RUNNING:
            raise NotRunning("this pipeline", was_stopped=self._state is not PipelineState.NEW)
        return self._batches.until_idle(timeout)

    @property
    def state(self) -> PipelineState:
        if self._state is PipelineState.RUNNING and self._batches.failure is not None:
            return PipelineState.FAILED
        return self._state

    @property
    def client_id(self) -> str:
        """The client id of this member."""
        if (found := self._driver.client_id) is None:
            raise NotRunning("this pipeline", was_stopped=self._state is not PipelineState.NEW)
        return found

    def assignment(self) -> frozenset[Queue]:
        """The owned queues, those of the retry topic included."""
        return self._driver.look(lambda member, _: frozenset(member.rebalancer.owned), frozenset())

    @property
    def queues(self) -> frozenset[Queue]:
        """Deprecated: use `assignment()`."""
        warn_deprecated("ConsumePipeline.queues", "assignment()")
        return self.assignment()

    def progress(self) -> PipelineProgress:
        """Batches, counts, lag and the last error."""
        return self._batches.progress(self.state)


T = TypeVar("T")


class Attended(NamedTuple):
    """What happened since the last look at a batch that follows queues."""

    reports: list[PieceReport]
    missing: int
    #: Why the job should end.
    why: str | None
    #: Whether all tasks have reached the driver.
    is_complete: bool


class Driver:
    """A member of the group, on a thread of its own. Blocking; thread-safe."""

    def __init__(
        self,
        *,
        group: str,
        namespace: str | None,
        access: RangeAccess,
        middleware: tuple[object, ...],
        serializer: Serializing = None,
        options: ConsumerOptions,
        batch: BatchSettings,
    ) -> None:
        self.group = group
        self.namespace = namespace
        self.access = access
        self.middleware = middleware
        self.serializer = serializer
        self.options = options
        self.batch = batch
        self.packed: PackedDefinition | None = None
        self.client_id: str | None = None
        self._thread = LoopThread(f"orbitmq pipeline {group}")
        self._engine: Engine | None = None
        self._member: DelegatedMember | None = None
        self._queues: OwnedQueues | None = None
        self._link = DriverLink()

    # ---- life

    def start(self, handled: Sequence[Handled], host: tuple[str, str] | None = None) -> None:
        """Join the group. Raises when handlers cannot be pickled or no broker answers.

        `host` is where tasks reach this process, and the address to listen on for them; without
        it, tasks do not follow queues.
        """
        self._thread.start()
        try:
            self._thread.run(self._start(tuple(handled), host))
        except BaseException:
            self._thread.stop()
            raise

    def stop(self) -> None:
        """Release the queues and leave the group."""
        member, engine = self._member, self._engine
        self._member = self._engine = self._queues = None
        if member is not None and engine is not None:
            try:
                self._thread.run(self._stop(member, engine))
            finally:
                self._thread.stop()

    async def _start(self, handled: tuple[Handled, ...], host: tuple[str, str] | None) -> None:
        engine = Engine(self.access.settings())
        definition = self._definition(handled, engine.client_id)
        packed = PackedDefinition.of(definition)
        await engine.start()
        queues = OwnedQueues(
            engine,
            definition.wire_group,
            ordered=self.options.ordered,
            first_pause=self.batch.first_pause,
            longest_pause=self.batch.longest_pause,
        )
        try:
            member = DelegatedMember(
                engine, definition.wire_group, definition.registrations(), self.options, queues
            )
            queues.offsets.progress = member.progress
            queues.end_tasks = self._link.end
            await member.start()
            if host is not None:
                await self._listen(*host)
        except BaseException:
            await engine.stop()
            raise
        self._engine, self._member, self._queues = engine, member, queues
        self.client_id, self.packed = engine.client_id, packed

    async def _listen(self, host: str, bind: str) -> None:
        try:
            await self._link.start(host, bind)
        except OSError as error:
            log.warning(
                "tasks cannot follow queues, as the driver cannot listen for them on %s: %s",
                bind,
                error,
                extra={"group": self.group},
            )

    async def _stop(self, member: DelegatedMember, engine: Engine) -> None:
        try:
            await member.stop()
        finally:
            await self._link.stop()
            await engine.stop()

    def _definition(self, handled: tuple[Handled, ...], client_id: str) -> Definition:
        return Definition(
            group=self.group,
            wire_group=wrap_group(self.namespace, self.group),
            namespace=self.namespace,
            access=self.access,
            handled=handled,
            middleware=self.middleware,
            serializer=self.serializer,
            consume=self.options.consume,
            ordered=self.options.ordered,
            client_id=client_id,
            bytes_in_task=self.batch.bytes_in_task,
            patience=self.batch.patience,
        )

    # ---- batches

    def plan(self, limit: int, *, follow: bool = False) -> BatchPlan:
        """Plan a batch of at most `limit` messages, as `OwnedQueues.plan`."""
        return self._thread.run(self._running[1].plan(limit, follow=follow))

    @property
    def has_link(self) -> bool:
        """Whether tasks may reach this process."""
        return self._link.is_started

    def open_link(self, tasks: int) -> LinkOffer:
        """Expect the tasks of a job."""
        return self._called(lambda: self._link.open(tasks))

    def end_tasks(self) -> None:
        """Have the tasks of a job that follows queues end."""
        self._called(self._link.end)

    def attend(self, planned: BatchPlan) -> Attended:
        """Take the reports of tasks that follow queues, commit, and look after the queues."""
        return self._thread.run(self._attend(planned))

    async def _attend(self, planned: BatchPlan) -> Attended:
        _, queues = self._running
        reports = self._link.arrived()
        self._count(planned, reports)
        missing = await queues.take(planned, reports)
        why = await queues.attend(planned)
        if any(report.has_ended for report in reports):
            why = "a task has ended its work on a queue"
        if self._link.has_lost_one:
            why = "a task has ended"
        return Attended(reports, missing, why, self._link.is_complete)

    def settle(self, planned: BatchPlan, reports: Iterable[PieceReport]) -> int:
        """Take the reports of a batch and commit offsets, which is done on return.

        Returns the number of offsets that were skipped because brokers have no messages there.
        """
        return self._thread.run(self._settle(planned, list(reports)))

    async def _settle(self, planned: BatchPlan, reports: list[PieceReport]) -> int:
        if planned.follows:
            reports = [*self._link.arrived(), *reports]
            self._link.close()
        self._count(planned, reports)
        return await self._running[1].settle(planned, reports)

    def _count(self, planned: BatchPlan, reports: Iterable[PieceReport]) -> None:
        member, _ = self._running
        counts = member.statistics
        for report in reports:
            topic = planned.pieces[report.place].range.queue.topic
            failed = report.retried + report.dead + report.kept
            # The number and duration of calls are known to the tasks only.
            counts.consumed(topic, done=report.done, failed=failed, times=())
            counts.sent_back += report.retried + report.dead
            counts.dead_letters += report.dead
            counts.kept_back += report.kept

    def is_settled(self) -> bool:
        """Whether the last rebalance is complete."""
        return self.look(lambda member, _: member.is_settled, False)

    def denial(self) -> AccessDenied | None:
        """Why nothing can arrive until an account is changed."""
        return self.look(lambda member, _: member.rebalancer.denial, None)

    def lag(self) -> Mapping[Queue, int]:
        """Messages that wait in each queue."""
        return self.look(lambda _, queues: dict(queues.lag), {})

    def failed_in_a_row(self) -> int:
        """The largest number of tasks that failed in a row with one queue."""
        return self.look(lambda _, queues: queues.failed_in_a_row, 0)

    def look(self, read: Callable[[DelegatedMember, OwnedQueues], T], default: T) -> T:
        """What `read` returns on the event loop; the default when this is not running."""
        member, queues = self._member, self._queues
        if member is None or queues is None:
            return default
        return self._called(lambda: read(member, queues))

    def _called(self, function: Callable[[], T]) -> T:
        """What a function returns on the event loop."""

        async def call() -> T:
            return function()

        return self._thread.run(call())

    @property
    def _running(self) -> tuple[DelegatedMember, OwnedQueues]:
        if self._member is None or self._queues is None:
            raise NotRunning("this pipeline")
        return self._member, self._queues


@dataclass(frozen=True, slots=True)
class Handled:
    """A topic and its handler, with the options of `ConsumePipeline.on` or `listen`."""

    topic: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_listener: bool = False

    def register(self, registrations: Registrations) -> Registration:
        """Bind and check the handler."""
        add = registrations.listener if self.is_listener else registrations.handler
        return add(self.topic, self.function, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What tasks need of a pipeline."""

    #: The application's name; `wire_group` has the namespace.
    group: str
    wire_group: str
    namespace: str | None
    access: RangeAccess
    handled: tuple[Handled, ...]
    middleware: tuple[object, ...]
    serializer: Serializing = None
    consume: ConsumeSettings
    ordered: bool
    #: The driver's client id, which holds the order locks.
    client_id: str
    bytes_in_task: int
    patience: float

    def registrations(self) -> tuple[Registration, ...]:
        """The handlers, bound."""
        found = Registrations(
            self.group,
            namespace=self.namespace,
            batch_size=self.consume.batch_size,
            middleware=self.middleware,
            serializer=self.serializer,
        )
        for each in self.handled:
            each.register(found)
        return found.all()


@dataclass(frozen=True, slots=True)
class PackedDefinition:
    """A pickled definition; each worker process unpacks it once."""

    data: bytes
    digest: str

    @classmethod
    def of(cls, definition: Definition) -> PackedDefinition:
        """Raises `SettingError`, naming a handler that cannot be pickled."""
        for each in definition.handled:
            make_portable(each.options.get("parameters"))
            parts = (*each.options.get("middleware", ()), *definition.middleware)
            for part in (each.function, definition.serializer, *parts):
                _packed(part)
        data = _packed(definition)
        return cls(data, hashlib.sha256(data).hexdigest())

    def unpack(self) -> Definition:
        definition: Definition = cloudpickle().loads(self.data)
        return definition


def portable_parameters(function: Any, *, batch: bool | None) -> Parameters | None:
    """What a handler takes, for workers, where the names of its annotations may not exist.

    Raises `SettingError` also for a msgspec struct that would arrive there without its fields: one
    that no worker can import is sent by value, which Spark's pickler cannot do with structs.
    """
    if not callable(function):
        return None  # refused elsewhere
    found = parameters_of(function, batch=batch)
    if found.kind is not ReceivedMessage:
        for struct in structs_in(found.kind):
            if is_by_value(struct):
                raise SettingError(
                    f"the msgspec struct {struct.__qualname__} cannot be sent to Spark's workers; "
                    "define it in a module that they can import, or make it a dataclass"
                )
    return found


def make_portable(parameters: Parameters | None) -> None:
    """Ready classes of handlers that were bound here for the way to workers."""
    if parameters is not None and parameters.kind is not ReceivedMessage:
        before_pickling(parameters.kind)


def _packed(part: object) -> bytes:
    try:
        data: bytes = cloudpickle().dumps(part)
    except Exception as error:
        # `__reduce__` of an object may raise anything.
        raise SettingError(
            f"{part!r} cannot be sent to Spark's workers: {error}; handlers must not hold "
            "sessions, locks, sockets or open files: create those inside the handler"
        ) from error
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Limits and times of batches, in seconds."""

    messages: int = 50_000  #: of one batch at most, all queues together
    #: A task begins no call after this time; messages that it did not reach are planned again. If
    #: it follows its queues, the time counts from its last report to the driver.
    #: Below `RebalanceSettings.handover`, so that queues change hands without repetition.
    seconds: float = 5.0
    tasks: int | None = None  #: of one batch; None: as many as the session runs in parallel
    #: How long the tasks of one job follow their queues and handle messages as they arrive. None:
    #: a job handles the messages that are there, and ends.
    follow: float | None = 60.0
    bytes_in_task: int = 64 * 1024 * 1024  #: of messages that wait for handlers in one task
    idle: float = 0.25  #: between two plans when there are no messages
    stop: float = 30.0  #: how long `stop` waits for the running batch before cancelling it
    first_pause: float = 0.5  #: after a failed job; doubles each time
    longest_pause: float = 30.0
    #: Failed jobs in a row, with nothing done between them, before the pipeline gives up. A failed
    #: task does not make its job fail if another task did something.
    failures: int = 10
    #: How long a task waits for a broker that does not answer; at most its time limit.
    patience: float = 20.0

    def __post_init__(self) -> None:
        checked = Fields(self, "batch")
        checked.whole("messages", "bytes_in_task", "failures")
        checked.whole("tasks", optional=True)
        checked.durations("seconds", "idle", "stop", "first_pause", "longest_pause", "patience")
        if self.follow is not None:
            checked.durations("follow")


def resolve_access(
    name_server: str | Iterable[str] | None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
    timeout: float = 3.0,
) -> RangeAccess:
    """Name servers and secrets, from the environment where they are not given."""
    given = name_server if name_server is None or isinstance(name_server, str) else (*name_server,)
    servers = resolve(given).name_servers
    found = access_to(";".join(servers), timeout)
    return replace(
        found,
        credentials=credentials or found.credentials,
        tls=tls if tls is not None else found.tls,
    )


def source_options(access: RangeAccess) -> dict[str, str]:
    """The same as options of the source, secrets included.

    The source is planned in a process of the JVM or of a Connect server, which may not have the
    environment variables of this one.
    """
    options: dict[str, object] = {"nameServer": ";".join(access.name_servers)}
    if (credentials := access.credentials) is not None:
        options |= {
            "accessKey": credentials.access_key,
            "secretKey": credentials.secret_key,
            "securityToken": credentials.security_token,
        }
    if (tls := access.tls) is not None:
        options |= {
            "tls.enabled": "true",
            "tls.authority": tls.authority,
            "tls.certificate": tls.certificate,
            "tls.key": tls.key,
            "tls.keyPassword": tls.key_password,
            "tls.verify": str(tls.verify).lower(),
            "tls.verifyHost": str(tls.verify_host).lower(),
        }
    return {name: str(value) for name, value in options.items() if value is not None}
