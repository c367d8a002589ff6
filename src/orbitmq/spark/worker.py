"""The sockets of a Python worker of Spark, and its memory for answers, kept between its tasks.

A worker is reused for tasks of many batches and queries; nothing but module state outlives a task
in it. So this is the one place of the package that has some. It is keyed by the process, because
workers are forked, and by how the cluster is reached, because queries of several clusters and
users share a worker. A session that lives long may see many of them: what was used least recently
is closed when there are more than a few. A task that still has it, as only another thread of the
same process could, would connect again to read, and fail to write.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from orbitmq.client.ranges.links import RangeAccess, RangeLinks
from orbitmq.client.ranges.read import ReceiveBuffer
from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from orbitmq.client.ranges.write import RangeWriter, WritingSettings


#: Clusters that a worker keeps connections to, and producers that it keeps; one is usual.
KEPT: Final = 4

_links: OrderedDict[tuple[int, RangeAccess], RangeLinks] = OrderedDict()
_writers: OrderedDict[tuple[int, RangeAccess, str, WritingSettings], RangeWriter] = OrderedDict()
#: At most one, and none while it is in use.
_memories: list[ReceiveBuffer] = []


@contextmanager
def receive_buffer(size: int) -> Iterator[ReceiveBuffer]:
    """Memory to receive into, the same for one task after the other: to map it anew costs time."""
    memory = _memories.pop() if _memories else ReceiveBuffer(size)
    if memory.size < size:
        memory = ReceiveBuffer(size)
    yield memory
    # Not after an error: then somebody may still have a piece of it.
    if memory.is_unused and not _memories:
        _memories.append(memory)


def connections_to(access: RangeAccess) -> RangeLinks:
    """The connections of this process to a cluster."""
    key = os.getpid(), access
    links = _links.get(key)
    if links is None:
        links = _links[key] = RangeLinks(access)
        while len(_links) > KEPT:
            (process, _), old = _links.popitem(last=False)
            if process == key[0]:  # those of the process that this one was forked from are not ours
                old.close()
    _links.move_to_end(key)
    return links


def range_writer(access: RangeAccess, group: str, settings: WritingSettings) -> RangeWriter:
    """The producer of this process for a cluster."""
    from orbitmq.client.ranges.write import RangeWriter  # noqa: PLC0415  # readers need none

    key = os.getpid(), access, group, settings
    writer = _writers.get(key)
    if writer is None:
        writer = RangeWriter(access, group, settings)
        writer.start()
        _writers[key] = writer
        while len(_writers) > KEPT:
            (process, *_), old = _writers.popitem(last=False)
            if process == key[0]:
                old.stop()
    _writers.move_to_end(key)
    return writer


# How a Python worker of Spark ends: an error names its cause first, and nothing else is said.
#
# Spark shows what Python code raised as a traceback, whose last line is the cause. What fails here
# is raised so that Spark shows the cause in front of the traceback as well (`cause_first`).
#
# For `show()` and `limit`, when a query is stopped, when a worker has had nothing to do for a
# minute and when a session ends, Java closes the connection to a worker that still waits or writes.
# Nothing is wrong then, and PySpark's daemon nevertheless prints a traceback of `BrokenPipeError`
# on the terminal.
#
# In a local session of ours tasks run under a daemon that does not (`workerdaemon`). Everywhere
# else, and for the workers that plan, which always are of PySpark's own daemon, a worker that has
# had to do with this source is told so (`exit_quietly`): it is quiet from its next turn on, and
# then it waits for most of its life.


#: What a worker meets when Java has closed the connection.
_CLOSED: Final = (BrokenPipeError, ConnectionResetError)


class cause_first(ContextDecorator):  # noqa: N801  # used as a function is
    """Has Spark show the cause of an error in front of the traceback; does nothing elsewhere.

    Decorates a function that Spark calls, or surrounds what a generator does for it.
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
    """What Spark is told of an error: has the traceback of it, and the error alone as its cause.

    A traceback begins with the causes, and one that has no traceback of its own is one line.
    PySpark shortens tracebacks by setting the cause to None, which therefore has no effect here.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self._error = error
        trace = error.__traceback__
        self.with_traceback(trace and (trace.tb_next or trace))  # the first one comes again
        error.with_traceback(None).__cause__ = None  # and with it, nothing of the context is shown

    @property
    def __cause__(self) -> BaseException | None:
        return self._error

    @__cause__.setter
    def __cause__(self, cause: BaseException | None) -> None:
        pass


def exit_quietly() -> None:
    """Let this process end without a word if it is a worker; does nothing in others."""
    if main_module() != PYSPARK_DAEMON:
        return
    daemon: Any = sys.modules["__main__"]
    worker = getattr(daemon, "worker", None)
    if worker is not None and not isinstance(worker, QuietWorker):
        daemon.worker = QuietWorker(worker)


class QuietWorker:
    """What a worker does in one turn; a connection that Java has closed is the end of its work.

    Errors of what a worker runs never come out of it: Java is told of those.
    """

    __slots__ = ("_worker",)

    def __init__(self, worker: Callable[..., Any]) -> None:
        self._worker = worker

    def __call__(self, *given: Any) -> Any:
        try:
            return self._worker(*given)
        except _CLOSED:
            # From Python 3.13 on, a file that cannot be flushed says so once more when it is freed.
            sys.unraisablehook = _say_what_is_wrong
            return 1  # what was not flushed stays in the connection: it cannot be used again


def _say_what_is_wrong(unraisable: sys.UnraisableHookArgs) -> None:
    if not isinstance(unraisable.exc_value, _CLOSED):
        sys.__unraisablehook__(unraisable)


# Spares a Python worker of Spark from looking through its modules for garbage after every task.
#
# A worker that is kept collects all garbage when a task has ended. That goes through every object
# that the process has: with PySpark, Arrow and this package 60,000 of them, 25 milliseconds, to
# find next to nothing. As much time is enough to read ten thousand messages. So what is there when
# a worker has done its first task is put aside for good; it is modules, and they stay anyway.
# Garbage that comes later is found as before, and whatever is not part of a cycle is freed as
# before.
#
# Only in processes that Spark forks for itself: what others do with their memory is their business.


def freeze_modules() -> None:
    """Let no later collection look at what is there now. Does something once in a worker."""
    if is_worker():
        _freeze(os.getpid())


@cache
def _freeze(_process: int) -> None:
    """Once: even to ask whether anything was put aside takes a walk through all of it."""
    gc.collect()
    gc.freeze()


# Which of Spark's Python processes this one is, if any: by the module that runs as its main one.
#
# Spark starts each of them with `python -m`, so the specification of `__main__` has that name. A
# script and a notebook have none.


#: Workers that run tasks are forked from it, by default; those that plan always are.
PYSPARK_DAEMON: Final = "pyspark.daemon"
#: Workers that run tasks are forked from it in local sessions of ours; see `workerdaemon`.
QUIET_DAEMON: Final = "orbitmq.spark.workerdaemon"
#: Asks the reader of a stream where its batches begin and end.
STREAM_RUNNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"
#: Runs tasks where there is no daemon, as on Windows.
_PLAIN_WORKER: Final = "pyspark.worker"


def main_module() -> str | None:
    """The name of the module that this process was started with; None when it was no module."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return None if spec is None else spec.name


def is_of_spark() -> bool:
    """Whether Spark has started this process, and tells the user what it raises."""
    return is_worker() or main_module() in (STREAM_RUNNER, _PLAIN_WORKER)


def is_worker() -> bool:
    """Whether Spark has forked this process, from its own daemon or from ours."""
    return main_module() in (PYSPARK_DAEMON, QUIET_DAEMON)
