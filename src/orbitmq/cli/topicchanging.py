"""The commands of `orbitmq topic` that make, change and delete topics."""

from __future__ import annotations

from typing import Annotated

import typer

from orbitmq.cli.choosing import Broker, ClusterName, TopicName
from orbitmq.cli.declaring import command, section
from orbitmq.cli.errors import CommandError, Misused
from orbitmq.cli.session import Session
from orbitmq.cli.suggesting import unknown
from orbitmq.cli.topicrecords import TopicChange, TopicRecord, change_of
from orbitmq.cli.wording import several
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.errors import TopicNotFound
from orbitmq.client.admin.topics import DEFAULT_QUEUES, MOST_QUEUES
from orbitmq.client.admin.topicvalues import (
    MESSAGE_TYPE,
    MESSAGE_TYPES,
    Permission,
    Topic,
    TopicOnBroker,
)

app = section("Make, change and delete topics.")

#: What a topic is like that is told nothing.
_USUAL = TopicOnBroker("", DEFAULT_QUEUES, DEFAULT_QUEUES, Permission.READ_WRITE)

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
    """Make a topic, on all brokers unless told otherwise; done when clients find it.

    Where other brokers have it already, it is made as it is there, but for what is given.
    """
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
    # Brokers had better be alike.
    usual = _USUAL if before is None else before.brokers[0]
    write_queues = _first(write_queues, queues, usual.write_queues)
    read_queues = _first(read_queues, queues, usual.read_queues)
    allowed = Permission(usual.permission & 6) if permission is None else Permission.of(permission)
    if session.is_dry_run:
        planned = (
            f"{write_queues} queues to write and {read_queues} to read on each of "
            f"{', '.join(lacking)}, permission {allowed.letters}"
        )
        _tell(session, change_of("would be created", topic, before, None, planned))
        return
    after = await session.admin.topics.create(
        topic,
        write_queues=write_queues,
        read_queues=read_queues,
        permission=allowed,
        ordered=usual.is_ordered if ordered is None else ordered,
        message_type=message_type or _type_of(usual),
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
    if broker:
        after = await session.admin.topics.get(topic)  # all of it, as before
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


def _type_of(topic: TopicOnBroker) -> str | None:
    """Which messages it is for, as far as a new topic can be told so."""
    found = topic.attributes.get(MESSAGE_TYPE)
    return found if found in MESSAGE_TYPES else None


def _first(*values: int | None) -> int:
    """The first that is given."""
    return next(value for value in values if value is not None)


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


def _summary(topic: Topic) -> str:
    return f"{topic.write_queues} queues to write, {topic.read_queues} to read"


def _described(record: TopicRecord) -> str:
    return (
        f"{record.write_queues} queues to write, {record.read_queues} to read, on "
        f"{', '.join(record.brokers)}, permission {record.permission}"
    )
