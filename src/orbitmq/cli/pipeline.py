"""`orbitmq pipeline`: runs and shows Spark pipelines, built-in ones and those of files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias

import typer

from orbitmq.cli.application import plain_command, section
from orbitmq.cli.command import (
    DEFAULT_NAME_SERVER,
    AsJson,
    Connection,
    Verbose,
    closest,
    seconds,
    unknown,
)
from orbitmq.cli.doctor import (
    ConsoleAddress,
    FindingRecord,
    Reported,
    forget_pipeline,
    reported_pipelines,
)
from orbitmq.cli.main import FAILED, CommandError, Misused
from orbitmq.cli.output import OLD_NAME, Columns, Printer, count, harmless, moment, rate
from orbitmq.client.admin.admin import AdminSettings, AsyncAdmin
from orbitmq.client.engine import Engine
from orbitmq.client.errors import GroupNotFound, TopicNotFound
from orbitmq.client.settings import split_name_servers
from orbitmq.client.signals import GracefulExit, Latch
from orbitmq.console.words import NOTHING, duration, several, share
from orbitmq.errors import BrokerRefused, OrbitError, SettingError, install_command
from orbitmq.names import dead_letter_topic
from orbitmq.parsing import fill
from orbitmq.remoting.settings import parse_address
from orbitmq.spark.consolelink import CONSOLE_VARIABLE, TOKEN_VARIABLE
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import GetConsumerListRequest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from rich.console import RenderableType
    from rich.live import Live

    from orbitmq.spark.pipelines.definition import Definition
    from orbitmq.spark.pipelines.load import Plan
    from orbitmq.spark.pipelines.run import Progress, Report, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEventRecord:
    """An event of a pipeline; one line for each."""

    #: plan (with --dry-run), started, progress, restarting, row (of a table as its result),
    #: or ended
    event: str
    at: float
    pipeline: str
    #: The stream or consumer group of the event.
    query: str | None = None
    #: starting, running, waiting, failing (it runs, but messages fail), stopped,
    #: finished or failed
    state: str | None = None
    batch: int | None = None  #: the last finished batch
    rows: int | None = None  #: read since the start; of a table, if that is the result
    rows_per_second: float | None = None  #: of the last batch
    batch_seconds: float | None = None
    unread: int | None = None  #: messages not read yet; null when unknown
    #: The same, by `topic@broker:queue`.
    unread_by_queue: Mapping[str, int] = field(default_factory=dict)
    retried: int | None = None  #: sent back for another delivery
    dead: int | None = None  #: became dead letters
    failed_share: float | None = None  #: of the messages handled in the last five minutes
    late: int | None = None  #: rows that came after their window closed, in no result
    restarts: int | None = None  #: restarts so far
    pause_seconds: float | None = None  #: until the restart
    #: At the end: whether every batch was finished.
    is_clean: bool | None = None
    error: str | None = None
    #: In plan and started: the given options and settings.
    options: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    row: Mapping[str, Any] | None = None
    lag: Mapping[str, int] = field(default_factory=dict, metadata=OLD_NAME)
    lag_total: int | None = field(default=None, metadata=OLD_NAME)

    @classmethod
    def of(cls, pipeline: str, progress: Progress, at: float) -> PipelineEventRecord:
        return fill(
            cls,
            progress,
            event="progress",
            at=at,
            pipeline=pipeline,
            unread=progress.total_lag,
            unread_by_queue=progress.lag,
            lag_total=progress.total_lag,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptionRecord:
    """An option of a pipeline."""

    name: str
    about: str
    allowed: str
    is_required: bool
    default: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRecord:
    """A pipeline that can be run."""

    name: str
    about: str
    file: str | None  #: null: built in
    options: tuple[PipelineOptionRecord, ...]

    @classmethod
    def of(cls, definition: Definition) -> PipelineRecord:
        return fill(
            cls,
            definition,
            file=None if definition.file is None else str(definition.file),
            options=tuple(
                fill(PipelineOptionRecord, each, each.kind, default=each.default_text)
                for each in definition.options
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatusRecord:
    """A pipeline, by its last report."""

    pipeline: str
    #: running, waiting, failing (it runs, but messages fail), failed, stopped, or
    #: lost (its driver stopped reporting)
    state: str
    reported_at: float
    group: str | None
    topics: tuple[str, ...]
    batch: int | None  #: the last finished batch
    rows: int | None  #: in it
    rows_per_second: float | None
    batch_seconds: float | None
    unread: int  #: messages that its source has not read (a group's lag: not finished)
    unread_by_queue: Mapping[str, int]  #: the same, by `topic@broker:queue`
    done: int | None  #: messages handled since the start
    retried: int | None  #: sent back for another delivery
    dead: int | None  #: became dead letters
    failed_share: float | None  #: of the messages handled in the last five minutes
    error: str | None  #: the last one
    url: str | None  #: of Spark's web page
    findings: tuple[FindingRecord, ...]  #: problems and remedies
    lag: Mapping[str, int] = field(metadata=OLD_NAME)
    lag_total: int = field(metadata=OLD_NAME)

    @classmethod
    def of(cls, pipeline: Reported) -> PipelineStatusRecord:
        report = pipeline.report
        unread = sum(report.lag.values())
        return fill(
            cls,
            pipeline,
            report,
            pipeline=pipeline.name,
            unread=unread,
            unread_by_queue=report.lag,
            findings=tuple(map(FindingRecord.of, pipeline.faults)),
            lag_total=unread,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineForgetRecord:
    """A pipeline that was removed from the list."""

    pipeline: str
    result: str  #: forgotten, or would be forgotten
    state: str  #: as last reported


app = section()

What: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="FILE", help="A .py or .toml file, or the name of a built-in pipeline."),
]


@plain_command(
    app,
    "run",
    examples=(
        "orbitmq pipeline run archive -o topic=orders -o path=lake/orders",
        "orbitmq pipeline run orders.py --option threshold=10 --checkpoint checkpoints/orders",
        "orbitmq pipeline run orders.toml --master spark://host:7077 --console http://127.0.0.1:8090",
        "orbitmq pipeline run triage -o group=billing -o replay=retry --json | jq .row",
    ),
    prints=PipelineEventRecord,
)
def run(
    what: What,
    connection: Connection,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="An option of the pipeline; may be repeated.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The name of this run; by default the pipeline's.")
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            "--master",
            "-m",
            metavar="URL",
            help="Where Spark runs: local[2], spark://host:7077, sc://host:15002 and so on; "
            "local[*] by default.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="FOLDER",
            help="The checkpoint folder; ./orbitmq-checkpoints/NAME by default.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Process the available messages, then end.")
    ] = False,
    trigger: Annotated[
        str | None,
        typer.Option(
            "--trigger",
            metavar="DURATION",
            help="The interval of batches; without it, one follows the other.",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--setting", "-s", metavar="NAME=VALUE", help="A setting of Spark; may be repeated."
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts", min=0, help="The maximum number of restarts after consecutive failures."
        ),
    ] = 5,
    restart_pause: Annotated[
        str,
        typer.Option(
            "--restart-pause",
            metavar="DURATION",
            help="The pause before the first restart; it doubles each time.",
        ),
    ] = "1s",
    stop_timeout: Annotated[
        str,
        typer.Option(
            "--stop-timeout",
            metavar="DURATION",
            help="The time for the running batch to finish at a stop.",
        ),
    ] = "60s",
    console: Annotated[
        str | None,
        typer.Option(
            "--console",
            metavar="URL",
            envvar=CONSOLE_VARIABLE,
            help=f"A console to report to; its token is read from {TOKEN_VARIABLE}.",
        ),
    ] = None,
    spark_log: Annotated[
        Path | None,
        typer.Option(
            "--spark-log",
            metavar="FILE",
            help="The file for Spark's log; by default it is kept only after a failure.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run; start nothing.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Run a pipeline until it has finished or is stopped by Ctrl-C or SIGTERM.

    A stop lets the current batch finish; the next start continues from the checkpoint.
    """
    definition, plan = _loaded(what)
    if connection.name_server is None and plan.name_server:
        connection = replace(connection, name_server=[plan.name_server])
    connection = connection.resolved()
    called = name or plan.name or definition.name
    # A flag overrides the file, also when the two exclude each other.
    wanted_trigger = trigger if trigger is not None or once else plan.trigger
    given = Given(
        name=called,
        options={**plan.options, **_pairs(option, "--option", "topic=orders")},
        master=master or plan.master,
        checkpoint=checkpoint or plan.checkpoint or f"orbitmq-checkpoints/{called}",
        once=once or (plan.once and trigger is None),
        trigger=None if wanted_trigger is None else seconds(str(wanted_trigger), "--trigger"),
        settings={
            **plan.settings,
            **_pairs(setting, "--setting", "spark.sql.shuffle.partitions=8"),
        },
        restarts=restarts,
        restart_pause=seconds(restart_pause, "--restart-pause"),
        stop_timeout=seconds(stop_timeout, "--stop-timeout"),
        console=console or plan.console,
        console_token=os.environ.get(TOKEN_VARIABLE) or None,
        spark_log=spark_log,
        is_dry_run=dry_run,
        is_verbose=verbose,
    )
    run_pipeline(definition, given, connection, Printer(as_json))


