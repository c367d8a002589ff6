"""The cluster as the console last saw it: values that views are made of."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from orbitmq.client.admin import ClusterStatus, GroupSettings, Topic, Unreachable
from orbitmq.client.admin.membervalues import Finding
from orbitmq.client.names import is_retry_topic
from orbitmq.console.rates import REPORT_INTERVAL, WINDOW
from orbitmq.console.resentletters import Resent

#: Seconds that a message waits, and without progress, after which a group is called stalled.
STALLED_AFTER = 60.0
#: Seconds until the next report of a member that is a little late with it.
_LATE_REPORT = 1.1 * REPORT_INTERVAL
NONE_RESENT = Resent()


class Pace(enum.StrEnum):
    """What a group's lag does."""

    DONE = "up to date"
    KEEPING = "keeping up"
    DRAINING = "draining"
    GROWING = "falling behind"
    STALLED = "stalled"
    SILENT = "nobody consumes"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class TopicPart:
    """A group in a topic."""

    topic: str
    lag: int
    queues: int
    in_rate: float = 0.0
    out_rate: float = 0.0
    #: Age of the oldest message that waits; None: not known yet.
    lag_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSample:
    """A group now."""

    name: str
    settings: GroupSettings
    brokers: tuple[str, ...]
    parts: tuple[TopicPart, ...]
    is_uniform: bool = True
    #: None: it had no turn yet.
    members: int | None = None
    model: str = ""
    #: Seconds since its progress last moved while messages waited; 0 when it moves.
    still: float = 0.0
    #: All of them, and those of the last hour; whether they were sent again or not.
    dead_letters: int = 0
    dead_last_hour: int = 0
    resent: Resent = NONE_RESENT
    #: What brokers and connections say is wrong among its members.
    findings: tuple[Finding, ...] = ()
    #: Seconds without progress after which it is called stalled.
    patience: float = STALLED_AFTER
    #: Seconds over which its rates were measured.
    measured: float = WINDOW

    @property
    def lag(self) -> int:
        return sum(part.lag for part in self.parts)

    @property
    def retry_lag(self) -> int:
        return sum(part.lag for part in self.parts if is_retry_topic(part.topic))

    @property
    def lag_seconds(self) -> float | None:
        """Age of the oldest message that waits; 0 when none does."""
        if not self.lag:
            return 0.0
        return max((part.lag_seconds for part in self.parts if part.lag_seconds), default=None)

    @property
    def open_letters(self) -> int:
        """Dead letters that were looked up and that nobody has sent again."""
        return self.resent.open

    @property
    def open_last_hour(self) -> int:
        """Of these, those that died in the last hour."""
        return self.resent.open_last_hour

    @property
    def unknown_letters(self) -> int:
        """Dead letters that were not looked up: nobody knows whether they were sent again."""
        return max(0, self.dead_letters - self.resent.looked)

    @property
    def unknown_last_hour(self) -> int:
        """Of these, those that died in the last hour."""
        looked = self.resent.open_last_hour + self.resent.resent_last_hour
        return max(0, self.dead_last_hour - looked)

    @property
    def in_rate(self) -> float:
        return sum(part.in_rate for part in self.parts)

    @property
    def out_rate(self) -> float:
        return sum(part.out_rate for part in self.parts)

    @property
    def drains_in(self) -> float | None:
        """Seconds until nothing waits, at the present pace; None: never."""
        if not self.lag:
            return 0.0
        gain = self.out_rate - self.in_rate
        return self.lag / gain if gain > 0.01 else None

    @property
    def pace(self) -> Pace:
        if not self.settings.is_enabled:
            return Pace.PAUSED
        if not self.lag:
            return Pace.DONE
        if self.members == 0 and self.out_rate <= 0:
            return Pace.SILENT
        age = self.lag_seconds
        if self.still >= self.patience and (age is None or age >= STALLED_AFTER):
            return Pace.STALLED
        gain = self.out_rate - self.in_rate
        # Members report every few seconds: what one report tells, more or less, is noise.
        noise = self.in_rate * _LATE_REPORT / max(self.measured, _LATE_REPORT)
        margin = max(0.5, noise)
        if gain > margin:
            return Pace.DRAINING
        is_judged = self.measured >= WINDOW
        return Pace.GROWING if is_judged and gain < -margin else Pace.KEEPING


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSample:
    """A topic now."""

    topic: Topic
    in_rate: float = 0.0
    #: None: it had no turn yet.
    messages: int | None = None
    first_stored_at: float | None = None
    last_stored_at: float | None = None
    #: The groups that have progress in it, and how far each is behind.
    groups: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return self.topic.name

    @property
    def worst(self) -> tuple[str, int] | None:
        """The group that is furthest behind."""
        return max(self.groups.items(), key=lambda each: each[1], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything at one time."""

    at: float
    cluster: ClusterStatus
    topics: Mapping[str, TopicSample] = field(hash=False)
    groups: Mapping[str, GroupSample] = field(hash=False)
    unreachable: tuple[Unreachable, ...] = ()
    #: Messages per second that are stored and that are finished, by broker.
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    #: Requests that this look took.
    requests: int = 0
    seconds: float = 0.0

    @property
    def in_rate(self) -> float:
        return sum(came for came, _ in self.rates.values())

    @property
    def out_rate(self) -> float:
        """What groups finish."""
        return sum(group.out_rate for group in self.groups.values())

    @property
    def lag(self) -> int:
        return sum(group.lag for group in self.groups.values())

    @property
    def oldest(self) -> float:
        return max((group.lag_seconds or 0.0 for group in self.groups.values()), default=0.0)

    @property
    def open_letters(self) -> int:
        return sum(group.open_letters for group in self.groups.values())

    @property
    def unknown_letters(self) -> int:
        return sum(group.unknown_letters for group in self.groups.values())

    @property
    def resent_letters(self) -> int:
        return sum(group.resent.count for group in self.groups.values())

    @property
    def open_last_hour(self) -> int:
        return sum(group.open_last_hour for group in self.groups.values())

    @property
    def unknown_last_hour(self) -> int:
        return sum(group.unknown_last_hour for group in self.groups.values())

    @property
    def dead_letters(self) -> int:
        return sum(group.dead_letters for group in self.groups.values())

    @property
    def dead_last_hour(self) -> int:
        return sum(group.dead_last_hour for group in self.groups.values())
