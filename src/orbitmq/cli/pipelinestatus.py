"""`orbitmq pipeline status`: how pipelines are that report to a console."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import typer

from orbitmq.cli.consoleasking import ConsoleAddress, Reported, reported_pipelines
from orbitmq.cli.declaring import AsJson
from orbitmq.cli.diagnosis import FindingRecord
from orbitmq.cli.errors import FAILED, CommandError, Misused
from orbitmq.cli.jsonoutput import OLD_NAME
from orbitmq.cli.printing import Printer
from orbitmq.cli.suggesting import closest
from orbitmq.cli.tables import Columns
from orbitmq.cli.wording import NOTHING, count, duration, moment, rate, several, share

EPILOG = (
    "Examples:\n\n"
    "  orbitmq pipeline status --console http://127.0.0.1:8090\n\n"
    "  ORBITMQ_CONSOLE=http://127.0.0.1:8090 orbitmq pipeline status billing --json"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatusRecord:
    """A pipeline, by its last report."""

    pipeline: str
    #: running, waiting, failing (it runs, and what it handles comes back), failed, stopped, or
    #: lost (its driver does not report any more)
    state: str
    reported_at: float
    group: str | None
    topics: tuple[str, ...]
    batch: int | None  #: the last batch that is done
    rows: int | None  #: in it
    rows_per_second: float | None
    batch_seconds: float | None
    unread: int  #: messages that its source has not read; a group's lag is what is not finished
    unread_by_queue: Mapping[str, int]  #: the same, by `topic@broker:queue`
    done: int | None  #: handled well since it was started
    retried: int | None  #: sent back, to be delivered again
    dead: int | None  #: given up
    failed_share: float | None  #: of what was handled in the last five minutes
    error: str | None  #: the last one
    url: str | None  #: of Spark's own page
    findings: tuple[FindingRecord, ...]  #: what is wrong, and what to do
    lag: Mapping[str, int] = field(metadata=OLD_NAME)
    lag_total: int = field(metadata=OLD_NAME)

    @classmethod
    def of(cls, pipeline: Reported) -> PipelineStatusRecord:
        report = pipeline.report
        return cls(
            pipeline=pipeline.name,
            state=report.state.value,
            reported_at=pipeline.reported_at,
            group=report.group,
            topics=report.topics,
            batch=report.batch,
            rows=report.rows,
            rows_per_second=report.rows_per_second,
            batch_seconds=report.batch_seconds,
            unread=sum(report.lag.values()),
            unread_by_queue=report.lag,
            done=report.done,
            retried=report.retried,
            dead=report.dead,
            failed_share=report.failed_share,
            error=report.error,
            url=report.url,
            findings=tuple(map(FindingRecord.of, pipeline.faults)),
            lag=report.lag,
            lag_total=sum(report.lag.values()),
        )


def status(
    name: Annotated[
        str | None, typer.Argument(metavar="[PIPELINE]", help="One of them; else all.")
    ] = None,
    console: ConsoleAddress = None,
    as_json: AsJson = False,
) -> None:
    """Show how pipelines are that report to a console; the exit code is 1 when one is ill."""
    if console is None:
        raise Misused("say which console with --console URL, or set ORBITMQ_CONSOLE")
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
        # By the console's clock, which need not be this one.
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

# For the documentation.
status.prints = PipelineStatusRecord  # type: ignore[attr-defined]
