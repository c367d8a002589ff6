"""What depends on the version of PySpark, for each version that is supported."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pyspark
import pytest
from pyspark import SparkContext, daemon
from pyspark.java_gateway import launch_gateway
from pyspark.sql.classic.dataframe import DataFrame

from orbitmq.spark import session, worker
from orbitmq.spark.options import stream_options, write_options
from orbitmq.spark.readers import PlainStreamReader, StreamReader, stream_reader
from orbitmq.spark.session import settings_for
from orbitmq.spark.source import full_schema
from orbitmq.spark.worker import QUIET_DAEMON, pyspark_features
from orbitmq.spark.write import RocketMQRowStreamWriter, stream_writer

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
    found, settings = pyspark_features(version), settings_for(version)

    assert (found.has_read_limits, found.has_arrow_stream_writer) == (limits, arrow_writer)
    assert settings["spark.sql.streaming.checkpointFileManagerClass"].endswith(f".{manager}")
    assert settings["spark.python.daemon.module"] == QUIET_DAEMON
    assert found.is_known


def test_an_unknown_version_is_not_patched_and_this_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        found, settings = pyspark_features("9.9.1"), settings_for("9.9.1")

    assert (found.has_read_limits, found.is_known) == (True, False)
    assert "spark.python.daemon.module" not in settings
    assert "PySpark 9.9.1 is not one of the versions that OrbitMQ knows" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("version", "starts"), [("4.0.1", 1), ("4.3.0", 1), ("9.9.1", 0)])
def test_java_is_started_here_only_with_a_known_version(monkeypatch, version, starts):
    """PySpark starts it otherwise."""
    found = pyspark_features(version)
    monkeypatch.setattr(worker, "pyspark_features", lambda: found)
    monkeypatch.setattr(SparkContext, "_gateway", None)
    started: list[object] = []
    monkeypatch.setattr(session, "start_gateway", started.append)
    monkeypatch.setattr(SparkContext, "__init__", lambda *_, **__: None)

    session.start_java({"spark.master": "local"})

    assert len(started) == starts


def test_a_missing_internal_is_named_with_the_version():
    frame: Any = object()

    with pytest.raises(worker.PySparkDiffers, match=f"PySpark {pyspark.__version__} does not give"):
        worker.analyzed_plan(frame)


def test_the_installed_version_is_what_the_table_says():
    installed = pyspark_features()

    assert installed == pyspark_features(pyspark.__version__)
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
