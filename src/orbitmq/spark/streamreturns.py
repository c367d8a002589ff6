"""Rows that streams give back, counted by the stream and the batch that they belong to.

What goes back is known in the middle of a batch, how many rows the batch had at its end, when Spark
reports it. Only the two together say how a stream is. So what goes back is kept by batch until the
report of that batch comes, and a stream has its own counts, from its own start on: neither what
another stream of the run gave back nor what came before a restart says anything about it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from orbitmq.spark.failing import FailureWatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from orbitmq.spark.consuming.settling import Settled

#: Batches of a stream that are told apart. Reports come at the end of each, so few would do.
_BATCHES: Final = 128


@dataclass(frozen=True, slots=True)
class Returned:
    """Rows that went back."""

    retried: int = 0  #: to be delivered again
    dead: int = 0  #: given up
    held: int = 0  #: not handled: to be delivered again without an attempt being spent
    #: Those that failed, by the attempts that were before.
    failures: Mapping[int, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.retried + self.dead + self.held

    def plus(self, other: Returned | Settled) -> Returned:
        return Returned(
            self.retried + other.retried,
            self.dead + other.dead,
            self.held + other.held,
            Counter(self.failures) + Counter(other.failures),
        )

    def since(self, earlier: Returned) -> Returned:
        return Returned(
            self.retried - earlier.retried,
            self.dead - earlier.dead,
            self.held - earlier.held,
            Counter(self.failures) - Counter(earlier.failures),
        )


class Batch(NamedTuple):
    """A batch of a stream."""

    query: str  #: the id of the stream, which stays the same when it is started again
    number: int


def batch_of(frame: DataFrame) -> Batch | None:
    """The batch that the calling thread works on; None outside of `foreachBatch`."""
    # A Connect session has no context; its batches run in a process of their own.
    context = getattr(frame.sparkSession, "sparkContext", None)
    if context is None:
        return None
    query = context.getLocalProperty("sql.streaming.queryId")
    number = context.getLocalProperty("streaming.sql.batchId")
    return None if query is None or number is None else Batch(query, int(number))


class ReturnCounts:
    """What the streams of a run gave back so far. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Returned()
        #: By stream: up to the end of each of its last batches, everything that went back.
        self._upto: dict[str, deque[tuple[int, Returned]]] = {}

    def add(self, batch: Batch | None, settled: Settled) -> None:
        """Rows went back; without a batch they are of no stream, and count in the total only."""
        with self._lock:
            self._total = self._total.plus(settled)
            if batch is None:
                return
            upto = self._upto.setdefault(batch.query, deque(maxlen=_BATCHES))
            before = upto[-1][1] if upto else Returned()
            # A stream that was started again repeats its last batch, or several of them.
            while upto and upto[-1][0] >= batch.number:
                upto.pop()
            upto.append((batch.number, before.plus(settled)))

    def total(self) -> Returned:
        with self._lock:
            return self._total

    def of(self, query: str, *, upto: int | None = None) -> Returned:
        """What a stream gave back, to the end of batch `upto`; None: so far."""
        with self._lock:
            batches = reversed(self._upto.get(query, ()))
            return next(
                (sofar for number, sofar in batches if upto is None or number <= upto), Returned()
            )


class StreamHealth:
    """What became of the rows of one stream since it was started. For one thread at a time."""

    def __init__(self, counts: ReturnCounts, query: str) -> None:
        """To be made when the stream is started."""
        self._counts = counts
        self._query = query
        self._began = self._seen = counts.of(query)
        self._watch = FailureWatch()
        self.done = 0  #: rows of batches that have ended, but for those that went back

    def batch_ended(self, now: float, number: int, rows: int) -> None:
        """A batch with rows, or several up to this one, was reported."""
        # Not less than was seen: that may be of a batch which is repeated, since the start.
        sofar = max(
            self._seen, self._counts.of(self._query, upto=number), key=lambda each: each.rows
        )
        new, self._seen = sofar.since(self._seen), sofar
        done = max(0, rows - new.rows)
        self.done += done
        self._watch.add(now, done, new.failures)

    @property
    def returned(self) -> Returned:
        """What went back, also in the batch that runs."""
        return self._counts.of(self._query).since(self._began)

    def share(self, now: float) -> float | None:
        return self._watch.share(now)

    def is_failing(self, now: float) -> bool:
        return self._watch.is_failing(now)
