"""`orbitmq doctor`: finds the usual mistakes, and says what to do about them."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer

from orbitmq.cli import groupchecks, serverchecks, sparkchecks
from orbitmq.cli.choosing import seconds
from orbitmq.cli.declaring import command, section
from orbitmq.cli.diagnosis import Diagnosis, DiagnosisRecord, Found
from orbitmq.cli.errors import FAILED
from orbitmq.cli.session import Session
from orbitmq.cli.wording import harmless, several
from orbitmq.client.admin.cluster import ClusterStatus
from orbitmq.client.errors import NoNameServer

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
        typer.Option("--watch", metavar="DURATION", help="How long to see whether lag grows."),
    ] = "2s",
    spark: Annotated[
        bool | None,
        typer.Option("--spark/--no-spark", help="Whether this machine is to run Spark."),
    ] = None,
) -> None:
    """Look for the usual mistakes; the exit code is 1 when something is wrong.

    Spark is looked at when it is installed here, unless told otherwise.
    """
    pause = seconds(watch, "--watch")
    diagnosis = Diagnosis()
    cluster = await _look_at_name_servers(session, diagnosis)
    if cluster is not None:
        _look_at_brokers(cluster, diagnosis)
        if any(broker.is_up for broker in cluster.brokers):
            await _look_at_topics(session, diagnosis)
            await _look_at_groups(session, diagnosis, frozenset(group or ()), pause)
    if sparkchecks.has_spark() if spark is None else spark:
        diagnosis.add("Java", "for Spark", sparkchecks.java(os.environ))
        diagnosis.add("Python of workers", "for Spark", sparkchecks.workers(os.environ))
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
    try:
        cluster = await session.admin.cluster()
    except NoNameServer as error:
        problem = f"no name server answers: {'; '.join(reason for _, reason in error.tried)}"
        remedy = (
            "start one with: orbitmq up, or say where it is with --name-server or "
            "ORBITMQ_NAME_SERVER"
        )
        diagnosis.add("name servers", shown, [Found(shown, problem, remedy)])
        return None
    diagnosis.add("name servers", shown, serverchecks.name_servers(cluster))
    return cluster


def _look_at_brokers(cluster: ClusterStatus, diagnosis: Diagnosis) -> None:
    shown = ", ".join(f"{each.node} at {each.node.address}" for each in cluster.brokers)
    diagnosis.add("brokers", shown or "none", serverchecks.brokers(cluster))
    diagnosis.add("advertised addresses", shown or "none", serverchecks.addresses(cluster))
    diagnosis.add("disks", shown or "none", serverchecks.disks(cluster))
    diagnosis.add("health", "what brokers say of themselves", serverchecks.health(cluster))


async def _look_at_topics(session: Session, diagnosis: Diagnosis) -> None:
    listing = await session.admin.topics.list()
    diagnosis.add("topics", several(len(listing), "topic"), serverchecks.topics(listing))
    now = session.out.clock.now()
    looked, skewed = await serverchecks.clocks(session.admin, listing, now)
    diagnosis.add("clocks", f"the latest messages of {several(looked, 'queue')}", skewed)


async def _look_at_groups(
    session: Session, diagnosis: Diagnosis, only: frozenset[str], pause: float
) -> None:
    admin = session.admin
    clock = session.out.clock
    began = clock.monotonic()
    before = await admin.groups.list(members=True, times=True)
    groups = [each for each in before if not only or each.group in only]
    shown = several(len(groups), "group")
    found: dict[str, list[Found]] = {name: [] for name in groupchecks.INSIDE_CHECKS}
    for check, finding in await groupchecks.inside(admin, groups):
        found[check].append(finding)
    diagnosis.add("endless retries", shown, await groupchecks.endless(admin, groups))
    diagnosis.add("unattended groups", shown, groupchecks.abandoned(groups))
    early = await groupchecks.waiting(admin, groups)
    looked = clock.monotonic()
    await asyncio.sleep(max(0.0, began + pause - looked))
    after = await admin.groups.list()
    found["stuck queues"] += groupchecks.growing(groups, after)
    watched = clock.monotonic() - looked
    if watched >= groupchecks.SHORTEST_WATCH:
        late = await groupchecks.waiting(admin, groups)
        known = {each.subject for each in found["stuck queues"]}
        still = groupchecks.idle(early, late, watched)
        found["stuck queues"] += (each for each in still if each.subject not in known)
    for check, findings in found.items():
        diagnosis.add(check, shown, findings)


def _print(session: Session, record: DiagnosisRecord) -> None:
    out = session.out
    for check in record.checks:
        mark = out.coloured("ok  ", "green") if check.is_well else out.coloured("BAD ", "red")
        out.raw(f"{mark} {harmless(f'{check.check}: {check.about}')}")
    for finding in record.findings:
        out.raw("")
        out.raw(f"{out.coloured('!', 'red')} {harmless(_sentence(finding.problem))}")
        out.line(f"  {_sentence(finding.remedy)}")
    out.raw("")
    made = several(len(record.checks), "check")
    if record.is_well:
        out.line(f"nothing is wrong; {made} made")
    else:
        number = len(record.findings)
        out.line(f"{several(number, 'thing')} {'is' if number == 1 else 'are'} wrong; {made} made")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
