"""`orbitmq pipeline run` of a pipeline whose result is a table: the rows, and what is said last."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbitmq.cli import pipeline
from orbitmq.cli.command import Connection
from orbitmq.cli.output import Printer
from orbitmq.spark.pipelines.load import load

PIPELINE = '''
"""Counts, without a topic."""


def pipeline(run, *, rows: int):
    return run.spark.range(rows).selectExpr("id AS number")
'''


@pytest.fixture
def shared_session(spark, monkeypatch):
    """Have the command use the session of the tests, and leave it running."""
    monkeypatch.setattr(pipeline, "_session", lambda *_: spark)
    monkeypatch.setattr(pipeline, "_quietly_stop", lambda _: None)


def run(folder: Path, rows: int, out: Printer) -> None:
    (folder / "counting.py").write_text(PIPELINE)
    definition, _ = load(str(folder / "counting.py"))
    given = pipeline.Given(
        name="counting",
        options={"rows": str(rows)},
        master=None,
        checkpoint=str(folder / "checkpoint"),
        once=False,
        trigger=None,
        settings={},
        restarts=0,
        restart_pause=1.0,
        stop_timeout=10.0,
        console=None,
        console_token=None,
        spark_log=folder / "spark.log",
        is_dry_run=False,
        is_verbose=False,
    )
    pipeline.run_pipeline(definition, given, Connection(), out)


@pytest.mark.usefixtures("shared_session")
@pytest.mark.parametrize(
    ("rows", "printed", "end"),
    [
        (2, ["number", "0", "number", "1"], "counting finished: 2 rows shown"),
        (4, ["number", "0", "number", "1", "number", "2"], "counting finished: 3 rows shown"),
        (0, [], "counting finished: 0 rows shown"),
    ],
)
def test_the_end_says_how_many_rows_were_shown(tmp_path, monkeypatch, capsys, rows, printed, end):
    monkeypatch.setattr(pipeline, "_MOST_ROWS", 3)

    run(tmp_path, rows, Printer())

    told = capsys.readouterr()
    started, _, table = told.out.partition("\n")
    assert started == f"counting started rows={rows}"
    assert table.split() == printed
    assert told.err.splitlines()[-1] == end
