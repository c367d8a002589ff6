"""PySpark's processes: quiet ends, garbage collection, and what workers keep between tasks."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pyspark
import pytest
from pyspark import SparkContext, daemon
from pyspark.errors import PythonException, StreamingQueryException
from pyspark.java_gateway import launch_gateway
from pyspark.sql.classic.dataframe import DataFrame
from pyspark.util import handle_worker_exception

from orbitmq.spark import internals
from orbitmq.spark.options import DataLost, SourceError, cause_of, stream_options, write_options
from orbitmq.spark.pipelines.run import session_settings
from orbitmq.spark.readers import PlainStreamReader, StreamReader, stream_reader
from orbitmq.spark.session import settings_for
from orbitmq.spark.source import full_schema
from orbitmq.spark.stream import StreamDriver
from orbitmq.spark.write import RocketMQRowStreamWriter, stream_writer
from tests.support.sparking import DEADLINE, stream
from tests.support.sparkquiet import FAILING


@pytest.mark.timeout(360)  # a worker is closed when it had nothing to do for a minute
def test_a_local_session_says_nothing_unless_something_is_wrong(quiet_session):
    before, found, after = quiet_session.result().stderr.partition(f"{FAILING}\n")

    assert found
    assert before == ""
    assert "ERROR" in after
    assert "TopicMissing: no broker serves topic 'missing'" in after


def test_a_worker_whose_connection_is_closed_has_done_its_work(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # restored afterwards

    def writes(connection, _authenticated):
        for _ in range(2):
            connection.sendall(b"x" * 1024)
        return 0

    here, there = socket.socketpair()
    with here:
        there.close()
        assert internals.QuietWorker(writes)(here, True) == 1  # it is not used again

    here, there = socket.socketpair()
    with here, there:
        assert internals.QuietWorker(writes)(here, True) == 0


@pytest.mark.parametrize(
    ("master", "is_local"),
    [(None, True), ("local", True), ("local[2]", True)]
    + [(master, False) for master in ("spark://host:7077", "yarn", "k8s://https://host:6443")],
)
def test_local_sessions_alone_have_the_quiet_daemon(master, is_local):
    """On a cluster this package may come with the first task, after the daemon."""
    chosen = session_settings(master, None, None)

    assert (chosen.get("spark.python.daemon.module") == internals.QUIET_DAEMON) is is_local
    assert bool({"spark.driver.host", "spark.driver.bindAddress"} & chosen.keys()) is is_local
    assert chosen["spark.python.unix.domain.socket.enabled"] == "true"


@pytest.mark.feature("M20")
@pytest.mark.parametrize(
    ("program", "version", "is_ours", "error", "is_quiet"),
    [
        # PySpark reads or writes, and Java has closed the connection.
        (internals.STREAM_RUNNER, "4.3.0", False, SystemExit(0), True),
        (internals.STREAM_RUNNER, "4.3.0", False, EOFError(), True),
        (internals.STREAM_RUNNER, "4.3.0", False, BrokenPipeError(), True),
        (internals.STREAM_RUNNER, "4.0.5", False, ConnectionResetError(), True),
        (internals.STREAM_RUNNER, "4.3.0", True, SystemExit(0), True),  # by a signal
        # Errors of brokers are reported to Java.
        (internals.STREAM_RUNNER, "4.3.0", False, SourceError("wrong"), False),
        (internals.STREAM_RUNNER, "4.3.0", True, BrokenPipeError(), False),
        (internals.STREAM_RUNNER, "4.3.0", True, EOFError(), False),
        # What is not known is left as it is.
        (internals.STREAM_RUNNER, "9.9.0", False, BrokenPipeError(), False),
        ("pytest", "4.3.0", False, SystemExit(0), False),
    ],
)
def test_the_process_of_a_query_ends_quietly_when_java_has_hung_up(
    monkeypatch, capsys, runs_as, program, version, is_ours, error, is_quiet
):
    for hook in ("excepthook", "unraisablehook"):
        monkeypatch.setattr(sys, hook, getattr(sys, f"__{hook}__"))  # restored afterwards
    monkeypatch.setattr(pyspark, "__version__", version)
    internals.pyspark_features.cache_clear()
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

    with pytest.raises((type(error), internals.WorkerFailed)):
        run()
    internals.pyspark_features.cache_clear()

    # PySpark fails again when it writes to the connection, and Python shows what nobody catches.
    for lost in (BrokenPipeError("Java is gone"), ConnectionResetError("Java is gone")):
        sys.excepthook(type(lost), lost, None)
    assert ("Java is gone" not in capsys.readouterr().err) is is_quiet
    sys.excepthook(ValueError, ValueError("a mistake"), None)
    assert "ValueError: a mistake" in capsys.readouterr().err


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


@pytest.mark.feature("M20")
@pytest.mark.parametrize(
    ("program", "setting", "expected"),
    [
        (internals.PYSPARK_DAEMON, "true", ["collect", "freeze"]),
        (internals.QUIET_DAEMON, "True ", ["collect", "freeze"]),
        # There may be objects of users in a worker, which would never be freed.
        (internals.PYSPARK_DAEMON, None, []),
        (internals.QUIET_DAEMON, "false", []),
        ("pytest", "true", []),
    ],
)
def test_a_worker_excludes_its_objects_from_collections_if_that_is_asked_for(
    monkeypatch, collections, runs_as, program, setting, expected
):
    monkeypatch.delenv(internals.FREEZE_VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(internals.FREEZE_VARIABLE, setting)
    runs_as(program)

    internals.freeze_modules()
    internals.freeze_modules()

    assert collections == expected


#: As the daemon of local sessions does before it forks workers.
_PRELOADS = """
import gc, sys, threading
from pyspark import daemon
from orbitmq.spark import internals
daemon.manager = lambda: None
internals.run_quiet_daemon()
frozen, loaded = gc.get_freeze_count(), set(sys.modules)
import orbitmq.spark.partition
print(
    [name for name in ("pyarrow", "numpy", "pandas") if name in loaded],
    threading.active_count(),
    isinstance(daemon.worker, internals.QuietWorker),
    frozen > 2 * (len(gc.get_objects())),
)
"""


@pytest.mark.feature("M20")
def test_the_daemon_imports_what_workers_need_and_starts_no_thread_by_it():
    found = subprocess.run(
        [sys.executable, "-c", _PRELOADS], capture_output=True, text=True, timeout=60, check=True
    )

    assert found.stdout.strip() == "[] 1 True True"


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
    cache = internals.WorkerCache(closed.append, size=2)

    for key in ("a", "b", "a", "c"):
        assert cache.get(key, key.upper) == key.upper()

    assert closed == ["B"]
    cache.clear()
    assert sorted(closed) == ["A", "B", "C"]


def test_values_of_the_parent_process_are_neither_used_nor_closed(monkeypatch):
    closed: list[str] = []
    cache = internals.WorkerCache(closed.append, size=2)
    assert cache.get("a", lambda: "parent's") == "parent's"

    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert cache.get("a", lambda: "own") == "own"
    for key in ("b", "c", "d"):
        cache.get(key, key.upper)

    assert closed == ["own", "B"]


# ---- errors


MISSING = "orbitmq.spark.options.TopicMissing: no broker serves topic 'missing'"


def said_first(error: BaseException | None) -> str:
    """The first line that names an error of Python."""
    (line, *_) = re.findall(r"(?:\w+\.)+[A-Z]\w+: .*", str(error).partition("Traceback (most")[0])
    return str(line)


def test_an_error_of_a_task_that_writes(spark, cluster):
    rows = spark.sql("SELECT 'x' AS body, 'missing' AS topic").write.format("rocketmq")

    with pytest.raises(PythonException) as raised:
        rows.option("nameServer", cluster.name_server).mode("append").save()

    assert said_first(raised.value).startswith(MISSING)
    assert "in write_partition" in str(raised.value)
    assert cause_of(str(raised.value)).startswith("TopicMissing: no broker serves topic")


def test_an_error_of_the_process_of_a_stream(spark, cluster, tmp_path):
    rows = stream(spark, cluster, "missing")
    query = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()

    with pytest.raises(StreamingQueryException) as raised:
        query.awaitTermination(DEADLINE)

    assert said_first(raised.value).startswith("orbitmq.errors.NoRoute: no broker serves")


def fails() -> None:
    raise DataLost(["all of it"]) from ValueError("of no interest any more")


@pytest.mark.parametrize("settings", [{}, {"SPARK_SIMPLIFIED_TRACEBACK": "1"}])
@pytest.mark.parametrize(
    "program", [internals.PYSPARK_DAEMON, internals.QUIET_DAEMON, internals.STREAM_RUNNER]
)
def test_spark_puts_the_cause_in_front_whether_it_shortens_tracebacks_or_not(
    monkeypatch, runs_as, program, settings
):
    for name, text in settings.items():
        monkeypatch.setenv(name, text)
    runs_as(program)

    text = told_by(internals.cause_first()(fails))

    first, _, rest = text.partition("\n")
    assert first == f"orbitmq.spark.options.DataLost: {DataLost(['all of it'])}"
    assert "in fails" in rest
    assert "ValueError:" not in text
    assert cause_of(text) == f"DataLost: {DataLost(['all of it'])}"


def told_by(function: Callable[[], None]) -> str:
    """What PySpark tells Java of an error."""
    told: list[bytes] = []
    try:
        function()
    except Exception as error:  # noqa: BLE001  # as PySpark does
        handle_worker_exception(error, SimpleNamespace(write=told.append))  # type: ignore[arg-type]
    return told[-1].decode()


def test_an_error_stays_what_it_is_outside_of_spark():
    with pytest.raises(DataLost) as raised:
        internals.cause_first()(fails)()

    assert isinstance(raised.value.__cause__, ValueError)


def test_what_is_no_error_passes(runs_as):
    runs_as(internals.PYSPARK_DAEMON)

    with pytest.raises(SystemExit), internals.cause_first():
        raise SystemExit(0)


NO_MODULE = """\
An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "serializers.py", line 191, in _read_with_length
    return self.loads(obj)
