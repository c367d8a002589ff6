"""What a driver knows of one of its queues, from one batch to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orbitmq.client.rangenotes import Gap

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.ranges import QueueRange
    from orbitmq.spark.consuming.ledger import Ledger


@dataclass(slots=True, eq=False)
class Portion:
    """An owned queue, as far as batches are concerned."""

    owned: OwnedQueue
    ledger: Ledger
    #: The offset that the next message will get, as was last heard.
    end: int
    #: In order: how often messages that are not done with were tried, by their offset, and when
    #: they are tried again.
    attempts: dict[int, int] = field(default_factory=dict)
    not_before: float = float("-inf")
    #: When the broker is next asked where the group stands, what it said the last time if that was
    #: something else, and whether this was told.
    compared_next: float = float("-inf")
    doubted: int | None = None
    is_contested: bool = False
    #: For how many seconds a master has said that it has nothing between two offsets, by these.
    gaps: dict[tuple[int, int], float] = field(default_factory=dict)
    #: In order: how many tasks in a row have failed with it.
    failures: int = 0

    def attempts_in(self, start: int, end: int) -> dict[int, int]:
        return {offset: tried for offset, tried in self.attempts.items() if start <= offset < end}

    def remember(self, attempts: Mapping[int, int]) -> None:
        """Take what a task says; of messages that it did not come to, what was known stays."""
        known = {**self.attempts, **attempts}
        first = self.ledger.committed
        self.attempts = {offset: tried for offset, tried in known.items() if offset >= first}

    def move(self, offset: int) -> None:
        """Go on from another offset; those beyond it will be other messages."""
        self.ledger.move(offset)
        self.attempts.clear()
        self.gaps.clear()
        self.not_before = float("-inf")

    def gaps_in(self, start: int, end: int) -> tuple[Gap, ...]:
        return tuple(
            Gap(*bounds, seconds)
            for bounds, seconds in self.gaps.items()
            if bounds[0] < end and start < bounds[1]
        )

    def hear_of(self, told: Sequence[tuple[QueueRange, Iterable[Gap]]]) -> None:
        """Take what the tasks of a batch say about gaps in their ranges.

        What a task was given of, and says no more, is none. A gap may be in several ranges, and go
        beyond the last: each task is heard from the start of its range to that of the next.
        """
        told = sorted(told, key=lambda each: each[0].start)
        self.gaps = {
            (start, end): seconds
            for (start, end), seconds in self.gaps.items()
            if all(end <= whole.start or whole.end <= start for whole, _ in told)
        }
        for number, (whole, gaps) in enumerate(told):
            following = told[number + 1 :]
            for start, end, seconds in gaps:
                first = max(start, whole.start)
                upto = min(end, following[0][0].start) if following else end
                if first < upto:
                    self.gaps[first, upto] = max(seconds, self.gaps.get((first, upto), 0.0))

    def forget_gaps(self) -> None:
        """Those that are passed are of no interest any more."""
        done = self.ledger.committed
        self.gaps = {bounds: seconds for bounds, seconds in self.gaps.items() if bounds[1] > done}
