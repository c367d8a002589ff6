"""Lists that say whether they are whole.

A broker that cannot be asked does not hide what the others have, and its part is not silently
missing either: the list names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A server whose answer is missing, and why."""

    server: str
    reason: str

    def __str__(self) -> str:
        return f"{self.server}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Listing(Generic[T_co]):
    """Things found, and the servers that could not be asked."""

    items: tuple[T_co, ...]
    unreachable: tuple[Unreachable, ...] = ()

    @property
    def is_complete(self) -> bool:
        return not self.unreachable

    def __iter__(self) -> Iterator[T_co]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> T_co:
        return self.items[place]
