"""PySpark's processes: quiet ends, garbage collection, and what workers keep between tasks."""

from __future__ import annotations

import gc
import os
import select
import socket
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from orbitmq.spark.options import SourceError, stream_options
from orbitmq.spark.pipelines.run import session_settings
from orbitmq.spark.readers import stream_reader
from orbitmq.spark.source import full_schema
from orbitmq.spark.stream import StreamDriver
from orbitmq.spark.worker import (
    PYSPARK_DAEMON,
    QUIET_DAEMON,
    STREAM_RUNNER,
    QuietWorker,
    WorkerCache,
    WorkerFailed,
    exit_quietly,
    freeze_modules,
)
from tests.support.filling import fill, numbered
from tests.support.sparking import until
from tests.support.sparkquiet import FAILING

ROOT = Path(__file__).parents[2]
#: Says that a worker ends with an error when Java does not listen any more; PySpark 4.1 and on.
_FAILS_AT_A_FLUSH = "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE"


@pytest.mark.timeout(360)  # a worker is closed when it had nothing to do for a minute
def test_a_local_session_says_nothing_unless_something_is_wrong(
    orbit_cluster, orbit_topic, orbit_broker, tmp_path
):
    fill(orbit_broker, orbit_topic, numbered(10))
    orbit_cluster.create_topic("copies", queues=1)
    # By these Spark would find settings of its own, and workers other ones.
    settings = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP")
    others = {name: text for name, text in os.environ.items() if name not in settings}

    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.sparkquiet"),
            *(orbit_cluster.name_server, orbit_topic, "copies", str(tmp_path)),
        ],
        cwd=tmp_path,
        env={**others, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    before, found, after = done.stderr.partition(f"{FAILING}\n")
    assert done.returncode == 0, done.stderr[-3000:]
    assert found
    assert before == ""
    assert "ERROR" in after
    assert "TopicMissing: no broker serves topic 'missing'" in after


def test_a_worker_of_ours_that_java_leaves_alone_says_nothing():
    assert what_a_worker_says(QUIET_DAEMON) == ""


def what_a_worker_says(daemon: str) -> str:
    """Start a daemon as Java does, have it fork a worker, and break that one's connection.

    Over TCP and with a secret, as all versions of PySpark can.
    """
    others = {name: text for name, text in os.environ.items() if "UNIX_DOMAIN" not in name}
    process = subprocess.Popen(
        [sys.executable, "-m", daemon, "pyspark.worker"],
        env={
            **others,
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHON_WORKER_FACTORY_SECRET": "secret",
            _FAILS_AT_A_FLUSH: "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], 30)
        assert readable, "the daemon does not say where it listens"
        (port,) = struct.unpack(">i", process.stdout.read(4))
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            (worker,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
            connection.sendall(struct.pack(">i", 6) + b"secret")
            assert connection.recv(6, socket.MSG_WAITALL) == struct.pack(">i", 2) + b"ok"
            # Closed at once, and not when the other side is ready for it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: not is_alive(worker), "the worker ends")
        _, said = process.communicate(timeout=30)  # it ends with its standard input
    finally:
        process.kill()
        process.wait(30)
    return said.decode()


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_whose_connection_is_closed_has_done_its_work(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # restored afterwards

    def writes(connection, _authenticated):
        for _ in range(2):
            connection.sendall(b"x" * 1024)
        return 0

    here, there = socket.socketpair()
    with here:
        there.close()
        assert QuietWorker(writes)(here, True) == 1  # it is not used again

    here, there = socket.socketpair()
    with here, there:
        assert QuietWorker(writes)(here, True) == 0


def test_a_worker_of_pysparks_daemon_is_wrapped_once(runs_as):
    main = runs_as(PYSPARK_DAEMON, worker=lambda *_: 0)

    exit_quietly()
    first = main.worker
    exit_quietly()

    assert isinstance(first, QuietWorker)
    assert main.worker is first
    assert main.worker() == 0


@pytest.mark.parametrize(
    ("master", "is_local"),
    [(None, True), ("local", True), ("local[2]", True)]
    + [(master, False) for master in ("spark://host:7077", "yarn", "k8s://https://host:6443")],
)
def test_local_sessions_alone_have_the_quiet_daemon(master, is_local):
    """On a cluster this package may come with the first task, after the daemon."""
    chosen = session_settings(master, None, None)

    assert (chosen.get("spark.python.daemon.module") == QUIET_DAEMON) is is_local
    assert bool({"spark.driver.host", "spark.driver.bindAddress"} & chosen.keys()) is is_local
    assert chosen["spark.python.unix.domain.socket.enabled"] == "true"


class _Ended(BaseException):
    """Stands for the end of a process."""


@pytest.mark.parametrize(
    ("program", "is_ours", "error", "comes"),
    [
        # PySpark reads or writes, and Java has closed the connection.
        (STREAM_RUNNER, False, SystemExit(0), _Ended),
        (STREAM_RUNNER, False, EOFError(), _Ended),
        (STREAM_RUNNER, False, BrokenPipeError(), _Ended),
        (STREAM_RUNNER, False, ConnectionResetError(), _Ended),
        (STREAM_RUNNER, True, SystemExit(0), _Ended),  # by a signal, whatever runs then
        # Errors of brokers are reported to Java.
        (STREAM_RUNNER, False, SourceError("wrong"), SourceError),
        (STREAM_RUNNER, True, BrokenPipeError(), WorkerFailed),
        (STREAM_RUNNER, True, EOFError(), WorkerFailed),
        ("pytest", False, SystemExit(0), SystemExit),
    ],
)
def test_the_process_of_a_query_ends_when_java_has_hung_up(
    monkeypatch, runs_as, program, is_ours, error, comes
):
    def leave(code):
        assert code == 0
        raise _Ended

    monkeypatch.setattr(os, "_exit", leave)
    runs_as(program)
    options = stream_options({"nameServer": "localhost:9876", "subscribe": "orders"}, {})
    reader = stream_reader(options, full_schema())

    def run():
        """As PySpark does."""
        try:
            if not is_ours:
                raise error
            with mock.patch.object(StreamDriver, "start", side_effect=error):
                reader.initialOffset()
        finally:
            reader.stop()

    with pytest.raises(comes):
        run()


# ---- memory and connections


@pytest.fixture
def collections(monkeypatch):
    """The calls of the garbage collector, in a process that looks like a new one."""
    done: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    process = object()
    monkeypatch.setattr(os, "getpid", lambda: process)
    return done


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (PYSPARK_DAEMON, ["collect", "freeze"]),
        (QUIET_DAEMON, ["collect", "freeze"]),
        ("pytest", []),
    ],
)
def test_a_worker_excludes_its_modules_from_collections_once(
    collections, runs_as, program, expected
):
    runs_as(program)

    freeze_modules()
    freeze_modules()

    assert collections == expected


#: Decodes few messages and many, and one without properties.
_DECODES = """
import sys
from orbitmq.message.arrow import BadBody, messages_to_arrow
from tests.support.message import plain_message, plain_pull
for pull in (plain_pull(5), plain_pull(500), plain_message(1, properties=b"").encode()):
    messages_to_arrow(pull, broker_name="b", bad_body=BadBody.NULL)
print("pandas" in sys.modules)
"""


def test_decoding_does_not_import_pandas():
    # Arrow does readily, and each worker of Spark would pay for it.
    found = subprocess.run(
        [sys.executable, "-c", _DECODES], capture_output=True, text=True, timeout=60, check=True
    )

    assert found.stdout.strip() == "False"


def test_the_least_recently_used_value_is_closed():
    closed: list[str] = []
    cache = WorkerCache(closed.append, size=2)

    for key in ("a", "b", "a", "c"):
        assert cache.get(key, key.upper) == key.upper()

    assert closed == ["B"]
    cache.clear()
    assert sorted(closed) == ["A", "B", "C"]


def test_values_of_the_parent_process_are_neither_used_nor_closed(monkeypatch):
    closed: list[str] = []
    cache = WorkerCache(closed.append, size=2)
    assert cache.get("a", lambda: "parent's") == "parent's"

    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert cache.get("a", lambda: "own") == "own"
    for key in ("b", "c", "d"):
        cache.get(key, key.upper)

    assert closed == ["own", "B"]
