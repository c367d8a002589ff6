"""Java's `String.hashCode`, on which tags, index keys, sharding and allocation agree.

`h = 31 * h + c` over UTF-16 code units with 32-bit overflow. A peer in any language that hashes
otherwise filters, finds and orders other messages than every other client, so there is one
implementation and the rest of the package asks it.
"""

from __future__ import annotations

_BITS = 0xFFFFFFFF
_SIGN = 0x80000000


def java_hash(text: str) -> int:
    """The signed 32-bit hash of `text`."""
    hashed = 0
    if text.isascii():
        for unit in text.encode("ascii"):
            hashed = hashed * 31 + unit & _BITS
    else:
        units = text.encode("utf-16-be", "surrogatepass")
        for at in range(0, len(units), 2):
            hashed = hashed * 31 + (units[at] << 8 | units[at + 1]) & _BITS
    return hashed - ((hashed & _SIGN) << 1)
