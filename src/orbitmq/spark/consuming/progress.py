"""Reports of tasks, batches and pipelines, and the errors of consumer groups on Spark."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from orbitmq.client.routes import Queue
from orbitmq.errors import OrbitError


class PipelineState(enum.Enum):
    """The life cycle of a pipeline."""

    NEW = "new"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceReport:
    """A task's report about one piece, sent to the driver."""

    #: The index of the piece in its batch.
    place: int
    #: Everything of the piece below this offset is done.
    finished: int
    #: Finished ranges above it: start, end, start, end.
    beyond: tuple[int, ...] = ()
    done: int = 0  #: messages that handlers finished
    retried: int = 0  #: messages sent back, to be delivered again
    dead: int = 0  #: messages given up
    kept: int = 0  #: failed messages that no broker took back
    held: int = 0  #: times that middleware kept a message from its handler, which is no failure
    failed: int = 0  #: calls of handlers that failed, by messages; in order, most are not sent back
    #: In order: attempts of unfinished messages by offset, and the pause of their queue. A batch
    #: handler may fail with several messages in one call.
    attempts: Mapping[int, int] = field(default_factory=dict)
    pause: float | None = None
    error: str | None = None  #: the last error
    #: The offset to which an administrator reset the group, if a pull reported it.
    reset_to: int | None = None
    #: In order: the error of the task as a whole, with its traceback.
    task_error: str | None = None
    #: In order: whether nothing was done because a lost earlier attempt may still be running.
    is_postponed: bool = False
    missing: int = 0  #: offsets that were skipped, because the master has no messages there
    #: While the task runs: whether it has ended its work on this queue.
    has_ended: bool = False

    @property
    def finished_beyond(self) -> int:
        """The number of finished messages above `finished`."""
        return sum(self.beyond[1::2]) - sum(self.beyond[::2])

    @property
    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not (self.done or self.failed or self.held or self.retried or self.dead)

    def since(self, earlier: PieceReport) -> PieceReport:
        """This with the counts, and an error, since an earlier report."""
        counts = {name: getattr(self, name) - getattr(earlier, name) for name in _COUNTS}
        is_known = self.error == earlier.error and not (counts["failed"] or counts["kept"])
        return replace(self, error=None if is_known else self.error, **counts)


#: What a report counts.
_COUNTS: Final = ("done", "retried", "dead", "kept", "held", "failed", "missing")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The result of a batch, or of the time since the last report of a job that follows queues."""

    number: int
    began_at: float  #: seconds since the epoch
    seconds: float
    planned: int = 0
    done: int = 0
    retried: int = 0
    dead: int = 0
    kept: int = 0
    held: int = 0  #: times that middleware kept a message from its handler, which is no failure
    missing: int = 0  #: offsets skipped because brokers have no messages there any more
    failed: int = 0  #: attempts that failed: a message counts each time
    tasks: int = 0
    #: Messages that wait in each owned queue, as far as known.
    lag: Mapping[Queue, int] = field(default_factory=dict)
    error: str | None = None

    @property
    def handled(self) -> int:
        """Messages that were handled, successfully or not."""
        return self.done + self.retried + self.dead

    @property
    def rows_per_second(self) -> float:
        return self.handled / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProgress:
    """The progress of a pipeline."""

    group: str
    client_id: str | None
    state: PipelineState
    batches: int = 0
    done: int = 0
    retried: int = 0
    dead: int = 0
    missing: int = 0  #: offsets skipped because brokers have no messages there any more
    #: Messages that wait in each owned queue.
    lag: Mapping[Queue, int] = field(default_factory=dict)
    last_batch: BatchReport | None = None
    last_error: str | None = None
    #: The share of attempts in the last five minutes that failed; None without any.
    failed_share: float | None = None
    is_failing: bool = False  #: it runs, and most attempts or jobs fail

    @property
    def total_lag(self) -> int:
        return sum(self.lag.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """How many rows of DataFrames were sent back."""

    retried: int = 0  #: to be delivered again
    dead: int = 0  #: given up
    #: Kept from the handler by middleware: they come again and did not fail.
    held: int = 0

    @property
    def rows(self) -> int:
        return self.retried + self.dead + self.held

    def plus(self, other: Settled) -> Settled:
        return Settled(
            retried=self.retried + other.retried,
            dead=self.dead + other.dead,
            held=self.held + other.held,
        )

    def since(self, earlier: Settled) -> Settled:
        return Settled(
            retried=self.retried - earlier.retried,
            dead=self.dead - earlier.dead,
            held=self.held - earlier.held,
        )


class PipelineFailed(OrbitError):
    """Too many jobs of a pipeline failed in a row; it has left its group."""

    def __init__(self, group: str, failures: int, last: str) -> None:
        self.group = group
        self.failures = failures
        self.last = last
        super().__init__(
            f"the pipeline of group {group!r} gave up after {failures} failed jobs in a row; "
            f"unhandled messages come again at the next start. The last error: {last}"
        )


class RowsRefused(OrbitError):
    """A DataFrame without the required columns or values."""


class ReturnFailed(OrbitError):
    """Failed messages could not be sent back."""

    retriable = True

    def __init__(self, count: int, reason: str) -> None:
        self.count = count
        self.reason = reason
        super().__init__(
            f"{count} failed message(s) could not be sent back, the first because: {reason}; let "
            "the batch fail, so that it is repeated"
        )
