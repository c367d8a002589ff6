"""`orbitmq topic`: topics, listed, looked into, made, changed and deleted."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from orbitmq.cli.choosing import Broker, ClusterName, TopicName
from orbitmq.cli.declaring import command, section
from orbitmq.cli.errors import CommandError, Misused
from orbitmq.cli.session import Session
from orbitmq.cli.suggesting import unknown
from orbitmq.cli.tables import Columns
from orbitmq.cli.topicrecords import (
    TopicChange,
    TopicDetails,
    TopicRecord,
    change_of,
    details_of,
)
from orbitmq.cli.wording import NOTHING, count, rate, several, size
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.errors import TopicNotFound
from orbitmq.client.admin.topics import DEFAULT_QUEUES, MOST_QUEUES
from orbitmq.client.admin.topicvalues import (
    MESSAGE_TYPES,
    NOT_LISTED,
    Permission,
    QueueStatus,
    Rate,
    RouteBroker,
    Topic,
    TopicKind,
)

app = section("List, make, change and delete topics.")

Queues = Annotated[
    int | None,
    typer.Option(
        "--queues",
        "-q",
        min=1,
        max=MOST_QUEUES,
        help="Queues on each broker, to write and read.",
    ),
]
WriteQueues = Annotated[
    int | None,
    typer.Option(
        "--write-queues",
        min=1,
        max=MOST_QUEUES,
        help="Queues that producers use, if not --queues.",
    ),
]
ReadQueues = Annotated[
    int | None,
    typer.Option(
        "--read-queues",
        min=1,
        max=MOST_QUEUES,
        help="Queues that consumers use, if not --queues.",
    ),
]
PermissionText = Annotated[
    str | None,
    typer.Option("--permission", "-p", metavar="[rw|r|w|-]", help="What may be done with it."),
]
Ordered = Annotated[
    bool | None,
    typer.Option(
        "--ordered/--unordered", help="Keep its queues in routes while a broker is away, too."
    ),
]


@command(
    app,
    "list",
    examples=(
        "orbitmq topic list",
        "orbitmq topic list --kind retry --kind dlq",
        "orbitmq topic list --status --json | jq -r 'select(.messages > 0) | .topic'",
    ),
    prints=TopicRecord,
)
async def list_topics(
    session: Session,
    kind: Annotated[
        list[TopicKind] | None,
        typer.Option("--kind", "-k", help="Only topics of this kind; may be repeated."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Those of the system, too.")] = False,
    status: Annotated[
        bool, typer.Option("--status", "-s", help="What is in each; asks for every topic.")
    ] = False,
) -> None:
    """List topics; those of the system, for retries and dead letters if asked for."""
    wanted = set(kind or TopicKind) if every or kind else set(TopicKind) - NOT_LISTED
    found = await session.admin.topics.list(kinds=wanted)
    records = [TopicRecord.of(topic) for topic in found]
    if status:
        # The admin itself limits how many requests wait at a time.
        statuses = await asyncio.gather(
            *(session.admin.topics.status(record.topic) for record in records)
        )
        records = [record.with_status(each) for record, each in zip(records, statuses, strict=True)]
    out = session.out
    if out.is_json:
        out.records(records)
    else:
        columns = (
            Columns[TopicRecord]()
            .text("topic", lambda each: each.topic)
            .text("kind", lambda each: each.kind)
            .number("write", lambda each: count(each.write_queues))
            .number("read", lambda each: count(each.read_queues))
            .text("may", lambda each: each.permission)
            .text("brokers", lambda each: ", ".join(each.brokers))
        )
        if status:
            columns = (
                columns.number("messages", lambda each: count(each.messages))
                .number("in/s", lambda each: rate(each.in_rate))
                .text("oldest", lambda each: out.moment(each.first_stored_at))
                .text("latest", lambda each: out.moment(each.last_stored_at))
            )
        out.table(columns, records, empty="no topics; orbitmq topic list --all shows all kinds")
    session.missing(found.unreachable)


@command(
    app,
    "show",
    examples=("orbitmq topic show orders", "orbitmq topic show orders --json | jq .messages"),
    prints=TopicDetails,
)
async def show(session: Session, topic: TopicName) -> None:
    """Show a topic: its settings, queues, route, rates and who consumes it."""
    admin, out = session.admin.topics, session.out
    found = await admin.get(topic)
    status = await admin.status(topic)
    route = await admin.route(topic)
    rates = await admin.rates(topic)
    if out.is_json:
        out.record(details_of(found, status, route, rates))
    else:
        out.facts(
            ("topic", found.name),
            ("kind", found.kind),
            ("may be", _permission(found)),
            ("order kept", "yes" if found.is_ordered else "no"),
            ("queues", f"{found.write_queues} to write, {found.read_queues} to read"),
            ("messages", count(status.messages)),
            ("oldest", out.moment(status.first_stored_at)),
            ("latest", out.moment(status.last_stored_at)),
            ("in", _rate(rates.incoming)),
        )
        out.table(
            Columns[RouteBroker]()
            .text("broker", lambda each: each.broker)
            .text("cluster", lambda each: each.cluster)
            .text("addresses", _addresses)
            .number("write", lambda each: count(each.write_queues))
            .number("read", lambda each: count(each.read_queues))
            .text("may", lambda each: each.permission.letters),
            route.brokers,
            title="Where clients find it",
        )
        out.table(
            Columns[QueueStatus]()
            .text("queue", lambda each: f"{each.queue.broker}:{each.queue.id}")
            .number("first", lambda each: count(each.min_offset))
            .number("next", lambda each: count(each.max_offset))
            .number("messages", lambda each: count(each.messages))
            .text("oldest", lambda each: out.moment(each.first_stored_at))
            .text("latest", lambda each: out.moment(each.last_stored_at)),
            status.queues,
            title="What is in it",
        )
        out.table(
            Columns[tuple[str, Rate]]()
            .text("group", lambda each: each[0])
            .number("out/s", lambda each: rate(each[1].messages))
            .number("today", lambda each: count(each[1].messages_today)),
            sorted(rates.outgoing.items()),
            title="Who consumes it",
            empty="nobody",
        )
    session.missing(status.unreachable)


@command(
    app,
    "create",
    examples=(
        "orbitmq topic create orders",
        "orbitmq topic create orders --queues 16 --broker broker-a --broker broker-b",
        "orbitmq topic create payments --type fifo --if-missing",
    ),
    prints=TopicChange,
    changes=True,
)
async def create(
    session: Session,
    topic: TopicName,
    queues: Queues = None,
    write_queues: WriteQueues = None,
    read_queues: ReadQueues = None,
    permission: PermissionText = None,
    ordered: Ordered = None,
    message_type: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar=f"[{'|'.join(MESSAGE_TYPES).lower()}]",
            help="Which messages it is for; brokers from 5.0 on keep it.",
        ),
    ] = None,
    broker: Broker = None,
    cluster: ClusterName = None,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Leave a topic that is there as it is.")
    ] = False,
) -> None:
    """Make a topic, on all brokers unless told otherwise; done when clients find it."""
    if message_type is not None and message_type.upper() not in MESSAGE_TYPES:
        allowed_types = ", ".join(MESSAGE_TYPES).lower()
        raise Misused(f"--type must be one of {allowed_types}, got {message_type!r}")
    before = await _before(session.admin, topic)
    chosen = await session.masters(broker, cluster)
    has = () if before is None else tuple(each.broker for each in before.brokers)
    lacking = [name for name in chosen if name not in has]
    if before is not None and not lacking:
        if not if_missing:
            raise CommandError(
                f"topic {topic!r} is there already ({_summary(before)}); change it with: orbitmq "
                f"topic update {topic}"
            )
        _tell(session, change_of("left", topic, before, before))
        return
    if len(lacking) < len(chosen) and not if_missing:
        named = " ".join(f"--broker {name}" for name in lacking)
        raise CommandError(
            f"topic {topic!r} is there already on {', '.join(has)}; to have it on "
            f"{', '.join(lacking)} as well: orbitmq topic create {topic} {named}"
        )
    # Where it is already it has a number of queues; brokers had better be alike.
    usual = DEFAULT_QUEUES if before is None else before.brokers[0].write_queues
    number = usual if queues is None else queues
    if session.is_dry_run:
        allowed = Permission.of(permission or "rw")
        planned = (
            f"{write_queues or number} queues to write and {read_queues or number} to read on each "
            f"broker, may be {_words(allowed)}"
        )
        _tell(session, change_of("would be created", topic, None, None, planned))
        return
    after = await session.admin.topics.create(
        topic,
        queues=number,
        write_queues=write_queues,
        read_queues=read_queues,
        permission=permission or "rw",
        ordered=bool(ordered),
        message_type=message_type,
        brokers=lacking,
    )
    if before is not None:
        after = await session.admin.topics.get(topic)
    _tell(session, change_of("created", topic, before, after))


@command(
    app,
    "update",
    examples=(
        "orbitmq topic update orders --queues 16",
        "orbitmq topic update orders --write-queues 4",
        "orbitmq topic update orders --permission r --broker broker-a --yes",
    ),
    prints=TopicChange,
    changes=True,
)
async def update(
    session: Session,
    topic: TopicName,
    queues: Queues = None,
    write_queues: WriteQueues = None,
    read_queues: ReadQueues = None,
    permission: PermissionText = None,
    ordered: Ordered = None,
    broker: Broker = None,
) -> None:
    """Change a topic and leave the rest of it. What takes something away is asked for.

    To have fewer queues and lose nothing: fewer --write-queues first, and fewer --read-queues when
    consumers have finished the others.
    """
    given = (queues, write_queues, read_queues, permission, ordered)
    if all(each is None for each in given):
        raise Misused("nothing to change: give --queues, --permission or --ordered, for example")
    before = await session.admin.topics.get(topic)
    has = {each.broker for each in before.brokers}
    for name in await session.masters(broker) if broker else ():
        if name not in has:
            raise CommandError(
                f"topic {topic!r} is not on {name}; make it there with: orbitmq topic create "
                f"{topic} --broker {name}"
            )
    losses = _losses(before, read_queues if queues is None else queues, permission, broker)
    if session.is_dry_run:
        _tell(session, change_of("would be changed", topic, before, None, "; ".join(losses)))
        return
    if losses and not session.may(f"{'; '.join(losses)} of topic {topic!r}"):
        return
    after = await session.admin.topics.update(
        topic,
        queues=queues,
        write_queues=write_queues,
        read_queues=read_queues,
        permission=permission,
        ordered=ordered,
        brokers=broker or None,
    )
    _tell(session, change_of("changed", topic, before, after))


@command(
    app,
    "delete",
    examples=("orbitmq topic delete orders", "orbitmq topic delete orders --yes"),
    prints=TopicChange,
    changes=True,
)
async def delete(session: Session, topic: TopicName, cluster: ClusterName = None) -> None:
    """Delete a topic with all its messages and every group's progress in it."""
    try:
        before = await session.admin.topics.get(topic)
    except TopicNotFound as error:
        raise await unknown(session.admin, error, "there is nothing to delete") from error
    status = await session.admin.topics.status(topic)
    groups = await session.admin.topics.groups(topic)
    messages, progress = several(status.messages, "message"), several(len(groups), "group")
    loss = f"{messages} and the progress of {progress}"
    what = f"this deletes topic {topic!r} with {loss}"
    if session.is_dry_run:
        _tell(session, change_of("would be deleted", topic, before, None, loss))
    elif session.may(what):
        await session.admin.topics.delete(topic, cluster=cluster)
        _tell(session, change_of("deleted", topic, before, None, loss))


