"""The `orbitmq` command: its subcommands, each imported when it is used.

Importing the broker takes a third of a second, which `orbitmq topic list` does not need.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from orbitmq import __version__
from orbitmq.arguments import meant
from orbitmq.cli.main import CommandError, Misused
from orbitmq.errors import install_command


@dataclass(frozen=True, slots=True)
class Word:
    """A subcommand."""

    module: str  #: the module with the Typer `app`
    about: str
    #: Whether it is one command of that app, not the whole app.
    is_single: bool = False
    #: The extra with its dependencies, if it needs one.
    extra: str | None = None


#: In the order of the help.
WORDS: Mapping[str, Word] = {
    "up": Word(
        "orbitmq.cli.servers",
        "Start a name server and brokers, for development on one machine.",
        True,
    ),
    "broker": Word("orbitmq.cli.servers", "Start one broker.", True),
    "namesrv": Word("orbitmq.cli.servers", "Start a name server.", True),
    "config": Word("orbitmq.cli.servers", "Show the settings in force.", True),
    "cluster": Word("orbitmq.cli.cluster", "Show brokers and name servers."),
    "topic": Word("orbitmq.cli.topics", "List, create, change and delete topics."),
    "group": Word("orbitmq.cli.groups", "Inspect consumer groups and move their progress."),
    "message": Word("orbitmq.cli.messages", "Find messages and track their consumption."),
    "dlq": Word("orbitmq.cli.deadletters", "Inspect, export and resend dead letters."),
    "produce": Word("orbitmq.cli.produce", "Send messages.", True),
    "consume": Word("orbitmq.cli.consume", "Print messages as they arrive.", True),
    "pipeline": Word("orbitmq.cli.pipeline", "Run Spark pipelines, built-in ones and your own."),
    "archive": Word(
        "orbitmq.cli.archive", "Keep old messages as Parquet, for Spark to read without the broker."
    ),
    "bench": Word("orbitmq.cli.bench", "Measure sending, consuming and end-to-end latency."),
    "top": Word("orbitmq.cli.top", "Watch lag, rates and queue owners, live.", True),
    "console": Word("orbitmq.cli.console", "Start the web console.", True, extra="console"),
    "user": Word("orbitmq.cli.users", "Manage who may log in to the console.", extra="console"),
    "context": Word("orbitmq.cli.context", "Manage named clusters."),
    "doctor": Word("orbitmq.cli.doctor", "Find common mistakes and suggest remedies.", True),
}


#: Command names of other tools, and ours.
_MEANT: Mapping[str, str] = {
    "add": "create",
    "current": "show",
    "delete": "remove",
    "describe": "show",
    "events": "message",
    "get": "show",
    "groups": "group",
    "info": "show",
    "lag": "group list",
    "listen": "consume",
    "list": "show",
    "ls": "list",
    "messages": "message",
    "new": "create",
    "ps": "list",
    "pub": "produce",
    "publish": "produce",
    "read": "consume",
    "receive": "consume",
    "remove": "delete",
    "rm": "delete",
    "run": "up",
    "send": "produce",
    "server": "up",
    "serve": "up",
    "start": "up",
    "status": "show",
    "sub": "consume",
    "subscribe": "consume",
    "tail": "consume",
    "topics": "topic",
    "ui": "console",
    "web": "console",
}


class Group(TyperGroup):
    """A group of commands. A word of another tool gets a suggestion."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        meant = _MEANT.get(args[0], "") if args else ""
        if args and args[0] not in known and meant.partition(" ")[0] in known:
            path = ctx.command_path
            raise Misused(f"there is no command {args[0]!r}; did you mean: {path} {meant}")
        return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> Any:
        return tidy(super().get_params(ctx))


