"""Memory for frames that have begun to arrive: who may have how much of it, and for how long.

A frame is kept from its first byte to its last, and nobody can be asked who sent it before the
last. So this memory is given to strangers, and all connections of a server share one bounded
amount of it:

* What one read brings is free (`FREE_BYTES`): nearly every frame is smaller.
* A longer frame needs a place. Its whole announced length is set aside, so that a frame that was
  let in can always be completed: places that grew with the bytes could all be half full, and
  nobody could go on. Where there is no room, the connection is not read from until there is.
* A host gets a part: with n hosts that have or want places, one of n + 1 parts, or a single frame.
  One alone gets half, so that there is room for the next who comes.
* Hosts take turns with what becomes free, and the connections of a host come in their order. Who
  waits for what his own host has holds up no other host.
* While somebody waits, a place is kept by going on. A connection that brought less than `rate`
  bytes a second for `patience` seconds is closed if that helps somebody who waits, the slowest
  first. However slow a line is above that, and however many share it, what was let in gets done.
  Time in which we do not read does not count.
* What those keep who wait is bounded by the same limit; beyond it, the latest comer of the host
  that keeps most is closed.

What strangers can make us hold is therefore twice the limit, and one read for each connection.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from orbitmq.remoting.address import Address

#: Bytes of an unfinished frame below which it needs no place.
FREE_BYTES = 64 * 1024
#: Looks at those who have places, within the time of one patience.
_LOOKS = 4


class Sender(Protocol):
    """A connection, as far as its unfinished frame is concerned."""

    remote: Address

    @property
    def received(self) -> int:
        """Bytes of the frame that are here."""

    @property
    def read_since(self) -> float | None:
        """Since when it has been read from without a break; None: it is not, now."""

    def place_given(self) -> None:
        """It may be read from again."""

    def place_taken(self, reason: str) -> None:
        """Its time is up: close it."""


@dataclass(slots=True)
class _Place:
    """Memory that is set aside, and what came of it since a moment."""

    size: int
    since: float = 0.0
    received: int = 0


@dataclass(frozen=True, slots=True)
class _Wish:
    """A place that is waited for, and what its sender keeps meanwhile."""

    size: int
    kept: int


class UnfinishedFrames:
    """The places for longer frames of all connections of a server. Belongs to the loop."""

    def __init__(
        self,
        limit: int,
        *,
        patience: float,
        rate: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._limit = limit
        self._patience = patience
        self._rate = rate
        self._monotonic = monotonic
        self._used = 0
        self._places: dict[Sender, _Place] = {}
        #: Bytes that are set aside for each host that has any.
        self._hosts: dict[str, int] = {}
        #: What is waited for, by host; the next host first.
        self._waiting: OrderedDict[str, OrderedDict[Sender, _Wish]] = OrderedDict()
        self._kept = 0
        self._timer: asyncio.TimerHandle | None = None
        #: Connections that had to wait for a place, ever.
        self.waited = 0
        #: Connections that were closed for the sake of others, ever.
        self.evicted = 0
        #: Connections that were closed because a frame did not go on, ever.
        self.too_slow = 0

    @property
    def used(self) -> int:
        """Bytes that are set aside."""
        return self._used

    @property
    def waiting(self) -> int:
        """Connections that are not read from for lack of room."""
        return sum(map(len, self._waiting.values()))

    @property
    def kept_by_waiting(self) -> int:
        """Bytes of frames whose connections wait for a place."""
        return self._kept

    def enter(self, sender: Sender, size: int) -> bool:
        """Ask for a place; False: there is no room, and `place_given` will say when there is."""
        host = sender.remote.host
        hosts = self._hosts
        if (
            not self._waiting
            and self._used + size <= self._limit
            and (host not in hosts or hosts[host] + size <= self._limit // (len(hosts) + 1))
        ):
            # As `_give` does, in fewer steps; nobody asks how it goes on before somebody waits.
            self._used += size
            hosts[host] = hosts.get(host, 0) + size
            self._places[sender] = _Place(size)
            return True
        wish = _Wish(size, sender.received)
        is_first = not self._waiting
        self._waiting.setdefault(host, OrderedDict())[sender] = wish
        self._kept += wish.kept
        self._bound_waiting()
        if self._fill(sender):
            return True
        self.waited += 1
        if is_first:
            self._watch_anew()
        return False

    def leave(self, sender: Sender) -> None:
        """The frame is complete, or its connection is gone. Idempotent."""
        if (self._vacate(sender) or self._forget(sender)) and self._waiting:
            self._fill()

    # Who has what

    def _is_due(self, host: str, size: int) -> bool:
        """Whether it is within the part of a host."""
        has = self._hosts.get(host, 0)
        if not has:
            return True
        hosts = len(self._hosts.keys() | self._waiting.keys())
        return has + size <= self._limit // (hosts + 1)

    def _give(self, sender: Sender, size: int) -> None:
        host = sender.remote.host
        self._used += size
        self._hosts[host] = self._hosts.get(host, 0) + size
        self._places[sender] = _Place(size, self._monotonic(), sender.received)

    def _vacate(self, sender: Sender) -> bool:
        place = self._places.pop(sender, None)
        if place is None:
            return False
        host = sender.remote.host
        self._used -= place.size
        if has := self._hosts[host] - place.size:
            self._hosts[host] = has
        else:
            del self._hosts[host]
        return True

    def _forget(self, sender: Sender) -> bool:
        host = sender.remote.host
        line = self._waiting.get(host)
        wish = None if line is None else line.pop(sender, None)
        if line is None or wish is None:
            return False
        self._kept -= wish.kept
        if not line:
            del self._waiting[host]
        return True

    # Whose turn it is

    def _fill(self, comer: Sender | None = None) -> bool:
        """Give what is free to those who wait, in turn; whether `comer`, who asks, is among them.

        A large frame is not overtaken for ever, except where its own host is in its way.
        """
        is_in = False
        while (found := next(self._wishes_due(), None)) is not None:
            sender, size = found
            if self._used + size > self._limit:
                break
            host = sender.remote.host
            self._forget(sender)
            if host in self._waiting:
                self._waiting.move_to_end(host)
            self._give(sender, size)
            if sender is comer:
                is_in = True
            else:
                sender.place_given()
        return is_in

    def _wishes_due(self) -> Iterator[tuple[Sender, int]]:
        """The first of each host's line, if it is within the part of that host."""
        for host, line in self._waiting.items():
            sender, wish = next(iter(line.items()))
            if self._is_due(host, wish.size):
                yield sender, wish.size

    def _bound_waiting(self) -> None:
        while self._kept > self._limit:
            line = max(
                self._waiting.values(), key=lambda line: sum(wish.kept for wish in line.values())
            )
            sender = next(reversed(line))
            self._forget(sender)
            self.evicted += 1
            sender.place_taken("too many connections of its host wait for memory for their frames")

    # Who has had enough time

    def _watch_anew(self) -> None:
        """See who goes on from now on."""
        now = self._monotonic()
        for sender, place in self._places.items():
            place.since, place.received = now, sender.received
        self._watch()

    def _watch(self) -> None:
        if self._timer is None and self._waiting:
            pause = self._patience / _LOOKS
            self._timer = asyncio.get_running_loop().call_later(
                pause, self._wake, self._monotonic() + 2 * pause
            )

    def _wake(self, latest: float) -> None:
        self._timer = None
        if self._monotonic() > latest:
            # The whole process stood still, or was too busy to read.
            self._watch_anew()
        else:
            self._look()

    def _look(self) -> None:
        if not self._waiting:
            return
        for _, sender in sorted(self._stalled(), key=lambda entry: entry[0]):
            if sender not in self._places or not self._would_help(sender.remote.host):
                continue
            size = self._places[sender].size
            self._vacate(sender)
            self.evicted += 1
            sender.place_taken(
                f"its frame of {size} bytes did not go on for {self._patience:g} s, and others "
                "wait for that memory"
            )
            self._fill()
        self._watch()

    def _stalled(self) -> Iterator[tuple[int, Sender]]:
        """Those who brought too little since they were last looked at, and how much."""
        now = self._monotonic()
        for sender, place in self._places.items():
            read_since = sender.read_since
            if read_since is None or read_since > place.since:
                # It could not go on: what counts is from when it is read from again.
                place.since = now if read_since is None else read_since
                place.received = sender.received
            passed = now - place.since
            if passed < self._patience:
                continue
            brought = sender.received - place.received
            if brought < self._rate * passed:
                yield brought, sender
            else:
                place.since, place.received = now, sender.received

    def _would_help(self, host: str) -> bool:
        """Whether a place of this host is in the way of anybody."""
        return host in self._waiting or next(self._wishes_due(), None) is not None
