"""How Spark finds the source, and what a session on this machine is made of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from orbitmq.spark.options import NoSpark
from orbitmq.spark.session import find_java, local_session, prepare


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_finding_the_source_loads_next_to_nothing():
    """It happens once in every session of everybody who has it installed."""
    loaded = run(
        "import sys, pyspark.sql.datasource\n"
        "before = set(sys.modules)\n"
        "import pyspark_orbitmq\n"
        "print(pyspark_orbitmq.DefaultSource.name())\n"
        "print(*sorted(set(sys.modules) - before))"
    ).split()

    assert loaded[0] == "rocketmq"
    assert set(loaded[1:]) == {
        "orbitmq",
        "orbitmq.errors",
        "orbitmq.spark",
        "orbitmq.spark.source",
        "orbitmq.spark.worker",
        "pyspark_orbitmq",
    }


def test_a_broken_installation_hides_no_other_source():
    said = run(
        "import sys\n"
        "sys.modules['orbitmq.spark.source'] = None\n"
        "import pyspark_orbitmq\n"
        "print(hasattr(pyspark_orbitmq, 'DefaultSource'))"
    )

    assert said == "False"


def test_the_environment_of_a_session_is_made(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": os.environ["PATH"]}

    prepare(environment)
    prepare(environment)

    assert environment["PYSPARK_PYTHON"] == sys.executable
    assert (Path(environment["JAVA_HOME"]) / "bin" / "java").exists()
    home = Path(environment["SPARK_HOME"])
    assert tmp_path in home.parents
    package = Path(pyspark.__file__).resolve().parent
    assert (home / "jars").resolve() == package / "jars"
    # With it, workers would import PySpark from a zip, which takes seconds.
    assert not (home / "python").exists()


def test_what_is_set_already_stays(tmp_path):
    given = {
        "PYSPARK_PYTHON": "python-of-mine",
        "PYSPARK_DRIVER_PYTHON": "another",
        "JAVA_HOME": f"{find_java().home}/",
        "SPARK_HOME": str(tmp_path),
    }
    environment = dict(given)

    prepare(environment)

    assert environment == given


def test_a_session_without_pyspark_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(NoSpark, match=r"pyspark, which is not installed; pip install 'orbitmq\[s"):
        local_session("nothing")
