"""`orbitmq context`: named clusters, in a file of the user.

The file is `contexts.json` in the user's configuration folder, readable by its owner alone. A
command uses the context of `--context`, of `ORBITMQ_CONTEXT`, or the one chosen by `context use`,
unless a name server is given more directly; then it uses nothing of any context.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from orbitmq.cli.application import plain_command, section
from orbitmq.cli.main import CommandError, Misused
from orbitmq.cli.output import Columns, Printer
from orbitmq.client.settings import NAME_SERVER_VARIABLES, split_name_servers
from orbitmq.errors import SettingError

app = section()

#: Names the context of a command, as `--context` does.
VARIABLE: Final = "ORBITMQ_CONTEXT"


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A named cluster."""

    name_servers: tuple[str, ...]
    access_key: str | None = None
    secret_key: str | None = None
    tls: bool = False
    tls_ca: str | None = None
    tls_unverified: bool = False


class Contexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of the file."""

    contexts: dict[str, Context] = {}
    current: str | None = None

    def get(self, name: str) -> Context:
        """Raises `Misused` for an unknown name."""
        if name not in self.contexts:
            known = ", ".join(sorted(self.contexts))
            what = f"; there are: {known}" if known else ""
            raise Misused(
                f"there is no context {name!r}{what}; add it with: "
                f"orbitmq context add {name} --name-server HOST:9876"
            )
        return self.contexts[name]


def file_of(environment: Mapping[str, str]) -> Path:
    """The file of the user."""
    if sys.platform == "win32" and (folder := environment.get("APPDATA")):
        return Path(folder) / "orbitmq" / "contexts.json"
    folder = environment.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "orbitmq" / "contexts.json"


def read(file: Path) -> Contexts:
    """The contexts in a file, none if there is no file. Raises `CommandError`."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Contexts)
    except FileNotFoundError:
        return Contexts()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CommandError(
            f"{file} is no file of contexts: {error}; repair or delete it"
        ) from error


def write(file: Path, contexts: Contexts) -> None:
    """Replace the file; only its owner may read it, since it may hold secrets."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    content = msgspec.json.format(msgspec.json.encode(contexts), indent=2) + b"\n"
    target = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(target, "wb") as out:
            out.write(content)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def chosen(given: str | None, environment: Mapping[str, str]) -> Context | None:
    """The context of a command: the given one, the environment's, or the current one."""
    name = given or environment.get(VARIABLE)
    contexts = read(file_of(environment))
    if not name and contexts.current not in contexts.contexts:
        return None
    return contexts.get(name or contexts.current or "")


