"""`orbitmq doctor`: finds the usual mistakes, and says what to do about them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import typer

from orbitmq.cli import sparkchecks
from orbitmq.cli.choosing import seconds
from orbitmq.cli.connecting import DEFAULT_NAME_SERVER
from orbitmq.cli.consoleasking import ConsoleAddress, checked_address, reported_pipelines
from orbitmq.cli.declaring import command, section
from orbitmq.cli.diagnosis import Diagnosis, DiagnosisRecord, FindingRecord
from orbitmq.cli.errors import FAILED, CommandError
from orbitmq.cli.session import Session
from orbitmq.cli.wording import harmless, several
from orbitmq.client.admin.cluster import ClusterStatus
from orbitmq.client.admin.runtime import Ceiling
from orbitmq.client.admin.topicvalues import NOT_LISTED
from orbitmq.client.errors import NoNameServer
from orbitmq.client.settings import NAME_SERVER_VARIABLES, split_name_servers
from orbitmq.console import commandlines
from orbitmq.console.checks.balance import UNEVEN_AFTER
from orbitmq.console.checks.examining import PATIENCE, Examination, examine
from orbitmq.console.checks.faults import Check, Fault, Weight
from orbitmq.console.checks.groups import OF_GROUPS
from orbitmq.console.checks.seen import find_faults
from orbitmq.console.checks.servers import of_servers
from orbitmq.console.rates import WINDOW
from orbitmq.console.samples import Snapshot

app = section("Find the usual mistakes.")


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
        typer.Option("--group", "-g", help="Look at this group only; may be repeated."),
    ] = None,
    watch: Annotated[
        str,
        typer.Option(
            "--watch",
            metavar="DURATION",
            help="How long to look at groups that seem to stand still; 30s and more tells also "
            "whether they fall behind.",
        ),
    ] = f"{PATIENCE:g}s",
    console: ConsoleAddress = None,
    spark: Annotated[
        bool | None,
        typer.Option("--spark/--no-spark", help="Whether this machine is to run Spark."),
    ] = None,
) -> None:
    """Look for the usual mistakes; the exit code is 1 when something is wrong.

    The console shows the same, and has more time: what a short watch cannot tell is not judged.
    Pipelines are looked at when a console is named, and what this machine has for Spark when that
    is installed here, unless told otherwise.
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
    if sparkchecks.has_spark() if spark is None else spark:
        diagnosis.made("for Spark", Check.JAVA, Check.WORKERS)
        diagnosis.found(sparkchecks.java(os.environ))
        diagnosis.found(sparkchecks.workers(os.environ))
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
            weight=Weight.BAD,
            subject=shown,
            text=f"no name server answers: {'; '.join(reason for _, reason in error.tried)}",
            remedy="start one, or say where it is with --name-server or ORBITMQ_NAME_SERVER",
            command=commandlines.command("up"),
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
    diagnosis.made("what brokers say of themselves", Check.HEALTH)
    diagnosis.made(_room_left(cluster), Check.ROOM)
    if not any(broker.is_up for broker in cluster.brokers):
        # Nobody can be asked about anything else.
        diagnosis.found(of_servers(cluster))
        return
    clock = session.out.clock
    found = await examine(session.engine, session.admin, clock, watch=watch, only=only)
    snapshot = found.seen.snapshot
    diagnosis.made(_topics_seen(snapshot), Check.TOPICS)
    diagnosis.made(_clocks_seen(found), Check.CLOCKS)
    groups = several(len(snapshot.groups), "group")
    diagnosis.made(groups, *(check for check in Check if check in OF_GROUPS))
    if snapshot.dead_letters:
        diagnosis.made(f"{groups}: {_letters_seen(snapshot)}", Check.DEAD_LETTERS)
    for check, needed, watched, lasted in (
        (Check.STUCK_QUEUES, PATIENCE, found.watched, found.seconds),
        # Nobody looks several times who does not mean to watch for so long.
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
    """The name servers, unless commands that are run here next ask them without being told."""
    named = next(filter(None, map(environment.get, NAME_SERVER_VARIABLES)), DEFAULT_NAME_SERVER)
    return () if split_name_servers(named) == asked else asked


def _topics_seen(snapshot: Snapshot) -> str:
    """Counted as `orbitmq topic list` does, which shows people's own."""
    kinds = [each.topic.kind for each in snapshot.topics.values()]
    hidden = sum(kind in NOT_LISTED for kind in kinds)
    others = f", and {hidden:,} of the system, for retries and dead letters" if hidden else ""
    return several(len(kinds) - hidden, "topic") + others


def _letters_seen(snapshot: Snapshot) -> str:
    text = f"{snapshot.open_letters:,} open, {snapshot.resent_letters:,} resent"
    unknown = snapshot.unknown_letters
    # Those of the last hour are looked up, as far as they are not too many.
    return f"{text}, {unknown:,} not looked up" if unknown else text


def _room_left(cluster: ClusterStatus) -> str:
    """How many there are of how many, at the broker that is nearest to its bound."""
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
            weight=Weight.BAD,
            subject=console,
            text=str(error),
            remedy="start it, or say where it is with --console or ORBITMQ_CONSOLE",
            command=commandlines.command("console"),
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
    out.raw("")
    made = several(len(record.checks), "check")
    if record.is_well:
        out.line(f"nothing is wrong; {made} made")
    else:
        number = len(record.findings)
        out.line(f"{several(number, 'thing')} {'is' if number == 1 else 'are'} wrong; {made} made")


def _problem(finding: FindingRecord) -> str:
    """What is wrong, and with what."""
    if finding.subject in finding.problem:
        return _sentence(finding.problem)
    return f"{finding.subject}: {_sentence(finding.problem)}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
