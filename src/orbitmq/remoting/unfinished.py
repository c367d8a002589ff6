"""Memory for frames that have begun to arrive: who may have how much of it, and for how long.

A frame is kept from its first byte to its last, and nobody can be asked who sent it before the
last. So this memory is given to strangers, and all connections of a server share one bounded
amount of it:

* What one read brings is free (`FREE_BYTES`): nearly every frame is smaller.
* A longer frame needs a place. Its whole announced length is set aside, so that a frame that was
  let in can always be completed: places that grew with the bytes could all be half full, and
  nobody could go on. Where there is no room, the connection is not read from until there is.
* Hosts take turns with what becomes free, and the connections of a host come in their order.
* While somebody waits, a place is had for `patience` seconds; then the connection that has had its
  own for longest is closed. Who sends at a usual speed never notices.

What strangers can make us hold is therefore the limit, and one read for each connection.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from orbitmq.remoting.address import Address

#: Bytes of an unfinished frame that need no place.
FREE_BYTES = 64 * 1024


class Sender(Protocol):
    """A connection, as far as its unfinished frame is concerned."""

    remote: Address

    def place_given(self) -> None:
        """It may be read from again."""

    def place_taken(self, reason: str) -> None:
        """Its time is up: close it."""


class UnfinishedFrames:
    """The places for longer frames of all connections of a server. Belongs to the loop."""

    def __init__(
        self,
        limit: int,
        *,
        patience: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._limit = limit
        self._patience = patience
        self._monotonic = monotonic
        self._used = 0
        #: Sizes of places and when each was given; the oldest first.
        self._places: dict[Sender, tuple[int, float]] = {}
        #: Sizes of the places that are waited for, by host; the next host first.
        self._waiting: OrderedDict[str, OrderedDict[Sender, int]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def used(self) -> int:
        """Bytes that are set aside."""
        return self._used

    @property
    def waiting(self) -> int:
        """Connections that are not read from for lack of room."""
        return sum(map(len, self._waiting.values()))

    def enter(self, sender: Sender, size: int) -> bool:
        """Ask for a place; False: there is no room, and `place_given` will say when there is."""
        if not self._waiting and self._used + size <= self._limit:
            self._give(sender, size)
            return True
        self._waiting.setdefault(sender.remote.host, OrderedDict())[sender] = size
        self._watch()
        return False

    def leave(self, sender: Sender) -> None:
        """The frame is complete, or its connection is gone. Idempotent."""
        if self._vacate(sender) or self._forget(sender):
            self._fill()

    def _give(self, sender: Sender, size: int) -> None:
        self._used += size
        self._places[sender] = (size, self._monotonic())

    def _vacate(self, sender: Sender) -> bool:
        place = self._places.pop(sender, None)
        if place is None:
            return False
        self._used -= place[0]
        return True

    def _forget(self, sender: Sender) -> bool:
        host = sender.remote.host
        line = self._waiting.get(host)
        if line is None or line.pop(sender, None) is None:
            return False
        if not line:
            del self._waiting[host]
        return True

    def _fill(self) -> None:
        """Give what is free to those who wait, in turn; a large frame is not overtaken for ever."""
        while self._waiting:
            host, line = next(iter(self._waiting.items()))
            sender, size = next(iter(line.items()))
            if self._used + size > self._limit:
                return
            self._forget(sender)
            if host in self._waiting:
                self._waiting.move_to_end(host)
            self._give(sender, size)
            sender.place_given()

    def _watch(self) -> None:
        """Look again when the oldest place has been had for long enough."""
        if self._timer is None and self._waiting and self._places:
            _, since = next(iter(self._places.values()))
            wait = max(0.0, since + self._patience - self._monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait, self._look)

    def _look(self) -> None:
        self._timer = None
        while self._waiting and self._places:
            sender, (size, since) = next(iter(self._places.items()))
            if self._monotonic() - since < self._patience:
                break
            self._vacate(sender)
            sender.place_taken(
                f"its frame of {size} bytes was not complete after {self._patience:g} s, and "
                "others wait for that memory"
            )
            self._fill()
        self._watch()
