"""How a Python worker of Spark ends when Java has closed its connection: without a word.

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
from typing import Any

from orbitmq.spark.sparkprocesses import PYSPARK_DAEMON, main_module


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
        except (BrokenPipeError, ConnectionResetError):
            return 1  # what was not flushed stays in the connection: it cannot be used again
