"""Writes docs/cli.md from the commands themselves: `python -m tools.cli_docs`.

`--check` only says whether the page is current; a test does the same.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orbitmq.cli.application import WORDS, load
from orbitmq.cli.settings import comments_of
from tools.madepages import keep_current

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"

_HEAD = """\
# The command line

This page is made by `python -m tools.cli_docs` from the code; edit the commands there, not the
page.

`orbitmq` starts servers (`up`, `broker`, `namesrv`), and looks at clusters and changes them. All
commands work with Apache RocketMQ 4.9 and 5.x as well.

- **Where the cluster is**: `--name-server HOST:PORT`, `ORBITMQ_NAME_SERVER` or `NAMESRV_ADDR`;
  `127.0.0.1:9876` otherwise. Accounts: `ORBITMQ_ACCESS_KEY` and `ORBITMQ_SECRET_KEY`.
- **Output**: tables for people; `--json` for programs. Results go to standard output, what is said
  about them to standard error. `--exact` shows times as dates instead of ages.
- **Servers** (`up`, `broker`, `namesrv`, `console`) say with `--json` where they listen, one object
  for each address (`event` is `listening`; `role`, `name`, `address`, `folder`), and then
  `{"event": "ready"}`.
- **Exit codes**: 0 done; 1 failed, incomplete, or something is wrong; 2 the words or flags cannot
  be meant like that; 130 interrupted; 141 the reader of the output left. Servers, `top` and
  `consume --follow` end with 0 after Ctrl-C, which is their ordinary end.
- **Changes**: at a terminal the command says what will happen and asks. Without one it does nothing
  unless `--yes` is given. `--dry-run` shows what would happen.
- **Completion**: `orbitmq --install-completion`.

## JSON

"""


_JSON = """\
What `--json` prints: one object per line, whose fields are those of a documented class.

Times (`..._at`) are seconds since 1970, durations (`..._seconds`) seconds, sizes bytes. A field
without a value is `null`, not missing. Fields are added in later versions, not renamed or removed.
A body that is UTF-8 is in `body`, any other in `body_base64`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    return keep_current(PAGE, page, "tools.cli_docs", __doc__, arguments)


def page() -> str:
    """The whole page."""
    found = list(commands())
    parts = [_HEAD, _JSON, "\n## Flags that commands share\n"]
    parts += _shared_flags(found)
    for command in found:
        parts += _section(command)
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Command:
    """A command, as Typer has it."""

    name: str
    made: Any

    @property
    def prints(self) -> type | None:
        """The class of what `--json` prints; None for commands that serve."""
        found: type | None = getattr(inspect.unwrap(self.made.callback), "prints", None)
        return found

    @property
    def declared(self) -> Mapping[str, Any]:
        """The types of its parameters."""
        signature = inspect.signature(inspect.unwrap(self.made.callback), eval_str=True)
        return {name: each.annotation for name, each in signature.parameters.items()}


def commands() -> Iterator[Command]:
    """All commands, in the order of the help."""
    for word in WORDS:
        made = load(word)
        inner: Mapping[str, Any] = getattr(made, "commands", {})
        if not inner:
            yield Command(word, made)
        for name, each in inner.items():
            if each.hidden:
                continue  # another name of one that is listed
            yield Command(f"{word} {name}", each)


_SHARED_PANELS = ("Connection", "Output", "Consent", "Settings")


def _shared_flags(found: Sequence[Command]) -> Iterator[str]:
    for panel in _SHARED_PANELS:
        flags: dict[str, Any] = {}
        declared: dict[str, Any] = {}
        for command in found:
            declared |= command.declared
            for flag in command.made.params:
                if getattr(flag, "rich_help_panel", None) == panel:
                    flags.setdefault(flag.opts[0], flag)
        if flags:
            yield f"\n### {panel}\n\n"
            yield from _flag_table(list(flags.values()), declared)


