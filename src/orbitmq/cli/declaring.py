"""Declares commands that ask a cluster: a coroutine becomes a command with the flags all share.

A command is an `async def` whose first parameter is the session. Its docstring is the help, its
other parameters are its own arguments and flags; one whose type is a dataclass stands for the flags
that are its fields. Those of the connection, of the output and, for what changes something, of
consent are added here, so that they are the same everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
import sys
import typing
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeAlias

import typer
from typer.models import OptionInfo

from orbitmq.cli.auditing import append
from orbitmq.cli.connecting import Connection
from orbitmq.cli.errors import Misused, Unheard
from orbitmq.cli.printing import Printer
from orbitmq.cli.session import Session
from orbitmq.cli.suggesting import unknown
from orbitmq.client.admin.admin import AdminSettings, AsyncAdmin
from orbitmq.client.admin.errors import BadRequest, GroupNotFound, TopicNotFound
from orbitmq.client.engine import Engine
from orbitmq.client.errors import MessageRefused
from orbitmq.errors import SettingError

P = ParamSpec("P")
Work: TypeAlias = Callable[Concatenate[Session, P], Coroutine[Any, Any, None]]

AsJson: TypeAlias = Annotated[
    bool,
    typer.Option("--json", help="Print JSON, one object per line.", rich_help_panel="Output"),
]
Exact: TypeAlias = Annotated[
    bool,
    typer.Option("--exact", help="Times as dates, to the millisecond.", rich_help_panel="Output"),
]
Verbose: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Write what the client logs to standard error.",
        rich_help_panel="Output",
    ),
]
Yes: TypeAlias = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask.", rich_help_panel="Consent")
]
DryRun: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Say what would happen and change nothing.", rich_help_panel="Consent"
    ),
]
Audit: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--audit",
        metavar="FILE",
        envvar="ORBITMQ_AUDIT",
        help="Append a line of JSON to this file: who did this, when, and what went wrong.",
        rich_help_panel="Consent",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    as_json: AsJson = False
    exact: Exact = False
    verbose: Verbose = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Consent:
    yes: Yes = False
    dry_run: DryRun = False
    audit: Audit = None


def section(about: str) -> typer.Typer:
    """A group of commands."""
    return typer.Typer(
        help=about,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def command(
    app: typer.Typer,
    name: str,
    *,
    examples: Sequence[str],
    prints: type,
    changes: bool = False,
    is_hidden: bool = False,
) -> Callable[[Work[P]], Work[P]]:
    """Make a coroutine a command. `prints` is the class of the objects that `--json` gives."""

    def declare(work: Work[P]) -> Work[P]:
        shared = (_Consent, _Output, Connection) if changes else (_Output, Connection)
        declared = list(inspect.signature(work, eval_str=True).parameters.values())[1:]
        bundles = {
            each.name: each.annotation
            for each in declared
            if dataclasses.is_dataclass(each.annotation)
        }
        own = [each for each in declared if each.name not in bundles]

        def call(**values: Any) -> None:
            given = {each: _taken(each, values) for each in shared}
            values |= {name: _taken(kind, values) for name, kind in bundles.items()}
            consent = given.get(_Consent, _Consent())
            _run(work, values, given[Connection], given[_Output], consent, counting)

        kinds = (*bundles.values(), *shared)
        parameters = [*own, *(each for kind in kinds for each in _parameters(kind))]
        counting = _counting(parameters)
        # Typer reads both.
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        call.__doc__ = work.__doc__
        call.prints = prints  # type: ignore[attr-defined]  # for the documentation
        lines = "\n\n".join(f"  {example}" for example in examples)
        app.command(name, epilog=f"Examples:\n\n{lines}", hidden=is_hidden)(call)
        return work

    return declare


def _parameters(kind: type) -> Iterable[inspect.Parameter]:
    hints = typing.get_type_hints(kind, include_extras=True)
    for each in dataclasses.fields(kind):
        yield inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=hints[each.name],
        )


def _counting(parameters: Iterable[inspect.Parameter]) -> str | None:
    """The flag of a command that says how many; what -n means elsewhere."""
    flags = [
        flag
        for each in parameters
        for about in typing.get_args(each.annotation)[1:]
        if isinstance(about, OptionInfo)
        # Typer keeps the first name where a default would stand.
        for flag in (about.default, *(about.param_decls or ()))
    ]
    return next((flag for flag in ("--count", "--limit") if flag in flags), None)


def _taken(kind: Any, values: dict[str, Any]) -> Any:
    return kind(**{each.name: values.pop(each.name) for each in dataclasses.fields(kind)})


def _run(
    work: Work[...],
    values: dict[str, Any],
    connection: Connection,
    output: _Output,
    consent: _Consent,
    counting: str | None,
) -> None:
    _listen_to_logs(verbose=output.verbose)
    printer = Printer(output.as_json, output.exact)
    try:
        engine = Engine(connection.client(counting))
        settings = AdminSettings(timeout=connection.timeout)
        with _audited(consent, printer), asyncio.Runner() as runner:
            runner.run(_with_client(work, values, engine, settings, printer, consent))
    except (SettingError, BadRequest, MessageRefused) as error:
        raise Misused(str(error)) from error
    except BrokenPipeError as error:
        # Typer would make a failure of it.
        raise Unheard from error


async def _with_client(
    work: Work[...],
    values: dict[str, Any],
    engine: Engine,
    settings: AdminSettings,
    printer: Printer,
    consent: _Consent,
) -> None:
    async with engine:
        admin = AsyncAdmin.on(engine, settings)
        try:
            await work(Session(engine, admin, printer, consent.yes, consent.dry_run), **values)
        except (TopicNotFound, GroupNotFound) as error:
            raise await unknown(admin, error) from error


@contextlib.contextmanager
def _audited(consent: _Consent, printer: Printer) -> Iterator[None]:
    """Write down what is changed, if that is wanted; also when it fails half-way."""
    if consent.audit is None or consent.dry_run:
        yield
        return
    problem: str | None = None
    try:
        yield
    except typer.Exit as end:
        problem = f"exit code {end.exit_code}" if end.exit_code else None
        raise
    except BaseException as error:
        problem = str(error) or type(error).__name__
        raise
    finally:
        append(consent.audit, sys.argv[1:], at=printer.clock.now(), problem=problem)


def _listen_to_logs(*, verbose: bool) -> None:
    if verbose:
        # Late: these know the settings of brokers, which take their time to load.
        from orbitmq.cli.logs import set_up_logging  # noqa: PLC0415
        from orbitmq.cli.schema import LogLevel, LogSettings  # noqa: PLC0415

        set_up_logging(LogSettings(), LogLevel.INFO)
        return
    for name in ("orbitmq", "asyncio"):
        # What matters is said as the outcome of the command.
        logging.getLogger(name).addHandler(logging.NullHandler())