# What they share.


async def _before(admin: AsyncAdmin, topic: str) -> Topic | None:
    try:
        return await admin.topics.get(topic)
    except TopicNotFound:
        return None


def _tell(session: Session, change: TopicChange) -> None:
    out = session.out
    if out.is_json:
        out.record(change)
        return
    shown = change.after or change.before
    about = change.remark or ("" if shown is None else _described(shown))
    out.line(f"topic {change.topic} {change.result}{': ' + about if about else ''}")


def _losses(
    before: Topic, read_queues: int | None, permission: str | None, brokers: list[str] | None
) -> list[str]:
    """What an update takes away, in words."""
    losses = []
    concerned = [each for each in before.brokers if not brokers or each.broker in brokers]
    for each in concerned:
        if read_queues is not None and read_queues < each.read_queues:
            losses.append(
                f"this hides queues {read_queues} to {each.read_queues - 1} on {each.broker} from "
                "consumers"
            )
        if permission is not None:
            taken = Permission(each.permission & ~Permission.of(permission) & 6)
            if taken:
                losses.append(f"this stops {_doing(taken)} on {each.broker}")
    return losses


def _doing(permission: Permission) -> str:
    return {"rw": "sending and consuming", "r": "consuming", "w": "sending"}[permission.letters]


def _words(permission: Permission) -> str:
    words = {"rw": "written and read", "r": "read only", "w": "written only"}
    return words.get(permission.letters, "neither written nor read")


def _permission(topic: Topic) -> str:
    return _words(Permission(topic.permission & 6))


def _summary(topic: Topic) -> str:
    return f"{topic.write_queues} queues to write, {topic.read_queues} to read"


def _described(record: TopicRecord) -> str:
    return (
        f"{record.write_queues} queues to write, {record.read_queues} to read, on "
        f"{', '.join(record.brokers)}, permission {record.permission}"
    )


def _addresses(broker: RouteBroker) -> str:
    return ", ".join(
        address if number == 0 else f"{address} (slave {number})"
        for number, address in sorted(broker.addresses.items())
    )


def _rate(incoming: Rate) -> str:
    if not incoming.messages_today and not incoming.messages:
        return NOTHING
    return (
        f"{rate(incoming.messages)} messages/s, {size(incoming.bytes)}/s over the last minute; "
        f"{several(incoming.messages_today, 'message')} today"
    )
