"""`orbitmq topic`: lists, shows, creates, changes and deletes topics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from orbitmq.cli.application import section
from orbitmq.cli.command import Broker, ClusterName, Session, TopicName, command, unknown
from orbitmq.cli.main import CommandError, Misused
from orbitmq.cli.output import Columns, count, rate, size
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.topics import (
    DEFAULT_QUEUES,
    MESSAGE_TYPE,
    MESSAGE_TYPES,
    MOST_QUEUES,
    NOT_LISTED,
    Permission,
    QueueStatus,
    Rate,
    Route,
    RouteBroker,
    Topic,
    TopicKind,
    TopicOnBroker,
    TopicRates,
    TopicStatus,
)
from orbitmq.client.errors import TopicNotFound
from orbitmq.console.words import NOTHING, several
from orbitmq.parsing import fill


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRecord:
    """A topic on all brokers that have it."""

    topic: str
    kind: str  #: normal, fifo, delay, transaction, mixed, retry, dlq or system
    write_queues: int  #: on all brokers
    read_queues: int  #: on all brokers
    permission: str  #: rw, r, w or -
    is_ordered: bool
    is_uniform: bool  #: whether all brokers have the same settings
    brokers: tuple[str, ...]
    messages: int | None = None  #: with --status
    in_rate: float | None = None  #: messages per second, with --status
    first_stored_at: float | None = None  #: with --status; null when it is empty
    last_stored_at: float | None = None  #: with --status; null when it is empty

    @classmethod
    def of(cls, topic: Topic) -> TopicRecord:
        return fill(
            cls,
            topic,
            topic=topic.name,
            permission=topic.permission.letters,
            brokers=tuple(each.broker for each in topic.brokers),
        )

    def with_status(self, status: TopicStatus) -> TopicRecord:
        return fill(TopicRecord, status, self, brokers=self.brokers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOnBrokerRecord:
    """The settings of a topic on one broker, and the broker's addresses."""

    broker: str
    cluster: str | None = None  #: null when the topic's route does not have the broker
    addresses: Mapping[str, str]  #: by broker id; 0 is the master
    write_queues: int
    read_queues: int
    permission: str
    is_ordered: bool
    attributes: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRecord:
    """What is in a queue."""

    broker: str
    queue_id: int
    min_offset: int  #: of the first message
    max_offset: int  #: where the next message will be stored
    messages: int
    first_stored_at: float | None
    last_stored_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConsumerRecord:
    """A group that consumes a topic."""

    group: str
    out_rate: float  #: messages per second that it pulls, over the last minute
    messages_today: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDetails:
    """Everything about one topic."""

    topic: str
    kind: str
    permission: str
    is_ordered: bool
    messages: int
    first_stored_at: float | None
    last_stored_at: float | None
    in_rate: float  #: messages per second, over the last minute
    in_bytes_rate: float  #: bytes per second, over the last minute
    messages_today: int
    brokers: tuple[TopicOnBrokerRecord, ...]
    queues: tuple[QueueRecord, ...]
    groups: tuple[TopicConsumerRecord, ...]


def details_of(topic: Topic, status: TopicStatus, route: Route, rates: TopicRates) -> TopicDetails:
    """One record of everything about a topic."""
    routed = {each.broker: each for each in route.brokers}
    return fill(
        TopicDetails,
        status,
        topic,
        permission=topic.permission.letters,
        in_rate=rates.incoming.messages,
        in_bytes_rate=rates.incoming.bytes,
        messages_today=rates.incoming.messages_today,
        brokers=tuple(
            fill(
                TopicOnBrokerRecord,
                each,
                broker := routed.get(each.broker),
                permission=each.permission.letters,
                addresses={}
                if broker is None
                else {str(number): at for number, at in sorted(broker.addresses.items())},
            )
            for each in topic.brokers
        ),
        groups=tuple(
            TopicConsumerRecord(
                group=group, out_rate=rate.messages, messages_today=rate.messages_today
            )
            for group, rate in sorted(rates.outgoing.items())
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicChange:
    """What a command did, or with --dry-run would do, to a topic."""

    topic: str
    result: str  #: created, changed, deleted, left; or `would be ...`
    is_dry_run: bool
    before: TopicRecord | None  #: null when there was no such topic
    after: TopicRecord | None  #: as read back; null when there is no such topic or nothing was done
    remark: str | None


def change_of(
    result: str, topic: str, before: Topic | None, after: Topic | None, remark: str | None = None
) -> TopicChange:
    return TopicChange(
        topic=topic,
        result=result,
        is_dry_run=result.startswith("would"),
        before=None if before is None else TopicRecord.of(before),
        after=None if after is None else TopicRecord.of(after),
        remark=remark,
    )


app = section()


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
    every: Annotated[bool, typer.Option("--all", "-a", help="Include system topics.")] = False,
    status: Annotated[
        bool,
        typer.Option(
            "--status", "-s", help="Print the contents of each topic; needs a request for each."
        ),
    ] = False,
) -> None:
    """List topics; with --all or --kind also system, retry and dead-letter topics."""
    wanted = set(kind or TopicKind) if every or kind else set(TopicKind) - NOT_LISTED
    found = await session.admin.topics.list(kinds=wanted)
    records = [TopicRecord.of(topic) for topic in found]
    if status:
        # The admin bounds the number of concurrent requests.
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
        none = "no topics; orbitmq topic list --all shows all kinds"
        out.table(columns, records, empty="" if found.unreachable else none)
    session.missing(found.unreachable)


@command(
    app,
    "show",
    examples=("orbitmq topic show orders", "orbitmq topic show orders --json | jq .messages"),
    prints=TopicDetails,
)
async def show(session: Session, topic: TopicName) -> None:
    """Show a topic: settings, queues, route, rates and consuming groups."""
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
            .number("pulled/s", lambda each: rate(each[1].messages))
            .number("today", lambda each: count(each[1].messages_today)),
            sorted(rates.outgoing.items()),
            title="Consuming groups",
            empty="none",
        )
    session.missing(status.unreachable)