@plain_command(
    app,
    "list",
    examples=(
        "orbitmq pipeline list",
        "orbitmq pipeline list --json",
    ),
    prints=PipelineRecord,
)
def list_ready(as_json: AsJson = False) -> None:
    """List the built-in pipelines."""
    with with_spark():
        from orbitmq.spark.pipelines.builtin import READY, ready  # noqa: PLC0415

        records = [PipelineRecord.of(ready(name)) for name in READY]
    out = Printer(as_json)
    if as_json:
        out.records(records)
        return
    out.table(_READY, records)
    out.note("orbitmq pipeline show NAME lists the options of one")


@plain_command(
    app,
    "show",
    examples=(
        "orbitmq pipeline show archive",
        "orbitmq pipeline show orders.py --json",
    ),
    prints=PipelineRecord,
)
def show(what: What, as_json: AsJson = False) -> None:
    """Show what a pipeline does, and its options."""
    definition, _ = _loaded(what)
    record = PipelineRecord.of(definition)
    out = Printer(as_json)
    if as_json:
        out.record(record)
        return
    out.line(record.name)
    if record.about:
        out.raw("")
        out.text(record.about)
    out.table(_OPTIONS, record.options, title="Options", empty="It has no options.")


def _loaded(what: str) -> tuple[Definition, Plan]:
    with with_spark():
        from orbitmq.spark.pipelines.load import load  # noqa: PLC0415  # needs Spark

        return load(what)


