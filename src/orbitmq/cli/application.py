"""The `orbitmq` command as a whole: which words there are, and where each is looked after.

What a word needs is imported when the word is used: a broker's parts take a third of a second to
load, which somebody who lists topics should not wait for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from orbitmq import __version__
from orbitmq.cli.errors import CommandError
from orbitmq.cli.refusing import reword


@dataclass(frozen=True, slots=True)
class Word:
    """Something that can be said to the command."""

    module: str  #: has the Typer `app`
    about: str
    #: Whether it is one of the commands of that app rather than the whole app.
    is_single: bool = False
    #: The extra that has what it needs beyond what every command does.
    extra: str | None = None


#: In the order of the help.
WORDS: Mapping[str, Word] = {
    "up": Word(
        "orbitmq.cli.commands", "Start a name server and brokers, all that a laptop needs.", True
    ),
    "broker": Word("orbitmq.cli.commands", "Start one broker.", True),
    "namesrv": Word("orbitmq.cli.commands", "Start a name server.", True),
    "config": Word("orbitmq.cli.commands", "Look at the settings.", True),
    "cluster": Word("orbitmq.cli.clusters", "Look at brokers and name servers."),
    "topic": Word("orbitmq.cli.topics", "List, make, change and delete topics."),
    "group": Word("orbitmq.cli.groups", "Look at consumer groups, and move their progress."),
    "message": Word("orbitmq.cli.messages", "Find messages and what became of them."),
    "dlq": Word("orbitmq.cli.deadletters", "Look at dead letters, and send them again."),
    "produce": Word("orbitmq.cli.producing", "Send messages.", True),
    "consume": Word("orbitmq.cli.consuming", "Print messages as they come.", True),
    "pipeline": Word(
        "orbitmq.cli.pipeline", "Run Spark pipelines: ready ones, and those of your files."
    ),
    "bench": Word(
        "orbitmq.cli.bench", "Measure what a cluster does: sending, consuming, and both."
    ),
    "top": Word("orbitmq.cli.top", "Watch lag, rates and owners, live.", True),
    "console": Word("orbitmq.cli.console", "Start the web console.", True, extra="console"),
    "doctor": Word(
        "orbitmq.cli.doctor", "Find the usual mistakes, and say what to do about them.", True
    ),
}


class LazyGroup(TyperGroup):
    """Knows all words, and loads what one needs when it is used.

    Contexts and commands are `Any` here: which click they are of depends on Typer's version.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(WORDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(cmd_name) if cmd_name in WORDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # Typer looks here for what is alike, to suggest it.
        self.commands = {**_listed(), **self.commands}
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            reword(error)
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # A list of the words takes no more than their names.
        listing = _Listing(
            name=self.name,
            commands=_listed(),
            help=self.help,
            params=self.params,
            rich_markup_mode=self.rich_markup_mode,
        )
        listing.format_help(ctx, formatter)


class _Listing(TyperGroup):
    """The words without what they need."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


def _listed() -> dict[str, Any]:
    return {name: TyperCommand(name, help=word.about) for name, word in WORDS.items()}


def load(name: str) -> Any:
    """The command that a word stands for."""
    word = WORDS[name]
    try:
        section: typer.Typer = importlib.import_module(word.module).app
    except ModuleNotFoundError as error:
        if word.extra is None or (error.name or "").startswith("orbitmq"):
            raise
        raise CommandError(
            f"the {name} needs {error.name}, which is not there; "
            f"pip install 'orbitmq[{word.extra}]'"
        ) from error
    group = typer.main.get_group(section)
    if word.is_single:
        return group.commands[name]
    group.name = name
    return group


def _print_version(wanted: bool) -> None:
    if wanted:
        from orbitmq.wire.versions import OUR_VERSION, release_of  # noqa: PLC0415  # few ask

        typer.echo(f"orbitmq {__version__} (speaks RocketMQ {release_of(OUR_VERSION)})")
        raise typer.Exit


app = typer.Typer(
    cls=LazyGroup,
    help="RocketMQ-compatible messaging: brokers, name servers and what is in them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def orbitmq(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """RocketMQ-compatible messaging: brokers, name servers and what is in them."""
