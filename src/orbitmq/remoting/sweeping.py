"""Looks after many connections with one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from orbitmq.clock import Clock
from orbitmq.remoting.connection import Connection


class IdleSweep:
    """Closes connections on which nothing was read or written for `idle` seconds, or on which
    a frame went on by fewer than `frame_rate` bytes a second for `frame` seconds."""

    def __init__(
        self,
        connections: Callable[[], Collection[Connection]],
        *,
        idle: float,
        frame: float | None = None,
        frame_rate: float = 0.0,
        interval: float,
        clock: Clock,
    ) -> None:
        self._connections = connections
        self._idle = idle
        self._frame = frame
        self._frame_rate = frame_rate
        self._interval = interval
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look after one interval, and again as long as there are connections. Idempotent."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval, self._again)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sweep(self) -> None:
        """Look once."""
        now = self._clock.monotonic()
        since = now - self._idle
        for connection in tuple(self._connections()):
            if self._frame is not None:
                connection.check_frame(now, self._frame, self._frame_rate)
            if connection.last_active > since:
                continue
            if connection.unwritten or not connection.is_open:
                # An orderly close would wait, or waits, for a peer that has stopped reading.
                connection.abort(f"nothing was read by it for {self._idle:g} s")
            else:
                connection.close(f"idle for {self._idle:g} s")

    def _again(self) -> None:
        self._timer = None
        self.sweep()
        if self._connections():
            self.start()
