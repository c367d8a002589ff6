"""Waiting until enough brokers have a message.

Messages lie in the log in the order in which they are waited for, so one number answers for all of
them: the offset that enough slaves have reached. Those below it are answered, at the latest after
`copy_timeout`: then the answer says that the message is stored, and perhaps only here. When there
are not enough slaves to wait for, it says so at once.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from orbitmq.broker.outcomes import PutStatus

Copied: TypeAlias = Callable[[PutStatus], None]


class Follower(Protocol):
    """A slave, as far as it matters here."""

    @property
    def acknowledged(self) -> int | None: ...

    @property
    def is_in_sync(self) -> bool: ...


class Copies:
    """Those who wait for slaves. Belongs to the loop."""

    def __init__(
        self,
        needed: int,
        timeout: float,
        followers: Callable[[], Iterable[Follower]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`needed` slaves must have a message, besides the master."""
        self._needed = needed
        self._timeout = timeout
        self._followers = followers
        self._loop = loop
        #: End of the message, when time is up, who waits; both numbers rise.
        self._waiting: deque[tuple[int, float, Copied]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def when_copied(self, end: int, call: Copied) -> None:
        """Call, perhaps at once, when the log below `end` is on enough brokers, or why not."""
        in_sync = sum(1 for follower in self._followers() if follower.is_in_sync)
        if in_sync < self._needed:
            call(PutStatus.SLAVE_NOT_AVAILABLE)
        elif self._reached() >= end:
            call(PutStatus.PUT_OK)
        else:
            deadline = self._loop.time() + self._timeout
            self._waiting.append((end, deadline, call))
            if self._timer is None:
                self._timer = self._loop.call_at(deadline, self._expire)

    def acknowledged(self) -> None:
        """Some slave has reported; answer those whose message is on enough of them."""
        if not self._waiting:
            return
        reached = self._reached()
        while self._waiting and self._waiting[0][0] <= reached:
            self._waiting.popleft()[2](PutStatus.PUT_OK)

    def _reached(self) -> int:
        """The offset up to which enough slaves have everything."""
        offsets = [follower.acknowledged or 0 for follower in self._followers()]
        if len(offsets) < self._needed:
            return 0
        return heapq.nlargest(self._needed, offsets)[-1]

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._waiting and self._waiting[0][1] <= now:
            self._waiting.popleft()[2](PutStatus.FLUSH_SLAVE_TIMEOUT)
        if self._waiting:
            self._timer = self._loop.call_at(self._waiting[0][1], self._expire)

    def end(self) -> None:
        """Let nobody wait any longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            self._waiting.popleft()[2](PutStatus.FLUSH_SLAVE_TIMEOUT)
