"""Java's `String.hashCode` and `String.compareTo`, which all clients and brokers must share.

Tags, index keys and the queue of an ordering key follow from the hash: `h = 31 * h + c` over UTF-16
code units with 32-bit overflow. Allocation and signatures follow from the order.
"""

from __future__ import annotations

from orbitmq.errors import MessageRefused

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


def java_order(text: str) -> bytes:
    """A sort key for Java's order of strings: by UTF-16 units, not by code points."""
    return text.encode("utf-16-be", "surrogatepass")


def key_hash(key: str | int) -> int:
    """Java's `hashCode` of a String, an Integer or a Long."""
    if isinstance(key, str):
        return java_hash(key)
    if isinstance(key, bool) or not -(2**63) <= key < 2**63:
        raise MessageRefused("key", f"must be a text or a 64-bit number, got {key!r}")
    if -(2**31) <= key < 2**31:
        return key
    folded = (key ^ (key & 0xFFFF_FFFF_FFFF_FFFF) >> 32) & 0xFFFF_FFFF
    return folded - ((folded & 0x8000_0000) << 1)
