"""Which dead letters still wait for somebody, and which were sent again: remembered, for counts.

A letter that was sent again stays so, and one that died stays what it is. So letters are read only
when there are new ones, and only those that were not sent again are looked up once more. It is the
newest letters that are looked at; of older ones nothing is known, and they count as open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from orbitmq.client.admin import AsyncAdmin
from orbitmq.client.admin.resent import LetterTrace
from orbitmq.client.received import ReceivedMessage

#: Letters that are looked up together.
_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class Resent:
    """Dead letters of a group that were sent again, as far as they were looked at."""

    looked: int = 0  #: letters that were looked at
    count: int = 0  #: of these, sent again
    last_hour: int = 0  #: and died in the last hour


@dataclass(slots=True)
class _Group:
    #: What the broker had of its letters when they were last read: something changes with each.
    state: object = None
    open: dict[str, LetterTrace] = field(default_factory=dict)
    resent: dict[str, LetterTrace] = field(default_factory=dict)


class ResentLetters:
    """Remembers which letters were sent again."""

    def __init__(self, admin: AsyncAdmin, *, most: int) -> None:
        """`most` is how many letters of a group are looked at."""
        self._admin = admin
        self._most = most
        self._groups: dict[str, _Group] = {}

    async def count(self, group: str, state: object, since: float) -> Resent:
        """Look at a group, whose letters are read anew when `state` is another than last time."""
        known = self._groups.setdefault(group, _Group())
        if known.state != state:
            await self._read(group, known)
            known.state = state
        for some in _pieces(list(known.open.values())):
            # The admin itself limits how many requests wait at a time.
            for trace, copy in zip(some, await self._copies(some), strict=True):
                if copy is not None:
                    known.resent[trace.letter_id] = known.open.pop(trace.letter_id)
        recent = sum(trace.died_at >= since for trace in known.resent.values())
        return Resent(len(known.open) + len(known.resent), len(known.resent), recent)

    def forget(self, group: str) -> None:
        """There is no such group any more."""
        self._groups.pop(group, None)

    async def _copies(self, some: list[LetterTrace]) -> list[ReceivedMessage | None]:
        return await asyncio.gather(*(trace.copy(self._admin.messages) for trace in some))

    async def _read(self, group: str, known: _Group) -> None:
        found: dict[str, LetterTrace] = {}
        async with aclosing(self._admin.dead_letters.list(group, newest_first=True)) as letters:
            async for letter in letters:
                found[letter.id] = LetterTrace.of(letter)
                if len(found) == self._most:
                    break
        known.resent = {name: trace for name, trace in found.items() if name in known.resent}
        known.open = {name: trace for name, trace in found.items() if name not in known.resent}


def _pieces(traces: list[LetterTrace]) -> Iterator[list[LetterTrace]]:
    for start in range(0, len(traces), _TOGETHER):
        yield traces[start : start + _TOGETHER]
