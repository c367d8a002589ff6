"""`orbitmq doctor`: finds common mistakes and names the remedies."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

import msgspec
import typer

from orbitmq.cli.application import section
from orbitmq.cli.command import DEFAULT_NAME_SERVER, Session, command, seconds
from orbitmq.cli.main import FAILED, CommandError, Misused
from orbitmq.cli.output import harmless
from orbitmq.client.admin.cluster import Ceiling, ClusterStatus
from orbitmq.client.admin.topics import NOT_LISTED
from orbitmq.client.errors import NoNameServer
from orbitmq.client.settings import NAME_SERVER_VARIABLES, split_name_servers
from orbitmq.console import words
from orbitmq.console.collect import UNEVEN_AFTER, Snapshot
from orbitmq.console.faults import (
    GROUP_CHECKS,
    PATIENCE,
    Check,
    Examination,
    Fault,
    Severity,
    examine,
    find_faults,
    server_faults,
    sorted_faults,
)
from orbitmq.console.history import WINDOW
from orbitmq.console.pipelines import PipelineReport
from orbitmq.console.words import Action, several
from orbitmq.errors import install_command
from orbitmq.spark.consolelink import CONSOLE_VARIABLE, TOKEN_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRecord:
    """A problem and its remedy."""

    check: str  #: the check that found it
    kind: str  #: the kind of problem, in a word or two
    weight: str  #: bad, or warn
    subject: str  #: a server, topic, group, pipeline or setting
    problem: str  #: what is wrong
    remedy: str  #: what to do
    command: str | None  #: that does it, or shows more
    otherwise: str | None = None  #: what else can be done where repair is not wanted
    otherwise_command: str | None = None  #: that does it

    @classmethod
    def of(cls, fault: Fault) -> FindingRecord:
        return cls(
            check=fault.check.value,
            kind=fault.kind,
            weight=fault.weight.value,
            subject=fault.subject,
            problem=fault.text,
            remedy=fault.remedy,
            command=fault.command,
            otherwise=fault.otherwise,
            otherwise_command=fault.otherwise_command,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecord:
    """A check that was made."""

    check: str
    is_well: bool
    about: str  #: what was checked, or why it could not be


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisRecord:
    """All checks and all problems."""

    is_well: bool
    checks: tuple[CheckRecord, ...]
    findings: tuple[FindingRecord, ...]


class Diagnosis:
    """Collects what checks find."""

    def __init__(self) -> None:
        self._made: dict[Check, str] = {}
        self._faults: list[Fault] = []

    def made(self, about: str, *checks: Check) -> None:
        """Add checks that were made, and what they covered."""
        self._made |= dict.fromkeys(checks, about)

    def found(self, faults: Iterable[Fault]) -> None:
        """Add problems."""
        self._faults += faults

    def record(self) -> DiagnosisRecord:
        ill = {fault.check for fault in self._faults}
        return DiagnosisRecord(
            is_well=not self._faults,
            checks=tuple(
                CheckRecord(check=check.value, is_well=check not in ill, about=about)
                for check, about in self._made.items()
            ),
            findings=tuple(map(FindingRecord.of, sorted_faults(self._faults))),
        )


_QUESTION = """
import sys
print("%d.%d" % sys.version_info[:2])
try:
    import orbitmq, pyarrow, pyspark
except ImportError as error:
    print(error)
"""


def has_spark() -> bool:
    return importlib.util.find_spec("pyspark") is not None


def java(environment: Mapping[str, str]) -> Iterator[Fault]:
    """Check that Spark finds a suitable Java."""
    from orbitmq.spark.session import NoJava, find_java  # noqa: PLC0415  # rarely used

    try:
        find_java(environment)
    except NoJava as error:
        problem, _, remedy = str(error).partition("; ")
        yield _bad(Check.JAVA, "Java", problem, remedy)


def workers(environment: Mapping[str, str]) -> Iterator[Fault]:
    """Check that Spark's workers run this Python version with the same packages."""
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        named = environment.get(variable)
        if not named:
            continue
        unset = f"unset {variable}, or set it to {sys.executable}"
        executable = shutil.which(named, path=environment.get("PATH", ""))
        if executable is None:
            yield _bad(
                Check.WORKERS, variable, f"{variable} is {named}, which cannot be run", unset
            )
            continue
        try:
            said = subprocess.run(
                [executable, "-c", _QUESTION],
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            ).stdout.splitlines()
        except (OSError, subprocess.SubprocessError) as error:
            yield _bad(
                Check.WORKERS,
                variable,
                f"{variable} is {named}, which is no Python: {error}",
                unset,
            )
            continue
        if said[0] != ours:
            problem = f"{variable} is {named}, a Python {said[0]}, and this is Python {ours}"
            yield _bad(Check.WORKERS, variable, f"{problem}: Spark refuses to mix them", unset)
        elif len(said) > 1:
            yield _bad(
                Check.WORKERS,
                variable,
                f"{variable} is {named}, which lacks a package: {said[1]}",
                f"{named} -m pip{install_command('spark').partition('pip')[2]}, or {unset}",
            )