def _section(command: Command) -> Iterator[str]:
    made = command.made
    yield f"\n## `orbitmq {command.name}`\n\n"
    yield (inspect.cleandoc(made.help or "")).strip() + "\n"
    arguments = [each for each in made.params if each.param_type_name == "argument"]
    flags = [
        each
        for each in made.params
        if each.param_type_name == "option"
        and not each.hidden
        and "--help" not in each.opts
        and getattr(each, "rich_help_panel", None) not in _SHARED_PANELS
    ]
    shared = sorted(
        {
            each.rich_help_panel.lower()
            for each in made.params
            if getattr(each, "rich_help_panel", None) in _SHARED_PANELS
        }
    )
    usage = " ".join(each.metavar or each.name.upper() for each in arguments)
    yield f"\n```\norbitmq {command.name}{' ' + usage if usage else ''} [FLAGS]\n```\n"
    if arguments:
        yield "\n| argument | what it is |\n|---|---|\n"
        for each in arguments:
            yield f"| `{_cell(each.metavar or each.name)}` | {_cell(each.help or '')} |\n"
    if flags:
        yield "\n"
        yield from _flag_table(flags, command.declared)
    if shared:
        yield f"\nAnd the flags for {', '.join(shared)}.\n"
    examples = [line.strip() for line in (made.epilog or "").splitlines() if line.startswith("  ")]
    if examples:
        yield "\nExamples:\n\n```sh\n" + "\n".join(examples) + "\n```\n"
    if command.prints is not None:
        about = (inspect.getdoc(command.prints) or "").strip()
        yield f"\nWith `--json`: {about[0].lower()}{about[1:]}\n"
        yield "\n| field | type | what it is |\n|---|---|---|\n"
        for described in describe_record(command.prints):
            row = (f"`{described.path}`", described.kind, described.meaning)
            yield f"| {' | '.join(map(_cell, row))} |\n"


def _flag_table(flags: Sequence[Any], declared: Mapping[str, Any]) -> Iterator[str]:
    yield "| flag | default | what it does |\n|---|---|---|\n"
    for flag in flags:
        names = ", ".join(f"`{name}`" for name in (*flag.opts, *flag.secondary_opts))
        value = "" if flag.is_flag else f" `{_value_name(flag, declared)}`"
        env = flag.envvar
        variables = [env] if isinstance(env, str) else list(env or ())
        about = flag.help or ""
        if variables:
            about += f" [{', '.join(variables)}]"
        yield f"| {_cell(names + value)} | {_cell(_default(flag))} | {_cell(about)} |\n"


def _value_name(flag: Any, declared: Mapping[str, Any]) -> str:
    """What stands for the value: its metavar, its choices, or what kind of thing it is."""
    if flag.metavar:
        return str(flag.metavar)
    kind = _bare(declared[flag.name])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(each.value) for each in kind)
    return {int: "NUMBER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")


def _bare(declared: Any) -> Any:
    """The type without what surrounds it: an annotation, `None` beside it, a list of it."""
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin is typing.Annotated or origin is list:
        return _bare(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _bare(next(each for each in arguments if each is not type(None)))
    return declared


def _default(flag: Any) -> str:
    default = flag.default
    if default is None or default is False or not default or flag.is_flag:
        return ""
    return f"`{getattr(default, 'value', default)}`"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


# What `--json` prints.


@dataclass(frozen=True, slots=True)
class FieldDescription:
    """A field of a record."""

    path: str
    kind: str
    meaning: str


def describe_record(record: type, above: str = "") -> Iterator[FieldDescription]:
    """All fields, those of inner records with the path to them; old names are left out."""
    comments = comments_of(record)
    declared = typing.get_type_hints(record)
    for each in dataclasses.fields(record):
        if each.metadata.get("is_old"):
            continue
        path = f"{above}{each.name}"
        kind, inner, is_list = _kind(declared[each.name])
        meaning = comments.get(each.name, "").replace("None", "null")
        yield FieldDescription(path, kind, meaning)
        if inner is not None:
            yield from describe_record(inner, f"{path}{'[]' if is_list else ''}.")


_NAMES: Mapping[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true/false",
    Any: "any",
}


def _kind(declared: Any) -> tuple[str, type | None, bool]:
    """What a type is called, the record inside, and whether there are several."""
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin in (typing.Union, types.UnionType):
        name, inner, is_list = _kind(next(each for each in arguments if each is not type(None)))
        return f"{name} or null", inner, is_list
    if origin in (tuple, list):
        name, inner, _ = _kind(arguments[0])
        return f"list of {name}", inner, True
    if origin is not None and issubclass(origin, Mapping):
        return f"object with {_kind(arguments[1])[0]} values", None, False
    if dataclasses.is_dataclass(declared):
        return "object", typing.cast("type", declared), False
    return _NAMES[declared], None, False


if __name__ == "__main__":
    sys.exit(main())
