"""Lines of standard input or of a file, without making the event loop wait for them.

A thread reads what is there at the time, so that a line typed or piped slowly is sent at once and a
big file fast. The thread never keeps the process alive: somebody at a terminal may not type again.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

from orbitmq.cli.errors import CommandError
from orbitmq.cli.stopping import unless

_CHUNK = 256 * 1024
#: No message may be as long.
LONGEST_LINE = 64 * 1024 * 1024
#: Chunks that wait for their lines to be sent.
_AHEAD = 4


async def read_all(path: Path | None, wish: asyncio.Event) -> bytes:
    """Everything; None: of standard input."""
    return b"".join([chunk async for chunk in _chunks(path, wish)])


async def read_lines(path: Path | None, wish: asyncio.Event) -> AsyncGenerator[bytes, None]:
    """Every line, without its end; None: of standard input. Ends with the wish to stop, too."""
    rest = b""
    async for chunk in _chunks(path, wish):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
        if len(rest) > LONGEST_LINE:
            raise CommandError(f"a line of the input is longer than {LONGEST_LINE} bytes")
    if rest and not wish.is_set():
        yield rest


async def _chunks(path: Path | None, wish: asyncio.Event) -> AsyncGenerator[bytes, None]:
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue(_AHEAD)
    reader = _Reader(path, loop, chunks)
    threading.Thread(target=reader.run, name="orbitmq-input", daemon=True).start()
    try:
        while chunk := await unless(wish, chunks.get()):
            if isinstance(chunk, OSError):
                raise chunk
            yield chunk
    finally:
        reader.is_wanted = False


class _Reader:
    """Reads on a thread of its own."""

    def __init__(
        self,
        path: Path | None,
        loop: asyncio.AbstractEventLoop,
        chunks: asyncio.Queue[bytes | OSError],
    ) -> None:
        self._path = path
        self._loop = loop
        self._chunks = chunks
        self.is_wanted = True

    def run(self) -> None:
        try:
            source = sys.stdin.fileno() if self._path is None else os.open(self._path, os.O_RDONLY)
            try:
                while chunk := os.read(source, _CHUNK):
                    if not self._give(chunk):
                        return
            finally:
                if self._path is not None:
                    os.close(source)
            self._give(b"")
        except OSError as error:
            self._give(error)

    def _give(self, chunk: bytes | OSError) -> bool:
        """Wait until there is room; False when nobody wants any more."""
        if not self.is_wanted:
            return False
        putting = self._chunks.put(chunk)
        try:
            asyncio.run_coroutine_threadsafe(putting, self._loop).result()
        except (RuntimeError, asyncio.CancelledError):
            # The loop is closed: the command has ended meanwhile.
            putting.close()
            return False
        return self.is_wanted
