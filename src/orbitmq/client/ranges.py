"""Stretches of a queue, and what is said when one is not there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from orbitmq.client.errors import ClientError, SettingError
from orbitmq.client.queue import Queue

#: The filter that lets every message pass.
EVERYTHING: Final = "*"


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """The messages of a queue from `start` up to, and without, `end`."""

    queue: Queue
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise SettingError(
                f"a range must start at 0 or later and end where it starts or later, got "
                f"{self.start} to {self.end} of {self.queue}"
            )

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.queue}[{self.start}, {self.end})"


@dataclass(frozen=True, slots=True)
class RangeFilter:
    """Which messages of a range are wanted; the broker leaves the others out."""

    expression: str = EVERYTHING
    #: `TAG` or `SQL92`.
    kind: str = "TAG"

    @property
    def passes_all(self) -> bool:
        return self.kind == "TAG" and self.expression in ("", EVERYTHING)


class OffsetsGone(ClientError):
    """Messages that are wanted are not at the broker any more, or not yet."""

    def __init__(self, wanted: QueueRange, low: int, high: int) -> None:
        self.wanted = wanted
        #: What the broker has: from `low` up to, and without, `high`.
        self.low = low
        self.high = high
        super().__init__(
            f"{wanted.queue} was asked for offsets {wanted.start} to {wanted.end} (exclusive) and "
            f"has {low} to {high}"
        )

    def __reduce__(self) -> tuple[type[OffsetsGone], tuple[QueueRange, int, int]]:
        return type(self), (self.wanted, self.low, self.high)
