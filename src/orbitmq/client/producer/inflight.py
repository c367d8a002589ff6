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
from collections.abc import Callable
from typing import Final

from orbitmq.client.errors import ClientError

#: Seconds after which a thread that waits looks again, for whatever reason nobody woke it.
_LOOK: Final = 0.1


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
        #: Who waits until nothing is in flight.
        self._until_empty: list[asyncio.Future[None]] = []

    @property
    def count(self) -> int:
        return self._room.count

    def enter_at_once(self, size: int) -> bool:
        """Whether there is room for a message of `size` bytes, which is taken then."""
        return not self._waiting and self._room.take(size)

    async def enter(self, size: int, timeout: float) -> None:  # noqa: ASYNC109  # see the error
        """Returns when there is room for a message of `size` bytes. Raises `TooManyInFlight`."""
        if self.enter_at_once(size):
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
        if self._waiting:
            self._admit()
        if self._until_empty and not self._room.count:
            ended, self._until_empty = self._until_empty, []
            for waiter in ended:
                if not waiter.done():
                    waiter.set_result(None)

    async def until_empty(self) -> None:
        """Returns when nothing is in flight."""
        if self._room.count:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._until_empty.append(waiter)
            await waiter

    def _admit(self) -> None:
        while self._waiting and (
            self._waiting[0][1].done() or self._room.take(self._waiting[0][0])
        ):
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)


class BlockingInFlight:
    """The same for threads. `leave` and the waiting for the end need no lock.

    A signal handler may hold up a thread that has the lock, and may itself wait for the end, or for
    the loop, which calls `leave`. So only those who enter take it, for a few instructions. Who
    leaves appends to `_left`, and who enters next takes that into account. Who finds no room puts a
    gate of its own (a condition can be left locked by a thread that is interrupted inside of it)
    where it is found, then looks again; who leaves says so first, then opens the gates: one of the
    two sees the other. A gate that is lost with a thread that was interrupted costs one `_LOOK`.

    Nothing is in flight when as many have left as had entered, and nobody has entered meanwhile.
    What has left is counted in `_left` or in `_gone`, for an instant in neither: never in both.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        # Under the lock: how many came in, how many of them are known to have left, and the bytes
        # of the others.
        self._entered = 0
        self._gone = 0
        self._size = 0
        #: When the time of everything that has come in so far is up.
        self._latest = 0.0
        #: The sizes of those that have left since.
        self._left: deque[int] = deque()
        #: Opened, all of them, when something has changed.
        self._gates: deque[threading.Lock] = deque()

    @property
    def count(self) -> int:
        """How many are in flight; at most, while others come and go."""
        return self._entered - self._gone - len(self._left)

    def enter(self, size: int, timeout: float, until: float = 0.0) -> None:
        """Blocks until there is room for a message of `size` bytes. Raises `TooManyInFlight`.

        `until` is when the message has an outcome at the latest.
        """
        is_in = False
        try:
            deadline = time.monotonic() + timeout
            while True:
                with self._lock:
                    while self._left:
                        self._forget_first()
                    count = self._entered - self._gone
                    if not count or (count < self._most and self._size + size <= self._most_bytes):
                        # No call until all of it is noted.
                        is_in = True
                        self._entered += 1
                        self._size += size
                        if until > self._latest:
                            self._latest = until
                        return
                if deadline <= time.monotonic():
                    break
                self._wait_for_change(lambda: bool(self._left), deadline)
        except BaseException:
            if is_in:
                self.leave(size)  # interrupted in its last step
            raise
        raise TooManyInFlight(self.count, self._size, timeout)

    def _forget_first(self) -> None:
        """Take one that has left into account. The lock is held; there is no call in it."""
        size = self._left[0]
        del self._left[0]
        self._gone += 1
        self._size -= size

    def leave(self, size: int) -> None:
        """A message was answered, or never will be. Never waits."""
        self._left.append(size)
        while self._gates:
            try:
                gate = self._gates.popleft()
            except IndexError:
                return  # somebody else has opened it
            gate.release()

    def until_empty(self, timeout: float | None) -> bool:
        """Blocks until nothing is in flight; False when the time is up."""
        end = None if timeout is None else time.monotonic() + timeout
        return self._wait(lambda: end)

    def until_over(self, grace: float) -> bool:
        """The same with the time that the messages have, and `grace` to tell what came of them."""
        return self._wait(lambda: self._latest + grace)

    def _wait(self, end_of: Callable[[], float | None]) -> bool:
        """Blocks until nothing is in flight, or until the end, which may move meanwhile."""
        while not self._is_empty():
            end = end_of()
            if end is not None and end <= time.monotonic():
                return False
            self._wait_for_change(self._is_empty, end)
        return True

    def _wait_for_change(self, has_come: Callable[[], bool], end: float | None) -> None:
        """Blocks until somebody has left, or for a while. May be interrupted anywhere."""
        gate = threading.Lock()
        gate.acquire()
        try:
            self._gates.append(gate)
            if not has_come():  # else nobody may have seen the gate
                left = _LOOK if end is None else min(_LOOK, end - time.monotonic())
                gate.acquire(timeout=max(0.0, left))
        finally:
            with contextlib.suppress(ValueError):  # it was opened
                self._gates.remove(gate)

    def _is_empty(self) -> bool:
        entered = self._entered
        ended = self._gone  # before `_left`: what moves between the two is not counted twice
        ended += len(self._left)
        return ended >= entered == self._entered
