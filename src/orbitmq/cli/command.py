"""Commands that talk to a cluster: `command` turns a coroutine into one, with the shared flags.

The coroutine's first parameter is the session, its docstring the help, its other parameters the
command's own arguments and flags. A parameter whose type is a dataclass stands for the flags that
are its fields. The flags for connection, output and (if it changes something) consent are added.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import getpass
import inspect
import json
import logging
import math
import os
import socket
import sys
import typing
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeAlias

import typer
from typer.models import OptionInfo

from orbitmq.cli.application import add_command, flags_of, taken
from orbitmq.cli.main import FAILED, CommandError, Misused, NeedsConsent, Unheard
from orbitmq.cli.output import Printer
from orbitmq.client.admin.admin import AdminSettings, AsyncAdmin
from orbitmq.client.admin.requests import Topology, Unreachable
from orbitmq.client.engine import Engine
from orbitmq.client.errors import GroupNotFound, TopicNotFound
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings, split_name_servers
from orbitmq.client.signals import stop_requested
from orbitmq.errors import MessageRefused, OrbitError, SettingError
from orbitmq.parsing import (
    Duration,
    NotAllowed,
    Position,
    duration_of,
    kind_of,
    moment,
    position,
)
from orbitmq.wire.command import Credentials

if TYPE_CHECKING:
    from orbitmq.remoting.tls import ClientTls

DEFAULT_NAME_SERVER = "127.0.0.1:9876"
_PANEL = "Connection"

NameServer: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--name-server",
        "-n",
        metavar="HOST[:PORT]",
        envvar=["ORBITMQ_NAME_SERVER", "NAMESRV_ADDR"],
        help=f"The name server's address; may be repeated. {DEFAULT_NAME_SERVER} by default.",
        rich_help_panel=_PANEL,
    ),
]
AccessKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--access-key",
        metavar="KEY",
        envvar="ORBITMQ_ACCESS_KEY",
        help="The account that signs the requests.",
        rich_help_panel=_PANEL,
    ),
]
SecretKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--secret-key",
        metavar="KEY",
        envvar="ORBITMQ_SECRET_KEY",
        help="The account's secret; as a flag it is visible in the process list.",
        rich_help_panel=_PANEL,
    ),
]
Tls: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--tls", envvar="ORBITMQ_TLS", help="Use TLS with all servers.", rich_help_panel=_PANEL
    ),
]
TlsAuthority: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        envvar="ORBITMQ_TLS_CA",
        help="A PEM file of certificates to trust; by default the system's. Implies --tls.",
        rich_help_panel=_PANEL,
    ),
]
TlsUnverified: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--tls-unverified",
        help="Use TLS and accept any certificate, as Apache's tools do.",
        rich_help_panel=_PANEL,
    ),
]
ContextName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help="The name of a saved cluster; see orbitmq context. [env var: ORBITMQ_CONTEXT]",
        rich_help_panel=_PANEL,
    ),
]
ContextNames: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help="The name of a saved cluster; see orbitmq context. [env var: ORBITMQ_CONTEXT]",
        rich_help_panel=_PANEL,
    ),
]
AllContexts: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--all-contexts", help="All clusters of orbitmq context list.", rich_help_panel=_PANEL
    ),
]

Timeout: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--timeout",
        metavar="DURATION",
        help="The time limit of the command, such as 30s.",
        rich_help_panel=_PANEL,
    ),
]
RequestTimeout: TypeAlias = Annotated[
    float,
    typer.Option(
        "--request-timeout",
        metavar="SECONDS",
        help="The time limit of a single request.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The connection flags. Every field is a parameter of every command."""

    name_server: NameServer = None
    context: ContextName = None
    access_key: AccessKey = None
    secret_key: SecretKey = None
    tls: Tls = False
    tls_ca: TlsAuthority = None
    tls_unverified: TlsUnverified = False
    timeout: Timeout = None
    request_timeout: RequestTimeout = 5.0

    def resolved(self) -> Connection:
        """With the name server of the context in force, unless one was given more directly."""
        if self.name_server and self.context is not None:
            raise Misused("--name-server and --context cannot be given together")
        if self.name_server:
            return self
        # Late: few commands need the file.
        from orbitmq.cli.context import chosen, fields_of  # noqa: PLC0415

        if (found := chosen(self.context, os.environ)) is None:
            return self
        given = {name: value for name in fields_of(found) if (value := getattr(self, name))}
        return replace(self, **fields_of(found) | given | {"context": None})

    @property
    def limit(self) -> float | None:
        """Seconds for the whole command. Raises `Misused`."""
        if self.timeout is None:
            return None
        found = seconds(self.timeout, "--timeout")
        if found <= 0:
            raise Misused(f"--timeout must be a duration such as 30s or 5m, got {self.timeout!r}")
        return found

    @property
    def request_limit(self) -> float:
        """Seconds for one request. Raises `Misused`."""
        found = self.request_timeout
        if not (math.isfinite(found) and found > 0):
            raise Misused(f"--request-timeout must be a number above 0, got {found!r}")
        # The error of a request says more than that of the whole command, so it comes first.
        return found if self.limit is None else min(found, 0.9 * self.limit)

    def client(self, counting: str | None = None) -> ClientSettings:
        """Raises `Misused` for flags that do not go together.

        `counting` is the command's flag for a number of messages, which many other tools call -n.
        """
        if (found := self.resolved()) is not self:
            return found.client(counting)
        limit = self.request_limit
        tls = self.tls_settings
        servers = _servers(self.name_server or [DEFAULT_NAME_SERVER], counting)
        return ClientSettings(
            name_servers=servers or (DEFAULT_NAME_SERVER,),
            credentials=self.credentials,
            tls=None if tls is None else tls.context(),
            request_timeout=limit,
            stop_timeout=min(limit, 3.0),
        )

    @property
    def credentials(self) -> Credentials | None:
        """The account. Raises `Misused` for half of one."""
        if self.access_key is None and self.secret_key is None:
            return None
        if self.access_key is None or self.secret_key is None:
            missing = "--secret-key" if self.secret_key is None else "--access-key"
            raise Misused(f"--access-key and --secret-key go together; {missing} is missing")
        return Credentials(access_key=self.access_key, secret_key=self.secret_key)

    @property
    def tls_settings(self) -> ClientTls | None:
        """How TLS is spoken; None: not at all."""
        if not (self.tls or self.tls_ca is not None or self.tls_unverified):
            return None
        from orbitmq.remoting.tls import ClientTls  # noqa: PLC0415  # rarely used

        return ClientTls(authority=self.tls_ca, verify=not self.tls_unverified)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections(Connection):
    """The connection flags of a command that serves several clusters."""

    context: ContextNames = None  # type: ignore[assignment]  # several names
    all_contexts: AllContexts = False

    def clients(self) -> Mapping[str, ClientSettings]:
        """The clients of all clusters by name; a single one has none. Raises `Misused`."""
        names = tuple(dict.fromkeys(self.context or ()))
        if self.all_contexts:
            if names or self.name_server:
                raise Misused("--all-contexts goes without --context and --name-server")
            # Late: few commands need the file.
            from orbitmq.cli.context import file_of, read  # noqa: PLC0415

            names = tuple(sorted(read(file_of(os.environ)).contexts))
            if not names:
                raise Misused(
                    "there are no contexts; add one with: "
                    "orbitmq context add NAME --name-server HOST:9876"
                )
        if len(names) < 2:
            kept = {name: getattr(self, name) for name in _CONNECTION}
            return {"": Connection(**kept | {"context": names[0] if names else None}).client()}
        if self.name_server:
            raise Misused("--name-server and --context cannot be given together")
        # Those of the environment are another cluster's.
        for flag, variable in _OF_ONE_CLUSTER.items():
            given = getattr(self, flag)
            if given and (variable is None or not os.environ.get(variable)):
                option = "--" + flag.replace("_", "-")
                raise Misused(f"{option} is of one cluster; with several, each context has its own")
        limits = {"timeout": self.timeout, "request_timeout": self.request_timeout}
        return {name: Connection(context=name, **limits).client() for name in names}  # type: ignore[arg-type]