class Command(TyperCommand):
    """A command. Former names of its flags still work."""

    #: Former flags, each with its replacement.
    former: Mapping[str, str] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().parse_args(ctx, list(_present(args, self.former)))
        except Exception as error:
            # Typer has its own class of it or click's, by its version.
            if (option := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
                raise Misused(self._unknown(ctx, option)) from error
            raise

    def _unknown(self, ctx: Any, option: str) -> str:
        """There is no such option, but the one that was meant."""
        known = {
            flag.removeprefix("--").replace("-", "_"): flag
            for each in self.get_params(ctx)
            if not getattr(each, "hidden", False)
            for flag in (*each.opts, *each.secondary_opts)
            if flag.startswith("--")
        }
        said = f"there is no option {option!r} of {ctx.command_path}"
        given = option.lstrip("-").replace("-", "_")
        places = {each.name for each in self.get_params(ctx) if each.param_type_name == "argument"}
        if given not in known and meant(given, places):
            usage = " ".join(each for each in self.collect_usage_pieces(ctx) if each != "[OPTIONS]")
            return f"{said}; write: {ctx.command_path} {usage}"
        alike = [flag for flag in known.values() if flag.endswith(f"-{option.lstrip('-')}")]
        if given not in known and len(alike) > 1:
            return f"{said}; did you mean {', '.join(alike[:-1])} or {alike[-1]}?"
        found = meant(given, known)
        if found is None:
            return f"{said}; see: {ctx.command_path} --help"
        return f"{said}; did you mean {known[found]}?"

    def invoke(self, ctx: Any) -> Any:
        given = ctx.params
        if (given.get("context") or given.get("all_contexts")) and _is_of_environment(
            ctx, "name_server"
        ):
            given["name_server"] = None  # a flag goes before the environment
        return super().invoke(ctx)

    def get_params(self, ctx: Any) -> Any:
        return tidy(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [_bare(each) for each in super().collect_usage_pieces(ctx)]


def _is_of_environment(ctx: Any, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"


def _present(args: Sequence[str], former: Mapping[str, str]) -> Iterable[str]:
    """The words of a command line with present names of flags."""
    given = iter(args)
    for word in given:
        if word == "--":
            yield word
            yield from given
            return
        flag, equals, value = word.partition("=")
        short = word[:2]
        if flag in former:
            sys.stderr.write(f"orbitmq: {flag} is deprecated; use {former[flag]}\n")
            *first, last = former[flag].split()
            yield from first
            yield f"{last}={value}" if equals else last
        elif short in former and len(word) > 2 and not word.startswith("--"):
            yield from (former[short], word[2:])
        else:
            yield word


def _bare(usage: str) -> str:
    """An argument in the usage line, without the brackets and braces that Typer adds."""
    return re.sub(r"^(?:\{(.*)\}|\[(\[.*)\])(\.\.\.)?$", r"\1\2", usage)


def tidy(params: list[Any]) -> list[Any]:
    """Replace Typer's names of values, such as `<str>` and `<int range>`, by plain ones."""
    for each in params:
        if each.param_type_name == "argument":
            each.display_type_rich = lambda ctx: None
        elif getattr(each, "is_flag", False):
            each.metavar = ""
        elif each.metavar is None:
            shown = getattr(each, "display_type_rich", None)
            text = str(shown(None)) if shown is not None else ""
            each.metavar = _value_name(text)
    return params


def _value_name(described: str) -> str | None:
    inner = described.strip("<>.")
    if "|" in inner:
        return inner
    word = inner.removeprefix("list[").partition(" ")[0].rstrip("].>")
    return {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "FILE"}.get(word)


class LazyGroup(Group):
    """Lists all subcommands and imports one when it is used.

    Contexts and commands are `Any`: Typer has its own or click's, by its version.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(WORDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(cmd_name) if cmd_name in WORDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # Typer searches `commands` for similar names.
        self.commands = {**_listed(), **self.commands}
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            reword(error)
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # Listing the subcommands must not import them.
        listing = _Listing(
            name=self.name,
            commands=_listed(),
            help=self.help,
            params=self.params,
            rich_markup_mode=self.rich_markup_mode,
        )
        listing.format_help(ctx, formatter)


class _Listing(TyperGroup):
    """Lists the subcommands without importing them."""

    def get_params(self, ctx: Any) -> Any:
        return tidy(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


def _listed() -> dict[str, Any]:
    return {name: TyperCommand(name, help=word.about) for name, word in WORDS.items()}


def load(name: str) -> Any:
    """Import a subcommand."""
    word = WORDS[name]
    try:
        section: typer.Typer = importlib.import_module(word.module).app
    except ModuleNotFoundError as error:
        if word.extra is None or (error.name or "").startswith("orbitmq"):
            raise
        raise CommandError(
            f"the {name} needs {error.name}, which is not installed; {install_command(word.extra)}"
        ) from error
    found: Any = typer.main.get_group(section)
    if word.is_single:
        found = found.commands[name]
    if isinstance(found, Group):
        found.name, found.help = name, word.about
    return found


def _print_version(wanted: bool) -> None:
    if wanted:
        from orbitmq.wire.codes import OUR_VERSION, release_of  # noqa: PLC0415  # rarely used

        typer.echo(f"orbitmq {__version__} (speaks RocketMQ {release_of(OUR_VERSION)})")
        raise typer.Exit


app = typer.Typer(
    cls=LazyGroup,
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
    """RocketMQ-compatible messaging: run brokers, use and administer them."""


#: The values that are allowed, by the type of pydantic's error.
_ALLOWED: Mapping[str, str] = {
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
}
_BOUNDS: Mapping[str, str] = {
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} at most",
}


def reword(error: Any) -> None:
    """Replace pydantic's text in an error of the parser by what is allowed and what was given.

    Typer 0.20 and later check values with pydantic; errors of older releases stay as they are.
    """
    found = getattr(error.__cause__, "errors", None)
    if not callable(found) or not hasattr(error, "message"):
        return
    problems = found()
    if not problems:
        return
    error.message = _usage_sentence(problems[0], str(error.message), _range(error))


def _usage_sentence(problem: Mapping[str, Any], said: str, bounds: str) -> str:
    kind, got = str(problem["type"]), problem["input"]
    if kind == "value_error":
        # Typer's own text about choices.
        return said.removeprefix("Value error, ")
    if kind in _ALLOWED:
        return f"must be {_ALLOWED[kind]}{bounds}, got {got!r}"
    if kind in _BOUNDS:
        return f"must be {bounds[2:] or _BOUNDS[kind].format_map(problem['ctx'])}, got {got!r}"
    return f"{said}, got {got!r}"


def _range(error: Any) -> str:
    """`, from 1 to 26` or `, 1 or more`, if the flag has bounds."""
    described = getattr(getattr(error, "param", None), "type_descriptor", None)
    info = getattr(described, "parameter_info", None)
    least, most = getattr(info, "min", None), getattr(info, "max", None)
    if least is None and most is None:
        return ""
    if least is None:
        return f", {most} at most"
    return f", {least} or more" if most is None else f", from {least} to {most}"


# Declaring commands. A parameter whose type is a dataclass stands for the flags that are its
# fields.

F = TypeVar("F", bound=Callable[..., None])


def section() -> typer.Typer:
    """A group of commands, which `WORDS` describes."""
    return typer.Typer(
        cls=Group,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def plain_command(
    app: typer.Typer, name: str, *, examples: Sequence[str], prints: type | None = None
) -> Callable[[F], F]:
    """Declare a function that needs no session as a command.

    `prints` is the class of the `--json` objects; servers have none.
    """

    def declare(work: F) -> F:
        parameters, bundles = flags_of(
            list(inspect.signature(work, eval_str=True).parameters.values())
        )

        def call(values: dict[str, Any]) -> None:
            work(**values | {each: taken(kind, values) for each, kind in bundles.items()})

        add_command(app, name, work, call, parameters, examples=examples, prints=prints)
        return work

    return declare


def flags_of(
    declared: Sequence[inspect.Parameter], shared: Sequence[type] = ()
) -> tuple[list[inspect.Parameter], Mapping[str, Any]]:
    """The flags of a command, and the dataclasses among its parameters; `shared` come last."""
    bundles: dict[str, Any] = {
        each.name: each.annotation for each in declared if dataclasses.is_dataclass(each.annotation)
    }
    own = [each for each in declared if each.name not in bundles]
    kinds = (*bundles.values(), *shared)
    return [*own, *(each for kind in kinds for each in _fields(kind))], bundles


def _fields(kind: type) -> Iterable[inspect.Parameter]:
    hints = typing.get_type_hints(kind, include_extras=True)
    for each in dataclasses.fields(kind):
        yield inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=hints[each.name],
        )


def taken(kind: Any, values: dict[str, Any]) -> Any:
    """The dataclass of the flags that are its fields; they are removed from `values`."""
    return kind(**{each.name: values.pop(each.name) for each in dataclasses.fields(kind)})


def add_command(
    app: typer.Typer,
    name: str,
    work: Callable[..., Any],
    call: Callable[[dict[str, Any]], None],
    parameters: Sequence[inspect.Parameter],
    *,
    examples: Sequence[str],
    prints: type | None,
    is_hidden: bool = False,
    former: Mapping[str, str] | None = None,
) -> None:
    """Add a command with these flags to a section; `call` gets their values.

    `former` says what to write instead of former flags, which still work.
    """

    def command(**values: Any) -> None:
        call(values)

    # Typer reads the signature and the annotations.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__doc__ = work.__doc__
    command.prints = prints  # type: ignore[attr-defined]  # for the documentation
    epilog = "Examples:\n\n" + "\n\n".join(f"  {example}" for example in examples)
    kind = type("Command", (Command,), {"former": former or {}})
    app.command(name, cls=kind, epilog=epilog, hidden=is_hidden)(command)
