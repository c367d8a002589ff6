"""Runs the example of a declarative pipeline with Spark's own command."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from orbitmq.spark.session import prepare
from orbitmq.testing.cluster import EmbeddedCluster

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pipelines" / "declarative"
#: Two Javas have to start, one after the other, and the catalogue's database is made.
DEADLINE = 270


def example_in(folder: Path) -> Path:
    """A copy of the example, which keeps its progress beside it."""
    copy = folder / "pipeline"
    shutil.copytree(EXAMPLE, copy)
    spec = copy / "spark-pipeline.yml"
    spec.write_text(re.sub(r"storage: .*", f"storage: file://{folder}/storage", spec.read_text()))
    return copy


def run_pipeline(folder: Path, cluster: EmbeddedCluster) -> None:
    """As a user would at a shell."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = str(ROOT / "src")
    environment["ORBITMQ_NAME_SERVER"] = cluster.name_server
    # A port of its own for the Connect server inside, which else has one port for everybody.
    environment["SPARK_TESTING"] = "1"
    prepare(environment)
    said = folder / "said.txt"
    with said.open("wb") as output:
        running = subprocess.Popen(
            [
                *(str(Path(sys.executable).parent / "spark-pipelines"), "--remote", "local[2]"),
                *("--conf", "spark.sql.catalogImplementation=hive"),
                *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"),
                *("--conf", "spark.sql.shuffle.partitions=2", "--conf", "spark.ui.enabled=false"),
                *("run", "--spec", "spark-pipeline.yml"),
            ],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it starts others, which are to end with it
        )
        try:
            code = running.wait(DEADLINE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait(DEADLINE)
    assert code == 0, said.read_text()[-4000:]
