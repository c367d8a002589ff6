"""Server-sent events: what is new is pushed to every open page.

Written here because it is thirty lines: the usual package changes the HTTP server's class when it
is imported and leaves a task on the loop, which a library inside somebody's process must not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import msgspec
from starlette.responses import StreamingResponse

#: Pages that can listen at the same time.
MOST_LISTENERS = 200
#: Events that a slow page may be behind before it misses some.
_BEHIND = 64
#: Seconds of silence before a comment keeps proxies from closing the connection.
_SILENCE = 15.0


class Events:
    """Gives what happens to everybody who listens."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._is_closed = False

    def publish(self, kind: str, content: object) -> None:
        """Tell all pages; nothing is encoded when there are none."""
        if not self._listeners:
            return
        event = encoded(kind, content)
        for listener in self._listeners:
            if listener.full():
                # It catches up with the newest: every event has the whole picture of its kind.
                listener.get_nowait()
            listener.put_nowait(event)

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Events as they come, until the console stops."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_BEHIND)
        if self._is_closed or len(self._listeners) >= MOST_LISTENERS:
            return
        self._listeners.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._listeners.discard(queue)

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        for listener in self._listeners:
            while listener.full():
                listener.get_nowait()
            listener.put_nowait(None)

    @property
    def listeners(self) -> int:
        return len(self._listeners)


def encoded(kind: str, content: object) -> bytes:
    """One event; JSON has no line breaks, so it is one line."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(content))


def stream(
    events: AsyncGenerator[bytes, None], is_allowed: Callable[[], bool]
) -> StreamingResponse:
    """The answer that carries events, for as long as whoever asked is let in."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    content = _kept_alive(events, is_allowed)
    return StreamingResponse(content, media_type="text/event-stream", headers=headers)


async def _kept_alive(
    events: AsyncGenerator[bytes, None], is_allowed: Callable[[], bool]
) -> AsyncIterator[bytes]:
    # Tells the browser how long to wait before it connects again, and that the stream is open.
    yield b"retry: 2000\n\n"
    async with aclosing(events):
        coming: asyncio.Future[bytes] | None = None
        try:
            while True:
                if coming is None:
                    coming = asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait((coming,), timeout=_SILENCE)
                if not is_allowed():
                    return
                if not done:
                    yield b": still here\n\n"
                    continue
                finished, coming = coming, None
                try:
                    yield finished.result()
                except StopAsyncIteration:
                    return
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
