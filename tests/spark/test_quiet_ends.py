"""When Java has enough of a Python process, that process ends without a word on the terminal."""

from __future__ import annotations

import importlib.util
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias
from unittest import mock

import pytest
from pyspark import daemon

from orbitmq.spark.options import SourceError, stream_options
from orbitmq.spark.pipelines.run import session_settings
from orbitmq.spark.readers import StreamReader, stream_reader
from orbitmq.spark.session import settings_for
from orbitmq.spark.source import full_schema
from orbitmq.spark.stream import StreamDriver
from orbitmq.spark.worker import (
    PYSPARK_DAEMON,
    QUIET_DAEMON,
    STREAM_RUNNER,
    QuietWorker,
    WorkerFailed,
    exit_quietly,
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


@pytest.mark.skipif(
    _FAILS_AT_A_FLUSH not in Path(daemon.__file__).read_text(),
    reason="PySpark 4.0 keeps quiet by itself",
)
def test_a_worker_of_pyspark_that_java_leaves_alone_complains():
    """When it does not any more, there is nothing left to be done about it."""
    assert "BrokenPipeError" in what_a_worker_says(PYSPARK_DAEMON)


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


def test_what_is_wrong_with_a_worker_is_not_kept_quiet():
    def fails(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        QuietWorker(fails)()


def test_workers_of_another_daemon_are_told_once(monkeypatch):
    spec = SimpleNamespace(name=PYSPARK_DAEMON)
    main = SimpleNamespace(__spec__=spec, worker=lambda *_: 0)
    monkeypatch.setitem(sys.modules, "__main__", main)

    exit_quietly()
    first = main.worker
    exit_quietly()

    assert isinstance(first, QuietWorker)
    assert main.worker is first
    assert main.worker() == 0


def test_another_program_with_something_of_that_name_is_left_alone(monkeypatch):
    program = SimpleNamespace(__spec__=SimpleNamespace(name="theirs"), worker=len)
    monkeypatch.setitem(sys.modules, "__main__", program)

    exit_quietly()

    assert program.worker is len


def test_the_modules_that_spark_is_told_of_and_tells_of_are_there():
    names = (PYSPARK_DAEMON, QUIET_DAEMON, STREAM_RUNNER)

    assert all(importlib.util.find_spec(name) for name in names)


@pytest.mark.parametrize("master", [None, "local", "local[2]"])
def test_local_sessions_of_ours_have_quiet_workers(master):
    assert settings_for()["spark.python.daemon.module"] == QUIET_DAEMON
    assert session_settings(master, None, None)["spark.python.daemon.module"] == QUIET_DAEMON


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://https://host:6443"])
def test_executors_of_a_cluster_start_the_daemon_that_all_of_them_have(master):
    """This package may come with the first task: a daemon of ours would fail all of them."""
    chosen = session_settings(master, None, None)

    assert not [name for name, value in chosen.items() if "orbitmq" in value]
    assert not {"spark.driver.host", "spark.driver.bindAddress"} & chosen.keys()
    assert chosen["spark.python.unix.domain.socket.enabled"] == "true"


def test_who_has_our_daemon_on_a_cluster_may_ask_for_it():
    wanted = {"spark.python.daemon.module": QUIET_DAEMON}

    assert session_settings("yarn", None, wanted)["spark.python.daemon.module"] == QUIET_DAEMON


class _Ended(BaseException):
    """Stands for the end of a process."""


Step: TypeAlias = Callable[[StreamReader], object]


def pyspark_meets(error: BaseException) -> Step:
    """When it reads what it is to do next, or writes what came of it."""

    def meet(_reader: StreamReader) -> None:
        raise error

    return meet


def we_meet(error: BaseException) -> Step:
    """When a broker, say, has closed a connection of ours."""

    def meet(reader: StreamReader) -> object:
        with mock.patch.object(StreamDriver, "start", side_effect=error):
            return reader.initialOffset()

    return meet


@pytest.mark.parametrize(
    ("runs", "step", "comes"),
    [
        (STREAM_RUNNER, pyspark_meets(SystemExit(0)), _Ended),
        (STREAM_RUNNER, we_meet(SystemExit(0)), _Ended),  # by a signal, whatever runs then
        (STREAM_RUNNER, pyspark_meets(EOFError()), _Ended),
        (STREAM_RUNNER, pyspark_meets(BrokenPipeError()), _Ended),
        (STREAM_RUNNER, pyspark_meets(ConnectionResetError()), _Ended),
        # Java is to hear of this, or is another program's business.
        (STREAM_RUNNER, pyspark_meets(SourceError("wrong")), SourceError),
        (STREAM_RUNNER, we_meet(BrokenPipeError()), WorkerFailed),
        (STREAM_RUNNER, we_meet(ConnectionResetError()), WorkerFailed),
        (STREAM_RUNNER, we_meet(EOFError()), WorkerFailed),
        ("pytest", pyspark_meets(SystemExit(0)), SystemExit),
    ],
)
def test_the_process_of_a_query_ends_at_once_when_java_has_hung_up(monkeypatch, runs, step, comes):
    def leave(code):
        assert code == 0
        raise _Ended

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setitem(
        sys.modules, "__main__", SimpleNamespace(__spec__=SimpleNamespace(name=runs))
    )
    options = stream_options({"nameServer": "localhost:9876", "subscribe": "orders"}, {})
    reader = stream_reader(options, full_schema())

    def run():
        """As PySpark does."""
        try:
            step(reader)
        finally:
            reader.stop()

    with pytest.raises(comes):
        run()