_CONNECTION = tuple(each.name for each in fields(Connection))
#: Flags that only one cluster can have, and their variables.
_OF_ONE_CLUSTER: Mapping[str, str | None] = {
    "access_key": "ORBITMQ_ACCESS_KEY",
    "secret_key": "ORBITMQ_SECRET_KEY",
    "tls": "ORBITMQ_TLS",
    "tls_ca": "ORBITMQ_TLS_CA",
    "tls_unverified": None,
}


def _servers(given: Sequence[str], counting: str | None) -> tuple[str, ...]:
    for text in given:
        if text.strip().isdecimal():
            meant = f"; for a number of messages use {counting} {text}" if counting else ""
            raise Misused(
                f"--name-server (-n) takes an address such as {DEFAULT_NAME_SERVER}, got "
                f"{text!r}{meant}"
            )
    try:
        return split_name_servers(given)
    except SettingError as error:
        said = str(error).removeprefix("client.name_servers: ")
        raise Misused(f"--name-server (-n): {said}") from error


@dataclass(frozen=True, slots=True)
class Session:
    """One run of a command: its client, its output and the consent."""

    engine: Engine
    admin: AsyncAdmin
    out: Printer
    says_yes: bool = False
    is_dry_run: bool = False
    #: When the whole command has to end, by the clock of the loop.
    _deadline: float | None = None
    _ends: asyncio.Timeout | None = None

    @contextlib.contextmanager
    def stop_requested(self) -> Iterator[asyncio.Event]:
        """An event that the first SIGINT or SIGTERM sets, and the end of `--timeout`.

        The command ends in order then: its time does not cut it off.
        """
        with stop_requested() as stopping:
            if self._ends is not None and (when := self._ends.when()) is not None:
                self._ends.reschedule(None)
                asyncio.get_running_loop().call_at(when, stopping.set)
            yield stopping

    @property
    def seconds_left(self) -> float | None:
        """Of the whole command; None without `--timeout`."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    @property
    def is_late(self) -> bool:
        """Whether the time of the whole command is over."""
        return self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline

    def may(self, what: str) -> bool:
        """Whether the user consents to `what`, a sentence about the change.

        False in a dry run. A refusal at the terminal ends the command. Without a terminal it raises
        `NeedsConsent` unless `--yes` is given.
        """
        if self.is_dry_run:
            self.out.note("dry run: nothing was changed")
            return False
        if self.says_yes:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise NeedsConsent(what)
        if typer.confirm(f"{what}. Go on?", err=True):
            return True
        self.out.note("nothing was changed")
        raise typer.Exit(FAILED)

    async def masters(
        self, brokers: Collection[str] | None, cluster: str | None = None
    ) -> tuple[str, ...]:
        """The brokers of a change: the named ones, those of a cluster, or all.

        Raises `BrokerNotFound` or `BrokerUnavailable`, as the change would.
        """
        status = await self.admin.cluster()
        found = Topology(tuple(broker.node for broker in status.brokers))
        return tuple(node.broker for node in found.masters(brokers or None, cluster=cluster))

    def missing(self, servers: Iterable[Unreachable]) -> None:
        """Report unreachable servers and end with exit code 1, if there are any."""
        found = tuple(servers)
        for server in found:
            self.out.note(
                f"orbitmq: incomplete, {server.server} could not be asked: {server.reason}"
            )
        if found:
            raise typer.Exit(FAILED)


P = ParamSpec("P")
Work: TypeAlias = Callable[Concatenate[Session, P], Coroutine[Any, Any, None]]

AsJson: TypeAlias = Annotated[
    bool,
    typer.Option("--json", help="Print JSON, one object per line.", rich_help_panel="Output"),
]
Exact: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--exact", help="Print times as dates with milliseconds.", rich_help_panel="Output"
    ),
]
Verbose: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Write the client's log to standard error.",
        rich_help_panel="Output",
    ),
]
Yes: TypeAlias = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Do not ask for confirmation.", rich_help_panel="Consent"),
]
DryRun: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print what would happen; change nothing.", rich_help_panel="Consent"
    ),
]
Audit: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--audit",
        metavar="FILE",
        envvar="ORBITMQ_AUDIT",
        help="Append the user, time, command and error as a line of JSON to this file.",
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


def command(
    app: typer.Typer,
    name: str,
    *,
    examples: Sequence[str],
    prints: type,
    changes: bool = False,
    is_hidden: bool = False,
    former: Mapping[str, str] | None = None,
) -> Callable[[Work[P]], Work[P]]:
    """Declare a coroutine as a command. `prints` is the class of the `--json` objects.

    `former` says what to write instead of former flags.
    """

    def declare(work: Work[P]) -> Work[P]:
        shared = (_Consent, _Output, Connection) if changes else (_Output, Connection)
        declared = list(inspect.signature(work, eval_str=True).parameters.values())[1:]
        parameters, bundles = flags_of(declared, shared)
        counting = _counting(parameters)

        def call(values: dict[str, Any]) -> None:
            given = {each: taken(each, values) for each in shared}
            values |= {name: taken(kind, values) for name, kind in bundles.items()}
            consent = given.get(_Consent, _Consent())
            _run(work, values, given[Connection], given[_Output], consent, counting)

        add_command(
            *(app, name, work, call, parameters),
            examples=examples,
            prints=prints,
            is_hidden=is_hidden,
            former=former,
        )
        return work

    return declare


def _counting(parameters: Iterable[inspect.Parameter]) -> str | None:
    """The command's flag for a number of messages, if it has one."""
    flags = [
        flag
        for each in parameters
        for about in typing.get_args(each.annotation)[1:]
        if isinstance(about, OptionInfo)
        # Typer keeps the first name in place of the default.
        for flag in (about.default, *(about.param_decls or ()))
    ]
    return "--limit" if "--limit" in flags else None


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
        settings = AdminSettings(timeout=connection.request_limit)
        with _audited(consent, printer), asyncio.Runner() as runner:
            runner.run(
                _with_client(work, values, engine, settings, printer, consent, connection.limit)
            )
    except (SettingError, MessageRefused) as error:
        raise Misused(str(error)) from error
    except BrokenPipeError as error:
        # Typer would report it as a failure.
        raise Unheard from error


