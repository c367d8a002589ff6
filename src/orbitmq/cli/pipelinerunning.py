"""How `orbitmq pipeline run` runs: a session, a supervisor, and what is said meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from orbitmq.cli.connecting import DEFAULT_NAME_SERVER, Connection
from orbitmq.cli.errors import FAILED, CommandError, Misused
from orbitmq.cli.pipelinechecks import check_names
from orbitmq.cli.pipelinerecords import PipelineEventRecord
from orbitmq.cli.pipelinescreen import Screen, screen_for
from orbitmq.cli.pipelinewish import StopWish
from orbitmq.cli.printing import Printer
from orbitmq.cli.wording import duration, several
from orbitmq.client.settings import split_name_servers
from orbitmq.errors import OrbitError, SettingError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from orbitmq.spark.pipelines.definition import Definition
    from orbitmq.spark.pipelines.run import Run
    from orbitmq.spark.pipelines.supervising import Report

#: Rows of a result that are printed.
_MOST_ROWS = 10_000
#: Settings that Spark itself does not show either.
_SECRET = re.compile(r"(?i)secret|password|token|access[.]?key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What was asked for on the command line and in the file."""

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
    """Errors of pipelines as this command tells them."""
    from orbitmq.cli.errors import SettingRefused  # noqa: PLC0415

    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pyspark", "pyarrow", "pandas", "py4j"):
            raise
        raise CommandError(
            f"pipelines need {error.name}, which is not installed; pip install 'orbitmq[spark]'"
        ) from error
    except OrbitError as error:
        from orbitmq.spark.errors import OptionRefused, SchemaRefused  # noqa: PLC0415
        from orbitmq.spark.pipelines.errors import PipelineRefused  # noqa: PLC0415

        if isinstance(error, PipelineRefused | SettingError | OptionRefused | SchemaRefused):
            raise SettingRefused(str(error)) from error
        raise


def run_pipeline(
    definition: Definition, given: Given, connection: Connection, out: Printer
) -> None:
    """Run it to its end; the exit code says how that was."""
    with with_spark():
        _run(definition, given, connection, out)


def _run(definition: Definition, given: Given, connection: Connection, out: Printer) -> None:
    from orbitmq.spark.errors import OptionRefused  # noqa: PLC0415
    from orbitmq.spark.pipelines.belonging import check_belongs, keep_places  # noqa: PLC0415
    from orbitmq.spark.pipelines.errors import PipelineRefused  # noqa: PLC0415
    from orbitmq.spark.pipelines.sessions import session_settings  # noqa: PLC0415

    connection.client()  # refuses flags that do not go together
    values = definition.values(given.options)
    settings = session_settings(given.master, given.checkpoint, given.settings)
    if given.once and given.trigger is not None:
        raise Misused("--once and --trigger cannot be given together")
    check_belongs(given.checkpoint, values)
    options = {name: str(value) for name, value in given.options.items()}
    if given.is_dry_run:
        _say_plan(given, settings, options, out)
        return
    check_names(connection, definition.topics(values), definition.groups(values))
    with contextlib.ExitStack() as stack:
        keep_places(given.checkpoint, values)
        wish = stack.enter_context(StopWish())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orbitmq-")))
        log = given.spark_log or folder / "spark.log"
        screen = stack.enter_context(screen_for(out, given.name))
        screen.note("starting Spark")
        spark = _session(definition, given, log)
        stack.callback(_quietly_stop, spark)
        # Spark has its own idea of Ctrl-C, which cancels all jobs.
        wish.take_over()
        run = _made_run(spark, given, connection, folder / "drain")
        if given.console is not None:
            from orbitmq.spark.reporting import report_queries  # noqa: PLC0415

            reports = report_queries(
                spark, given.console, token=given.console_token, returned=run.returned
            )
            stack.callback(reports.stop)
            run.console = reports.link
        try:
            report = _supervised(definition, values, given, run, folder / "drain", wish, screen)
        except Exception as error:
            screen.close()
            if isinstance(error, PipelineRefused | SettingError | OptionRefused):
                raise
            if given.spark_log is None and not given.is_verbose:
                _keep_log(log, given.name, out)
            if isinstance(error, OrbitError):
                raise
            # Whatever Spark or the function of the pipeline raises.
            raise CommandError(_told(error, definition, given)) from error
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
    wish: StopWish,
    screen: Screen,
) -> Report:
    from orbitmq.spark.pipelines.supervising import (  # noqa: PLC0415
        Restarting,
        RestartPolicy,
        Supervisor,
    )

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
    return supervisor.run(wish.event)


