"""Topics as `--json` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orbitmq.client.admin.topicvalues import Route, Topic, TopicRates, TopicStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRecord:
    """A topic on all brokers that have it."""

    topic: str
    kind: str  #: normal, fifo, delay, transaction, mixed, retry, dlq or system
    write_queues: int  #: on all brokers together
    read_queues: int  #: on all brokers together
    permission: str  #: rw, r, w or -
    is_ordered: bool
    is_uniform: bool  #: whether all brokers have it configured alike
    brokers: tuple[str, ...]
    messages: int | None = None  #: with --status
    in_rate: float | None = None  #: messages per second, with --status
    first_stored_at: float | None = None  #: with --status; null when it is empty
    last_stored_at: float | None = None  #: with --status; null when it is empty

    @classmethod
    def of(cls, topic: Topic) -> TopicRecord:
        return cls(
            topic=topic.name,
            kind=topic.kind.value,
            write_queues=topic.write_queues,
            read_queues=topic.read_queues,
            permission=topic.permission.letters,
            is_ordered=topic.is_ordered,
            is_uniform=topic.is_uniform,
            brokers=tuple(each.broker for each in topic.brokers),
        )

    def with_status(self, status: TopicStatus) -> TopicRecord:
        return replace(
            self,
            messages=status.messages,
            in_rate=status.in_rate,
            first_stored_at=status.first_stored_at,
            last_stored_at=status.last_stored_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOnBrokerRecord:
    """How a topic is configured on one broker, and where that is."""

    broker: str
    cluster: str | None  #: null when clients are not told of it
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
    """All that was found out about a topic as one record."""
    routed = {each.broker: each for each in route.brokers}
    return TopicDetails(
        topic=topic.name,
        kind=topic.kind.value,
        permission=topic.permission.letters,
        is_ordered=topic.is_ordered,
        messages=status.messages,
        first_stored_at=status.first_stored_at,
        last_stored_at=status.last_stored_at,
        in_rate=rates.incoming.messages,
        in_bytes_rate=rates.incoming.bytes,
        messages_today=rates.incoming.messages_today,
        brokers=tuple(
            TopicOnBrokerRecord(
                broker=each.broker,
                cluster=routed[each.broker].cluster if each.broker in routed else None,
                addresses={
                    str(number): address
                    for number, address in sorted(routed[each.broker].addresses.items())
                }
                if each.broker in routed
                else {},
                write_queues=each.write_queues,
                read_queues=each.read_queues,
                permission=each.permission.letters,
                is_ordered=each.is_ordered,
                attributes=dict(each.attributes),
            )
            for each in topic.brokers
        ),
        queues=tuple(
            QueueRecord(
                broker=each.queue.broker,
                queue_id=each.queue.id,
                min_offset=each.min_offset,
                max_offset=each.max_offset,
                messages=each.messages,
                first_stored_at=each.first_stored_at,
                last_stored_at=each.last_stored_at,
            )
            for each in status.queues
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
