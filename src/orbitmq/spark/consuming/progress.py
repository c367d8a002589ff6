"""What is told about a pipeline: of each batch, and altogether."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orbitmq.client.ranges.read import Gap
from orbitmq.client.routes import Queue
from orbitmq.errors import OrbitError


class PipelineState(enum.Enum):
    """Where a pipeline is in its life."""

    NEW = "new"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceReport:
    """What a task says about one piece. Travels from tasks to the driver."""

    #: The place of the piece in its batch.
    place: int
    #: Everything of the piece below this offset is done with.
    finished: int
    #: Stretches above it that are done with as well, one after the other: start, end, start, end.
    beyond: tuple[int, ...] = ()
    done: int = 0  #: messages that handlers were done with
    retried: int = 0  #: messages that a broker took back, to be delivered again
    dead: int = 0  #: messages given up
    kept: int = 0  #: failed messages that no broker took back
    held: int = 0  #: times that middleware kept a message from its handler, which is no failure
    failed: int = 0  #: calls of handlers that failed, by messages; in order, most are not sent back
    #: In order: how often messages that are not done with were tried, by their offset, and how long
    #: their queue pauses. A batch handler may fail with several messages at once.
    attempts: Mapping[int, int] = field(default_factory=dict)
    pause: float | None = None
    error: str | None = None  #: the last thing that went wrong
    #: Where an administrator wants the group to go on in the queue, if the task was told so.
    reset_to: int | None = None
    #: In order: what went wrong with the task as a whole, with its traceback.
    task_error: str | None = None
    #: In order: whether nothing was done because an attempt before was lost, and may be at work.
    is_postponed: bool = False
    #: Offsets that were passed over: the broker has had no messages there for long enough.
    missing: int = 0
    #: Where its master says that it has none, one after the other: start, end, start, end; and for
    #: how many seconds it has said so of each.
    gaps: tuple[int, ...] = ()
    gap_seconds: tuple[float, ...] = ()

    @property
    def known_gaps(self) -> list[Gap]:
        bounds = zip(self.gaps[::2], self.gaps[1::2], self.gap_seconds, strict=True)
        return [Gap(start, end, seconds) for start, end, seconds in bounds]

    @property
    def finished_beyond(self) -> int:
        """How many messages above `finished` are done with."""
        return sum(self.beyond[1::2]) - sum(self.beyond[::2])

    def below(self, offset: int) -> PieceReport:
        """The report without what was done, or found missing, from an offset on."""
        return replace(
            self,
            finished=min(self.finished, offset),
            beyond=tuple(min(bound, offset) for bound in self.beyond),
            missing=0,
            gaps=(),
            gap_seconds=(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What became of a batch."""

    number: int
    began_at: float  #: seconds since the epoch
    seconds: float
    planned: int = 0
    done: int = 0
    retried: int = 0
    dead: int = 0
    kept: int = 0
    held: int = 0  #: times that middleware kept a message from its handler, which is no failure
    missing: int = 0  #: offsets passed over, at which brokers have no messages any more
    failed: int = 0  #: attempts that failed: a message counts each time
    tasks: int = 0
    #: Messages that wait in each owned queue, as far as that is known.
    lag: Mapping[Queue, int] = field(default_factory=dict)
    error: str | None = None

    @property
    def handled(self) -> int:
        """Messages that were dealt with, well or badly."""
        return self.done + self.retried + self.dead

    @property
    def rows_per_second(self) -> float:
        return self.handled / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProgress:
    """Where a pipeline stands."""

    group: str
    client_id: str | None
    state: PipelineState
    batches: int = 0
    done: int = 0
    retried: int = 0
    dead: int = 0
    missing: int = 0  #: offsets passed over, at which brokers have no messages any more
    #: The queues that are consumed here, and how many messages wait in each.
    lag: Mapping[Queue, int] = field(default_factory=dict)
    last_batch: BatchReport | None = None
    last_error: str | None = None
    #: Of what was handled in the last five minutes, the share that failed; None: nothing was.
    failed_share: float | None = None
    is_failing: bool = False  #: it runs, and what it handles comes back

    @property
    def total_lag(self) -> int:
        return sum(self.lag.values())


# What can go wrong with a consumer group on Spark.


class PipelineFailed(OrbitError):
    """Too many of a pipeline's jobs failed one after the other; it has left its group."""

    def __init__(self, group: str, failures: int, last: str) -> None:
        self.group = group
        self.failures = failures
        self.last = last
        super().__init__(
            f"the pipeline of group {group!r} is given up after {failures} failed jobs in a row; "
            f"what was not handled comes again at the next start. The last one said: {last}"
        )


class RowsRefused(OrbitError):
    """A DataFrame that does not have what is needed."""


class ReturnFailed(OrbitError):
    """Failed messages that no broker took back."""

    retriable = True

    def __init__(self, count: int, reason: str) -> None:
        self.count = count
        self.reason = reason
        super().__init__(
            f"{count} failed message(s) could not be sent back, the first because: {reason}; let "
            "the batch fail, so that it is repeated"
        )
