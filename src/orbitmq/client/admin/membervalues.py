"""Connected clients as administration shows them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from orbitmq.client.admin.listing import Unreachable
from orbitmq.client.calltimes import CallTimes
from orbitmq.client.queue import Queue


@dataclass(frozen=True, slots=True, order=True)
class ClientConnection:
    """A connected client."""

    client_id: str
    #: By the broker that it is connected to.
    address: str
    language: str
    version: str


@dataclass(frozen=True, slots=True)
class GroupSubscription:
    """What a group wants of a topic."""

    topic: str
    expression: str
    #: `TAG` or `SQL92`.
    expression_type: str


@dataclass(frozen=True, slots=True)
class Members:
    """Who consumes in a group, and what."""

    group: str
    #: Each member once, however many brokers it is connected to.
    clients: tuple[ClientConnection, ...]
    #: `push`, `pull` or `pop`; empty when the broker does not say.
    consume_type: str
    #: `clustering` or `broadcasting`.
    model: str
    consume_from: str
    subscriptions: tuple[GroupSubscription, ...]
    unreachable: tuple[Unreachable, ...] = ()

    @property
    def client_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.client_id for each in self.clients))


class FindingKind(enum.StrEnum):
    """What can be wrong inside a group."""

    DIFFERENT_SUBSCRIPTIONS = "different subscriptions"
    DUPLICATE_CLIENT = "duplicate client"
    UNOWNED_QUEUE = "unowned queue"
    STALLED_QUEUE = "stalled queue"


@dataclass(frozen=True, slots=True)
class Variant:
    """What some members want of a topic; no expression: they do not subscribe to it."""

    clients: tuple[str, ...]
    expression: str | None = None
    expression_type: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong inside a group."""

    kind: FindingKind
    group: str
    #: What is wrong and what to do, in words.
    text: str
    topic: str | None = None
    variants: tuple[Variant, ...] = ()
    client_id: str | None = None
    addresses: tuple[str, ...] = ()
    queue: Queue | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedQueueInfo:
    """What a consumer holds of a queue. Times are epoch seconds, None for never."""

    queue: Queue
    commit_offset: int
    cached_messages: int
    cached_mib: int
    cached_min_offset: int
    cached_max_offset: int
    is_locked: bool
    is_dropped: bool
    last_pull_at: float | None
    last_consume_at: float | None
    last_lock_at: float | None


@dataclass(frozen=True, slots=True)
class TopicConsumption:
    """How fast a consumer works on a topic; rates per second, mean times in seconds."""

    pull_rate: float
    pull_time: float
    ok_rate: float
    failed_rate: float
    consume_time: float
    failed_last_hour: int
    #: How long calls of handlers took in the last minute. None: it has made none, or does not tell,
    #: as consumers of other languages do not.
    consume_times: CallTimes | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class RunningInfo:
    """What a consumer holds and does, by its own account."""

    group: str
    client_id: str
    queues: tuple[OwnedQueueInfo, ...]
    subscriptions: tuple[GroupSubscription, ...]
    topics: Mapping[str, TopicConsumption] = field(hash=False)
    #: Its settings, as it names them.
    properties: Mapping[str, str] = field(hash=False)
    #: What its threads do, when it was asked for that.
    stack: str | None = None

    @property
    def cached_messages(self) -> int:
        return sum(each.cached_messages for each in self.queues)

    @property
    def is_orderly(self) -> bool:
        return self.properties.get("PROP_CONSUMEORDERLY", "").lower() == "true"


@dataclass(frozen=True, slots=True)
class DirectResult:
    """What a consumer made of a message that it was told to consume."""

    #: `success`, `later`, `rollback`, `commit`, `throw_exception` or `return_null`.
    result: str
    remark: str | None
    seconds: float
    is_orderly: bool

    @property
    def is_success(self) -> bool:
        return self.result in ("success", "commit")