async def _with_client(
    work: Work[...],
    values: dict[str, Any],
    engine: Engine,
    settings: AdminSettings,
    printer: Printer,
    consent: _Consent,
    limit: float | None,
) -> None:
    ends = asyncio.timeout(limit)
    try:
        async with engine, ends:
            await _work(work, values, engine, settings, printer, consent, ends)
    except TimeoutError as error:
        if not ends.expired():
            raise
        raise CommandError(f"not finished within the {limit:g} s of --timeout") from error


async def _work(
    work: Work[...],
    values: dict[str, Any],
    engine: Engine,
    settings: AdminSettings,
    printer: Printer,
    consent: _Consent,
    ends: asyncio.Timeout,
) -> None:
    admin = AsyncAdmin.on(engine, settings)
    session = Session(engine, admin, printer, consent.yes, consent.dry_run, ends.when(), ends)
    try:
        await work(session, **values)
    except (TopicNotFound, GroupNotFound) as error:
        raise await unknown(admin, error) from error


@contextlib.contextmanager
def _audited(consent: _Consent, printer: Printer) -> Iterator[None]:
    """Append the change to the audit file, if one is given; also when it fails half-way."""
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
        # Late: the settings of brokers take long to import.
        from orbitmq.cli.settings import (  # noqa: PLC0415
            LogLevel,
            LogSettings,
            set_up_logging,
        )

        set_up_logging(LogSettings(), LogLevel.INFO)
        return
    for name in ("orbitmq", "asyncio"):
        # Problems are reported as the command's outcome.
        logging.getLogger(name).addHandler(logging.NullHandler())


