"""`orbitmq user`: who may log in to the console.

The file of users is what `orbitmq console --users FILE` reads; a console that runs sees each change
with the next request, and ends the sessions of users who were removed or changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from orbitmq.cli.application import plain_command, section
from orbitmq.cli.main import CommandError, Misused
from orbitmq.cli.output import Columns, Printer
from orbitmq.cli.settings import USERS_VARIABLE
from orbitmq.console.roles import RULES, Role
from orbitmq.console.settings import BadInput, ConsoleError
from orbitmq.console.users import Users

app = section()

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRecord:
    """A user of the console."""

    name: str
    role: str  #: reader, operator or admin


Name = Annotated[str, typer.Argument(metavar="NAME", help="The user's name.")]
File = Annotated[
    Path,
    typer.Option(
        "--users",
        metavar="FILE",
        envvar=USERS_VARIABLE,
        help="The file of users, which the console is started with.",
    ),
]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--password-file",
        metavar="FILE",
        help="The file with the password, or - for standard input; asked for at a terminal.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]


@plain_command(app, "list", examples=("orbitmq user list --users users.json",), prints=UserRecord)
def list_users(users: File, as_json: AsJson = False) -> None:
    """List the users and their roles."""
    found = [
        UserRecord(name=name, role=user.role.value)
        for name, user in _done(lambda: Users(users).all).items()
    ]
    out = Printer(as_json)
    if as_json:
        out.records(found)
        return
    out.table(
        Columns[UserRecord]()
        .text("user", lambda each: each.name)
        .text("role", lambda each: each.role),
        found,
        empty=f"no users; add one with: orbitmq user add NAME --role admin --users {users}",
    )


@plain_command(
    app,
    "add",
    examples=(
        "orbitmq user add ada --role admin --users users.json",
        "orbitmq user add grafana --role reader --users users.json --password-file secret.txt",
    ),
    prints=UserRecord,
)
def add(
    name: Name,
    users: File,
    role: Annotated[
        Role,
        typer.Option("--role", help="What the user may do; see docs/console.md."),
    ] = Role.READER,
    password_file: PasswordFile = None,
    as_json: AsJson = False,
) -> None:
    """Add a user; the file is made if it is not there."""
    password = _password(password_file)
    _done(lambda: Users(users).add(name, role, password))
    may = ", ".join(rule.about for rule in RULES.values() if rule.least is role)
    _say(users, name, f"user {name} added as {role}: may {may}", as_json=as_json)


@plain_command(
    app, "remove", examples=("orbitmq user remove ada --users users.json",), prints=UserRecord
)
def remove(name: Name, users: File, as_json: AsJson = False) -> None:
    """Remove a user; the user's sessions end."""
    known = _done(lambda: Users(users).all).get(name)
    _done(lambda: Users(users).remove(name))
    if as_json and known is not None:
        Printer(as_json).record(UserRecord(name=name, role=known.role.value))
        return
    Printer().line(f"user {name} removed; the user's sessions have ended")


@plain_command(
    app, "password", examples=("orbitmq user password ada --users users.json",), prints=UserRecord
)
def password(
    name: Name, users: File, password_file: PasswordFile = None, as_json: AsJson = False
) -> None:
    """Give a user another password; the user's sessions end."""
    text = _password(password_file)
    _done(lambda: Users(users).change(name, password=text))
    _say(users, name, f"user {name} has another password now", as_json=as_json)


@plain_command(
    app, "role", examples=("orbitmq user role ada operator --users users.json",), prints=UserRecord
)
def role(
    name: Name,
    role: Annotated[Role, typer.Argument(help="What the user may do from now on.")],
    users: File,
    as_json: AsJson = False,
) -> None:
    """Give a user another role; the user's sessions end."""
    _done(lambda: Users(users).change(name, role=role))
    _say(users, name, f"user {name} is {role} now", as_json=as_json)


def _say(users: Path, name: str, text: str, *, as_json: bool) -> None:
    if as_json:
        user = _done(lambda: Users(users).all)[name]
        Printer(as_json).record(UserRecord(name=name, role=user.role.value))
    else:
        Printer().line(text)


def _done(work: Callable[[], T]) -> T:
    """The result. Raises `Misused` for what cannot be, `CommandError` for what failed."""
    try:
        return work()
    except BadInput as error:
        raise Misused(str(error)) from error
    except ConsoleError as error:
        raise CommandError(str(error)) from error


def _password(file: Path | None) -> str:
    if file is not None:
        try:
            text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"{file} cannot be read: {error}") from error
        return text.strip()
    if sys.stdin.isatty():
        typed: str = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        return typed
    raise Misused("a password is needed: give --password-file FILE, or - for standard input")
