"""Bounds for what was submitted and is not answered yet.

A program that submits faster than brokers take would fill its memory with messages; it waits here
instead. One message always fits, however large it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque

from orbitmq.client.errors import ClientError


class TooManyInFlight(ClientError):
    """The messages submitted before were not answered in time to make room for another one."""

    retriable = True

    def __init__(self, count: int, size: int, timeout: float) -> None:
        self.count = count
        self.size = size
        self.timeout = timeout
        super().__init__(
            f"{count} submitted messages with {size} bytes wait for answers and left no room for "
            f"another one within {timeout:g} s; submit less at a time, or raise "
            "sending.max_in_flight or sending.max_in_flight_bytes"
        )


class Room:
    """How much is in flight, and how much may be. Not guarded against anything."""

    __slots__ = ("_most", "_most_bytes", "count", "size")

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.count = 0
        self.size = 0

    def take(self, size: int) -> bool:
        """Take room for a message of `size` bytes, if there is."""
        if self.count and (self.count >= self._most or self.size + size > self._most_bytes):
            return False
        self.count += 1
        self.size += size
        return True

    def give_back(self, size: int) -> None:
        self.count -= 1
        self.size -= size


class InFlight:
    """Room that coroutines of one loop wait for, in the order of their coming."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._room = Room(most, most_bytes)
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def count(self) -> int:
        return self._room.count

    async def enter(self, size: int, timeout: float) -> None:  # noqa: ASYNC109  # see the error
        """Returns when there is room for a message of `size` bytes. Raises `TooManyInFlight`."""
        if not self._waiting and self._room.take(size):
            self._is_empty.clear()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(timeout):
                await turn
        except BaseException as error:
            full = TooManyInFlight(self._room.count, self._room.size, timeout)
            if turn.done() and not turn.cancelled():
                # It came in the same instant: pass it on.
                self.leave(size)
            else:
                with contextlib.suppress(ValueError):  # whoever admitted others passed over it
                    self._waiting.remove((size, turn))
                self._admit()
            if isinstance(error, TimeoutError):
                raise full from None
            raise

    def leave(self, size: int) -> None:
        """A message was answered, or never will be."""
        self._room.give_back(size)
        self._admit()
        if not self._room.count:
            self._is_empty.set()

    async def until_empty(self) -> None:
        """Returns when nothing is in flight."""
        await self._is_empty.wait()

    def _admit(self) -> None:
        while self._waiting and (
            self._waiting[0][1].done() or self._room.take(self._waiting[0][0])
        ):
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)


class BlockingInFlight:
    """The same for threads. The lock is held for a few instructions, and `leave` never waits.

    Who waits has a gate of its own, and is not kept in a condition: a thread that is interrupted
    inside of one can leave it locked, and `leave` is called by the loop.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._room = Room(most, most_bytes)
        self._lock = threading.Lock()
        #: Opened, all of them, when something has changed.
        self._gates: list[threading.Lock] = []

    @property
    def count(self) -> int:
        return self._room.count

    def enter(self, size: int, timeout: float) -> None:
        """Blocks until there is room for a message of `size` bytes. Raises `TooManyInFlight`."""
        is_in = False
        try:
            deadline = time.monotonic() + timeout
            while True:
                with self._lock:
                    is_in = self._room.take(size)
                    if is_in:
                        return
                    gate = self._new_gate()
                if not gate.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    break
        except BaseException:
            if is_in:
                self.leave(size)  # interrupted in its last step
            raise
        raise TooManyInFlight(self._room.count, self._room.size, timeout)

    def leave(self, size: int) -> None:
        with self._lock:
            self._room.give_back(size)
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()

    def until_empty(self, timeout: float | None) -> bool:
        """Blocks until nothing is in flight; False when the time is up."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if not self._room.count:
                    return True
                gate = self._new_gate()
            left = -1 if deadline is None else max(0.0, deadline - time.monotonic())
            if not gate.acquire(timeout=left):
                return False

    def _new_gate(self) -> threading.Lock:
        """A gate that is shut. The lock is held."""
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        return gate