Broker: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--broker", "-b", metavar="NAME", help="Only on this broker; may be repeated."),
]
ClusterName: TypeAlias = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME", help="Only on brokers of this cluster.")
]
TopicName: TypeAlias = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")]
GroupName: TypeAlias = Annotated[
    str, typer.Argument(metavar="GROUP", help="The consumer group's name.")
]
Queues: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--queue", "-q", metavar="BROKER:ID", help="Only this queue; may be repeated."),
]
_TIME = "a date such as 2026-01-31T23:59:59, or an age such as 90s, 15m, 2h or 7d"
Since: TypeAlias = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help=f"Stored at or after: {_TIME}.")
]
Until: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--until", metavar="TIME", help="Stored before this time, written as for --since."
    ),
]
Tags: TypeAlias = Annotated[
    str | None,
    typer.Option("--tags", metavar="'A || B'", help="Only messages with one of these tags."),
]
Sql: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--sql",
        metavar="CONDITION",
        help='Only messages that match this SQL92 expression, such as "a > 5".',
    ),
]

_DURATION = kind_of(Duration)


def seconds(text: str, flag: str) -> float:
    """A duration: `90s`, `15m`, or a plain number of seconds. Raises `Misused`."""
    try:
        value: float = _DURATION.from_text(text)
    except NotAllowed:
        value = -1
    if value < 0:
        raise Misused(f"{flag} must be a duration such as 90s, 15m, 2h or 7d, got {text!r}")
    return value


