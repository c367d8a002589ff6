"""PySpark's processes: everything that depends on its internals, and what workers keep.

Invariant: no other module of the package reads or changes what PySpark does not document, and
each use depends on the version table `_VERSIONS`. With an unknown version nothing is patched, one
line says so, and documented calls do the rest.

Trap: Spark imports this module in every session, so imports of the client stay in functions.
"""

from __future__ import annotations

import gc
import importlib
import io
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager, redirect_stdout
from functools import cache
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext, TaskContext
    from pyspark.sql import DataFrame

    from orbitmq.client.ranges.connections import RangeAccess, RangeConnections
    from orbitmq.client.ranges.read import ReceiveBuffer
    from orbitmq.client.ranges.write import RangeWriter, WritingSettings


log = logging.getLogger(__name__)

V = TypeVar("V")


# Versions of PySpark


class PySparkFeatures(NamedTuple):
    """What a version of PySpark has."""

    #: Readers of streams are called with a start and a limit.
    has_read_limits: bool = True
    #: Writers of streams may take Arrow's record batches.
    has_arrow_stream_writer: bool = True
    #: The package of Spark's Java code for checkpoints, below that for streams.
    checkpointing: str = "checkpointing."
    #: `pyspark.sql` imports numpy, which starts threads, so the daemon must not import it.
    sql_has_threads: bool = False
    #: Whether the internals are known, so that workers may be patched.
    is_known: bool = True


_VERSIONS: Final[Mapping[str, PySparkFeatures]] = {
    "4.0": PySparkFeatures(
        has_read_limits=False,
        has_arrow_stream_writer=False,
        checkpointing="",
        sql_has_threads=True,
    ),
    "4.1": PySparkFeatures(has_read_limits=False, sql_has_threads=True),
    "4.2": PySparkFeatures(),
    "4.3": PySparkFeatures(),
}


#: `true`: any version is used as an unknown one, should a patch of its own break something.
PLAIN_VARIABLE: Final = "ORBITMQ_SPARK_PLAIN"


@cache
def pyspark_features(version: str | None = None) -> PySparkFeatures:
    """What a version of PySpark has, by default the installed one.

    An unknown version is used by its documented interface alone, which is logged.
    """
    if version is None:
        from pyspark import __version__ as version  # noqa: PLC0415  # loaded in Spark's processes
    assert version is not None  # noqa: S101  # for the type checker
    known = _VERSIONS.get(".".join(version.split(".")[:2]))
    is_plain = is_true(PLAIN_VARIABLE)
    if known is not None and not is_plain:
        return known
    log.warning(
        "PySpark %s is %s: its processes are left as they are, and may print a traceback when "
        "Spark closes their connection; Ctrl-C also ends Java, in the middle of a batch",
        version,
        f"used as {PLAIN_VARIABLE} says"
        if is_plain
        else f"not one of the versions that OrbitMQ knows ({', '.join(_VERSIONS)})",
    )
    return (known or PySparkFeatures())._replace(is_known=False)


def is_true(variable: str) -> bool:
    """Whether a variable of the environment is `true`."""
    return os.environ.get(variable, "").strip().lower() == "true"


# Which of Spark's Python processes this is. Spark starts each of them with `python -m`, so the
# specification of `__main__` has the module's name. Scripts and notebooks have no such name.

#: Forks the workers that run tasks, by default, and always those that plan.
PYSPARK_DAEMON: Final = "pyspark.daemon"
#: Forks the workers that run tasks in local sessions of OrbitMQ; see `workerdaemon`.
QUIET_DAEMON: Final = "orbitmq.spark.workerdaemon"
#: Asks the reader of a stream where its batches begin and end.
STREAM_RUNNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"
#: Runs tasks where there is no daemon, as on Windows.
_PLAIN_WORKER: Final = "pyspark.worker"


