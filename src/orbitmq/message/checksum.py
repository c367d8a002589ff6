"""The checksum of a stored body: CRC-32 (zlib's polynomial) without its highest bit.

Java keeps the value in a signed int and clears the sign, so the stored number is 31 bits wide.
isal computes the same sum; it is never slower and, from 100 bytes on, 3 to 10 times faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zlib import crc32
else:
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        from zlib import crc32

__all__ = ["CRC_BITS", "body_crc", "crc32"]

CRC_BITS = 0x7FFFFFFF


def body_crc(body: bytes | bytearray | memoryview) -> int:
    """The checksum that a record carries for `body`; 0 for an empty one."""
    return crc32(body) & CRC_BITS
