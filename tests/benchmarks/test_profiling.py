"""Profiles of the hot paths: what a second of one of them says, and how processes are named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.profiling.__main__ import main
from benchmarks.profiling.paths import PATHS, role_of
from benchmarks.profiling.speedscope import Speedscope
from benchmarks.profiling.tracing import py_spy, refusal

ROOT = Path(__file__).parents[2]
BY_NAME = {path.name: path for path in PATHS}


@pytest.fixture
def profiler():
    found = py_spy()
    if reason := refusal(found):
        pytest.skip(reason)
    assert found is not None
    return found


def test_a_second_of_decoding_shows_the_functions_that_decode(profiler, tmp_path, capsys):
    status = main(["decode", "--seconds", "1", "--to", str(tmp_path)], profiler=profiler)

    told = capsys.readouterr()
    assert status == 0, told.err
    assert "client" in told.out
    assert "src/orbitmq/message/" in told.out
    written = (tmp_path / "decode.speedscope.json").read_bytes()
    graph = msgspec.json.decode(written, type=Speedscope)
    ours = {
        place
        for place, frame in enumerate(graph.shared.frames)
        if (frame.file or "").startswith("src/orbitmq/message/")
    }
    stacks = [stack for thread in graph.profiles for stack in thread.samples]
    assert any(stack[-1] in ours for stack in stacks)
    # Setting up is over before samples are taken.
    assert "<frozen importlib._bootstrap>" not in {frame.file for frame in graph.shared.frames}
    assert str(ROOT) not in written.decode()


def saying(folder: Path, *lines: str) -> str:
    """A profiler that does what these lines of a shell say."""
    program = folder / "profiler"
    program.write_text("\n".join(("#!/bin/sh", *lines)))
    program.chmod(0o755)
    return str(program)


def test_where_nothing_may_be_traced_that_is_said_and_how_to_change_it(tmp_path, capsys):
    refused = saying(tmp_path, "echo 'Permission Denied: try as root' >&2", "exit 1")

    status = main(["decode", "--to", str(tmp_path)], profiler=refused)

    assert status == 2
    told = capsys.readouterr().err
    assert "py-spy may not trace processes here (Permission Denied: try as root): " in told
    assert "SYS_PTRACE" in told
    assert "Traceback" not in told


def test_a_path_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["decode", "guess"])

    assert "no path guess; there are: send, produce, pull" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("/venv/bin/python -m orbitmq.cli broker --json --port 0", "broker"),
        ("/venv/bin/python -m orbitmq.cli up --json", "broker"),
        ("/venv/bin/python -m benchmarks.load.generator", "load generator"),
        ("/venv/bin/python -m benchmarks.load.ourclient", "client"),
        ("python3 -m orbitmq.spark.workerdaemon pyspark.worker", "Spark worker"),
        ("python3 -m pyspark.daemon pyspark.worker", "Spark worker"),
        ("python3 -m pyspark.daemon pyspark.sql.worker.plan_data_source_read", "Spark planner"),
        ("/venv/bin/python -m benchmarks.profiling.workload spark out", "Spark driver"),
        ("/usr/bin/top", "other"),
    ],
)
def test_processes_are_named_by_what_they_do(command, role):
    assert role_of(command, BY_NAME["spark"]) == role
