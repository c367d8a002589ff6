"""What went wrong in a process of Spark reaches the user as a sentence, and then as a traceback."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from pyspark.errors import AnalysisException, PythonException, StreamingQueryException
from pyspark.util import handle_worker_exception

from orbitmq.spark.options import DataLost, cause_of
from orbitmq.spark.worker import PYSPARK_DAEMON, QUIET_DAEMON, STREAM_RUNNER, cause_first
from tests.support.sparking import DEADLINE, read, stream

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


def test_an_error_of_the_process_that_plans(spark, cluster):
    with pytest.raises(AnalysisException) as raised:
        read(spark, cluster, "missing").count()

    assert said_first(raised.value).startswith("orbitmq.errors.NoRoute: no broker serves")


def test_an_error_of_the_process_of_a_stream(spark, cluster, tmp_path):
    rows = stream(spark, cluster, "missing")
    query = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()

    with pytest.raises(StreamingQueryException) as raised:
        query.awaitTermination(DEADLINE)

    assert said_first(raised.value).startswith("orbitmq.errors.NoRoute: no broker serves")


def fails() -> None:
    raise DataLost(["all of it"]) from ValueError("of no interest any more")


@pytest.mark.parametrize("settings", [{}, {"SPARK_SIMPLIFIED_TRACEBACK": "1"}])
@pytest.mark.parametrize("program", [PYSPARK_DAEMON, QUIET_DAEMON, STREAM_RUNNER])
def test_spark_puts_the_cause_in_front_whether_it_shortens_tracebacks_or_not(
    monkeypatch, runs_as, program, settings
):
    for name, text in settings.items():
        monkeypatch.setenv(name, text)
    runs_as(program)

    text = told_by(cause_first()(fails))

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
        cause_first()(fails)()

    assert isinstance(raised.value.__cause__, ValueError)


def test_what_is_no_error_passes(runs_as):
    runs_as(PYSPARK_DAEMON)

    with pytest.raises(SystemExit), cause_first():
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
