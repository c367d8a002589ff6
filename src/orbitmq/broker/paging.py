"""Pages of a table that is too long for one answer (GET_ALL_TOPIC_CONFIG and its like for groups).

A tool says how many entries it has, how many it wants and which version of the table they were
from. Another version means that its entries may be stale: it gets the first page again and starts
over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from orbitmq.broker.dataversion import is_version_text
from orbitmq.wire.bodies.topics import DataVersion

V = TypeVar("V")

LARGEST_PAGE = 2000


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What a tool asks for; all absent: the whole table, as tools before 5.3 expect it."""

    received: int | None = None
    version: str | None = None
    largest: int | None = None

    @property
    def is_for_all(self) -> bool:
        return self.received is None and self.version is None and self.largest is None


def page(
    table: Mapping[str, V], version: DataVersion, request: PageRequest, largest: int = LARGEST_PAGE
) -> dict[str, V]:
    """The entries that answer a request, in the order of their names."""
    names = sorted(table)
    if not request.is_for_all:
        start = 0
        if is_version_text(request.version, version):
            start = max(0, request.received or 0)
        size = largest if request.largest is None else min(largest, max(0, request.largest))
        names = names[start : start + size]
    return {name: table[name] for name in names}
