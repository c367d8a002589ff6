"""Java's string hash of many pieces of one text at once.

The hash of a piece `[a, b)` of a text is the sum of `unit[j] * 31 ** (b - 1 - j)` modulo 2**32.
31 is odd, so it has an inverse `i` modulo 2**32, and the weight of a unit need not know where its
piece ends:

    hash(a, b) = 31 ** (b - 1) * (unit[a] * i ** a + ... + unit[b - 1] * i ** (b - 1))

One multiplication over the whole text and one sum for each piece give all of them, whatever
their lengths are: no sorting by length, no text object for a key.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from orbitmq.javahash import java_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    type_of_units = NDArray[np.uint8] | NDArray[np.uint16]

_BASE = 31
_INVERSE = pow(_BASE, -1, 1 << 32)
_HASH_SIGN = ord("#")


def index_hash(topic: str, key: str) -> int:
    """The hash under which the index keeps `key` of `topic`: never negative."""
    hashed = abs(java_hash(f"{topic}#{key}"))
    return hashed if hashed <= 0x7FFFFFFF else 0


def index_hashes(
    topics: NDArray[np.uint32], keys: NDArray[np.uint32], lengths: NDArray[np.int64]
) -> NDArray[np.int32]:
    """`index_hash` of many: from the hashes of the topics, those of the keys and their lengths.

    A hash of joined text needs no joined text: `hash(x + y) = hash(x) * 31 ** len(y) + hash(y)`.
    """
    prefixes = topics * np.uint32(_BASE) + np.uint32(_HASH_SIGN)
    hashes = prefixes * powers(int(lengths.max(initial=0)))[lengths] + keys
    signed = hashes.view(np.int32)
    # abs() of the smallest int32 stays negative, as in Java; the index keeps 0 for it.
    return np.maximum(np.abs(signed), np.int32(0))


def hash_pieces(
    units: type_of_units, starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """The Java hash of every piece `units[start:end]`, as unsigned 32-bit numbers.

    `units` are UTF-16 code units, or the bytes of a text that is ASCII wherever a piece lies.
    """
    if not len(starts):
        return np.zeros(0, np.uint32)
    weighted = np.zeros(len(units) + 1, np.uint32)
    np.multiply(units, _inverse_powers(len(units))[: len(units)], out=weighted[:-1])
    # Of the sums between neighbouring bounds every second one is that of a piece. The others cost
    # next to nothing, because a bound that is not above the one before it means a single unit.
    bounds = np.column_stack((starts, ends))[::-1].ravel()
    sums = np.add.reduceat(weighted, bounds, dtype=np.uint32)[::2][::-1]
    return np.where(ends > starts, sums * powers(len(units))[ends - 1], np.uint32(0))


def hash_texts(texts: Sequence[str]) -> NDArray[np.uint32]:
    """The Java hash of every text, with all of Unicode."""
    joined = "".join(texts)
    if joined.isascii():
        units: type_of_units = np.frombuffer(joined.encode("ascii"), np.uint8)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    else:
        units = np.frombuffer(joined.encode("utf-16-le", "surrogatepass"), "<u2")
        lengths = utf16_lengths(texts)
    ends = np.cumsum(lengths)
    return hash_pieces(units, ends - lengths, ends)


def utf16_lengths(texts: Sequence[str]) -> NDArray[np.int64]:
    """How many UTF-16 code units every text has."""
    return np.fromiter((_utf16_length(text) for text in texts), np.int64, len(texts))


def _utf16_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def powers(highest: int) -> NDArray[np.uint32]:
    """31 to the power of 0, 1, ... at least `highest`, modulo 2**32."""
    return _powers(_BASE, 1 << max(highest, 1 << 15).bit_length())


def _inverse_powers(highest: int) -> NDArray[np.uint32]:
    return _powers(_INVERSE, 1 << max(highest, 1 << 15).bit_length())


@lru_cache(maxsize=8)
def _powers(base: int, count: int) -> NDArray[np.uint32]:
    factors: NDArray[Any] = np.full(count, base, np.uint32)
    factors[0] = 1
    table = np.cumprod(factors, dtype=np.uint32)
    table.flags.writeable = False
    return table
