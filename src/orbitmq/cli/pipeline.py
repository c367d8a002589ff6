"""`orbitmq pipeline`: Spark pipelines, ready ones and one's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from orbitmq.cli.choosing import seconds
from orbitmq.cli.connecting import (
    AccessKey,
    Connection,
    NameServer,
    SecretKey,
    Timeout,
    Tls,
    TlsAuthority,
    TlsUnverified,
)
from orbitmq.cli.declaring import AsJson, Verbose, section
from orbitmq.cli.errors import Misused
from orbitmq.cli.pipelineforgetting import EPILOG as FORGET_EPILOG
from orbitmq.cli.pipelineforgetting import forget
from orbitmq.cli.pipelinerecords import PipelineEventRecord, PipelineOptionRecord, PipelineRecord
from orbitmq.cli.pipelinerunning import Given, run_pipeline, with_spark
from orbitmq.cli.pipelinestatus import EPILOG as STATUS_EPILOG
from orbitmq.cli.pipelinestatus import status
from orbitmq.cli.printing import Printer
from orbitmq.cli.tables import Columns
from orbitmq.cli.wording import NOTHING
from orbitmq.spark.consolelink import CONSOLE_VARIABLE, TOKEN_VARIABLE

if TYPE_CHECKING:
    from orbitmq.spark.pipelines.definition import Definition
    from orbitmq.spark.pipelines.loading import Plan

app = section("Run Spark pipelines: ready ones, and those of your files.")

What: TypeAlias = Annotated[
    str, typer.Argument(metavar="FILE", help="A .py or .toml file, or the name of a ready one.")
]


@app.command(
    "run",
    epilog="Examples:\n\n"
    "  orbitmq pipeline run archive -o topic=orders -o path=lake/orders\n\n"
    "  orbitmq pipeline run orders.py --option threshold=10 --checkpoint checkpoints/orders\n\n"
    "  orbitmq pipeline run orders.toml --master spark://host:7077 --console http://127.0.0.1:8090"
    "\n\n"
    "  orbitmq pipeline run triage -o group=billing -o replay=retry --json | jq .row",
)
def run(
    what: What,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", "-o", metavar="NAME=VALUE", help="Of the pipeline; may be repeated."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Of this run; the pipeline's by default.")
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
            help="Where progress is kept; ./orbitmq-checkpoints/NAME by default.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Take what is there, and end.")] = False,
    trigger: Annotated[
        str | None,
        typer.Option(
            "--trigger", metavar="DURATION", help="From one batch to the next; at once by default."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--setting", "-s", metavar="NAME=VALUE", help="Of Spark; may be repeated."),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts", min=0, help="How often it is started again after failures in a row."
        ),
    ] = 5,
    restart_pause: Annotated[
        str,
        typer.Option(
            "--restart-pause", metavar="DURATION", help="Before the first; doubles each time."
        ),
    ] = "1s",
    stop_timeout: Annotated[
        str,
        typer.Option(
            "--stop-timeout",
            metavar="DURATION",
            help="How long a stop waits for the batch that runs.",
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
            "--spark-log", metavar="FILE", help="What Spark logs; else kept only after a failure."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be run, and start nothing.")
    ] = False,
    name_server: NameServer = None,
    access_key: AccessKey = None,
    secret_key: SecretKey = None,
    tls: Tls = False,
    tls_ca: TlsAuthority = None,
    tls_unverified: TlsUnverified = False,
    timeout: Timeout = 5.0,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Run a pipeline until it has finished or is stopped by Ctrl-C or SIGTERM.

    A stop lets the batch that runs finish; the next start goes on from the checkpoint.
    """
    definition, plan = _loaded(what)
    connection = Connection(
        name_server=name_server or ([plan.name_server] if plan.name_server else None),
        access_key=access_key,
        secret_key=secret_key,
        tls=tls,
        tls_ca=tls_ca,
        tls_unverified=tls_unverified,
        timeout=timeout,
    )
    called = name or plan.name or definition.name
    # A flag is stronger than what the file says, also when the two exclude each other.
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


@app.command(
    "list", epilog="Examples:\n\n  orbitmq pipeline list\n\n  orbitmq pipeline list --json"
)
def list_ready(as_json: AsJson = False) -> None:
    """List the ready pipelines."""
    with with_spark():
        from orbitmq.spark.pipelines.ready import READY, ready  # noqa: PLC0415

        records = [PipelineRecord.of(ready(name)) for name in READY]
    out = Printer(as_json)
    if as_json:
        out.records(records)
        return
    out.table(_READY, records)
    out.note("orbitmq pipeline show NAME tells the options of one")


@app.command(
    "show",
    epilog="Examples:\n\n"
    "  orbitmq pipeline show archive\n\n"
    "  orbitmq pipeline show orders.py --json",
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
        from orbitmq.spark.pipelines.loading import load  # noqa: PLC0415  # needs Spark

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

app.command("status", epilog=STATUS_EPILOG)(status)
app.command("forget", epilog=FORGET_EPILOG)(forget)

# For the documentation.
run.prints = PipelineEventRecord  # type: ignore[attr-defined]
list_ready.prints = PipelineRecord  # type: ignore[attr-defined]
show.prints = PipelineRecord  # type: ignore[attr-defined]
