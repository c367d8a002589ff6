"""PySpark's daemon of Python workers, whose workers end without a word (see `workerends`).

Java runs it as `python -m orbitmq.spark.workerdaemon` where `spark.python.daemon.module` says so,
as it does in the sessions that `session` makes. Workers are forked from here, so nothing may be
imported that starts threads, as Arrow does.
"""

from __future__ import annotations

from pyspark import daemon

from orbitmq.spark.workerends import Quiet


def main() -> None:
    daemon.worker = Quiet(daemon.worker)  # type: ignore[assignment]  # called in the same way
    daemon.manager()


if __name__ == "__main__":
    main()
