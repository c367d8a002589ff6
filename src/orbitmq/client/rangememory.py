"""Memory that answers are received into, one behind the other, and again when they are done with.

New memory costs more than what is done with it: the kernel has to clear every page and to map it,
which takes longer than to copy a message there. And answers that lie side by side can be decoded
together as they are. A piece is used until it is given back, in whatever order that happens; only
when all of them were is the memory used from its beginning again. Who does not give a piece back
loses nothing but the advantage.
"""

from __future__ import annotations

from collections.abc import Iterable

from orbitmq.client.rangewindow import Bytes


class AnswerMemory:
    """Lends pieces of one block of memory. For one thread."""

    def __init__(self, size: int) -> None:
        self._block = bytearray(size)
        self._view = memoryview(self._block)
        self._at = 0
        self._lent = 0

    @property
    def size(self) -> int:
        return len(self._block)

    @property
    def is_unused(self) -> bool:
        """Whether all pieces were given back."""
        return not self._lent

    def room(self, size: int) -> memoryview:
        """A piece of this size; of its own where there is no room in the block."""
        end = self._at + size
        if end > len(self._block):
            return memoryview(bytearray(size))
        piece = self._view[self._at : end]
        self._at = end
        self._lent += 1
        return piece

    def give_back(self, pieces: Iterable[Bytes]) -> None:
        """Say that nobody looks at these pieces any more; each may be given back once."""
        for piece in pieces:
            # Some are of other origin.
            if isinstance(piece, memoryview) and piece.obj is self._block:
                self._lent -= 1
        if not self._lent:
            self._at = 0
