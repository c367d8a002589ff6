"""When Java has enough of a Python process, that process ends without a word on the terminal."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from orbitmq.spark.errors import SourceError
from orbitmq.spark.options import stream_options
from orbitmq.spark.schema import full_schema
from orbitmq.spark.session import settings_for
from orbitmq.spark.streamreader import stream_reader
from orbitmq.spark.workerends import Quiet, leave_quietly
from tests.support.sparking import until

ROOT = Path(__file__).parents[2]
_RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"


@pytest.mark.parametrize(
    ("daemon", "complains"), [("orbitmq.spark.workerdaemon", False), ("pyspark.daemon", True)]
)
def test_a_worker_that_java_leaves_alone_says_nothing(daemon: str, complains: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        said = what_a_worker_says(daemon, folder)

    assert ("BrokenPipeError" in said) == complains
    assert complains or said == ""


def what_a_worker_says(daemon: str, folder: str) -> str:
    """Start a daemon as Java does, have it fork a worker, and close that one's connection."""
    process = subprocess.Popen(
        [sys.executable, "-m", daemon, "pyspark.worker"],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHON_UNIX_DOMAIN_ENABLED": "true",
            "PYTHON_WORKER_FACTORY_SOCK_DIR": folder,
            "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        (size,) = struct.unpack(">i", process.stdout.read(4))
        path = process.stdout.read(size).decode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(path)
            (worker,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
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


def test_a_worker_whose_connection_is_closed_has_done_its_work() -> None:
    def writes(connection: socket.socket, _authenticated: bool) -> int:
        for _ in range(2):
            connection.sendall(b"x" * 1024)
        return 0

    here, there = socket.socketpair()
    with here:
        there.close()
        assert Quiet(writes)(here, True) == 1  # it is not used again

    here, there = socket.socketpair()
    with here, there:
        assert Quiet(writes)(here, True) == 0


def test_what_is_wrong_with_a_worker_is_not_kept_quiet() -> None:
    def fails(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        Quiet(fails)()


def test_workers_of_another_daemon_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(name="pyspark.daemon")
    daemon = SimpleNamespace(__spec__=spec, worker=lambda *_: 0)
    monkeypatch.setitem(sys.modules, "__main__", daemon)

    leave_quietly()
    first = daemon.worker
    leave_quietly()

    assert isinstance(first, Quiet)
    assert daemon.worker is first
    assert daemon.worker() == 0


def test_another_program_with_something_of_that_name_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = SimpleNamespace(__spec__=SimpleNamespace(name="theirs"), worker=len)
    monkeypatch.setitem(sys.modules, "__main__", program)

    leave_quietly()

    assert program.worker is len


def test_sessions_of_ours_have_quiet_workers() -> None:
    assert settings_for()["spark.python.daemon.module"] == "orbitmq.spark.workerdaemon"


class _Ended(BaseException):
    """Stands for the end of a process."""


@pytest.mark.parametrize(
    ("runs", "error", "ends"),
    [
        (_RUNNER, SystemExit(0), True),
        (_RUNNER, EOFError(), True),
        (_RUNNER, BrokenPipeError(), True),
        # Java is to hear of this, or is another program's business.
        (_RUNNER, SourceError("wrong"), False),
        ("pytest", SystemExit(0), False),
    ],
)
def test_the_process_of_a_query_ends_at_once_when_java_has_hung_up(
    monkeypatch: pytest.MonkeyPatch, runs: str, error: BaseException, ends: bool
) -> None:
    def leave(code: int) -> None:
        assert code == 0
        raise _Ended

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setitem(
        sys.modules, "__main__", SimpleNamespace(__spec__=SimpleNamespace(name=runs))
    )
    options = stream_options({"nameServer": "localhost:9876", "subscribe": "orders"}, {})
    reader = stream_reader(options, full_schema())

    def run() -> None:
        """As PySpark does."""
        try:
            raise error
        finally:
            reader.stop()

    with pytest.raises(_Ended if ends else type(error)):
        run()
