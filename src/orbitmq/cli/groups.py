"""`orbitmq group`: consumer groups, their settings, progress and members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from orbitmq.cli.application import section
from orbitmq.cli.command import (
    Broker,
    ClusterName,
    GroupName,
    Queues,
    Session,
    command,
    position_of,
    queues_of,
    seconds,
    unknown,
)
from orbitmq.cli.main import FAILED, CommandError, Misused
from orbitmq.cli.output import OLD_NAME, Columns, count, fine, rate
from orbitmq.client.admin.groups import (
    GroupDetails,
    GroupProgress,
    GroupSettings,
    GroupState,
    GroupSummary,
    TopicLag,
)
from orbitmq.client.admin.members import (
    ClientConnection,
    GroupSubscription,
    RunningInfo,
    TopicConsumption,
)
from orbitmq.client.admin.resets import (
    QueueMove,
    QueueOutcome,
    ResetFailed,
    ResetPlan,
    ResetReport,
    ResetTo,
)
from orbitmq.client.consumer.statistics import CallTimes
from orbitmq.client.errors import BadRequest, GroupNotFound
from orbitmq.console.collect import BrokerTables, readers
from orbitmq.console.resends import LaterAttempts, later_attempts
from orbitmq.console.words import NOTHING, duration, several
from orbitmq.names import dead_letter_topic, retry_topic
from orbitmq.parsing import POSITIONS, fill


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A group."""

    group: str
    state: str  #: online, offline, paused, or unknown with --quick
    lag: int  #: messages that wait in all topics, including retries
    retry_lag: int  #: of them, retries
    lag_seconds: float | None  #: age of the oldest message that waits; null with --quick
    consume_rate: float  #: messages per second that it pulls, over the last minute
    members: int | None  #: null with --quick
    brokers: tuple[str, ...]
    is_uniform: bool  #: whether all brokers have the same settings
    topics: tuple[TopicLag, ...]

    @classmethod
    def of(cls, group: GroupSummary) -> GroupRecord:
        members = None
        if group.was_asked_for_members:
            members = 0 if group.members is None else len(group.members.client_ids)
        return fill(cls, group, members=members)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettingsRecord:
    """How a group is configured on a broker."""

    broker: str
    is_enabled: bool  #: false: it is paused
    max_retries: int
    retry_queues: int
    is_orderly: bool
    may_broadcast: bool
    consume_timeout_seconds: float

    @classmethod
    def of_all(cls, settings: Mapping[str, GroupSettings]) -> tuple[GroupSettingsRecord, ...]:
        """`settings` by broker, as records in the order of the brokers."""
        return tuple(
            fill(cls, each, broker=broker, consume_timeout_seconds=each.consume_timeout)
            for broker, each in sorted(settings.items())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueProgressRecord:
    """How far a group is in a queue."""

    topic: str
    broker: str
    queue_id: int
    broker_offset: int  #: where the next message will be stored
    consumer_offset: int  #: the next message to finish
    pull_offset: int | None  #: the next message to pull; null when the broker does not report it
    in_flight: int | None  #: pulled and not finished
    lag: int
    lag_seconds: float | None  #: age of the oldest message that waits
    finished_stored_at: float | None  #: when the last finished message was stored
    owner: str | None  #: client id of the member that has the queue
    last_consumed_at: float | None = field(metadata=OLD_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFindingRecord:
    """Something that is wrong inside a group."""

    kind: str  #: different subscriptions, duplicate client, unowned queue or stalled queue
    text: str  #: what is wrong and what to do
    topic: str | None
    client_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimesRecord:
    """How long handlers took in the last minute, by topic, over all members that report it."""

    topic: str
    calls: int
    p50_seconds: float | None  #: the median
    p95_seconds: float | None
    p99_seconds: float | None
    longest_seconds: float | None


def call_times_of(progress: GroupProgress) -> tuple[CallTimesRecord, ...]:
    return tuple(
        CallTimesRecord(topic=topic, calls=times.calls, **_seconds_of(times))
        for topic, times in progress.call_times.items()
    )


def _seconds_of(times: CallTimes, prefix: str = "") -> dict[str, float | None]:
    names = ("p50", "p95", "p99", "longest")
    return {f"{prefix}{name}_seconds": getattr(times, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDetailsRecord:
    """Everything about one group."""

    group: str
    state: str  #: online, offline or paused
    lag: int  #: messages that wait in all topics, including retries
    retry_lag: int  #: of them, retries
    #: Failed messages that wait for the delay before their next attempt; not in the lag. Null when
    #: brokers do not report them.
    later: int | None
    is_later_all: bool  #: false: `later` is a lower bound, there are too many to count
    lag_seconds: float | None  #: age of the oldest message that waits, without `later`
    consume_rate: float  #: messages per second that it pulls, over the last minute
    dead_letters: int
    consume_type: str | None = None  #: push, pull or pop; null while no member is online
    model: str | None = None  #: clustering or broadcasting
    consume_from: str | None = None
    members: tuple[ClientConnection, ...]
    subscriptions: tuple[GroupSubscription, ...] = ()
    settings: tuple[GroupSettingsRecord, ...]
    queues: tuple[QueueProgressRecord, ...]
    #: Empty without calls in the last minute, and when all members are other clients.
    handlers: tuple[CallTimesRecord, ...]
    findings: tuple[GroupFindingRecord, ...]

    @classmethod
    def of(cls, found: GroupDetails, later: LaterAttempts | None) -> GroupDetailsRecord:
        return fill(
            cls,
            found,
            found.members,
            found.progress,
            later=None if later is None else later.count,
            is_later_all=later is not None and later.is_all,
            members=() if found.members is None else found.members.clients,
            settings=GroupSettingsRecord.of_all(found.settings),
            handlers=call_times_of(found.progress),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedQueueRecord:
    """A queue that a member owns."""

    topic: str
    broker: str
    queue_id: int
    commit_offset: int
    cached_messages: int
    is_locked: bool
    last_pull_at: float | None
    last_consume_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionRecord:
    """How fast a member consumes a topic."""

    topic: str
    pull_rate: float  #: messages per second
    pull_seconds: float  #: duration of a pull, on average
    ok_rate: float
    failed_rate: float
    consume_seconds: float  #: duration of a handler call, on average
    #: Percentiles; null when the member does not report them, as other clients do not.
    consume_p50_seconds: float | None
    consume_p95_seconds: float | None
    consume_p99_seconds: float | None
    consume_longest_seconds: float | None
    failed_last_hour: int

    @classmethod
    def of(cls, topic: str, consumption: TopicConsumption) -> ConsumptionRecord:
        return fill(
            cls,
            consumption,
            topic=topic,
            pull_seconds=consumption.pull_time,
            consume_seconds=consumption.consume_time,
            **_seconds_of(consumption.consume_times or CallTimes({}), "consume_"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """The state of a member, as it reports it."""

    group: str
    client_id: str
    is_orderly: bool
    cached_messages: int
    queues: tuple[OwnedQueueRecord, ...]
    subscriptions: tuple[GroupSubscription, ...]
    topics: tuple[ConsumptionRecord, ...]
    properties: Mapping[str, str]  #: its settings, as it names them
    stack: str | None  #: the stacks of its threads, with --stack

    @classmethod
    def of(cls, info: RunningInfo) -> MemberRecord:
        topics = (ConsumptionRecord.of(*each) for each in sorted(info.topics.items()))
        return fill(cls, info, topics=tuple(topics))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """What a command did, or with --dry-run would do, to a group."""

    group: str
    result: str  #: created, changed, paused, resumed, deleted, left; or `would be ...`
    is_dry_run: bool
    settings: tuple[GroupSettingsRecord, ...]  #: as read back; without a change, as they are
    remark: str | None


def change_of(
    result: str,
    group: str,
    settings: Mapping[str, GroupSettings],
    remark: str | None = None,
) -> GroupChange:
    return GroupChange(
        group=group,
        result=result,
        is_dry_run=result.startswith("would"),
        settings=GroupSettingsRecord.of_all(settings),
        remark=remark,
    )


app = section()


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
    lagging: Annotated[bool, typer.Option("--lagging", "-l", help="Only groups with lag.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the members and the age of the lag.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", "-a", help="Include system groups.")] = False,
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
    """Show a group: progress and owner of every queue, members, settings and findings.

    Failed messages that wait for the delay before their next attempt are in no queue of the group.
    Only `later` counts them.
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
        ("later", "not known: a broker does not report it" if later is None else str(later)),
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
        empty="not reported" if record.members else "no member is online",
    )
    out.table(
        Columns[ClientConnection]()
        .text("client", lambda each: each.client_id)
        .text("address", lambda each: each.address)
        .text("language", lambda each: each.language)
        .text("version", lambda each: each.version),
        record.members,
        title="Members",
        empty="no member is online",
    )
    out.table(
        Columns[GroupSubscription]()
        .text("topic", lambda each: each.topic)
        .text("type", lambda each: each.expression_type)
        .text("expression", lambda each: each.expression),
        record.subscriptions,
        title="Subscription",
        empty="not known while no member is online",
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
        typer.Argument(metavar="[CLIENT]", help="The client id, or a unique part of it."),
    ] = "",
    stack: Annotated[
        bool, typer.Option("--stack", help="Include the stacks of its threads.")
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
        empty="not reported",
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
        return "no member is online"
    return f"{record.model}, {record.consume_type or 'consume type unknown'}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingFlags:
    """The flags for the settings of a group."""

    max_retries: Annotated[
        int | None,
        typer.Option(
            "--max-retries",
            min=0,
            help="The number of retries before a message becomes a dead letter.",
        ),
    ] = None
    retry_queues: Annotated[
        int | None,
        typer.Option("--retry-queues", min=0, help="Queues per broker of the group's retry topic."),
    ] = None
    orderly: Annotated[
        bool | None,
        typer.Option(
            "--orderly/--concurrent", help="Whether messages of a queue are consumed in order."
        ),
    ] = None
    may_broadcast: Annotated[
        bool | None,
        typer.Option(
            "--broadcast/--no-broadcast",
            help="Whether broadcasting is allowed: each member gets all messages.",
        ),
    ] = None
    consume_timeout: Annotated[
        str | None,
        typer.Option(
            "--consume-timeout",
            metavar="DURATION",
            help="The time limit of a handler, such as 15m.",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """The settings that were given, by their names in `admin.groups.create`."""
        timeout = self.consume_timeout
        values = {
            "max_retries": self.max_retries,
            "retry_queues": self.retry_queues,
            "orderly": self.orderly,
            "may_broadcast": self.may_broadcast,
            "consume_timeout": None if timeout is None else seconds(timeout, "--consume-timeout"),
        }
        return {name: value for name, value in values.items() if value is not None}


_SETTING_NAMES = {
    "max_retries": "max retries",
    "retry_queues": "retry queues",
    "orderly": "in order",
    "may_broadcast": "may broadcast",
    "consume_timeout": "handler may take",
}


@command(
    app,
    "create",
    examples=(
        "orbitmq group create billing",
        "orbitmq group create billing --max-retries 5 --if-missing",
    ),
    prints=GroupChange,
    changes=True,
)
async def create(
    session: Session,
    group: GroupName,
    flags: SettingFlags,
    broker: Broker = None,
    cluster: ClusterName = None,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Do nothing if the group exists.")
    ] = False,
) -> None:
    """Create a group, on all brokers by default.

    Settings that are not given are copied from brokers that have the group already.
    """
    before = await _before(session, group)
    chosen = await session.masters(broker, cluster)
    lacking = [name for name in chosen if name not in before]
    if not lacking:
        if not if_missing:
            raise CommandError(
                f"group {group!r} exists; change it with: orbitmq group update {group}"
            )
        _tell(session, change_of("left", group, before))
        return
    if len(lacking) < len(chosen) and not if_missing:
        named = " ".join(f"--broker {name}" for name in lacking)
        raise CommandError(
            f"group {group!r} exists on {', '.join(sorted(before))}; to have it on "
            f"{', '.join(lacking)} as well: orbitmq group create {group} {named}"
        )
    usual = before[min(before)] if before else GroupSettings(group)
    wanted = {
        "max_retries": usual.max_retries,
        "retry_queues": usual.retry_queues,
        "orderly": usual.is_orderly,
        "may_broadcast": usual.may_broadcast,
        "consume_timeout": usual.consume_timeout,
        **flags.given(),
    }
    if session.is_dry_run:
        planned = (
            f"max retries {wanted['max_retries']}, retry queues {wanted['retry_queues']}, "
            f"{'in order' if wanted['orderly'] else 'concurrent'}, on {', '.join(lacking)}"
        )
        _tell(session, change_of("would be created", group, {}, planned))
        return
    after = await session.admin.groups.create(
        group, enabled=usual.is_enabled, brokers=lacking, **wanted
    )
    _tell(session, change_of("created", group, after))


@command(
    app,
    "update",
    examples=(
        "orbitmq group update billing --max-retries 3",
        "orbitmq group update billing --consume-timeout 30m --dry-run",
    ),
    prints=GroupChange,
    changes=True,
)
async def update(
    session: Session,
    group: GroupName,
    flags: SettingFlags,
    broker: Broker = None,
) -> None:
    """Change settings of a group and leave the others."""
    changes = flags.given()
    if not changes:
        raise Misused("nothing to change: give --max-retries or another setting")
    if session.is_dry_run:
        await session.masters(broker)
        before = await session.admin.groups.settings(group)
        words = ", ".join(f"{_SETTING_NAMES[name]} {value}" for name, value in changes.items())
        _tell(session, change_of("would be changed", group, before, words))
        return
    after = await session.admin.groups.update(group, brokers=broker or None, **changes)
    _tell(session, change_of("changed", group, after))


@command(
    app,
    "pause",
    examples=("orbitmq group pause billing", "orbitmq group pause billing --yes"),
    prints=GroupChange,
    changes=True,
)
async def pause(session: Session, group: GroupName) -> None:
    """Stop a group from pulling, on every broker; its members stay connected and wait."""
    before = await session.admin.groups.settings(group)
    if session.is_dry_run:
        _tell(session, change_of("would be paused", group, before))
    elif session.may(f"this stops group {group!r} from consuming until it is resumed"):
        _tell(session, change_of("paused", group, await session.admin.groups.pause(group)))


@command(
    app,
    "resume",
    examples=("orbitmq group resume billing",),
    prints=GroupChange,
    changes=True,
)
async def resume(session: Session, group: GroupName) -> None:
    """Let a group that was paused pull again."""
    before = await session.admin.groups.settings(group)
    if session.is_dry_run:
        _tell(session, change_of("would be resumed", group, before))
    else:
        _tell(session, change_of("resumed", group, await session.admin.groups.resume(group)))


@command(
    app,
    "delete",
    examples=(
        "orbitmq group delete billing",
        "orbitmq group delete billing --with-topics --yes",
    ),
    prints=GroupChange,
    changes=True,
)
async def delete(
    session: Session,
    group: GroupName,
    keep_progress: Annotated[
        bool,
        typer.Option(
            "--keep-progress", help="Keep the committed offsets for a later group of this name."
        ),
    ] = False,
    with_topics: Annotated[
        bool, typer.Option("--with-topics", help="Also delete its retry and dead-letter topics.")
    ] = False,
) -> None:
    """Delete a group and its progress; refused while members are online."""
    try:
        details = await session.admin.groups.describe(group)
    except GroupNotFound as error:
        raise await unknown(session.admin, error, "there is nothing to delete") from error
    try:
        # Before the question for consent, and in a dry run as well.
        await session.admin.groups.check_offline(group)
    except BadRequest as error:
        raise CommandError(str(error)) from error
    parts = ["its settings"]
    if not keep_progress:
        parts.append(f"its progress in {several(len(details.progress.queues), 'queue')}")
    if with_topics:
        letters = several(details.dead_letters, "dead letter")
        parts.append(f"{retry_topic(group)} and {dead_letter_topic(group)} with {letters}")
    loss = ", ".join(parts)
    if session.is_dry_run:
        _tell(session, change_of("would be deleted", group, details.settings, loss))
    elif session.may(f"this deletes group {group!r}: {loss}"):
        await session.admin.groups.delete(
            group, forget_progress=not keep_progress, delete_topics=with_topics
        )
        _tell(session, change_of("deleted", group, {}, loss))


async def _before(session: Session, group: str) -> Mapping[str, GroupSettings]:
    try:
        return await session.admin.groups.settings(group)
    except GroupNotFound:
        return {}


def _tell(session: Session, change: GroupChange) -> None:
    out = session.out
    if out.is_json:
        out.record(change)
        return
    where = ", ".join(each.broker for each in change.settings)
    about = change.remark or (f"on {where}" if where else "")
    out.line(f"group {change.group} {change.result}{': ' + about if about else ''}")


# Moving progress. A plan names the offset of every queue; the plan that was shown is the one that
# is applied, also when messages arrive in between. The offsets printed at the end are read back
# from the brokers.

#: Shown where the progress may be a Spark stream's report, which the stream does not read.
STREAMS_DO_NOT_MOVE = (
    "no member is online; if a Spark stream reports this progress: a stream goes on from its "
    "checkpoint and ignores the progress set here"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueMoveRecord:
    """What happens to the progress in one queue."""

    broker: str
    queue_id: int
    from_offset: int | None  #: null: the group has no progress here
    to_offset: int
    min_offset: int  #: what the queue had when the plan was made
    max_offset: int
    skipped: int  #: messages that the group will not get
    replayed: int  #: messages that it gets again
    read_back: int | None = None  #: progress after the move; null when nothing was changed
    problem: str | None = None  #: why it has no effect


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRecord:
    """How a group's progress in a topic is moved; one line for each topic."""

    group: str
    topic: str
    source: str | None  #: the group whose progress is copied
    result: str  #: moved, failed, unchanged, or `would be moved`
    is_dry_run: bool
    skipped: int
    replayed: int
    online: tuple[str, ...]  #: client ids of members that were online
    queues: tuple[QueueMoveRecord, ...]

    @classmethod
    def of(cls, plan: ResetPlan, result: str, report: ResetReport | None = None) -> MoveRecord:
        if report is None:
            queues = tuple(fill(QueueMoveRecord, move) for move in plan.moves)
        else:
            queues = tuple(fill(QueueMoveRecord, each.move, each) for each in report.outcomes)
        return fill(cls, plan, result=result, is_dry_run=result.startswith("would"), queues=queues)


@command(
    app,
    "reset",
    examples=(
        "orbitmq group reset billing orders --to 2026-01-31T12:00 --dry-run",
        "orbitmq group reset billing orders --to -2h",
        "orbitmq group reset billing orders --to earliest --yes",
        "orbitmq group reset billing orders --to 1500 --queue broker-a:3",
        "orbitmq group reset billing orders --by -100",
    ),
    prints=MoveRecord,
    changes=True,
    former={
        "--to-begin": "--to earliest",
        "--to-end": "--to latest",
        "--to-time": "--to",
        "--to-offset": "--to",
    },
)
async def reset(
    session: Session,
    group: GroupName,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="POSITION", help=f"{POSITIONS[0].upper()}{POSITIONS[1:]}."),
    ] = None,
    by: Annotated[
        int | None,
        typer.Option("--by", help="The number of messages to skip; a negative number goes back."),
    ] = None,
    queue: Queues = None,
) -> None:
    """Move a group's progress in a topic; its members may be online."""
    if (to is None) == (by is None):
        raise Misused(f"say where to with --to, which is {POSITIONS}, or with --by; give one")
    now = session.out.clock.now()
    target = ResetTo.shift(by or 0) if to is None else ResetTo.of(position_of(to, now, "--to"))
    plan = await session.admin.progress.plan_reset(
        group, topic, target, queues=queues_of(topic, queue)
    )
    await _carry_out(session, (plan,))


@command(
    app,
    "skip",
    examples=(
        "orbitmq group skip billing --dry-run",
        "orbitmq group skip billing orders --yes",
    ),
    prints=MoveRecord,
    changes=True,
)
async def skip(
    session: Session,
    group: GroupName,
    topic: Annotated[
        str,
        typer.Argument(
            metavar="[TOPIC]", help="The topic; by default all topics that the group consumes."
        ),
    ] = "",
    retries: Annotated[
        bool, typer.Option("--retries", help="Also skip messages that wait for a retry.")
    ] = False,
) -> None:
    """Skip the backlog: the group continues with new messages."""
    plans = await session.admin.progress.plan_skip(group, topic or None, retries=retries)
    await _carry_out(session, plans)


@command(
    app,
    "clone",
    examples=(
        "orbitmq group clone billing billing-next --dry-run",
        "orbitmq group clone billing billing-next --topic orders --yes",
    ),
    prints=MoveRecord,
    changes=True,
)
async def clone(
    session: Session,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The group to copy from.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The group to copy to.")],
    topic: Annotated[
        str | None, typer.Option("--topic", "-t", help="Only this topic; by default all.")
    ] = None,
) -> None:
    """Copy the progress of a group to another, which is created if it does not exist."""
    plans = await session.admin.progress.plan_clone(source, target, topic)
    await _carry_out(session, plans)


async def _carry_out(session: Session, plans: Sequence[ResetPlan]) -> None:
    out = session.out
    changing = [plan for plan in plans if plan.is_change]
    for plan in plans:
        if not out.is_json:
            _print_plan(session, plan)
        elif session.is_dry_run or not plan.is_change:
            out.record(MoveRecord.of(plan, "would be moved" if plan.is_change else "unchanged"))
    if not changing:
        out.note("nothing to move: the progress is there already")
        return
    # A Spark stream reports progress without being a member.
    if not any(plan.online or plan.source for plan in changing):
        out.note(STREAMS_DO_NOT_MOVE)
    if not session.may(_sentence(changing)):
        return
    failures = 0
    for plan in changing:
        try:
            report, result = await session.admin.progress.apply(plan), "moved"
        except ResetFailed as failed:
            report, result = failed.report, "failed"
            failures += 1
        if out.is_json:
            out.record(MoveRecord.of(plan, result, report))
        else:
            _print_report(session, report)
    if failures:
        raise typer.Exit(FAILED)


def _sentence(plans: Sequence[ResetPlan]) -> str:
    skipped = sum(plan.skipped for plan in plans)
    replayed = sum(plan.replayed for plan in plans)
    topics = ", ".join(repr(plan.topic) for plan in plans)
    return (
        f"this moves group {plans[0].group!r} in {topics}: {several(skipped, 'message')} skipped, "
        f"{count(replayed)} consumed again"
    )


def _print_plan(session: Session, plan: ResetPlan) -> None:
    origin = f", as group {plan.source}" if plan.source else ""
    session.out.table(
        Columns[QueueMove]()
        .text("queue", lambda move: f"{move.queue.broker}:{move.queue.id}")
        .number("has from", lambda move: count(move.min_offset))
        .number("up to", lambda move: count(move.max_offset))
        .number("progress", lambda move: count(move.from_offset))
        .number("goes to", lambda move: count(move.to_offset))
        .number("skipped", lambda move: count(move.skipped), bad=lambda move: move.skipped > 0)
        .number("again", lambda move: count(move.replayed)),
        plan.moves,
        title=f"Plan: group {plan.group} in topic {plan.topic}{origin}",
        empty="it has no queues",
    )
    if plan.online:
        session.out.line(f"online: {', '.join(plan.online)}")


def _print_report(session: Session, report: ResetReport) -> None:
    plan = report.plan
    session.out.table(
        Columns[QueueOutcome]()
        .text("queue", lambda each: f"{each.move.queue.broker}:{each.move.queue.id}")
        .number("wanted", lambda each: count(each.move.to_offset))
        .number("read back", lambda each: count(each.read_back))
        .text("problem", lambda each: each.problem or NOTHING, bad=lambda e: not e.is_effective),
        report.outcomes,
        title=f"Read back: group {plan.group} in topic {plan.topic}",
    )
    if not report.is_effective:
        failed = sum(not each.is_effective for each in report.outcomes)
        session.out.note(f"orbitmq: {several(failed, 'queue')} could not be moved")
