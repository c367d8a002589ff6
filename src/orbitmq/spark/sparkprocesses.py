"""Which of Spark's Python processes this one is, if any: by the module that runs as its main one.

Spark starts each of them with `python -m`, so the specification of `__main__` has that name. A
script and a notebook have none.
"""

from __future__ import annotations

import sys
from typing import Final

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