def _made_run(spark: SparkSession, given: Given, connection: Connection, drain_file: Path) -> Run:
    from orbitmq.client.rangeaccess import ClientTls, Credentials  # noqa: PLC0415
    from orbitmq.spark.pipelines.run import Run  # noqa: PLC0415

    credentials = tls = None
    if connection.access_key is not None and connection.secret_key is not None:
        credentials = Credentials(
            access_key=connection.access_key, secret_key=connection.secret_key
        )
    if connection.tls or connection.tls_ca is not None or connection.tls_unverified:
        tls = ClientTls(authority=connection.tls_ca, verify=not connection.tls_unverified)
    return Run(
        spark,
        name=given.name,
        name_server=split_name_servers(connection.name_server or DEFAULT_NAME_SERVER),
        credentials=credentials,
        tls=tls,
        checkpoint=given.checkpoint,
        once=given.once,
        trigger=given.trigger,
        drain_file=drain_file,
    )


def _session(definition: Definition, given: Given, log: Path) -> SparkSession:
    from orbitmq.spark.pipelines.sessions import pipeline_session  # noqa: PLC0415

    redirected = contextlib.nullcontext() if given.is_verbose else _redirected(log)
    with warnings.catch_warnings(), redirected:
        warnings.simplefilter("ignore")  # PySpark's own, at import and start
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
            # Whatever PySpark raises when its Java does not start, or a cluster does not answer.
            text = str(error).strip().splitlines()
            raise CommandError(
                f"Spark cannot be started: {text[0] if text else type(error).__name__}; "
                "orbitmq doctor looks for the usual reasons, and --verbose shows what Spark says"
            ) from error


def _told(error: Exception, definition: Definition, given: Given) -> str:
    """What went wrong, and where in the file of the pipeline."""
    from orbitmq.spark.errors import cause_of  # noqa: PLC0415

    if given.is_verbose:
        traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [each.lineno for each in frames if each.filename == str(definition.file)]
    place = f" ({definition.file}, line {lines[-1]})" if lines else ""
    words = cause_of(str(error)) or "it says nothing"
    return f"pipeline {given.name!r} failed{place}: {type(error).__name__}: {words}"


@contextlib.contextmanager
def _redirected(log: Path) -> Iterator[None]:
    """Have what is started meanwhile, Spark's Java, write to a file instead of to the terminal."""
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
        warnings.simplefilter("ignore")  # PySpark's own
        spark.stop()


def _keep_log(log: Path, name: str, out: Printer) -> None:
    """What Spark said about a failure is worth more than a clean folder."""
    with contextlib.suppress(OSError):
        kept = Path(tempfile.gettempdir()) / f"orbitmq-{name}-{os.getpid()}.log"
        kept.write_bytes(log.read_bytes())
        out.note(f"what Spark logged is in {kept}")


# What is said at the beginning and at the end.


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
    """Print the rows of a result; says how many those were."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # as everybody calls them

    as_json = F.to_json(F.struct("*"), {"ignoreNullFields": "false"}).alias("json")
    rows = [row["json"] for row in frame.limit(_MOST_ROWS + 1).select(as_json).collect()]
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


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tell_end(
    report: Report, shown: int | None, given: Given, out: Printer, screen: Screen
) -> None:
    """How it ended, and how much it did: rows of its streams and groups, or of its result."""
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