def main_module() -> str | None:
    """The module that this process was started with; None when it was started otherwise."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return None if spec is None else spec.name


def is_worker() -> bool:
    """Whether this process was forked by a daemon of Spark."""
    return main_module() in (PYSPARK_DAEMON, QUIET_DAEMON)


def is_of_spark() -> bool:
    """Whether Spark started this process and shows its errors to the user."""
    return is_worker() or main_module() in (STREAM_RUNNER, _PLAIN_WORKER)


# Errors


class cause_first(ContextDecorator):  # noqa: N801  # used as a function is
    """Makes Spark show the cause of an error in front of the traceback; no effect elsewhere.

    Decorates a function that Spark calls, or surrounds the body of a generator.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and is_of_spark():
            raise WorkerFailed(error) from None


class WorkerFailed(OrbitError):
    """An error as PySpark reports it: carries the traceback, its cause is the error alone.

    A printed traceback begins with the causes, and a cause without a traceback is one line.
    PySpark shortens tracebacks by setting the cause to None, which is ignored here.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self._error = error
        trace = error.__traceback__
        self.with_traceback(trace and (trace.tb_next or trace))  # raising adds the first frame
        error.with_traceback(None).__cause__ = None  # which hides the context as well

    @property
    def __cause__(self) -> BaseException | None:
        return self._error

    @__cause__.setter
    def __cause__(self, cause: BaseException | None) -> None:
        pass


#: Java gives a new Python process a few seconds to connect, which a busy machine may exceed.
_NOT_CONNECTED: Final = "Python worker failed to connect back"


def is_slow_start(problem: str) -> bool:
    """Whether Spark gave up because a Python process started too slowly: worth another try."""
    return _NOT_CONNECTED in problem


# The end of a worker. Java closes the connection of a worker that waits or writes after `show()`
# and `limit`, when a query stops, after a minute without tasks, and at the end of a session.
# PySpark 4.1 and later then print a traceback of BrokenPipeError, although nothing is wrong.

_CLOSED: Final = (BrokenPipeError, ConnectionResetError)


def exit_quietly() -> None:
    """Keep a worker of PySpark's own daemon from printing that Java closed its connection.

    Takes effect when the daemon calls its `worker` function next. Does nothing elsewhere.
    """
    if main_module() != PYSPARK_DAEMON or not pyspark_features().is_known:
        return
    daemon: Any = sys.modules["__main__"]
    worker = getattr(daemon, "worker", None)
    if worker is not None and not isinstance(worker, QuietWorker):
        daemon.worker = QuietWorker(worker)


class QuietWorker:
    """The daemon's `worker` function, for which a connection closed by Java is no error.

    Errors of tasks do not pass through it: Java receives those over the connection.
    """

    __slots__ = ("_worker",)

    def __init__(self, worker: Callable[..., Any]) -> None:
        self._worker = worker

    def __call__(self, *given: Any) -> Any:
        try:
            return self._worker(*given)
        except _CLOSED:
            # From Python 3.13 on, freeing a file that cannot be flushed reports the error again.
            sys.unraisablehook = _report_unless_closed
            return 1  # the daemon ends the process: the connection cannot be used again


def _report_unless_closed(unraisable: sys.UnraisableHookArgs) -> None:
    if not isinstance(unraisable.exc_value, _CLOSED):
        sys.__unraisablehook__(unraisable)


def stop_quietly() -> None:
    """Keep the process of a query from printing that Java has hung up. Does nothing elsewhere.

    Called where a reader stops. PySpark then reports the reason to Java, and fails a second time if
    Java has ended the process by a signal or closed the connection; that error alone is not shown.
    """
    if main_module() == STREAM_RUNNER and pyspark_features().is_known and _has_java_hung_up():
        sys.excepthook = _show_unless_closed
        sys.unraisablehook = _report_unless_closed


def _has_java_hung_up() -> bool:
    """Whether the present error is that Java has hung up.

    A connection to a broker may fail in the same way, and that must be reported to Java.
    """
    error = sys.exception()
    if isinstance(error, EOFError | BrokenPipeError | ConnectionResetError):
        return not _passed_through_us(error.__traceback__)
    return isinstance(error, SystemExit)


def _show_unless_closed(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not isinstance(error, _CLOSED):
        sys.__excepthook__(kind, error, trace)


def _passed_through_us(traceback: TracebackType | None) -> bool:
    """Whether an error came out of code of this package."""
    ours = __name__.partition(".")[0]
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] == ours:
            return True
        traceback = traceback.tb_next
    return False


# The memory of a worker. PySpark collects all garbage after every task. With its modules, Arrow and
# OrbitMQ that walks 64,000 objects in 35 ms, more than the time to read ten thousand messages. So
# the daemon of local sessions imports what it may and excludes it from collections before it forks
# a worker: 15,000 objects in 4 ms are left. In a worker there may be objects of users, which would
# never be freed, so a worker excludes its objects only where a variable asks for it.

#: `true` on executors: a worker that reads or writes a topic excludes its objects, once.
FREEZE_VARIABLE: Final = "ORBITMQ_SPARK_FREEZE"
#: What the daemon may import: none of these modules starts a thread, as Arrow does.
_PRELOADED: Final = ("orbitmq.client.ranges.read", "orbitmq.client.ranges.write")
_PRELOADED_OF_SPARK: Final = ("orbitmq.spark.source", "orbitmq.spark.write")


def run_quiet_daemon() -> None:
    """PySpark's daemon, with quiet workers that have OrbitMQ's modules; plain if it is unknown."""
    gc.disable()  # modules are no garbage
    from pyspark import daemon  # noqa: PLC0415  # not in other processes

    if pyspark_features().is_known:
        daemon.worker = QuietWorker(daemon.worker)  # type: ignore[assignment]  # called alike
        preload()
        gc.freeze()
    gc.enable()
    daemon.manager()


def preload() -> None:
    """Import what workers need before they are forked."""
    of_spark = () if pyspark_features().sql_has_threads else _PRELOADED_OF_SPARK
    for name in (*_PRELOADED, *of_spark):
        importlib.import_module(name)


def freeze_modules() -> None:
    """Exclude the objects of a worker from later garbage collections, if `FREEZE_VARIABLE` says so.

    For clusters whose workers run no functions of users. Does nothing elsewhere.
    """
    if is_worker() and is_true(FREEZE_VARIABLE):
        _freeze(os.getpid())


@cache
def _freeze(_process: int) -> None:
    gc.collect()
    gc.freeze()


class WorkerCache(Generic[V]):
    """Values that a worker keeps between tasks, by key; evicts the least recently used.

    Keys include the process: workers are forked, and a value of the parent is never closed.
    Trap: a value that another thread still uses may be closed.
    """

    def __init__(self, close: Callable[[V], object], *, size: int = 4) -> None:
        self._close = close
        self._size = size
        self._values: OrderedDict[tuple[int, Hashable], V] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made when it is missing."""
        process = os.getpid()
        if (process, key) not in self._values:
            self._values[process, key] = make()
            while len(self._values) > self._size:
                (owner, _), evicted = self._values.popitem(last=False)
                if owner == process:
                    self._close(evicted)
        self._values.move_to_end((process, key))
        return self._values[process, key]

    def clear(self) -> None:
        """Close the values of this process and forget all."""
        process = os.getpid()
        while self._values:
            (owner, _), value = self._values.popitem()
            if owner == process:
                self._close(value)