def _bad(check: Check, subject: str, problem: str, remedy: str) -> Fault:
    return Fault(
        check=check,
        kind="not ready for Spark",
        weight=Severity.BAD,
        subject=subject,
        text=problem,
        remedy=remedy,
    )


_TIMEOUT = 5.0

ConsoleAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--console",
        metavar="URL",
        envvar=CONSOLE_VARIABLE,
        help=f"A console that pipelines report to; its token is read from {TOKEN_VARIABLE}.",
    ),
]


@dataclass(frozen=True, slots=True)
class Reported:
    """A pipeline as its console sees it now, by the console's clock."""

    name: str
    #: Its last report; the state is the console's judgement.
    report: PipelineReport
    reported_at: float
    faults: tuple[Fault, ...]


def checked_address(console: str) -> str:
    """The address of a console. Raises `Misused`."""
    parts = urllib.parse.urlsplit(console)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise Misused(f"the address of a console begins with http:// or https://, got {console!r}")
    # What leads into one of several clusters stays; other parts are the address of a page.
    cluster = re.match(r"/clusters/[^/]+", parts.path)
    return f"{parts.scheme}://{parts.netloc}{cluster[0] if cluster else ''}"


def reported_pipelines(console: str) -> list[Reported]:
    """The last reports of pipelines to a console. Raises `Misused` or `CommandError`."""
    found = _asked(f"{checked_address(console)}/api/v1/pipelines")
    try:
        return [
            Reported(
                each["name"],
                # The shown fields include all reported ones.
                msgspec.convert(each, PipelineReport),
                each["reported_at"],
                tuple(
                    _with_address(fault, console)
                    for fault in msgspec.convert(each["faults"], tuple[Fault, ...])
                ),
            )
            for each in found["pipelines"]
        ]
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise CommandError(f"{console} does not answer like a console") from error


def forget_pipeline(console: str, name: str) -> None:
    """Remove a pipeline from a console's list. Raises `Misused` or `CommandError`."""
    address = checked_address(console)
    headers = {}
    if not os.environ.get(TOKEN_VARIABLE):
        # A console without login still needs the cookie of a first visit.
        headers["x-csrf-token"] = str(_asked(f"{address}/api/v1/me").get("csrf") or "")
    path = urllib.parse.quote(name, safe="")
    _asked(f"{address}/api/v1/pipelines/{path}", "DELETE", headers)


def _with_address(fault: Fault, console: str) -> Fault:
    """Replace the placeholder for the console's address by the address that was asked."""
    if fault.command != words.command(Action.SHOW_PIPELINE, fault.subject, console="URL"):
        return fault
    return replace(
        fault, command=words.command(Action.SHOW_PIPELINE, fault.subject, console=console)
    )


