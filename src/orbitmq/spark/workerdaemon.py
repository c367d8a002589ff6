"""PySpark's daemon of Python workers, whose workers end without a word (see `workerends`).

Java runs it as `python -m orbitmq.spark.workerdaemon` where `spark.python.daemon.module` says so,
as it does in the local sessions that `session` and pipelines make. On a cluster nothing says so:
this package may come to an executor with the first task (`--py-files`), and a daemon that is not
there yet fails every Python task, also those that have nothing to do with us.

Workers are forked from here, so nothing may be imported that starts threads, as Arrow does.
"""

from __future__ import annotations

from pyspark import daemon

from orbitmq.spark.worker import QuietWorker


def main() -> None:
    daemon.worker = QuietWorker(daemon.worker)  # type: ignore[assignment]  # called in the same way
    daemon.manager()


if __name__ == "__main__":
    main()