def name_in_force(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The context that gave a command line with these words its name server."""
    given = None
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag == "--name-server" or (word.startswith("-n") and not word.startswith("--")):
            return None
        if flag == "--context":
            given = value if equals else following
    if not given and any(environment.get(name) for name in NAME_SERVER_VARIABLES):
        return None
    contexts = read(file_of(environment))
    name = given or environment.get(VARIABLE) or contexts.current
    return name if name in contexts.contexts else None


# Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRecord:
    """A named cluster. Its secret is never shown."""

    name: str
    is_current: bool  #: whether commands use it that name no cluster
    name_servers: tuple[str, ...]
    access_key: str | None
    has_secret: bool
    tls: bool


Name = Annotated[str, typer.Argument(metavar="NAME", help="The context's name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]


def _record(name: str, contexts: Contexts) -> ContextRecord:
    each = contexts.contexts[name]
    return ContextRecord(
        name=name,
        is_current=name == _current(contexts),
        name_servers=each.name_servers,
        access_key=each.access_key,
        has_secret=each.secret_key is not None,
        tls=each.tls or each.tls_ca is not None or each.tls_unverified,
    )


def _current(contexts: Contexts) -> str | None:
    return os.environ.get(VARIABLE) or contexts.current


def _mine() -> tuple[Path, Contexts]:
    file = file_of(os.environ)
    return file, read(file)


@plain_command(
    app,
    "list",
    examples=("orbitmq context list", "orbitmq context list --json"),
    prints=ContextRecord,
)
def list_contexts(as_json: AsJson = False) -> None:
    """List all contexts; a star marks the current one."""
    _, contexts = _mine()
    _show([_record(name, contexts) for name in sorted(contexts.contexts)], as_json=as_json)
    current = _current(contexts)
    if current is not None and current not in contexts.contexts:
        Printer().note(f"orbitmq: the current context is {current!r}, which does not exist")


@plain_command(
    app,
    "show",
    examples=("orbitmq context show", "orbitmq context show staging --json"),
    prints=ContextRecord,
)
def show(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="The context's name; by default the current one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a context without its secret."""
    _, contexts = _mine()
    wanted = name or _current(contexts)
    if wanted is None:
        raise CommandError(
            "there is no current context: commands use 127.0.0.1:9876; choose one with: "
            "orbitmq context use NAME"
        )
    contexts.get(wanted)
    _show([_record(wanted, contexts)], as_json=as_json)


def _show(records: list[ContextRecord], *, as_json: bool) -> None:
    out = Printer(as_json)
    if as_json:
        out.records(records)
        return
    out.table(
        Columns[ContextRecord]()
        .text("", lambda each: "*" if each.is_current else "")
        .text("context", lambda each: each.name)
        .text("name servers", lambda each: ", ".join(each.name_servers))
        .text("account", lambda each: each.access_key or "none")
        .text("TLS", lambda each: "yes" if each.tls else "no"),
        records,
        empty="no contexts; add one with: orbitmq context add NAME --name-server HOST:9876",
    )


@plain_command(
    app,
    "add",
    examples=(
        "orbitmq context add laptop --name-server 127.0.0.1:9876 --use",
        "orbitmq context add production -n ns1:9876 -n ns2:9876 --tls",
        "orbitmq context add secured -n ns1:9876 --access-key ops --secret-file secret.txt",
    ),
    prints=ContextRecord,
)
def add(
    name: Name,
    name_server: Annotated[
        list[str],
        typer.Option(
            "--name-server",
            "-n",
            metavar="HOST[:PORT]",
            help="The name server's address; may be repeated.",
        ),
    ],
    access_key: Annotated[
        str | None,
        typer.Option("--access-key", metavar="KEY", help="The account that signs the requests."),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            "--secret-file",
            metavar="FILE",
            help="The file with the account's secret, or - for standard input; by "
            "default a terminal asks for it.",
        ),
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Use TLS with all servers.")] = False,
    tls_ca: Annotated[
        Path | None,
        typer.Option("--tls-ca", metavar="FILE", help="A PEM file of certificates to trust."),
    ] = None,
    tls_unverified: Annotated[
        bool, typer.Option("--tls-unverified", help="Use TLS and accept any certificate.")
    ] = False,
    use: Annotated[bool, typer.Option("--use", help="Also make it the current context.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing context of this name.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add a context; the first one becomes the current one."""
    file, contexts = _mine()
    if not name.strip() or name.startswith("-"):
        raise Misused(f"a context needs a name that does not begin with a dash, got {name!r}")
    if name in contexts.contexts and not replace:
        raise Misused(f"there is a context {name!r} already; change it with --replace")
    try:
        servers = split_name_servers(name_server)
    except SettingError as error:
        raise Misused(
            f"--name-server: {str(error).removeprefix('client.name_servers: ')}"
        ) from error
    made = Context(
        name_servers=servers,
        access_key=access_key,
        secret_key=_secret(access_key, secret_file),
        tls=tls,
        tls_ca=None if tls_ca is None else str(tls_ca.expanduser().absolute()),
        tls_unverified=tls_unverified,
    )
    current = name if use or not contexts.contexts else contexts.current
    changed = Contexts(contexts.contexts | {name: made}, current)
    write(file, changed)
    _say(name, changed, as_json=as_json)


def _secret(access_key: str | None, file: Path | None) -> str | None:
    if access_key is None:
        if file is not None:
            raise Misused("--secret-file is the secret of an account: give --access-key as well")
        return None
    if file is not None:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    elif sys.stdin.isatty():
        text = typer.prompt("Secret key", hide_input=True, err=True)
    else:
        raise Misused("--access-key needs its secret: give --secret-file FILE, or - for input")
    if not text.strip():
        raise Misused("the secret is empty")
    return text.strip()


@plain_command(app, "use", examples=("orbitmq context use production",), prints=ContextRecord)
def use(name: Name, as_json: AsJson = False) -> None:
    """Make a context the current one, which commands without a name server use."""
    file, contexts = _mine()
    contexts.get(name)
    changed = Contexts(contexts.contexts, name)
    write(file, changed)
    _say(name, changed, as_json=as_json)


@plain_command(app, "remove", examples=("orbitmq context remove staging",), prints=ContextRecord)
def remove(name: Name, as_json: AsJson = False) -> None:
    """Remove a context with its secret."""
    file, contexts = _mine()
    contexts.get(name)
    removed = _record(name, contexts)
    rest = {each: found for each, found in contexts.contexts.items() if each != name}
    was_current = contexts.current == name
    write(file, Contexts(rest, None if was_current else contexts.current))
    if as_json:
        Printer(as_json).record(removed)
        return
    after = "; commands use 127.0.0.1:9876 now" if was_current else ""
    Printer().line(f"context {name} removed{after}")


def _say(name: str, contexts: Contexts, *, as_json: bool) -> None:
    out = Printer(as_json)
    if as_json:
        out.record(_record(name, contexts))
        return
    if contexts.current != name:
        out.line(f"context {name} added; use it with: orbitmq context use {name}")
        return
    out.line(f"commands use context {name} now")
    for variable in (VARIABLE, "ORBITMQ_NAME_SERVER", "NAMESRV_ADDR"):
        if found := os.environ.get(variable):
            out.note(f"orbitmq: {variable}={found} is set here and goes first")


def fields_of(context: Context) -> dict[str, Any]:
    """What a context says about the connection, by the names of its flags."""
    return {
        "name_server": list(context.name_servers),
        "access_key": context.access_key,
        "secret_key": context.secret_key,
        "tls": context.tls,
        "tls_ca": None if context.tls_ca is None else Path(context.tls_ca),
        "tls_unverified": context.tls_unverified,
    }
