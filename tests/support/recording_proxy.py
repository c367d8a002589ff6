"""A relay between remoting clients and a server that keeps the frames of each direction.

A frame is a four-byte length and that many bytes; the relay forwards bytes as they come and
cuts them into frames only for the record, so that it changes nothing and delays nothing. Frames
of several connections are kept in the order in which they were complete, whole frames only.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

LENGTH = 4
START_DEADLINE = 10.0


@dataclass(slots=True)
class Recording:
    """The frames seen since the last `take`, by direction."""

    to_server: list[bytes] = field(default_factory=list)
    to_client: list[bytes] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, frames: list[bytes], *, to_server: bool) -> None:
        with self._lock:
            (self.to_server if to_server else self.to_client).extend(frames)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """The frames to the server and to the client, which are then forgotten."""
        with self._lock:
            taken = self.to_server, self.to_client
            self.to_server, self.to_client = [], []
            return taken


@dataclass(slots=True)
class FrameCutter:
    """Cuts one direction of one connection into frames."""

    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[bytes]:
        self._rest += data
        frames: list[bytes] = []
        while len(self._rest) >= LENGTH:
            end = LENGTH + int.from_bytes(self._rest[:LENGTH], "big")
            if len(self._rest) < end:
                break
            frames.append(bytes(self._rest[:end]))
            del self._rest[:end]
        return frames


@dataclass(slots=True)
class RecordingProxy:
    """Listens on one address, relays to another, in a thread of its own."""

    listen: tuple[str, int]
    server: tuple[str, int]
    recording: Recording

    @classmethod
    @contextlib.contextmanager
    def running(
        cls, listen: tuple[str, int], server: tuple[str, int], recording: Recording | None = None
    ) -> Iterator[Self]:
        """`listen` may have port 0; the proxy's own `listen` then has the real one."""
        proxy = cls(listen, server, recording or Recording())
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name=f"proxy to {server}")
        thread.start()
        ending = asyncio.Event()
        opened: asyncio.Future[None] = loop.create_future()
        serving = asyncio.run_coroutine_threadsafe(proxy.serve(opened, ending), loop)
        try:
            asyncio.run_coroutine_threadsafe(
                asyncio.wait_for(opened, START_DEADLINE), loop
            ).result()
            yield proxy
        finally:
            loop.call_soon_threadsafe(ending.set)
            serving.result(START_DEADLINE)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(START_DEADLINE)
            loop.close()

    async def serve(self, opened: asyncio.Future[None], ending: asyncio.Event) -> None:
        connections: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            task.add_done_callback(connections.discard)
            with contextlib.suppress(asyncio.CancelledError):
                await self._relay(reader, writer)

        try:
            listener = await asyncio.start_server(accept, *self.listen)
        except OSError as refused:
            opened.set_exception(refused)
            return
        self.listen = listener.sockets[0].getsockname()[:2]
        opened.set_result(None)
        async with listener:
            await ending.wait()
            for task in tuple(connections):
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.server)
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, far_writer, to_server=True))
                both.create_task(self._pass(far_reader, writer, to_server=False))
        finally:
            writer.close()
            far_writer.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_server: bool
    ) -> None:
        cutter = FrameCutter()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.recording.add(cutter.feed(data), to_server=to_server)
                writer.write(data)
                await writer.drain()
        writer.close()