def _permission(topic: Topic) -> str:
    return {
        "rw": "written and read",
        "r": "read only",
        "w": "written only",
    }.get(Permission(topic.permission & 6).letters, "neither written nor read")


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


#: The settings of a new topic without flags.
_USUAL = TopicOnBroker("", DEFAULT_QUEUES, DEFAULT_QUEUES, Permission.READ_WRITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingFlags:
    """The flags for the settings of a topic."""

    queues: Annotated[
        int | None,
        typer.Option(
            "--queues",
            "-q",
            min=1,
            max=MOST_QUEUES,
            help="Queues per broker, for writing and reading.",
        ),
    ] = None
    write_queues: Annotated[
        int | None,
        typer.Option(
            "--write-queues",
            min=1,
            max=MOST_QUEUES,
            help="Queues per broker for producers, if not --queues.",
        ),
    ] = None
    read_queues: Annotated[
        int | None,
        typer.Option(
            "--read-queues",
            min=1,
            max=MOST_QUEUES,
            help="Queues per broker for consumers, if not --queues.",
        ),
    ] = None
    permission: Annotated[
        str | None,
        typer.Option(
            "--permission",
            "-p",
            metavar="[rw|r|w|-]",
            help="Whether clients may read, write or both.",
        ),
    ] = None
    ordered: Annotated[
        bool | None,
        typer.Option(
            "--ordered/--unordered", help="Keep the queues of an absent broker in the routes."
        ),
    ] = None


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
    flags: SettingFlags,
    message_type: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar=f"[{'|'.join(MESSAGE_TYPES).lower()}]",
            help="The type of its messages; kept by brokers from 5.0 on.",
        ),
    ] = None,
    broker: Broker = None,
    cluster: ClusterName = None,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Do nothing if the topic exists.")
    ] = False,
) -> None:
    """Create a topic, on all brokers by default; returns when clients find it.

    Settings that are not given are copied from brokers that have the topic already.
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
                f"topic {topic!r} exists ({_summary(before)}); change it with: orbitmq "
                f"topic update {topic}"
            )
        _tell(session, change_of("left", topic, before, before))
        return
    if len(lacking) < len(chosen) and not if_missing:
        named = " ".join(f"--broker {name}" for name in lacking)
        raise CommandError(
            f"topic {topic!r} exists on {', '.join(has)}; to have it on "
            f"{', '.join(lacking)} as well: orbitmq topic create {topic} {named}"
        )
    # All brokers should have the same settings.
    usual = _USUAL if before is None else before.brokers[0]
    write_queues = flags.write_queues or flags.queues or usual.write_queues
    read_queues = flags.read_queues or flags.queues or usual.read_queues
    allowed = Permission.of(usual.permission & 6 if flags.permission is None else flags.permission)
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
        ordered=usual.is_ordered if flags.ordered is None else flags.ordered,
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
    flags: SettingFlags,
    broker: Broker = None,
) -> None:
    """Change settings of a topic. A change that hides messages or stops clients needs consent.

    To remove queues without losing messages: reduce --write-queues first, and --read-queues when
    consumers have finished the removed queues.
    """
    changes = asdict(flags)
    if all(each is None for each in changes.values()):
        raise Misused("nothing to change: give --queues, --permission or --ordered, for example")
    before = await session.admin.topics.get(topic)
    has = {each.broker for each in before.brokers}
    for name in await session.masters(broker) if broker else ():
        if name not in has:
            raise CommandError(
                f"topic {topic!r} is not on {name}; create it there with: orbitmq topic create "
                f"{topic} --broker {name}"
            )
    losses = _losses(before, flags.read_queues or flags.queues, flags.permission, broker)
    if session.is_dry_run:
        _tell(session, change_of("would be changed", topic, before, None, "; ".join(losses)))
        return
    if losses and not session.may(f"{'; '.join(losses)} of topic {topic!r}"):
        return
    after = await session.admin.topics.update(topic, brokers=broker or None, **changes)
    if broker:
        after = await session.admin.topics.get(topic)  # on all brokers, as before
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


def _type_of(topic: TopicOnBroker) -> str | None:
    """The message type, if a new topic can be created with it."""
    found = topic.attributes.get(MESSAGE_TYPE)
    return found if found in MESSAGE_TYPES else None


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
    """What clients lose by an update, as sentences."""
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
