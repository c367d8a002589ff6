"""Consumer groups as administration shows them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from orbitmq.client.admin.listing import Unreachable
from orbitmq.client.admin.membervalues import Finding, Members, RunningInfo
from orbitmq.client.calltimes import CallTimes
from orbitmq.client.names import is_retry_topic
from orbitmq.client.queue import Queue


class GroupState(enum.StrEnum):
    """Whether anybody consumes."""

    ONLINE = "online"
    OFFLINE = "offline"
    PAUSED = "paused"
    #: Nobody was asked.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How a group is configured on a broker."""

    group: str
    is_enabled: bool = True
    may_broadcast: bool = True
    may_start_at_min: bool = True
    is_orderly: bool = False
    retry_queues: int = 1
    max_retries: int = 16
    consume_timeout: float = 900.0
    notifies_members: bool = True
    attributes: Mapping[str, str] | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class TopicLag:
    """How far a group is behind in a topic."""

    topic: str
    lag: int
    queues: int
    consume_rate: float
    #: Age of the oldest message that waits; 0 when none does, None when it was not asked for.
    lag_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group in a list."""

    settings: GroupSettings
    brokers: tuple[str, ...]
    topics: tuple[TopicLag, ...]
    #: None when nobody was asked.
    members: Members | None = None
    was_asked_for_members: bool = False
    #: Whether all brokers have it configured alike.
    is_uniform: bool = True

    @property
    def group(self) -> str:
        return self.settings.group

    @property
    def state(self) -> GroupState:
        if not self.settings.is_enabled:
            return GroupState.PAUSED
        if not self.was_asked_for_members:
            return GroupState.UNKNOWN
        return GroupState.ONLINE if self.members is not None else GroupState.OFFLINE

    @property
    def lag(self) -> int:
        """Messages that wait, those that failed before included."""
        return sum(each.lag for each in self.topics)

    @property
    def retry_lag(self) -> int:
        """Of them, those that failed before."""
        return sum(each.lag for each in self.topics if is_retry_topic(each.topic))

    @property
    def lag_seconds(self) -> float | None:
        """Age of the oldest message that waits; 0 when none does."""
        if not self.lag:
            return 0.0
        return max((each.lag_seconds for each in self.topics if each.lag_seconds), default=None)

    @property
    def consume_rate(self) -> float:
        return sum(each.consume_rate for each in self.topics)


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """How far a group is in a queue."""

    queue: Queue
    #: Where the next message will be stored.
    broker_offset: int
    #: The next message that the group has not finished.
    consumer_offset: int
    #: The next message that nobody of the group has pulled; None when the broker does not say.
    pull_offset: int | None
    #: When the last finished message was stored; None when there is none.
    last_consumed_at: float | None
    #: Age of the oldest message that waits; 0 when none does, None when the broker cannot say.
    lag_seconds: float | None
    #: The member that has the queue; None when nobody says so.
    owner: str | None = None

    @property
    def lag(self) -> int:
        return max(0, self.broker_offset - self.consumer_offset)

    @property
    def in_flight(self) -> int | None:
        """Pulled and not finished."""
        if self.pull_offset is None:
            return None
        return max(0, self.pull_offset - self.consumer_offset)


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How far a group is in all its queues."""

    group: str
    queues: tuple[QueueProgress, ...]
    #: Messages per second that it pulls.
    consume_rate: float
    unreachable: tuple[Unreachable, ...] = ()
    #: How long calls of handlers took in the last minute, by topic: of all members together that
    #: were asked, had calls and tell. Who consumes with another client than this one does not.
    call_times: Mapping[str, CallTimes] = field(default_factory=dict, hash=False)

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.queue.topic for each in self.queues))

    @property
    def lag(self) -> int:
        return sum(each.lag for each in self.queues)

    @property
    def retry_lag(self) -> int:
        return sum(each.lag for each in self.queues if is_retry_topic(each.queue.topic))

    @property
    def lag_seconds(self) -> float | None:
        """Age of the oldest message that waits; 0 when none does."""
        if not self.lag:
            return 0.0
        return max((each.lag_seconds for each in self.queues if each.lag_seconds), default=None)

    def of_topic(self, topic: str) -> tuple[QueueProgress, ...]:
        return tuple(each for each in self.queues if each.queue.topic == topic)


@dataclass(frozen=True, slots=True)
class GroupDetails:
    """Everything about one group."""

    group: str
    #: By broker.
    settings: Mapping[str, GroupSettings] = field(hash=False)
    members: Members | None
    findings: tuple[Finding, ...]
    progress: GroupProgress
    #: Messages in its dead-letter topic.
    dead_letters: int
    #: What members say of themselves, by client id; those that do not answer are missing.
    running: Mapping[str, RunningInfo] = field(default_factory=dict, hash=False)

    @property
    def state(self) -> GroupState:
        if any(not each.is_enabled for each in self.settings.values()):
            return GroupState.PAUSED
        return GroupState.ONLINE if self.members is not None else GroupState.OFFLINE
