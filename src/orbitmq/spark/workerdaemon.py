"""PySpark's daemon of Python workers, without tracebacks when Java closes a connection.

Java runs it as `python -m orbitmq.spark.workerdaemon`, as `spark.python.daemon.module` says in
local sessions of OrbitMQ. On a cluster an executor may start its daemon before this package
arrives with the first task, so the setting is not used there.

Trap: workers are forked from here, so nothing may be imported that starts threads, as Arrow does.
"""

from __future__ import annotations

from orbitmq.spark.internals import run_quiet_daemon

if __name__ == "__main__":
    run_quiet_daemon()