def check_positive(value: float | None, flag: str) -> None:
    """Raises `Misused` unless the value is None or a number above 0."""
    if value is not None and not 0 < value < float("inf"):
        raise Misused(f"{flag} must be a number above 0, got {value!r}")


def time_of(text: str | None, now: float, flag: str, also: str = "") -> float | None:
    """The seconds since the epoch of a date or an age. Raises `Misused`.

    `also` names further values of the flag, for the error text.
    """
    if text is None:
        return None
    with suppress(NotAllowed):
        return now - duration_of(text.removeprefix("-"))
    if text.strip().lower() == "now":
        return now
    try:
        return moment(text)
    except SettingError as error:
        raise Misused(f"{flag} must be {also}{_TIME}, got {text!r}") from error


def position_of(text: str, now: float, flag: str) -> Position:
    """A position in a queue. Raises `Misused`."""
    try:
        return position(text, flag, now=now)
    except SettingError as error:
        raise Misused(str(error)) from error


def is_age(text: str) -> bool:
    """Whether a time is written as an age, such as 15m."""
    with suppress(NotAllowed):
        duration_of(text)
        return True
    return False


def queues_of(topic: str, texts: Iterable[str] | None) -> tuple[Queue, ...] | None:
    """Queues named as `broker-a:3`; None when none are named. Raises `Misused`."""
    if not texts:
        return None
    return tuple(queue_of(topic, text) for text in texts)


def queue_of(topic: str, text: str) -> Queue:
    """The queue named as `broker-a:3`. Raises `Misused`."""
    broker, colon, number = text.rpartition(":")
    if not colon or not broker or not number.isdecimal():
        raise Misused(f"a queue is named as broker-a:3, got {text!r}")
    return Queue(topic, broker, int(number))


def filter_of(tags: str | None, sql: str | None) -> tuple[str, str]:
    """The filter expression and its type. Raises `Misused`."""
    if tags is not None and sql is not None:
        raise Misused("--tags and --sql cannot be given together")
    return (sql, "SQL92") if sql is not None else (tags or "*", "TAG")


async def unknown(
    admin: AsyncAdmin, error: TopicNotFound | GroupNotFound, remedy: str | None = None
) -> CommandError:
    """The error for a missing topic or group, with the most similar name.

    Without a similar name the text ends with `remedy`, or with how to create it.
    """
    if isinstance(error, TopicNotFound):
        name, sentence = error.topic, f"no broker has topic {error.topic!r}"
    else:
        name, sentence = error.group, f"no broker knows group {error.group!r}"
    try:
        if isinstance(error, TopicNotFound):
            known = [each.name for each in await admin.topics.list()]
        else:
            known = [each.group for each in await admin.groups.list()]
    except OrbitError:
        known = []  # the original error matters more than the hint
    if hint := closest(name, known):
        return CommandError(sentence + hint)
    return CommandError(str(error) if remedy is None else f"{sentence}; {remedy}")


def closest(name: str, known: Iterable[str]) -> str:
    """`; do you mean X?` with the most similar known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f"; do you mean {close[0]}?" if close else ""


#: Flags whose values are hidden in the audit file.
_SECRETS = frozenset({"--secret-key"})


def append(file: Path, words: Sequence[str], *, at: float, problem: str | None) -> None:
    """Append a change to the audit file, safe with concurrent commands. Raises `CommandError`."""
    line = {
        "at": round(at, 3),
        "user": _user(),
        "host": socket.gethostname(),
        "command": ["orbitmq", *without_secrets(words)],
        "problem": problem,
    }
    data = json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
    try:
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        try:
            # One write, so that concurrent lines do not mix.
            os.write(target, data)
        finally:
            os.close(target)
    except OSError as error:
        raise CommandError(f"the change cannot be recorded in {file}: {error}") from error


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command with secrets hidden."""
    shown: list[str] = []
    hides_next = False
    for word in words:
        flag, equals, _ = word.partition("=")
        if hides_next:
            shown.append("(hidden)")
        elif equals and flag in _SECRETS:
            shown.append(f"{flag}=(hidden)")
        else:
            shown.append(word)
        hides_next = not hides_next and word in _SECRETS
    return shown


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        # A container's user may have no name.
        return str(os.getuid())
