"""How a Python worker of Spark ends: an error names its cause first, and nothing else is said.

Spark shows what Python code raised as a traceback, whose last line is the cause. What fails here is
raised so that Spark shows the cause in front of the traceback as well (`cause_first`).

For `show()` and `limit`, when a query is stopped, when a worker has had nothing to do for a minute
and when a session ends, Java closes the connection to a worker that still waits or writes. Nothing
is wrong then, and PySpark's daemon nevertheless prints a traceback of `BrokenPipeError` on the
terminal.

In a local session of ours tasks run under a daemon that does not (`workerdaemon`). Everywhere
else, and for the workers that plan, which always are of PySpark's own daemon, a worker that has had
to do with this source is told so (`leave_quietly`): it is quiet from its next turn on, and then it
waits for most of its life.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, Final

from orbitmq.errors import OrbitError
from orbitmq.spark.sparkprocesses import PYSPARK_DAEMON, is_of_spark, main_module

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


def leave_quietly() -> None:
    """Let this process end without a word if it is a worker; does nothing in others."""
    if main_module() != PYSPARK_DAEMON:
        return
    daemon: Any = sys.modules["__main__"]
    worker = getattr(daemon, "worker", None)
    if worker is not None and not isinstance(worker, Quiet):
        daemon.worker = Quiet(worker)


class Quiet:
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
