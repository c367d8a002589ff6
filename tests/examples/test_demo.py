"""The demo ends in a summary that adds up, and says so in its exit code."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo.orders import is_hopeless

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def running_demo(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The demo as a process; ended with all its children if it is still there afterwards."""
    demo = subprocess.Popen(
        [sys.executable, "-m", "examples.demo", "--folder", str(folder), *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "120", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        start_new_session=True,  # a group of its own, to which signals can be sent
    )
    try:
        yield demo
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.communicate(timeout=60)


def children_of(parent: int) -> list[int]:
    tasks = Path(f"/proc/{parent}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def until_gone(processes: list[int]) -> None:
    """Wait for the end of processes that are not ours to wait for."""
    end = time.monotonic() + 60
    pause = threading.Event()
    while left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, f"still there: {left}"
        pause.wait(0.05)


def rows_of(said: str) -> dict[str, list[int]]:
    """The numbers of the summary: sent, done, dead letters, lost, done twice."""
    rows = {}
    for line in said.splitlines():
        if match := re.match(r"│ (billing|shipping) [^│]+│(.*)│$", line):
            rows[match[1]] = [int(cell.replace(",", "")) for cell in match[2].split("│")]
    return rows


@pytest.mark.timeout(300)
def test_the_summary_of_a_run_adds_up(tmp_path: Path) -> None:
    options = ("--seconds", "5", "--rate", "200", "--seed", "7")

    with running_demo(tmp_path / "demo", *options) as demo:
        said, _ = demo.communicate(timeout=280)

    assert demo.returncode == 0, said
    sent, billed, dead, lost, _ = rows_of(said)["billing"]
    assert sent > 100  # at most 1,000; how many depends on the machine
    # Which orders are hopeless is decided by the seed, not by the run.
    assert dead == sum(is_hopeless(number, 7) for number in range(sent)) > 0
    assert (sent, lost) == (billed + dead, 0)
    assert rows_of(said)["shipping"][:4] == [sent, sent, 0, 0]
    assert "the bank knows no such account" in said
    # Into a pipe goes a line now and then, from the beginning on.
    line = r"^[\d,]+ sent, .* dead letters\. Orders come in\. \d+ s left\.$"
    assert re.search(line, said, re.MULTILINE)
    assert any((tmp_path / "demo" / "billed").rglob("*.parquet"))
    assert (tmp_path / "demo" / "history.svg").stat().st_size > 0
    assert not (tmp_path / "demo" / "broker").exists()


@pytest.mark.timeout(300)
def test_a_signal_to_all_of_it_still_ends_in_a_summary_that_adds_up(tmp_path: Path) -> None:
    pause = threading.Event()
    with running_demo(tmp_path / "demo", "--seconds", "600", "--rate", "100") as demo:
        # The shippers write nothing there; the file is made when the first of them is started.
        end = time.monotonic() + 120
        while not (tmp_path / "demo" / "shops.log").exists():
            assert demo.poll() is None, demo.communicate(timeout=60)[0]
            assert time.monotonic() < end, "no shipper was started"
            pause.wait(0.05)

        # What `timeout` does, and a terminal's Ctrl-C: Spark's Java and all children hear it.
        children = children_of(demo.pid)
        assert children
        os.killpg(demo.pid, signal.SIGTERM)
        said, _ = demo.communicate(timeout=150)

    assert demo.returncode == 0, said
    assert "Stopped early" in said
    sent, billed, dead, lost, _ = rows_of(said)["billing"]
    assert (sent, lost) == (billed + dead, 0)
    until_gone(children)


def test_no_child_outlives_a_demo_that_is_killed(tmp_path: Path) -> None:
    with running_demo(tmp_path / "demo", "--seconds", "600") as demo:
        assert demo.stdout is not None
        assert "name server" in demo.stdout.readline()
        children = children_of(demo.pid)
        assert children

        demo.kill()
        demo.communicate(timeout=60)
        until_gone(children)


def test_a_senseless_time_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with running_demo(tmp_path / "demo", "--seconds", "-1") as demo:
        said, _ = demo.communicate(timeout=60)

    assert demo.returncode == 2
    assert "--seconds must be positive, got -1" in said


def test_a_folder_that_is_not_its_own_is_left_alone(tmp_path: Path) -> None:
    thesis = tmp_path / "precious" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")

    with running_demo(thesis.parent, "--seconds", "1") as demo:
        said, _ = demo.communicate(timeout=60)

    assert demo.returncode == 1
    assert "is not empty and not a demo's" in said
    assert thesis.read_text() == "years of work"


def test_the_picture_in_the_readme_shows_a_run_that_adds_up() -> None:
    picture = (ROOT / "docs" / "images" / "demo.svg").read_text().replace("&#160;", " ")

    assert "sent = done + dead letters, in both groups; lost 0" in picture
    assert "does not add up" not in picture
