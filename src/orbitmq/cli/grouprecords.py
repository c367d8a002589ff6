"""Consumer groups as `--json` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orbitmq.cli.jsonoutput import OLD_NAME
from orbitmq.client.admin.groupvalues import (
    GroupDetails,
    GroupProgress,
    GroupSettings,
    GroupSummary,
    QueueProgress,
    TopicLag,
)
from orbitmq.client.admin.membervalues import (
    ClientConnection,
    Finding,
    GroupSubscription,
    OwnedQueueInfo,
    RunningInfo,
    TopicConsumption,
)
from orbitmq.client.calltimes import CallTimes
from orbitmq.console.laterattempts import LaterAttempts


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLagRecord:
    """How far a group is behind in a topic."""

    topic: str
    lag: int  #: messages
    lag_seconds: float | None  #: age of the oldest that waits; null when it was not asked for
    queues: int
    consume_rate: float  #: messages per second that it pulls, over the last minute

    @classmethod
    def of(cls, lag: TopicLag) -> TopicLagRecord:
        return cls(
            topic=lag.topic,
            lag=lag.lag,
            lag_seconds=lag.lag_seconds,
            queues=lag.queues,
            consume_rate=lag.consume_rate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A group."""

    group: str
    state: str  #: online, offline, paused, or unknown with --quick
    lag: int  #: messages that wait, in all topics, those that failed before included
    retry_lag: int  #: of them, those that failed before
    lag_seconds: float | None  #: age of the oldest that waits; null with --quick
    consume_rate: float  #: messages per second that it pulls, over the last minute
    members: int | None  #: null with --quick
    brokers: tuple[str, ...]
    is_uniform: bool  #: whether all brokers have it configured alike
    topics: tuple[TopicLagRecord, ...]

    @classmethod
    def of(cls, group: GroupSummary) -> GroupRecord:
        members = None
        if group.was_asked_for_members:
            members = 0 if group.members is None else len(group.members.client_ids)
        return cls(
            group=group.group,
            state=group.state.value,
            lag=group.lag,
            retry_lag=group.retry_lag,
            lag_seconds=group.lag_seconds,
            consume_rate=group.consume_rate,
            members=members,
            brokers=group.brokers,
            is_uniform=group.is_uniform,
            topics=tuple(map(TopicLagRecord.of, group.topics)),
        )


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
    def of(cls, broker: str, settings: GroupSettings) -> GroupSettingsRecord:
        return cls(
            broker=broker,
            is_enabled=settings.is_enabled,
            max_retries=settings.max_retries,
            retry_queues=settings.retry_queues,
            is_orderly=settings.is_orderly,
            may_broadcast=settings.may_broadcast,
            consume_timeout_seconds=settings.consume_timeout,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRecord:
    """A member of a group."""

    client_id: str
    address: str  #: by the broker that it is connected to
    language: str
    version: str

    @classmethod
    def of(cls, client: ClientConnection) -> ClientRecord:
        return cls(
            client_id=client.client_id,
            address=client.address,
            language=client.language,
            version=client.version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionRecord:
    """What a group wants of a topic."""

    topic: str
    expression: str
    expression_type: str  #: TAG or SQL92

    @classmethod
    def of(cls, subscription: GroupSubscription) -> SubscriptionRecord:
        return cls(
            topic=subscription.topic,
            expression=subscription.expression,
            expression_type=subscription.expression_type,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueProgressRecord:
    """How far a group is in a queue."""

    topic: str
    broker: str
    queue_id: int
    broker_offset: int  #: where the next message will be stored
    consumer_offset: int  #: the next message that is not finished
    pull_offset: int | None  #: the next message that is not pulled; null when brokers do not say
    in_flight: int | None  #: pulled and not finished
    lag: int
    lag_seconds: float | None  #: age of the oldest that waits
    finished_stored_at: float | None  #: when the last finished message was stored
    owner: str | None  #: client id of the member that has the queue
    last_consumed_at: float | None = field(metadata=OLD_NAME)

    @classmethod
    def of(cls, place: QueueProgress) -> QueueProgressRecord:
        return cls(
            topic=place.queue.topic,
            broker=place.queue.broker,
            queue_id=place.queue.id,
            broker_offset=place.broker_offset,
            consumer_offset=place.consumer_offset,
            pull_offset=place.pull_offset,
            in_flight=place.in_flight,
            lag=place.lag,
            lag_seconds=place.lag_seconds,
            finished_stored_at=place.last_consumed_at,
            owner=place.owner,
            last_consumed_at=place.last_consumed_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFindingRecord:
    """Something that is wrong inside a group."""

    kind: str  #: different subscriptions, duplicate client, unowned queue or stalled queue
    text: str  #: what is wrong and what to do
    topic: str | None
    client_id: str | None

    @classmethod
    def of(cls, finding: Finding) -> GroupFindingRecord:
        return cls(
            kind=finding.kind.value,
            text=finding.text,
            topic=finding.topic,
            client_id=finding.client_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimesRecord:
    """How long handlers took in the last minute, for a topic, by all members that tell it."""

    topic: str
    calls: int
    p50_seconds: float | None  #: what half of the calls took at most
    p95_seconds: float | None
    p99_seconds: float | None
    longest_seconds: float | None


def call_times_of(progress: GroupProgress) -> tuple[CallTimesRecord, ...]:
    return tuple(
        CallTimesRecord(
            topic=topic,
            calls=times.calls,
            p50_seconds=times.p50,
            p95_seconds=times.p95,
            p99_seconds=times.p99,
            longest_seconds=times.longest,
        )
        for topic, times in progress.call_times.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDetailsRecord:
    """Everything about one group."""

    group: str
    state: str  #: online, offline or paused
    lag: int  #: messages that wait, in all topics, those that failed before included
    retry_lag: int  #: of them, those that failed before
    #: Failed, and wait for the delay before their next attempt: not in the lag; null when brokers
    #: do not tell.
    later: int | None
    is_later_all: bool  #: false: there may be more than `later`, too many wait to look at each one
    lag_seconds: float | None  #: age of the oldest that waits; those in `later` not included
    consume_rate: float  #: messages per second that it pulls, over the last minute
    dead_letters: int
    consume_type: str | None  #: push, pull or pop; null while nobody is online
    model: str | None  #: clustering or broadcasting
    consume_from: str | None
    members: tuple[ClientRecord, ...]
    subscriptions: tuple[SubscriptionRecord, ...]
    settings: tuple[GroupSettingsRecord, ...]
    queues: tuple[QueueProgressRecord, ...]
    #: Empty when nobody has worked lately, and when all members consume with other clients.
    handlers: tuple[CallTimesRecord, ...]
    findings: tuple[GroupFindingRecord, ...]

    @classmethod
    def of(cls, found: GroupDetails, later: LaterAttempts | None) -> GroupDetailsRecord:
        members, progress = found.members, found.progress
        return cls(
            group=found.group,
            state=found.state.value,
            lag=progress.lag,
            retry_lag=progress.retry_lag,
            later=None if later is None else later.count,
            is_later_all=later is not None and later.is_all,
            lag_seconds=progress.lag_seconds,
            consume_rate=progress.consume_rate,
            dead_letters=found.dead_letters,
            consume_type=None if members is None else members.consume_type,
            model=None if members is None else members.model,
            consume_from=None if members is None else members.consume_from,
            members=() if members is None else tuple(map(ClientRecord.of, members.clients)),
            subscriptions=()
            if members is None
            else tuple(map(SubscriptionRecord.of, members.subscriptions)),
            settings=tuple(
                GroupSettingsRecord.of(broker, settings)
                for broker, settings in sorted(found.settings.items())
            ),
            queues=tuple(map(QueueProgressRecord.of, progress.queues)),
            handlers=call_times_of(progress),
            findings=tuple(map(GroupFindingRecord.of, found.findings)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedQueueRecord:
    """What a member holds of a queue."""

    topic: str
    broker: str
    queue_id: int
    commit_offset: int
    cached_messages: int
    is_locked: bool
    last_pull_at: float | None
    last_consume_at: float | None

    @classmethod
    def of(cls, held: OwnedQueueInfo) -> OwnedQueueRecord:
        return cls(
            topic=held.queue.topic,
            broker=held.queue.broker,
            queue_id=held.queue.id,
            commit_offset=held.commit_offset,
            cached_messages=held.cached_messages,
            is_locked=held.is_locked,
            last_pull_at=held.last_pull_at,
            last_consume_at=held.last_consume_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionRecord:
    """How fast a member works on a topic."""

    topic: str
    pull_rate: float  #: messages per second
    pull_seconds: float  #: from asking for messages to having some
    ok_rate: float
    failed_rate: float
    consume_seconds: float  #: for one call of the handler, on average
    #: What so many of 100 calls took at most; null when it does not tell, as other clients.
    consume_p50_seconds: float | None
    consume_p95_seconds: float | None
    consume_p99_seconds: float | None
    consume_longest_seconds: float | None
    failed_last_hour: int

    @classmethod
    def of(cls, topic: str, consumption: TopicConsumption) -> ConsumptionRecord:
        times = consumption.consume_times or CallTimes({})
        return cls(
            topic=topic,
            pull_rate=consumption.pull_rate,
            pull_seconds=consumption.pull_time,
            ok_rate=consumption.ok_rate,
            failed_rate=consumption.failed_rate,
            consume_seconds=consumption.consume_time,
            consume_p50_seconds=times.p50,
            consume_p95_seconds=times.p95,
            consume_p99_seconds=times.p99,
            consume_longest_seconds=times.longest,
            failed_last_hour=consumption.failed_last_hour,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """What a member holds and does, by its own account."""

    group: str
    client_id: str
    is_orderly: bool
    cached_messages: int
    queues: tuple[OwnedQueueRecord, ...]
    subscriptions: tuple[SubscriptionRecord, ...]
    topics: tuple[ConsumptionRecord, ...]
    properties: Mapping[str, str]  #: its settings, as it names them
    stack: str | None  #: what its threads do, with --stack

    @classmethod
    def of(cls, info: RunningInfo) -> MemberRecord:
        return cls(
            group=info.group,
            client_id=info.client_id,
            is_orderly=info.is_orderly,
            cached_messages=info.cached_messages,
            queues=tuple(map(OwnedQueueRecord.of, info.queues)),
            subscriptions=tuple(map(SubscriptionRecord.of, info.subscriptions)),
            topics=tuple(
                ConsumptionRecord.of(topic, each) for topic, each in sorted(info.topics.items())
            ),
            properties=dict(info.properties),
            stack=info.stack,
        )


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
        settings=tuple(
            GroupSettingsRecord.of(broker, each) for broker, each in sorted(settings.items())
        ),
        remark=remark,
    )