ModuleNotFoundError: No module named 'orbitmq'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "worker.py", line 1, in main
    read_command()
pyspark.serializers.SerializationError: Caused by Traceback (most recent call last):
  File "serializers.py", line 191, in _read_with_length
    return self.loads(obj)
ModuleNotFoundError: No module named 'orbitmq'

\tat org.apache.spark.api.python
"""
GONE = """\
Py4JJavaError: An error occurred while calling o95.collectToPython.
: org.apache.spark.SparkException: Job aborted: Python worker exited (crashed).
\tat org.apache.spark.api.python
Caused by: java.io.EOFException
"""


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (NO_MODULE, "ModuleNotFoundError: No module named 'orbitmq'"),
        (GONE, "org.apache.spark.SparkException: Job aborted: Python worker exited (crashed)."),
        ("\n  plain words\nmore", "plain words"),
        ("", ""),
    ],
)
def test_the_cause_of_what_spark_says_is_one_line(said, cause):
    assert cause_of(said) == cause


# ---- versions of PySpark


_MANAGER_SETTING = "spark.sql.streaming.checkpointFileManagerClass"
_MANAGER = "FileSystemBasedCheckpointFileManager"


@pytest.mark.parametrize(
    ("version", "limits", "arrow_writer", "manager"),
    [
        ("4.0.1", False, False, f"streaming.{_MANAGER}"),
        ("4.1.0", False, True, f"checkpointing.{_MANAGER}"),
        ("4.2.0", True, True, f"checkpointing.{_MANAGER}"),
        ("4.3.0", True, True, f"checkpointing.{_MANAGER}"),
    ],
)
def test_a_supported_version(version, limits, arrow_writer, manager):
    found, settings = internals.pyspark_features(version), settings_for(version)

    assert (found.has_read_limits, found.has_arrow_stream_writer) == (limits, arrow_writer)
    assert settings[_MANAGER_SETTING].endswith(f".{manager}")
    assert settings["spark.python.daemon.module"] == internals.QUIET_DAEMON
    assert found.is_known


def test_an_unknown_version_is_not_patched_and_this_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        found, settings = internals.pyspark_features("9.9.1"), settings_for("9.9.1")

    assert (found.has_read_limits, found.is_known) == (True, False)
    assert not {"spark.python.daemon.module", _MANAGER_SETTING} & settings.keys()
    assert "PySpark 9.9.1 is not one of the versions that OrbitMQ knows" in caplog.text
    assert len(caplog.records) == 1


def test_a_known_version_is_used_as_an_unknown_one_on_request(monkeypatch, caplog):
    monkeypatch.setenv(internals.PLAIN_VARIABLE, "true")
    internals.pyspark_features.cache_clear()

    with caplog.at_level(logging.WARNING):
        found, settings = internals.pyspark_features("4.0.5"), settings_for("4.0.5")

    internals.pyspark_features.cache_clear()
    assert (found.has_read_limits, found.is_known) == (False, False)
    assert not {"spark.python.daemon.module", _MANAGER_SETTING} & settings.keys()
    assert [each.message.partition(": its")[0] for each in caplog.records] == [
        "PySpark 4.0.5 is used as ORBITMQ_SPARK_PLAIN says"
    ]


def test_the_installed_version_is_what_the_table_says():
    installed = internals.pyspark_features()

    assert installed == internals.pyspark_features(pyspark.__version__)
    assert installed.is_known
    options = {"nameServer": "localhost:9876", "topic": "orders"}
    reader = stream_reader(stream_options(options, {}), full_schema())
    writer = stream_writer(write_options(options, {}), full_schema(), overwrite=False)
    assert isinstance(reader, StreamReader)
    assert isinstance(reader, PlainStreamReader) != installed.has_read_limits
    assert isinstance(writer, RocketMQRowStreamWriter) != installed.has_arrow_stream_writer
    if installed.has_read_limits:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

        assert isinstance(reader, SupportsTriggerAvailableNow)


def test_the_internals_of_the_installed_version_are_as_they_are_used():
    assert len(inspect.signature(daemon.worker).parameters) == 2
    assert "worker(sock, authenticated)" in inspect.getsource(daemon.manager)
    assert list(inspect.signature(launch_gateway).parameters) == ["conf", "popen_kwargs"]
    assert hasattr(SparkContext, "_gateway")
    assert "_jdf" in inspect.getsource(DataFrame.__init__)
