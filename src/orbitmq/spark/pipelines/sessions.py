"""The Spark session of a pipeline: on this machine, on a cluster, or through Connect."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orbitmq.spark.pipelines.errors import PipelineRefused
from orbitmq.spark.session import LOCAL_ONLY, prepare, settings_for, start_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: How often a task of a local session is tried, unless the master says so.
_ATTEMPTS: Final = 4
_local = re.compile(r"local(?:\[(\d+|\*)(?:,(\d+))?\])?").fullmatch
_MASTERS: Final = (
    "local, local[2], spark://host:7077, yarn, k8s://https://host:6443 or sc://host:15002"
)
_FILE_MANAGER: Final = "spark.sql.streaming.checkpointFileManagerClass"


def pipeline_session(
    name: str,
    *,
    master: str | None = None,
    checkpoint: str | None = None,
    settings: Mapping[str, object] | None = None,
    python_path: Iterable[Path] = (),
) -> SparkSession:
    """A session with what was measured to matter for where it runs. Raises `PipelineRefused`.

    `python_path` are folders that Spark's workers import from as well.
    """
    chosen = session_settings(master, checkpoint, settings)
    _extend_path(python_path)
    prepare(os.environ)
    from pyspark.sql import SparkSession  # noqa: PLC0415  # reads the environment

    builder = SparkSession.builder.appName(name)
    url = chosen.pop("spark.master")
    builder = builder.remote(url) if url.startswith("sc://") else builder.master(url)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    if not url.startswith("sc://"):
        start_java({**chosen, "spark.master": url, "spark.app.name": name})
    return builder.getOrCreate()


def session_settings(
    master: str | None, checkpoint: str | None, settings: Mapping[str, object] | None
) -> dict[str, str]:
    """All settings of such a session, the master among them."""
    url = _master(master)
    chosen: dict[str, str] = {}
    if not url.startswith("sc://"):
        chosen = dict(settings_for())
        if not url.startswith("local"):
            for setting in LOCAL_ONLY:
                chosen.pop(setting, None)
        if checkpoint is not None and "://" in checkpoint and not checkpoint.startswith("file:"):
            # The quick way to write checkpoints is for file systems of this machine.
            chosen.pop(_FILE_MANAGER, None)
        chosen["spark.log.level"] = "ERROR"
        # Streams that are stopped leave nothing behind that would end with an error later.
        chosen["spark.sql.streaming.stopTimeout"] = "30s"
    given = {key: _text(value) for key, value in (settings or {}).items()}
    return {**chosen, **given, "spark.master": url}


def _master(master: str | None) -> str:
    text = master or "local[*]"
    if found := _local(text):
        return f"local[{found[1] or 1},{found[2] or _ATTEMPTS}]"
    if text == "yarn" or text.startswith(("spark://", "k8s://", "sc://")):
        return text
    raise PipelineRefused(f"master must be {_MASTERS}; got {text!r}")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _extend_path(folders: Iterable[Path]) -> None:
    """What lies beside a pipeline's file is found by workers too, which this process starts."""
    given = [str(folder.resolve()) for folder in folders]
    before = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*given, *before]))
    if not os.environ["PYTHONPATH"]:
        del os.environ["PYTHONPATH"]
    for folder in given:
        if folder not in sys.path:
            sys.path.append(folder)
