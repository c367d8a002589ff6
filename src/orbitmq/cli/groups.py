"""`orbitmq group`: consumer groups, how far they are, who they are and what they hold."""

from __future__ import annotations

from typing import Annotated

import typer

from orbitmq.cli import groupchanging, moving
from orbitmq.cli.choosing import GroupName
from orbitmq.cli.declaring import command, section
from orbitmq.cli.errors import CommandError
from orbitmq.cli.grouprecords import (
    CallTimesRecord,
    ClientRecord,
    ConsumptionRecord,
    GroupDetailsRecord,
    GroupRecord,
    GroupSettingsRecord,
    MemberRecord,
    OwnedQueueRecord,
    QueueProgressRecord,
    SubscriptionRecord,
)
from orbitmq.cli.session import Session
from orbitmq.cli.tables import Columns
from orbitmq.cli.wording import NOTHING, count, duration, fine, rate, several
from orbitmq.client.admin.groupvalues import GroupState
from orbitmq.console.collecting import readers
from orbitmq.console.laterattempts import LaterAttempts, later_attempts
from orbitmq.console.tables import BrokerTables

app = section("Look at consumer groups, and move their progress.")


@command(
    app,
    "list",
    examples=(
        "orbitmq group list",
        "orbitmq group list --lagging --json | jq -r .group",
        "orbitmq group list --quick",
    ),
    prints=GroupRecord,
)
async def list_groups(
    session: Session,
    state: Annotated[
        list[GroupState] | None,
        typer.Option("--state", "-s", help="Only groups in this state; may be repeated."),
    ] = None,
    lagging: Annotated[
        bool, typer.Option("--lagging", "-l", help="Only groups with messages that wait.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Ask neither who is online nor how old the lag is.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", "-a", help="The system's groups, too.")] = False,
) -> None:
    """List groups with their lag, in messages and in time."""
    found = await session.admin.groups.list(members=not quick, times=not quick, system=every)
    records = [
        GroupRecord.of(each)
        for each in found
        if (not state or each.state in state) and (not lagging or each.lag)
    ]
    out = session.out
    if out.is_json:
        out.records(records)
    else:
        out.table(
            Columns[GroupRecord]()
            .text("group", lambda each: each.group)
            .text("state", lambda each: each.state, bad=_is_stranded)
            .number("members", lambda each: count(each.members))
            .number("lag", lambda each: count(each.lag), bad=_is_stranded)
            .number("oldest", lambda each: duration(each.lag_seconds))
            .number("retries", lambda each: count(each.retry_lag))
            .number("pulled/s", lambda each: rate(each.consume_rate))
            .text("topics", _topics),
            records,
            empty="" if found.unreachable else "no groups",
        )
    session.missing(found.unreachable)


def _is_stranded(group: GroupRecord) -> bool:
    return group.state == GroupState.OFFLINE and group.lag > 0


def _topics(group: GroupRecord) -> str:
    names = [each.topic for each in group.topics if not each.topic.startswith("%RETRY%")]
    return ", ".join(names) or NOTHING


@command(
    app,
    "show",
    examples=(
        "orbitmq group show billing",
        "orbitmq group show billing --json | jq '.queues[] | select(.lag > 0)'",
    ),
    prints=GroupDetailsRecord,
)
async def show(session: Session, group: GroupName) -> None:
    """Show a group: progress and owner of every queue, members, settings and what is wrong.

    Messages that failed and wait for the delay before their next attempt are in no queue of the
    group until then: `later` counts them, and nothing else does.
    """
    found = await session.admin.groups.describe(group)
    brokers = readers(await session.admin.cluster())
    later = await later_attempts(session.engine, BrokerTables(session.engine), brokers, group)
    record = GroupDetailsRecord.of(found, later)
    out = session.out
    if out.is_json:
        out.record(record)
    else:
        _print_details(session, record, later)
    session.missing(found.progress.unreachable)


def _print_details(
    session: Session, record: GroupDetailsRecord, later: LaterAttempts | None
) -> None:
    out = session.out
    out.facts(
        ("group", record.group),
        ("state", record.state),
        ("lag", _lag(record)),
        ("retries", f"{count(record.retry_lag)} of them failed before"),
        ("later", "not known: a broker does not tell" if later is None else str(later)),
        ("empty in", _empty(record)),
        ("dead letters", count(record.dead_letters)),
        ("consumes", _manner(record)),
    )
    out.table(
        Columns[QueueProgressRecord]()
        .text("topic", lambda each: each.topic)
        .text("queue", lambda each: f"{each.broker}:{each.queue_id}")
        .number("stored", lambda each: count(each.broker_offset))
        .number("finished", lambda each: count(each.consumer_offset))
        .number("in flight", lambda each: count(each.in_flight))
        .number("lag", lambda each: count(each.lag))
        .number("oldest", lambda each: duration(each.lag_seconds))
        .text("finished up to", lambda each: out.moment(each.finished_stored_at))
        .text(
            "owner",
            lambda each: each.owner or NOTHING,
            bad=lambda each: each.owner is None and each.lag > 0,
        ),
        record.queues,
        title="Progress",
        empty="none yet",
    )
    out.table(
        Columns[CallTimesRecord]()
        .text("topic", lambda each: each.topic)
        .number("calls", lambda each: count(each.calls))
        .number("p50", lambda each: fine(each.p50_seconds))
        .number("p95", lambda each: fine(each.p95_seconds))
        .number("p99", lambda each: fine(each.p99_seconds))
        .number("longest", lambda each: fine(each.longest_seconds)),
        record.handlers,
        title="Handlers in the last minute",
        empty="not told" if record.members else "nobody is online",
    )
    out.table(
        Columns[ClientRecord]()
        .text("client", lambda each: each.client_id)
        .text("address", lambda each: each.address)
        .text("language", lambda each: each.language)
        .text("version", lambda each: each.version),
        record.members,
        title="Members",
        empty="nobody is online",
    )
    out.table(
        Columns[SubscriptionRecord]()
        .text("topic", lambda each: each.topic)
        .text("type", lambda each: each.expression_type)
        .text("expression", lambda each: each.expression),
        record.subscriptions,
        title="Subscription",
        empty="not known while nobody is online",
    )
    out.table(
        Columns[GroupSettingsRecord]()
        .text("broker", lambda each: each.broker)
        .text("enabled", lambda each: _yes(each.is_enabled), bad=lambda each: not each.is_enabled)
        .number("max retries", lambda each: count(each.max_retries))
        .number("retry queues", lambda each: count(each.retry_queues))
        .text("in order", lambda each: _yes(each.is_orderly))
        .text("may broadcast", lambda each: _yes(each.may_broadcast))
        .number("handler may take", lambda each: duration(each.consume_timeout_seconds)),
        record.settings,
        title="Settings",
    )
    if record.findings:
        out.raw("")
        out.line("What is wrong")
        for finding in record.findings:
            out.line(f"! {finding.text}")


