"""`orbitmq pipeline`: what is said before Spark is started; the runs are in tests/spark."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orbitmq.cli.output import Printer
from orbitmq.cli.pipeline import LineScreen
from orbitmq.spark.pipelines.run import Progress, save_places
from tests.support.command import DEADLINE, environment

PIPELINE = '''
"""Doubles numbers."""

from typing import Annotated, Literal

from orbitmq.parsing import Duration


def pipeline(
    run,
    *,
    topic: Annotated[str, "What is read."],
    limit: int = 5,
    pause: Duration = 2.0,
    form: Literal["json", "text"] = "json",
): ...
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "doubling.py"
    path.write_text(PIPELINE)
    return str(path)


def test_list_shows_the_ready_pipelines_and_what_they_need(cli):
    records = {each["name"]: each for each in cli.records("pipeline", "list")}
    table = cli.text("pipeline", "list")

    assert set(records) == {"archive", "triage", "backfill", "transform", "statistics"}
    required = {
        name: [each["name"] for each in record["options"] if each["is_required"]]
        for name, record in records.items()
    }
    assert required["archive"] == ["topic", "path"]
    assert required["transform"] == ["topic", "into", "sql"]
    assert all(option["about"] for each in records.values() for option in each["options"])
    assert "Keep a topic as Parquet" in table


def test_show_tells_the_options_of_a_ready_pipeline_and_of_a_file(cli, file):
    ready = cli.record("pipeline", "show", "statistics")
    own = cli.record("pipeline", "show", file)

    windows = next(each for each in ready["options"] if each["name"] == "window")
    assert (windows["default"], "10s" in windows["allowed"]) == ("60.0", True)
    assert (own["name"], own["about"], own["file"]) == ("doubling", "Doubles numbers.", file)
    assert {each["name"]: (each["is_required"], each["default"]) for each in own["options"]} == {
        "topic": (True, None),
        "limit": (False, "5"),
        "pause": (False, "2.0"),
        "form": (False, "json"),
    }
    assert "What is read." in cli.text("pipeline", "show", file)


def test_a_dry_run_says_what_would_run_and_starts_nothing(cli, file):
    (plan,) = cli.records(
        *("pipeline", "run", file, "--dry-run", "-o", "topic=orders", "-o", "pause=1m"),
        *("--master", "local[3]", "-s", "spark.sql.shuffle.partitions=9"),
    )

    assert (plan["event"], plan["pipeline"]) == ("plan", "doubling")
    assert plan["options"] == {"topic": "orders", "pause": "1m"}
    assert plan["settings"]["spark.master"] == "local[3,4]"
    assert plan["settings"]["spark.sql.shuffle.partitions"] == "9"
    assert plan["settings"]["spark.python.unix.domain.socket.enabled"] == "true"
    assert "spark.master" in cli.text("pipeline", "run", file, "--dry-run", "-o", "topic=t")


def test_a_toml_file_says_how_to_run_and_flags_are_stronger(cli, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'pipeline = "archive"\nname = "lake"\nmaster = "spark://host:7077"\n'
        'checkpoint = "s3a://bucket/ck"\n[options]\ntopic = "orders"\npath = "a"\n'
        '[settings]\n"spark.executor.cores" = 2\n'
    )

    (record,) = cli.records("pipeline", "run", str(plan), "--dry-run", "-o", "path=b")

    assert record["pipeline"] == "lake"
    assert record["options"] == {"topic": "orders", "path": "b"}
    settings = record["settings"]
    assert (settings["spark.master"], settings["spark.executor.cores"]) == (
        "spark://host:7077",
        "2",
    )
    # Neither a driver that only this machine reaches, nor quick writes that only local disks take.
    assert "spark.driver.host" not in settings
    assert "spark.sql.streaming.checkpointFileManagerClass" not in settings


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("archiv",), "ready are: archive"),
        (("nowhere.py",), "nowhere.py cannot be read"),
        (("FILE",), "needs the option(s) topic"),
        (("FILE", "-o", "topic=t", "-o", "limt=3"), "do you mean limit?"),
        (
            ("FILE", "-o", "topic=t", "-o", "limit=x"),
            "limit of pipeline 'doubling' must be a whole",
        ),
        (("FILE", "-o", "topic=t", "-o", "form=xml"), "must be json or text; got 'xml'"),
        (("FILE", "-o", "topic=t", "-o", "pause=soon"), "must be a duration"),
        (("FILE", "-o", "topic"), "--option takes a name and a value"),
        (("FILE", "-o", "topic=t", "-o", "topic=u"), "--option topic is given twice"),
        (("FILE", "-o", "topic=t", "--master", "mesos://x"), "master must be local"),
        (("FILE", "-o", "topic=t", "--trigger", "often"), "--trigger must be a duration"),
        (("FILE", "-o", "topic=t", "--once", "--trigger", "1s"), "cannot be given together"),
        (("FILE", "-o", "topic=t", "--access-key", "a"), "--secret-key is missing"),
        (("broken.toml",), "does not say how to run a pipeline"),
        (("unknown.toml",), "pipeline must be a Python file (.py) or one of archive"),
        (("raises.py",), "raises.py, line 2: ZeroDivisionError"),
        (("empty.py",), "defines no pipeline"),
        (("starred.py",), "a pipeline is a function with one parameter, the run"),
        (("odd.py",), "option topics: no option can have the type"),
        (("json.py",), "has the name of a module of Python"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(cli, file, tmp_path, words, expected):
    for name, text in {
        "broken.toml": 'pipeline = "archive"\ntopic = "orders"\n',
        "unknown.toml": 'pipeline = "archival"\n',
        "raises.py": "\n1 / 0\n",
        "empty.py": "",
        "starred.py": "def pipeline(run, *options): ...\n",
        "odd.py": "def pipeline(run, *, topics: set[str]): ...\n",
        "json.py": "def pipeline(run): ...\n",
    }.items():
        (tmp_path / name).write_text(text)
    place = {"FILE": file}
    given = [
        place.get(word, str(tmp_path / word) if word.endswith((".py", ".toml")) else word)
        for word in words
    ]

    sentence = cli.refusal("pipeline", "run", *given, "--dry-run", code=2)

    assert expected in sentence


def test_without_pyspark_the_remedy_is_named(tmp_path):
    hidden = tmp_path / "pyspark.py"
    hidden.write_text("raise ModuleNotFoundError('hidden', name='pyspark')\n")
    ran = subprocess.run(
        [sys.executable, "-m", "orbitmq.cli", "pipeline", "list"],
        env=environment(
            {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        ),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )

    assert ran.returncode == 1
    assert re.search(r"pip install '.*\[spark\]'", ran.stderr)


def test_options_of_a_toml_file_keep_their_types(cli, file, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'pipeline = "{Path(file).name}"\n[options]\ntopic = "t"\nlimit = 7\npause = 0.5\n'
    )

    (record,) = cli.records("pipeline", "run", str(plan), "--dry-run")
    plan.write_text(plan.read_text().replace("limit = 7", "limit = true"))
    sentence = cli.refusal("pipeline", "run", str(plan), "--dry-run", code=2)

    assert record["options"] == {"topic": "t", "limit": "7", "pause": "0.5"}
    assert "limit of pipeline 'doubling' must be a whole number; got True" in sentence


def test_a_checkpoint_of_a_run_between_other_places_is_refused(cli, file, tmp_path):
    checkpoint = str(tmp_path / "checkpoint")
    save_places(checkpoint, {"topic": "orders", "limit": 5})
    words = ("pipeline", "run", file, "--dry-run", "--checkpoint", checkpoint)

    sentence = cli.refusal(*words, "-o", "topic=others", code=2)

    assert "belongs to a run with topic=orders, and this one has topic=others" in sentence
    assert "--checkpoint" in sentence
    assert cli.records(*words, "-o", "topic=orders", "-o", "limit=6")  # it goes on, with less


def test_a_dry_run_shows_no_secret_of_spark(cli, file):
    given = "spark.hadoop.fs.s3a.secret.key=hunter2"
    words = ("pipeline", "run", file, "--dry-run", "-o", "topic=t", "-s", given)

    shown = cli.text(*words)
    (record,) = cli.records(*words)

    assert "spark.hadoop.fs.s3a.secret.key" in shown
    assert "hunter2" not in shown
    assert record["settings"]["spark.hadoop.fs.s3a.secret.key"] == "(not shown)"


@pytest.mark.parametrize(
    ("kept", "flag"), [("once = true", ("--trigger", "1s")), ('trigger = "1s"', ("--once",))]
)
def test_a_flag_is_stronger_than_the_contrary_in_the_file(cli, file, tmp_path, kept, flag):
    plan = tmp_path / "plan.toml"
    plan.write_text(f'pipeline = "{Path(file).name}"\n{kept}\n[options]\ntopic = "t"\n')

    assert cli.records("pipeline", "run", str(plan), "--dry-run", *flag)


# What is seen while it runs.

BUSY = Progress(
    query="numbers",
    state="running",
    batch=12,
    rows=3400,
    rows_per_second=1234.5,
    batch_seconds=0.25,
    lag={f"numbers@broker-a:{queue}": 10 * queue for queue in range(12)},
    retried=3,
    dead=1,
)


def test_lines_are_written_for_batches_and_ends_and_not_for_every_look(capsys):
    screen = LineScreen(Printer(), "billing")

    screen.progress([BUSY])
    screen.progress([replace(BUSY, state="waiting")])
    screen.progress([replace(BUSY, batch=13, lag={})])
    screen.progress([replace(BUSY, batch=13, state="failed", error="no sink")])
    screen.restarting("no sink", 2, 4.0)

    assert capsys.readouterr().out.splitlines() == [
        "numbers  running  batch 12  3,400 rows  1,234.5/s  lag 660  3 retried, 1 dead",
        "numbers  running  batch 13  3,400 rows  1,234.5/s  3 retried, 1 dead",
        "numbers  failed  batch 13  3,400 rows  1,234.5/s  lag 660  3 retried, 1 dead  no sink",
        "billing failed: no sink; restart 2 in 4.0 s",
    ]


@pytest.mark.parametrize(
    ("pipeline", "options", "expected"),
    [
        ("archive", "topic=nope", "no broker has topic 'nope' ("),
        (
            "archive",
            "topic=nope zone=Mars",
            "option zone of pipeline 'archive' must be a time zone",
        ),
        ("triage", "group=ghost", "no broker knows group 'ghost'"),
        (
            "statistics",
            "topic=orders into=order",
            "no broker has topic 'order'; do you mean orders?",
        ),
    ],
)
def test_names_that_nobody_has_are_refused_before_spark_starts(
    cli, cluster, tmp_path, pipeline, options, expected
):
    cluster.create_topic("orders", queues=1)
    given = [word for option in options.split() for word in ("-o", option)]
    path = ("-o", "path=lake") if pipeline == "archive" else ()

    refused = cli.refusal(
        *("pipeline", "run", pipeline, "--once", "--checkpoint", str(tmp_path / "ck")),
        *(*given, *path),
        code=2,
    )

    assert refused.startswith(expected)
    assert not (tmp_path / "ck").exists()