def _asked(url: str, method: str = "GET", more: Mapping[str, str] | None = None) -> Any:
    """The console's answer; None without a body."""
    token = os.environ.get(TOKEN_VARIABLE)
    headers = {**(more or {}), **({"authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310  # of http and https only
    # No proxy: the console is in the local network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT) as answer:
            return None if answer.status == http.HTTPStatus.NO_CONTENT else json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.HTTPStatus.UNAUTHORIZED:
                raise CommandError(f"the console needs its token: set {TOKEN_VARIABLE}") from error
            raise CommandError(f"the console answers: {_reason(error)}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CommandError(f"no console answers at {url}: {error}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    """The reason of a refusal, from the console's answer if it has one."""
    try:
        return str(json.load(error)["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"


app = section()


@command(
    app,
    "doctor",
    examples=(
        "orbitmq doctor",
        "orbitmq doctor --group billing --watch 30s",
        "orbitmq doctor --json | jq -r '.findings[] | .problem + \" => \" + .remedy'",
    ),
    prints=DiagnosisRecord,
)
async def doctor(
    session: Session,
    group: Annotated[
        list[str] | None,
        typer.Option("--group", "-g", help="Check only this group; may be repeated."),
    ] = None,
    watch: Annotated[
        str,
        typer.Option(
            "--watch",
            metavar="DURATION",
            help="The time for watching groups that seem stalled; from 30s on it also "
            "shows whether they fall behind.",
        ),
    ] = f"{PATIENCE:g}s",
    console: ConsoleAddress = None,
    spark: Annotated[
        bool | None,
        typer.Option("--spark/--no-spark", help="Check whether this machine can run Spark."),
    ] = None,
) -> None:
    """Look for common mistakes; the exit code is 1 when something is wrong.

    The console makes the same checks over a longer time: what a short watch cannot show is not
    judged. Pipelines are checked when a console is named, Spark's requirements on this machine when
    PySpark is installed, by default.
    """
    pause = seconds(watch, "--watch")
    if console is not None:
        checked_address(console)
    diagnosis = Diagnosis()
    cluster = await _look_at_name_servers(session, diagnosis)
    if cluster is not None:
        await _look_at_cluster(session, diagnosis, cluster, frozenset(group or ()), pause)
    if console is not None:
        await _look_at_pipelines(diagnosis, console)
    if has_spark() if spark is None else spark:
        diagnosis.made("for Spark", Check.JAVA, Check.WORKERS)
        diagnosis.found(java(os.environ))
        diagnosis.found(workers(os.environ))
    record = diagnosis.record()
    if session.out.is_json:
        session.out.record(record)
    else:
        _print(session, record)
    if not record.is_well:
        raise typer.Exit(FAILED)


async def _look_at_name_servers(session: Session, diagnosis: Diagnosis) -> ClusterStatus | None:
    addresses = session.engine.name_servers
    shown = ", ".join(map(str, addresses))
    diagnosis.made(shown, Check.NAME_SERVERS)
    try:
        return await session.admin.cluster()
    except NoNameServer as error:
        fault = Fault(
            check=Check.NAME_SERVERS,
            kind="name server down",
            weight=Severity.BAD,
            subject=shown,
            text=f"no name server answers: {'; '.join(reason for _, reason in error.tried)}",
            remedy="start one, or give its address with --name-server or ORBITMQ_NAME_SERVER",
            command=words.command(Action.START_CLUSTER),
        )
        diagnosis.found((fault,))
        return None


async def _look_at_cluster(
    session: Session,
    diagnosis: Diagnosis,
    cluster: ClusterStatus,
    only: frozenset[str],
    watch: float,
) -> None:
    shown = ", ".join(f"{each.node} at {each.node.address}" for each in cluster.brokers) or "none"
    diagnosis.made(shown, Check.BROKERS, Check.ADDRESSES, Check.DISKS)
    diagnosis.made("the state that brokers report", Check.HEALTH)
    diagnosis.made(_room_left(cluster), Check.ROOM)
    if not any(broker.is_up for broker in cluster.brokers):
        # Without a broker the other checks are impossible.
        diagnosis.found(server_faults(cluster))
        return
    clock = session.out.clock
    found = await examine(session.engine, session.admin, clock, watch=watch, only=only)
    snapshot = found.seen.snapshot
    diagnosis.made(_topics_seen(snapshot), Check.TOPICS)
    diagnosis.made(_clocks_seen(found), Check.CLOCKS)
    groups = several(len(snapshot.groups), "group")
    diagnosis.made(groups, *(check for check in Check if check in GROUP_CHECKS))
    if snapshot.dead_letters:
        diagnosis.made(f"{groups}: {_letters_seen(snapshot)}", Check.DEAD_LETTERS)
    for check, needed, watched, lasted in (
        (Check.STUCK_QUEUES, PATIENCE, found.watched, found.seconds),
        # A short watch takes a single look.
        (Check.UNBALANCED, UNEVEN_AFTER, found.uneven, watch),
        (Check.FALLING_BEHIND, WINDOW, found.watched, found.seconds),
    ):
        if watched and lasted < needed:
            short = f"{len(watched)} not judged, which takes --watch {needed:g}s"
            diagnosis.made(f"{groups}, {short}", check)
    asked = tuple(map(str, session.engine.name_servers))
    servers = _not_asked_anyway(asked, os.environ)
    diagnosis.found(find_faults(replace(found.seen, name_servers=servers)))


def _not_asked_anyway(asked: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The flag for the name servers, unless they are the default of later commands."""
    named = next(filter(None, map(environment.get, NAME_SERVER_VARIABLES)), DEFAULT_NAME_SERVER)
    return () if split_name_servers(named) == asked else asked


def _topics_seen(snapshot: Snapshot) -> str:
    """Topics without those of the system, as `orbitmq topic list` shows them."""
    kinds = [each.topic.kind for each in snapshot.topics.values()]
    hidden = sum(kind in NOT_LISTED for kind in kinds)
    others = f", and {hidden:,} of the system, for retries and dead letters" if hidden else ""
    return several(len(kinds) - hidden, "topic") + others


def _letters_seen(snapshot: Snapshot) -> str:
    text = f"{snapshot.open_letters:,} open, {snapshot.resent_letters:,} resent"
    unknown = snapshot.unknown_letters
    # Look up the last hour's letters, if there are not too many.
    return f"{text}, {unknown:,} not looked up" if unknown else text


def _room_left(cluster: ClusterStatus) -> str:
    """The count and the bound, at the broker nearest to its bound."""
    fullest: dict[str, Ceiling] = {}
    for broker in cluster.brokers:
        for each in () if broker.runtime is None else broker.runtime.ceilings:
            if each.what not in fullest or each.share > fullest[each.what].share:
                fullest[each.what] = each
    if not cluster.brokers:
        return "none"
    parts = [f"{each.count:,} of {each.most:,} {each.what}" for each in fullest.values()]
    return (
        f"{', '.join(parts)}, the system's among them" if parts else "brokers have no such bounds"
    )


def _clocks_seen(found: Examination) -> str:
    text = f"the latest messages of {several(found.queues, 'queue')}"
    reasons = [f"{topic} ({why})" for topic, why in found.left_out.items()]
    return f"{text}; topics that could not be read: {', '.join(reasons)}" if reasons else text


async def _look_at_pipelines(diagnosis: Diagnosis, console: str) -> None:
    try:
        pipelines = await asyncio.to_thread(reported_pipelines, console)
    except CommandError as error:
        diagnosis.made(console, Check.PIPELINES)
        fault = Fault(
            check=Check.PIPELINES,
            kind="console does not answer",
            weight=Severity.BAD,
            subject=console,
            text=str(error),
            remedy="start it, or say where it is with --console or ORBITMQ_CONSOLE",
            command=words.command(Action.START_CONSOLE),
        )
        diagnosis.found((fault,))
        return
    diagnosis.made(several(len(pipelines), "pipeline"), Check.PIPELINES)
    diagnosis.found(fault for each in pipelines for fault in each.faults)


def _print(session: Session, record: DiagnosisRecord) -> None:
    out = session.out
    for check in record.checks:
        mark = out.coloured("ok  ", "green") if check.is_well else out.coloured("BAD ", "red")
        out.raw(f"{mark} {harmless(f'{check.check}: {check.about}')}")
    for finding in record.findings:
        out.raw("")
        out.raw(f"{out.coloured('!', 'red')} {harmless(_problem(finding))}")
        out.line(f"  {_sentence(finding.remedy)}")
        if finding.command is not None:
            out.line(f"  {finding.command}")
        if finding.otherwise is not None:
            out.line(f"  {_sentence(finding.otherwise)}")
        if finding.otherwise_command is not None:
            out.line(f"  {finding.otherwise_command}")
    out.raw("")
    made = several(len(record.checks), "check")
    if record.is_well:
        out.line(f"nothing is wrong; {made} made")
    else:
        number = len(record.findings)
        out.line(f"{several(number, 'thing')} {'is' if number == 1 else 'are'} wrong; {made} made")


def _problem(finding: FindingRecord) -> str:
    """The subject and the problem."""
    if finding.subject in finding.problem:
        return _sentence(finding.problem)
    return f"{finding.subject}: {_sentence(finding.problem)}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