@command(
    app,
    "member",
    examples=(
        "orbitmq group member billing 10.0.0.7@worker-1",
        "orbitmq group member billing 10.0.0.7@worker-1 --stack",
    ),
    prints=MemberRecord,
)
async def member(
    session: Session,
    group: GroupName,
    client_id: Annotated[
        str,
        typer.Argument(metavar="[CLIENT]", help="Its client id, or a part of it that only it has."),
    ] = "",
    stack: Annotated[
        bool, typer.Option("--stack", help="Also what its threads do at this moment.")
    ] = False,
) -> None:
    """Show what one consumer holds and does: owned queues, cached messages, locks, last pull."""
    members = await session.admin.consumers.members(group)
    chosen = _one_of(group, members.client_ids, client_id)
    info = await session.admin.consumers.running_info(group, chosen, stack=stack)
    record = MemberRecord.of(info)
    out = session.out
    if out.is_json:
        out.record(record)
        return
    out.facts(
        ("client", record.client_id),
        ("group", record.group),
        ("in order", _yes(record.is_orderly)),
        ("cached", f"{count(record.cached_messages)} messages"),
    )
    out.table(
        Columns[OwnedQueueRecord]()
        .text("topic", lambda each: each.topic)
        .text("queue", lambda each: f"{each.broker}:{each.queue_id}")
        .number("finished", lambda each: count(each.commit_offset))
        .number("cached", lambda each: count(each.cached_messages))
        .text("locked", lambda each: _yes(each.is_locked))
        .text("last pull", lambda each: out.moment(each.last_pull_at))
        .text("last handled", lambda each: out.moment(each.last_consume_at)),
        record.queues,
        title="Owned queues",
        empty="none",
    )
    out.table(
        Columns[ConsumptionRecord]()
        .text("topic", lambda each: each.topic)
        .number("pulled/s", lambda each: rate(each.pull_rate))
        .number("pull takes", lambda each: fine(each.pull_seconds))
        .number("ok/s", lambda each: rate(each.ok_rate))
        .number("failed/s", lambda each: rate(each.failed_rate), bad=lambda e: e.failed_rate > 0)
        .number("handler takes", lambda each: fine(each.consume_seconds))
        .number("p50", lambda each: fine(each.consume_p50_seconds))
        .number("p95", lambda each: fine(each.consume_p95_seconds))
        .number("p99", lambda each: fine(each.consume_p99_seconds))
        .number("longest", lambda each: fine(each.consume_longest_seconds))
        .number("failed in the last hour", lambda each: count(each.failed_last_hour)),
        record.topics,
        title="Speed",
        empty="not told",
    )
    if record.stack is not None:
        out.raw("")
        out.line("Threads")
        for line in record.stack.splitlines():
            out.line(line)


def _one_of(group: str, client_ids: tuple[str, ...], wanted: str) -> str:
    if wanted in client_ids:
        return wanted
    alike = [each for each in client_ids if wanted in each]
    if len(alike) == 1:
        return alike[0]
    problem = f"{len(alike)} members of {group!r} match {wanted!r}" if wanted else "name a member"
    raise CommandError(f"{problem}; there are {', '.join(client_ids)}")


def _lag(record: GroupDetailsRecord) -> str:
    waits = several(record.lag, "message")
    return f"{waits}, the oldest waits {duration(record.lag_seconds)}" if record.lag else waits


def _empty(record: GroupDetailsRecord) -> str:
    if not record.lag:
        return "0 s"
    if record.consume_rate <= 0:
        return "never, nothing was pulled in the last minute"
    pace = f"{rate(record.consume_rate)} messages/s in the last minute"
    return f"{duration(record.lag / record.consume_rate)} if it finishes what it pulls, {pace}"


def _manner(record: GroupDetailsRecord) -> str:
    if record.model is None:
        return "nobody is online"
    return f"{record.model}, {record.consume_type or 'in a manner not told'}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


app.add_typer(groupchanging.app)
app.add_typer(moving.app)
