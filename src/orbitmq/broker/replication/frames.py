"""What master and slave say to each other: reports one way, frames the other.

    report   offset          8 bytes    the slave's log ends here
    frame    offset  size    12 bytes   followed by so many bytes of the master's log from there on

All numbers are big endian. A frame of size 0 is a sign of life. Frames are cut without regard to
messages. The first report says where to begin. (RocketMQ's HA protocol; nothing in it tells who is
speaking.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from orbitmq.broker.errors import BrokerError

REPORT_SIZE = 8
HEAD_SIZE = 12
#: What Apache's slave has room for, and so what any frame may take.
LARGEST_FRAME = 4 * 1024 * 1024

_report = struct.Struct(">q")
_head = struct.Struct(">qi")

pack_report = _report.pack
pack_head = _head.pack


class FrameRefused(BrokerError):
    """The other side says something that is not of this protocol."""


class ReportReader:
    """Turns what a slave sends into the last offset that it has reported. Holds no socket."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> int | None:
        """The newest report, None when none has ended."""
        data = self._rest + data
        whole = len(data) - len(data) % REPORT_SIZE
        self._rest = data[whole:]
        if not whole:
            return None
        offset: int = _report.unpack_from(data, whole - REPORT_SIZE)[0]
        if offset < 0:
            raise FrameRefused(f"a slave must report an offset of 0 or more, got {offset}")
        return offset


class FrameReader:
    """Turns what a master sends into frames. Holds no socket, and at most one frame."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The frames that are complete now: offset and bytes."""
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        try:
            while end - at >= HEAD_SIZE:
                offset, size = _head.unpack_from(data, at)
                if offset < 0 or not 0 <= size <= LARGEST_FRAME - HEAD_SIZE:
                    raise FrameRefused(
                        f"a frame of {size} bytes at offset {offset} cannot be; the size must be "
                        f"from 0 to {LARGEST_FRAME - HEAD_SIZE}"
                    )
                body = at + HEAD_SIZE
                if body + size > end:
                    break
                at = body + size
                yield offset, data[body:at]
        finally:
            self._rest = data[at:]
