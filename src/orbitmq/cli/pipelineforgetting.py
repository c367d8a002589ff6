"""`orbitmq pipeline forget`: take a pipeline off the list of a console."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from orbitmq.cli.consoleasking import ConsoleAddress, forget_pipeline, reported_pipelines
from orbitmq.cli.declaring import AsJson
from orbitmq.cli.errors import CommandError, Misused
from orbitmq.cli.printing import Printer
from orbitmq.cli.suggesting import closest

EPILOG = (
    "Examples:\n\n"
    "  orbitmq pipeline forget billing --console http://127.0.0.1:8090\n\n"
    "  ORBITMQ_CONSOLE=http://127.0.0.1:8090 orbitmq pipeline forget billing --dry-run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineForgetRecord:
    """A pipeline that is on the list no more."""

    pipeline: str
    result: str  #: forgotten, or would be forgotten
    state: str  #: what it said last


def forget(
    name: Annotated[str, typer.Argument(metavar="PIPELINE", help="Its name.")],
    console: ConsoleAddress = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would happen and change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Take a pipeline off the list of a console, which must have been started with --write.

    Nothing is stopped or deleted: one that still runs is there again with its next report.
    """
    if console is None:
        raise Misused("say which console with --console URL, or set ORBITMQ_CONSOLE")
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


# For the documentation.
forget.prints = PipelineForgetRecord  # type: ignore[attr-defined]