connections: Final[WorkerCache[RangeConnections]] = WorkerCache(lambda links: links.close())
writers: Final[WorkerCache[RangeWriter]] = WorkerCache(lambda writer: writer.stop())
#: At most one, and none while it is in use.
_buffers: Final[list[ReceiveBuffer]] = []


def connections_to(access: RangeAccess) -> RangeConnections:
    """The connections of this process to a cluster."""
    from orbitmq.client.ranges.connections import RangeConnections  # noqa: PLC0415  # see the head

    return connections.get(access, lambda: RangeConnections(access))


def range_writer(access: RangeAccess, group: str, settings: WritingSettings) -> RangeWriter:
    """The producer of this process for a cluster."""
    from orbitmq.client.ranges.write import RangeWriter  # noqa: PLC0415  # see the head

    key = (access, group, settings)
    return writers.get(key, lambda: started(RangeWriter(*key)))


class Startable(Protocol):
    """What is started once, when a worker makes it."""

    def start(self) -> None: ...


S = TypeVar("S", bound=Startable)


def started(thing: S) -> S:
    """The same thing, running."""
    thing.start()
    return thing


@contextmanager
def receive_buffer(size: int) -> Iterator[ReceiveBuffer]:
    """A buffer for answers, reused by later tasks: mapping new memory is slow."""
    from orbitmq.client.ranges.read import ReceiveBuffer  # noqa: PLC0415  # see the head

    buffer = _buffers.pop() if _buffers else ReceiveBuffer(size)
    if buffer.size < size:
        buffer = ReceiveBuffer(size)
    yield buffer
    # Not after an error: then a piece of it may still be in use.
    if buffer.is_unused and not _buffers:
        _buffers.append(buffer)


