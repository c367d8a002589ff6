"""Host and port as a record and an offset message id keep them: packed address, 32-bit port."""

from __future__ import annotations

import ipaddress
from typing import Final

from orbitmq.message.errors import RecordRefused

#: Packed sizes: 4 or 16 bytes of address, then the port.
V4_HOST_SIZE: Final = 8
V6_HOST_SIZE: Final = 20


def pack_host(address: str, port: int) -> bytes:
    """`address` (IPv4 or IPv6 text, no names) and `port` as 8 or 20 bytes."""
    try:
        packed = ipaddress.ip_address(address).packed
    except ValueError as error:
        raise RecordRefused(f"{address!r} is not an IPv4 or IPv6 address") from error
    if not 0 <= port <= 0x7FFFFFFF:
        raise RecordRefused(f"port {port} is not within 0 and 2147483647")
    return packed + port.to_bytes(4, "big")


def unpack_host(packed: bytes) -> tuple[str, int]:
    """The address text and the port of 8 or 20 packed bytes."""
    if len(packed) == V4_HOST_SIZE:
        address = ".".join(map(str, packed[:4]))
    elif len(packed) == V6_HOST_SIZE:
        address = ipaddress.IPv6Address(packed[:16]).compressed
    else:
        raise RecordRefused(f"a packed host has 8 or 20 bytes, not {len(packed)}")
    return address, int.from_bytes(packed[-4:], "big", signed=True)
