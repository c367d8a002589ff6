"""From queue entries to views of the log: where messages lie, in as few pieces as is worth it."""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import compress
from operator import add, ne
from typing import TYPE_CHECKING

import numpy as np

from orbitmq.message.record import MIN_RECORD_SIZE
from orbitmq.store.consumequeue import ENTRY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orbitmq.store.commitlog import CommitLog

#: Up to this many entries are unpacked by a format that is kept, more by columns.
_MANY = 128
#: Up to this many entries it costs more to find out which lie side by side than to send each.
_WORTH_JOINING = 32


def places(raw: bytes, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Offsets in the log and sizes of so many entries."""
    if count > _MANY:
        entries = np.frombuffer(raw, ENTRY)
        return entries["offset"].tolist(), entries["size"].tolist()
    fields = _places(count).unpack(raw)
    return fields[0::2], fields[1::2]


def views(
    commit_log: CommitLog, offsets: Sequence[int], sizes: Sequence[int], total: int
) -> list[memoryview] | None:
    """The messages that lie there, `total` bytes of them; None when one of them cannot."""
    first = offsets[0]
    end = offsets[-1] + sizes[-1]
    file = commit_log.file_of(first)
    if file is None or min(sizes) < MIN_RECORD_SIZE:
        return None
    if end <= file.end:
        base, view = file.base, file.view
        if end - first == total:
            return [view[first - base : end - base]]
        if len(offsets) > _WORTH_JOINING:
            return [view[begin - base : stop - base] for begin, stop in _runs(offsets, sizes)]
        return [
            view[(at := offset - base) : at + size]
            for offset, size in zip(offsets, sizes, strict=True)
        ]
    pieces = []
    for offset, size in zip(offsets, sizes, strict=True):
        piece = commit_log.view(offset, size)
        if piece is None:
            return None
        pieces.append(piece)
    return pieces


def _runs(offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """From where to where messages lie side by side: batches do, between those of other queues."""
    ends = list(map(add, offsets, sizes))
    breaks = list(compress(range(1, len(ends)), map(ne, ends, offsets[1:])))
    firsts = [offsets[0], *(offsets[place] for place in breaks)]
    return zip(firsts, [*(ends[place - 1] for place in breaks), ends[-1]], strict=True)


@lru_cache(maxsize=_MANY)
def _places(count: int) -> struct.Struct:
    # The tag codes are left out: of three numbers each would cost as much as the others.
    return struct.Struct(">" + "qi8x" * count)
