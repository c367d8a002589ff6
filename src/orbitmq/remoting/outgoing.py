"""What waits to be written to one connection, gathered into few and cheap writes.

Small pieces are joined: one system call and one packet for the answers of a whole turn. Large
bodies are handed on as they are: joining a 300 KiB body to its head would map, fill and unmap
that much memory once more than writing it from where it lies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from orbitmq.wire.frame import Bytes

#: Pieces below this are joined with their neighbours; copying them costs less than another vector.
JOIN_BELOW = 16 * 1024


class Outgoing:
    """Pieces of frames in the order in which they will be written."""

    __slots__ = ("_pieces", "_transport", "_writes_each", "size")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pieces: list[Bytes] = []
        # asyncio's selector transport, which alone has this attribute, is given single pieces: its
        # `writelines` joins all of them before Python 3.12, and in many releases from there on it
        # does not tell that a peer is slow (CVE-2024-12254), or never ends at an empty piece.
        self._writes_each = hasattr(transport, "max_size")
        #: Bytes that wait here; those that the transport holds come on top.
        self.size = 0

    @property
    def unwritten(self) -> int:
        """Bytes that the peer's side has not taken yet."""
        return self.size + self._transport.get_write_buffer_size()

    def add(self, pieces: Sequence[Bytes]) -> None:
        """Take the pieces of a frame; their buffers must not change until they are written."""
        self._pieces += pieces
        self.size += sum(map(len, pieces))

    def flush(self) -> int:
        """Write what waits; return how many bytes that was."""
        size, self.size = self.size, 0
        pieces, self._pieces = self._pieces, []
        if not size:
            return 0
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        elif size < JOIN_BELOW:
            self._transport.write(b"".join(pieces))
        else:
            self._write_gathered(gathered(pieces))
        return size

    def clear(self) -> None:
        self._pieces.clear()
        self.size = 0

    def _write_gathered(self, pieces: list[Bytes]) -> None:
        if not self._writes_each:
            self._transport.writelines(pieces)
            return
        for piece in pieces:
            if self._transport.is_closing():
                # A write before this one failed; asyncio would warn about every further one.
                return
            self._transport.write(piece)


def gathered(pieces: Iterable[Bytes]) -> list[Bytes]:
    """The same bytes with neighbouring small pieces joined and large ones untouched."""
    out: list[Bytes] = []
    small: list[Bytes] = []
    for piece in pieces:
        if len(piece) < JOIN_BELOW:
            small.append(piece)
            continue
        if small:
            out.append(b"".join(small))
            small.clear()
        out.append(piece)
    if small:
        out.append(b"".join(small))
    return out


def call_on_loop(
    loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object
) -> None:
    """Have the loop call it soon; nothing happens when the loop is closed already."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise  # not of the loop: what interrupts a thread can have any type