# Streams

#: The local properties that name the stream and the batch of a thread or a task.
_QUERY_PROPERTY: Final = "sql.streaming.queryId"
_BATCH_PROPERTY: Final = "streaming.sql.batchId"


def query_of(frame: DataFrame) -> str | None:
    """The id of the stream whose batch the calling thread handles; None outside of one.

    A stream keeps its id when it is started again.
    """
    # A Connect session has no context; its batches run in another process.
    context = getattr(frame.sparkSession, "sparkContext", None)
    return None if context is None else context.getLocalProperty(_QUERY_PROPERTY)


def batch_of_task(context: TaskContext) -> str | None:
    """The stream and the batch of a task; None if it is of no stream."""
    query = context.getLocalProperty(_QUERY_PROPERTY)
    batch = context.getLocalProperty(_BATCH_PROPERTY)
    return f"{query}/{batch}" if query and batch is not None else None


# Functions of users


def cloudpickle() -> ModuleType:
    """PySpark's copy of cloudpickle, or the package where a version has none."""
    try:
        return importlib.import_module("pyspark.cloudpickle")
    except ModuleNotFoundError:
        return importlib.import_module("cloudpickle")


# The driver


def may_start_java() -> bool:
    """Whether Java is yet to be started, and PySpark's way of starting it is known."""
    from pyspark import SparkContext  # noqa: PLC0415  # only where Spark is

    return pyspark_features().is_known and SparkContext._gateway is None


def task_slots(context: SparkContext) -> int | None:
    """How many tasks the executors that are there run at the same time; None: not known.

    `defaultParallelism` is another number where `spark.default.parallelism` is set.
    """
    if not pyspark_features().is_known:
        return None
    java: Any = context._jsc.sc()
    profile = java.resourceProfileManager().defaultResourceProfile()
    return int(java.maxNumConcurrentTasks(profile))


def start_gateway(conf: SparkConf) -> Any:
    """Start Java in a session of its own, so that signals of the terminal do not reach it."""
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415  # only where Spark is

    launch: Callable[..., Any] = launch_gateway
    return launch(conf, {"start_new_session": True})


def analyzed_plan(frame: DataFrame) -> str:
    """The plan of a DataFrame as text."""
    java = getattr(frame, "_jdf", None)
    if java is not None and pyspark_features().is_known:
        return str(java.queryExecution().analyzed().toString())
    explain: Callable[..., object] | None = getattr(frame, "_explain_string", None)
    if explain is not None:
        return str(explain(mode="extended"))  # Connect
    said = io.StringIO()
    with redirect_stdout(said):
        frame.explain(mode="extended")  # the documented way, which prints
    return said.getvalue()


def release_checkpoint(rows: DataFrame) -> None:
    """Free a local checkpoint. Spark itself frees it some time after the DataFrame is collected."""
    java = getattr(rows, "_jdf", None)
    # In Connect, the server frees it with the DataFrame.
    if java is not None and pyspark_features().is_known:
        java.queryExecution().analyzed().rdd().unpersist(False)