def _pairs(words: list[str] | None, flag: str, example: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            raise Misused(f"{flag} takes a name and a value, as in {example}; got {word!r}")
        if name.strip() in found:
            raise Misused(f"{flag} {name.strip()} is given twice")
        found[name.strip()] = value
    return found


_READY = (
    Columns[PipelineRecord]()
    .text("pipeline", lambda each: each.name)
    .text("what it does", lambda each: each.about.partition("\n")[0])
    .text("needs", lambda each: ", ".join(o.name for o in each.options if o.is_required))
)
_OPTIONS = (
    Columns[PipelineOptionRecord]()
    .text("option", lambda each: each.name)
    .text("default", lambda each: "required" if each.is_required else each.default or NOTHING)
    .text("may be", lambda each: each.allowed)
    .text("what it is", lambda each: each.about)
)


@plain_command(
    app,
    "status",
    examples=(
        "orbitmq pipeline status --console http://127.0.0.1:8090",
        "ORBITMQ_CONSOLE=http://127.0.0.1:8090 orbitmq pipeline status billing --json",
    ),
    prints=PipelineStatusRecord,
)
def status(
    name: Annotated[
        str | None, typer.Argument(metavar="[PIPELINE]", help="The name of a run; by default all.")
    ] = None,
    console: ConsoleAddress = None,
    as_json: AsJson = False,
) -> None:
    """Show the pipelines that report to a console; the exit code is 1 when one has a problem."""
    if console is None:
        raise Misused("name a console with --console URL, or set ORBITMQ_CONSOLE")
    out = Printer(as_json)
    found = reported_pipelines(console)
    records = [PipelineStatusRecord.of(each) for each in found]
    if name is not None:
        records = [each for each in records if each.pipeline == name]
        if not records:
            near = closest(name, [each.name for each in found])
            raise CommandError(f"no pipeline {name!r} has reported to {console}{near}")
    if as_json:
        out.records(records)
    elif name is not None:
        _print_one(records[0], out)
    else:
        out.table(_ALL, records, empty="No pipeline has reported.")
        _print_findings(records, out)
    if any(each.findings for each in records):
        raise typer.Exit(FAILED)


def _print_one(record: PipelineStatusRecord, out: Printer) -> None:
    out.facts(
        ("pipeline", record.pipeline),
        ("state", record.state),
        # By the console's clock, which may differ from this one.
        ("reported", moment(record.reported_at, out.clock.now(), exact=True)),
        ("group", record.group or NOTHING),
        ("topics", ", ".join(record.topics) or NOTHING),
        ("batch", count(record.batch)),
        ("rows", f"{count(record.rows)}, {rate(record.rows_per_second)}/s"),
        ("took", duration(record.batch_seconds)),
        ("unread", several(record.unread, "message")),
        ("done", count(record.done)),
        ("retried", count(record.retried)),
        ("dead", count(record.dead)),
        ("failed lately", share(record.failed_share)),
        ("last error", record.error or NOTHING),
    )
    queues = sorted(record.unread_by_queue.items(), key=lambda each: (-each[1], each[0]))
    out.table(_UNREAD, queues, title="Unread in each queue", empty="It did not report its queues.")
    _print_findings([record], out)


def _print_findings(records: list[PipelineStatusRecord], out: Printer) -> None:
    for record in records:
        for each in record.findings:
            out.raw("")
            out.line(f"! {record.pipeline}: {each.problem}")
            out.line(f"  {each.remedy}")
            out.line(f"  {each.command}")


_ALL = (
    Columns[PipelineStatusRecord]()
    .text("pipeline", lambda each: each.pipeline)
    .text("state", lambda each: each.state, bad=lambda each: bool(each.findings))
    .text("group", lambda each: each.group or NOTHING)
    .number("batch", lambda each: count(each.batch))
    .number("rows/s", lambda each: rate(each.rows_per_second))
    .number("unread", lambda each: count(each.unread))
    .number("retried", lambda each: count(each.retried))
    .number("dead", lambda each: count(each.dead), bad=lambda each: bool(each.dead))
    .number("failed", lambda each: share(each.failed_share), bad=lambda e: e.state == "failing")
)
_UNREAD = (
    Columns[tuple[str, int]]()
    .text("queue", lambda each: each[0])
    .number("unread", lambda each: count(each[1]))
)


@plain_command(
    app,
    "forget",
    examples=(
        "orbitmq pipeline forget billing --console http://127.0.0.1:8090",
        "ORBITMQ_CONSOLE=http://127.0.0.1:8090 orbitmq pipeline forget billing --dry-run",
    ),
    prints=PipelineForgetRecord,
)
def forget(
    name: Annotated[str, typer.Argument(metavar="PIPELINE", help="The name of the run.")],
    console: ConsoleAddress = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would happen; change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a pipeline from the list of a console that was started with --write.

    Nothing is stopped or deleted: a running pipeline returns with its next report.
    """
    if console is None:
        raise Misused("name a console with --console URL, or set ORBITMQ_CONSOLE")
    found = {each.name: each for each in reported_pipelines(console)}
    if name not in found:
        raise CommandError(f"no pipeline {name!r} has reported to {console}{closest(name, found)}")
    if not dry_run:
        forget_pipeline(console, name)
    result = "would be forgotten" if dry_run else "forgotten"
    state = found[name].report.state.value
    out = Printer(as_json)
    if as_json:
        out.record(PipelineForgetRecord(pipeline=name, result=result, state=state))
    else:
        out.line(f"pipeline {name} {result}; it was {state}")


#: The most rows of a result that are printed.
_MOST_ROWS = 10_000
#: How often the rows are asked for while Spark's Python process starts too slowly.
_STARTS = 4
#: Settings that Spark redacts, too.
_SECRET = re.compile(r"(?i)secret|password|token|access[.]?key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options and settings from the command line and the file."""

    name: str
    options: Mapping[str, object]
    master: str | None
    checkpoint: str
    once: bool
    trigger: float | None
    settings: Mapping[str, object]
    restarts: int
    restart_pause: float
    stop_timeout: float
    console: str | None
    console_token: str | None
    spark_log: Path | None
    is_dry_run: bool
    is_verbose: bool


@contextlib.contextmanager
def with_spark() -> Iterator[None]:
    """Turns errors of pipelines into errors of the command."""
    from orbitmq.cli.main import SettingRefused  # noqa: PLC0415

    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pyspark", "pyarrow", "pandas", "py4j"):
            raise
        raise CommandError(
            f"pipelines need {error.name}, which is not installed; {install_command('spark')}"
        ) from error
    except OrbitError as error:
        from orbitmq.spark.options import OptionRefused, SchemaRefused  # noqa: PLC0415
        from orbitmq.spark.pipelines.definition import PipelineRefused  # noqa: PLC0415

        if isinstance(error, PipelineRefused | SettingError | OptionRefused | SchemaRefused):
            raise SettingRefused(str(error)) from error
        raise


def run_pipeline(
    definition: Definition, given: Given, connection: Connection, out: Printer
) -> None:
    """Run it to its end; the exit code is 1 after a failure."""
    with with_spark():
        _run(definition, given, connection, out)


def _run(definition: Definition, given: Given, connection: Connection, out: Printer) -> None:
    from orbitmq.spark.options import OptionRefused  # noqa: PLC0415
    from orbitmq.spark.pipelines.definition import PipelineRefused  # noqa: PLC0415
    from orbitmq.spark.pipelines.run import (  # noqa: PLC0415
        check_checkpoint,
        save_places,
        session_settings,
    )

    connection.client()  # refuses flags that exclude each other
    values = definition.values(given.options)
    settings = session_settings(given.master, given.checkpoint, given.settings)
    if given.once and given.trigger is not None:
        raise Misused("--once and --trigger cannot be given together")
    check_checkpoint(given.checkpoint, values)
    options = {name: str(value) for name, value in given.options.items()}
    if given.is_dry_run:
        _say_plan(given, settings, options, out)
        return
    check_names(connection, definition.topics(values), definition.groups(values))
    with contextlib.ExitStack() as stack:
        save_places(given.checkpoint, values)
        stop = Latch()
        signals = stack.enter_context(GracefulExit(stop.set))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orbitmq-")))
        log = given.spark_log or folder / "spark.log"
        screen = stack.enter_context(screen_for(out, given.name))
        screen.note("starting Spark")
        spark = _session(definition, given, log)
        stack.callback(_quietly_stop, spark)
        # Spark's handler of Ctrl-C cancels all jobs.
        signals.reinstall()
        run = _made_run(spark, given, connection, folder / "drain")
        if given.console is not None:
            from orbitmq.spark.health import report_queries  # noqa: PLC0415

            reports = report_queries(
                spark, given.console, token=given.console_token, returned=run.returned
            )
            stack.callback(reports.stop)
            run.console = reports.link
        try:
            report = _supervised(definition, values, given, run, folder / "drain", stop, screen)
        except Exception as error:
            screen.close()
            if isinstance(error, PipelineRefused | SettingError | OptionRefused):
                raise
            if given.spark_log is None and not given.is_verbose:
                _keep_log(log, given.name, out)
            if isinstance(error, OrbitError):
                raise
            # Spark or the pipeline's function may raise anything.
            raise CommandError(_failure_text(error, definition, given)) from error
        shown = None
        if report.shown is not None:
            shown = _show(report.shown, given.name, out, screen)
        _tell_end(report, shown, given, out, screen)
    if not report.is_clean:
        raise typer.Exit(FAILED)


def _supervised(
    definition: Definition,
    values: Mapping[str, Any],
    given: Given,
    run: Run,
    drain_file: Path,
    stop: Latch,
    screen: Screen,
) -> Report:
    from orbitmq.spark.pipelines.run import Restarting, RestartPolicy, Supervisor  # noqa: PLC0415

    def restarting(each: Restarting) -> None:
        screen.restarting(each.problem, each.number, each.pause)

    supervisor = Supervisor(
        definition,
        values,
        run,
        drain_file=drain_file,
        policy=RestartPolicy(
            restarts=given.restarts,
            first_pause=max(0.001, given.restart_pause),
            longest_pause=max(60.0, given.restart_pause),
        ),
        stop_timeout=given.stop_timeout,
        on_progress=screen.progress,
        on_restart=restarting,
    )
    screen.started({name: str(value) for name, value in given.options.items()})
    return supervisor.run(stop)


def _made_run(spark: SparkSession, given: Given, connection: Connection, drain_file: Path) -> Run:
    from orbitmq.spark.pipelines.run import Run  # noqa: PLC0415

    return Run(
        spark,
        name=given.name,
        name_server=split_name_servers(connection.name_server or DEFAULT_NAME_SERVER),
        credentials=connection.credentials,
        tls=connection.tls_settings,
        checkpoint=given.checkpoint,
        once=given.once,
        trigger=given.trigger,
        drain_file=drain_file,
    )


def _session(definition: Definition, given: Given, log: Path) -> SparkSession:
    from orbitmq.spark.pipelines.run import pipeline_session  # noqa: PLC0415

    redirected = contextlib.nullcontext() if given.is_verbose else _redirected(log)
    with warnings.catch_warnings(), redirected:
        warnings.simplefilter("ignore")  # of PySpark, at import and start
        try:
            return pipeline_session(
                given.name,
                master=given.master,
                checkpoint=given.checkpoint,
                settings=given.settings,
                python_path=() if definition.file is None else (definition.file.parent,),
            )
        except OrbitError:
            raise
        except Exception as error:
            # PySpark raises many types when Java does not start or the cluster is unreachable.
            text = str(error).strip().splitlines()
            raise CommandError(
                f"Spark cannot be started: {text[0] if text else type(error).__name__}; "
                "orbitmq doctor looks for the usual reasons, and --verbose shows what Spark says"
            ) from error


def _failure_text(error: Exception, definition: Definition, given: Given) -> str:
    """The cause, and its line in the pipeline's file."""
    from orbitmq.spark.options import cause_of  # noqa: PLC0415

    if given.is_verbose:
        traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [each.lineno for each in frames if each.filename == str(definition.file)]
    place = f" ({definition.file}, line {lines[-1]})" if lines else ""
    words = cause_of(str(error)) or "no error text"
    return f"pipeline {given.name!r} failed{place}: {type(error).__name__}: {words}"


@contextlib.contextmanager
def _redirected(log: Path) -> Iterator[None]:
    """Redirect the output of processes started meanwhile (Spark's Java) to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file_number in zip((1, 2), kept, strict=True):
            os.dup2(file_number, number)
            os.close(file_number)


def _quietly_stop(spark: SparkSession) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PySpark
        spark.stop()


def _keep_log(log: Path, name: str, out: Printer) -> None:
    """Keep Spark's log after a failure."""
    with contextlib.suppress(OSError):
        kept = Path(tempfile.gettempdir()) / f"orbitmq-{name}-{os.getpid()}.log"
        kept.write_bytes(log.read_bytes())
        out.note(f"what Spark logged is in {kept}")


def _say_plan(
    given: Given, settings: Mapping[str, str], options: Mapping[str, str], out: Printer
) -> None:
    settings = {
        name: "(not shown)" if _SECRET.search(name) else value for name, value in settings.items()
    }
    if out.is_json:
        out.record(
            PipelineEventRecord(
                event="plan",
                at=out.clock.now(),
                pipeline=given.name,
                options=options,
                settings=settings,
            )
        )
        return
    out.facts(
        ("pipeline", given.name),
        ("checkpoint", given.checkpoint),
        *((f"option {name}", value) for name, value in options.items()),
        *((name, value) for name, value in sorted(settings.items())),
    )
    out.note("dry run: nothing was started")


def _show(frame: DataFrame, name: str, out: Printer, screen: Screen) -> int:
    """Print the rows of a result and return their number."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # as everybody calls them

    as_json = F.to_json(F.struct("*"), {"ignoreNullFields": "false"}).alias("json")
    rows = _collected(frame.limit(_MOST_ROWS + 1).select(as_json), out)
    screen.close()
    for row in rows[:_MOST_ROWS]:
        found = json.loads(row)
        if out.is_json:
            out.record(
                PipelineEventRecord(event="row", at=out.clock.now(), pipeline=name, row=found)
            )
        else:
            out.facts(*((key, _cell(value)) for key, value in found.items()))
            out.raw("")
    if not rows:
        out.note("there is nothing to show")
    if len(rows) > _MOST_ROWS:
        out.note(f"only the first {_MOST_ROWS:,} rows are shown")
    return min(len(rows), _MOST_ROWS)


def _collected(frame: DataFrame, out: Printer) -> list[str]:
    from orbitmq.spark.internals import is_slow_start  # noqa: PLC0415  # where Spark is

    for left in reversed(range(_STARTS)):
        try:
            return [row["json"] for row in frame.collect()]
        except Exception as error:
            # Spark raises many types.
            if not left or not is_slow_start(str(error)):
                raise
            out.note("Spark's Python process started too slowly; trying again")
    raise AssertionError


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tell_end(
    report: Report, shown: int | None, given: Given, out: Printer, screen: Screen
) -> None:
    """Print the outcome: rows of its streams and groups, or of its result."""
    screen.close()
    rows = sum(each.rows for each in report.progress) if shown is None else shown
    if out.is_json:
        out.record(
            PipelineEventRecord(
                event="ended",
                at=out.clock.now(),
                pipeline=given.name,
                state=report.end.value,
                rows=rows,
                retried=sum(each.retried for each in report.progress),
                dead=sum(each.dead for each in report.progress),
                restarts=report.restarts,
                is_clean=report.is_clean,
            )
        )
        return
    did = several(rows, "row") + ("" if shown is None else " shown")
    again = f", {several(report.restarts, 'restart')}" if report.restarts else ""
    out.note(f"{given.name} {report.end.value}: {did}{again}")
    if not report.is_clean:
        out.note(
            f"orbitmq: a batch was cut off after {duration(given.stop_timeout)}; the next start "
            "repeats it"
        )


def check_names(connection: Connection, topics: Sequence[str], groups: Sequence[str]) -> None:
    """Raises `Misused` for a topic or a group with dead letters that does not exist.

    Checked before Spark starts, which takes seconds.
    """
    if topics or groups:
        with asyncio.Runner() as runner:
            runner.run(_check(connection, topics, groups))


async def _check(connection: Connection, topics: Sequence[str], groups: Sequence[str]) -> None:
    async with Engine(connection.client()) as engine:
        admin = AsyncAdmin.on(engine, AdminSettings(timeout=connection.request_limit))
        try:
            for topic in topics:
                await admin.topics.get(topic)
            for group in groups:
                await _check_group(engine, admin, group)
        except (TopicNotFound, GroupNotFound) as error:
            raise Misused(str(await unknown(admin, error))) from error


async def _check_group(engine: Engine, admin: AsyncAdmin, group: str) -> None:
    """Raises `GroupNotFound` unless the group exists or has dead letters."""
    try:
        await admin.groups.settings(group)
    except GroupNotFound:
        try:
            await admin.topics.get(dead_letter_topic(group))
        except TopicNotFound:
            pass
        else:
            return
        raise
    except BrokerRefused as refused:
        if refused.code != ResponseCode.NO_PERMISSION:
            raise
        # An account that reads the letters need not be an operator. Without letters, a wrong key
        # or name would look like an empty queue.
        try:
            await admin.topics.route(dead_letter_topic(group))
        except TopicNotFound:
            await engine.ask(
                parse_address(refused.address),
                RequestCode.GET_CONSUMER_LIST_BY_GROUP,
                GetConsumerListRequest(consumer_group=group),
                accept=frozenset({ResponseCode.SUCCESS, ResponseCode.SYSTEM_ERROR}),
            )


#: States that get a line.
_TOLD = ("failing", "failed", "finished", "stopped")
#: The most queues whose lag is shown, largest first.
_MOST_QUEUES = 8


class Screen(Protocol):
    """Shows the progress of a run: a live table on a terminal, lines, or JSON."""

    def note(self, text: str) -> None:
        """Show a current activity."""

    def started(self, options: Mapping[str, str]) -> None:
        """The pipeline begins."""

    def progress(self, progress: Sequence[Progress]) -> None:
        """Show the progress."""

    def restarting(self, problem: str, number: int, pause: float) -> None:
        """It failed and is restarted."""

    def close(self) -> None:
        """Stop redrawing. May be called again."""


@contextlib.contextmanager
def screen_for(out: Printer, pipeline: str) -> Iterator[Screen]:
    """The screen for the kind of output."""
    screen: Screen
    if out.is_json:
        screen = JsonScreen(out, pipeline)
    elif out.is_terminal:
        screen = LiveScreen(out, pipeline)
    else:
        screen = LineScreen(out, pipeline)
    try:
        yield screen
    finally:
        screen.close()


class JsonScreen:
    """One object per line."""

    def __init__(self, out: Printer, pipeline: str) -> None:
        self._out = out
        self._pipeline = pipeline

    def note(self, text: str) -> None:
        """Not reported as JSON."""

    def started(self, options: Mapping[str, str]) -> None:
        self._tell(event="started", options=options)

    def progress(self, progress: Sequence[Progress]) -> None:
        for each in progress:
            self._out.record(PipelineEventRecord.of(self._pipeline, each, self._out.clock.now()))

    def restarting(self, problem: str, number: int, pause: float) -> None:
        self._tell(event="restarting", error=problem, restarts=number, pause_seconds=pause)

    def close(self) -> None:
        """Nothing to do."""

    def _tell(self, **fields: Any) -> None:
        self._out.record(
            PipelineEventRecord(at=self._out.clock.now(), pipeline=self._pipeline, **fields)
        )


class LineScreen:
    """One line for every batch and every change."""

    def __init__(self, out: Printer, pipeline: str) -> None:
        self._out = out
        self._pipeline = pipeline
        self._told: dict[str, tuple[str, int | None]] = {}

    def note(self, text: str) -> None:
        self._out.note(text)

    def started(self, options: Mapping[str, str]) -> None:
        given = "".join(f" {name}={value}" for name, value in options.items())
        self._out.line(f"{self._pipeline} started{given}")

    def progress(self, progress: Sequence[Progress]) -> None:
        for each in progress:
            # States change within a batch; only the important ones get a line.
            state = each.state if each.state in _TOLD else ""
            if self._told.get(each.query) != (state, each.batch):
                self._told[each.query] = (state, each.batch)
                self._out.line(_line(each))

    def restarting(self, problem: str, number: int, pause: float) -> None:
        self._out.line(f"{self._pipeline} failed: {problem}; restart {number} in {duration(pause)}")

    def close(self) -> None:
        """Nothing to do."""


def _line(progress: Progress) -> str:
    parts = [progress.query, progress.state]
    if progress.batch is not None:
        parts.append(f"batch {progress.batch}")
    parts.append(several(progress.rows, "row"))
    if progress.rows_per_second is not None:
        parts.append(f"{rate(progress.rows_per_second)}/s")
    if progress.total_lag is not None:
        parts.append(f"lag {count(progress.total_lag)}")
    if progress.retried or progress.dead:
        parts.append(f"{count(progress.retried)} retried, {count(progress.dead)} dead")
    if progress.failed_share:
        parts.append(f"{share(progress.failed_share)} failed lately")
    if progress.late:
        parts.append(_too_late(progress))
    if progress.error is not None:
        parts.append(progress.error)
    return "  ".join(parts)


def _too_late(progress: Progress) -> str:
    return f"{count(progress.late)} came too late for their windows and are not counted"


class LiveScreen:
    """A table that is redrawn in place."""

    def __init__(self, out: Printer, pipeline: str) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415

        self._out = out
        self._pipeline = pipeline
        self._said = ""
        self._last: Sequence[Progress] = ()
        # Its own console: standard output is redirected while Spark starts.
        self._file = os.fdopen(os.dup(1), "w")
        self._live: Live | None = Live(
            console=Console(file=self._file, highlight=False), refresh_per_second=4
        )
        self._live.start()

    def note(self, text: str) -> None:
        self._said = text
        self._draw()

    def started(self, options: Mapping[str, str]) -> None:
        self.note("Ctrl-C stops after the running batch")

    def progress(self, progress: Sequence[Progress]) -> None:
        self._last = progress
        self._draw()

    def restarting(self, problem: str, number: int, pause: float) -> None:
        self.note(f"failed: {problem}; restart {number} in {duration(pause)}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._file.close()

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(drawn(self._pipeline, self._said, self._last), refresh=True)


def drawn(pipeline: str, said: str, progress: Sequence[Progress]) -> RenderableType:
    """The renderable for a terminal."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    parts: list[RenderableType] = [
        Text.assemble((harmless(pipeline), "bold"), ("  " + harmless(said), "dim"))
    ]
    if progress:
        parts.append(_QUERIES.grid(progress))
    lags = [(queue, lag) for each in progress for queue, lag in each.lag.items() if lag]
    lags.sort(key=lambda each: (-each[1], each[0]))
    if lags:
        more = f" ({_MOST_QUEUES} of {len(lags)} queues)" if len(lags) > _MOST_QUEUES else ""
        parts += [
            Text(""),
            Text(f"Unread in each queue{more}", style="bold"),
            _LAGS.grid(lags[:_MOST_QUEUES]),
        ]
    for each in progress:
        if each.late:
            parts.append(Text(harmless(f"! {each.query}: {_too_late(each)}"), style="red"))
        if each.error is not None:
            parts.append(Text(harmless(f"! {each.query}: {each.error}"), style="red"))
    return Group(*parts)


_QUERIES: Columns[Progress] = (
    Columns["Progress"]()
    .text("query", lambda each: each.query)
    .text("state", lambda each: each.state, bad=lambda each: each.state in ("failing", "failed"))
    .number("batch", lambda each: count(each.batch))
    .number("rows", lambda each: count(each.rows))
    .number("rows/s", lambda each: rate(each.rows_per_second))
    .number("took", lambda each: duration(each.batch_seconds))
    .number("unread", lambda each: count(each.total_lag))
    .number("retried", lambda each: count(each.retried))
    .number("dead", lambda each: count(each.dead), bad=lambda each: each.dead > 0)
    .number("failed", lambda each: share(each.failed_share), bad=lambda e: e.state == "failing")
)
_LAGS = (
    Columns[tuple[str, int]]()
    .text("queue", lambda each: each[0])
    .number("messages", lambda each: count(each[1]))
)
