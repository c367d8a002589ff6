"""Plans for moving a group's progress: where it goes, and what that skips or repeats.

A plan is made of offsets, whatever it was asked for: what people looked at is what is done, also
when messages arrive in between.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from orbitmq.client.admin.arguments import whole_number
from orbitmq.client.admin.errors import BadRequest, NotEffective
from orbitmq.client.admin.moments import Moment, moment
from orbitmq.client.queue import Queue
from orbitmq.clock import milliseconds


class _Kind(enum.Enum):
    BEGIN = "the beginning"
    END = "the end"
    TIME = "a time"
    OFFSET = "an offset"
    OFFSETS = "offsets by queue"
    SHIFT = "a number of messages"


@dataclass(frozen=True, slots=True)
class ResetTo:
    """Where a group is to go on. Made by `begin()`, `end()`, `time()`, `offset()` and so on."""

    kind: _Kind
    at: float = 0.0
    number: int = 0
    offsets: Mapping[Queue, int] = field(default_factory=dict, hash=False)

    @classmethod
    def begin(cls) -> ResetTo:
        """Everything that is still stored."""
        return cls(_Kind.BEGIN)

    @classmethod
    def end(cls) -> ResetTo:
        """Nothing that is stored now."""
        return cls(_Kind.END)

    @classmethod
    def first(cls) -> ResetTo:
        """The same as `begin()`, by the word that consumers have for it."""
        return cls.begin()

    @classmethod
    def last(cls) -> ResetTo:
        """The same as `end()`, by the word that consumers have for it."""
        return cls.end()

    @classmethod
    def of(cls, wanted: ResetTo | datetime | str) -> ResetTo:
        """A place as people write it: "first", "last", a time, or a `ResetTo`.

        A bare number is none: it could be an offset or a time. Raises `BadRequest`, which says
        what there is.
        """
        if isinstance(wanted, ResetTo):
            return wanted
        words = {"first": cls.begin, "begin": cls.begin, "last": cls.end, "end": cls.end}
        if isinstance(wanted, str) and (made := words.get(wanted.strip().lower())):
            return made()
        if isinstance(wanted, datetime | str):
            with contextlib.suppress(BadRequest):
                return cls.time(wanted)
        raise BadRequest(
            'a reset goes to "first", "last", a time (a datetime, or a text like '
            "2026-01-31T23:59:59), or what ResetTo makes: offset(), by_queue(), shift() and so on; "
            f"got {wanted!r}"
        )

    @classmethod
    def time(cls, at: Moment) -> ResetTo:
        """The first message of each queue that was stored at or after a time."""
        return cls(_Kind.TIME, at=moment(at, "the time of a reset"))

    @classmethod
    def offset(cls, offset: int) -> ResetTo:
        """The same offset in every queue concerned."""
        return cls(_Kind.OFFSET, number=_whole(offset, "an offset"))

    @classmethod
    def by_queue(cls, offsets: Mapping[Queue, int]) -> ResetTo:
        """An offset for each queue; other queues stay where they are."""
        if not offsets:
            raise BadRequest("a reset by queue must name at least one queue")
        checked = {queue: _whole(offset, "an offset") for queue, offset in offsets.items()}
        return cls(_Kind.OFFSETS, offsets=checked)

    @classmethod
    def shift(cls, messages: int) -> ResetTo:
        """So many messages back (negative) or forward, as far as there are any."""
        whole_number("a shift", messages, -(2**63), 2**63 - 1)
        return cls(_Kind.SHIFT, number=messages)

    @property
    def push_millis(self) -> int | None:
        """The same as a timestamp, for brokers that know no other way; None when it is none."""
        match self.kind:
            case _Kind.BEGIN:
                return 0
            case _Kind.END:
                return -1
            case _Kind.TIME:
                return milliseconds(self.at)
            case _:
                return None

    def __str__(self) -> str:
        return self.kind.value


def _whole(value: object, what: str) -> int:
    return whole_number(what, value, 0, 2**63 - 1)


@dataclass(frozen=True, slots=True)
class QueueMove:
    """What happens to the progress in one queue."""

    queue: Queue
    #: None: the group has no progress here.
    from_offset: int | None
    to_offset: int
    #: What the queue had when the plan was made.
    min_offset: int
    max_offset: int

    @property
    def is_change(self) -> bool:
        return self.from_offset != self.to_offset

    @property
    def skipped(self) -> int:
        """Messages that the group will not get."""
        return max(0, self.to_offset - self._base)

    @property
    def replayed(self) -> int:
        """Messages that it gets again."""
        if self.from_offset is None:
            return 0
        return max(0, min(self._base, self.max_offset) - self.to_offset)

    @property
    def _base(self) -> int:
        """Where it would go on without the move; without progress, at the beginning."""
        return max(self.from_offset or 0, self.min_offset)


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """What a reset will do, queue by queue. Nothing is changed until it is applied."""

    group: str
    topic: str
    to: ResetTo
    moves: tuple[QueueMove, ...]
    #: The members that were online when the plan was made.
    online: tuple[str, ...] = ()
    #: Whether all queues of the topic are in it.
    is_whole_topic: bool = True
    #: The group whose progress it copies, if it does.
    source: str | None = None

    @property
    def skipped(self) -> int:
        return sum(move.skipped for move in self.moves)

    @property
    def replayed(self) -> int:
        return sum(move.replayed for move in self.moves)

    @property
    def is_change(self) -> bool:
        return any(move.is_change for move in self.moves)


@dataclass(frozen=True, slots=True)
class QueueOutcome:
    """What became of a move, as read back from the broker."""

    move: QueueMove
    #: None when it could not be read.
    read_back: int | None
    #: Why it has no effect; None when it has.
    problem: str | None = None

    @property
    def is_effective(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True)
class ResetReport:
    """What became of a plan."""

    plan: ResetPlan
    outcomes: tuple[QueueOutcome, ...]

    @property
    def is_effective(self) -> bool:
        return all(outcome.is_effective for outcome in self.outcomes)


class ResetFailed(NotEffective):
    """A reset that took no effect in at least one queue; `report` says in which."""

    def __init__(self, report: ResetReport) -> None:
        self.report = report
        super().__init__(
            f"moving group {report.plan.group!r} in topic {report.plan.topic!r}",
            (
                f"{outcome.move.queue.broker}:{outcome.move.queue.id} {outcome.problem}"
                for outcome in report.outcomes
                if outcome.problem is not None
            ),
        )


def target(
    to: ResetTo, queue: Queue, *, progress: int | None, low: int, high: int, timed: int | None
) -> int | None:
    """Where the progress in a queue goes; None: it stays. `timed` is the offset of `to.at`."""
    match to.kind:
        case _Kind.BEGIN:
            return low
        case _Kind.END:
            return high
        case _Kind.TIME:
            return timed
        case _Kind.OFFSET:
            return _inside(to.number, queue, low, high)
        case _Kind.OFFSETS:
            offset = to.offsets.get(queue)
            return None if offset is None else _inside(offset, queue, low, high)
        case _Kind.SHIFT:
            return min(max((progress or 0) + to.number, low), high)


def is_by_time(to: ResetTo) -> bool:
    return to.kind is _Kind.TIME


def _inside(offset: int, queue: Queue, low: int, high: int) -> int:
    if not low <= offset <= high:
        raise BadRequest(
            f"offset {offset} is not in queue {queue.broker}:{queue.id} of {queue.topic!r}, which "
            f"has {low} to {high}"
        )
    return offset
