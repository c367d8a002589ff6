"""How much a connection, and a host, may have compiled: SQL expressions, in characters.

Compiling one takes up to some tens of milliseconds, and a broker has one loop. So each connection
has an allowance of `BURST` characters, which comes back at `RATE`: that is about a seventh of a
core. An expression that is longer than the whole allowance is compiled when all of it is there, and
leaves a debt. All connections of a host together have `HOST_SHARES` times as much: else whoever
opens many, one after the other or side by side, has the broker do nothing else. Not all hosts
together have a bound: then one of them could have those of all others refused.

What there is no allowance for is put off. A heartbeat's expression is registered uncompiled, and
left to the first pull that needs it. A pull reserves its share and waits until that is there
(`Postponed`), or is refused if that takes more than `LONGEST_WAIT`. It reserves for its connection:
the pulls for other queues that need the same expression meanwhile wait for it, and pay nothing.
The check before a consumer begins waits in the same way, but is never refused for that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from orbitmq.broker.clients import Channel
from orbitmq.broker.errors import SystemBusy
from orbitmq.remoting.connection import Connection

#: Characters that may be compiled at once; up to 35 milliseconds.
BURST = 8_192
#: Characters that may be compiled in a second.
RATE = 32_768
#: Connections of one host that may have as much as that compiled, all the time; under half a core.
HOST_SHARES = 3
#: Seconds that a pull waits for its expression.
LONGEST_WAIT = 3.0
#: Of so many it is worth looking who has all of an allowance again, and need not be remembered.
_MANY = 1024

#: What is compiled: a text, and the language that it is in.
Expression = tuple[str | None, str]


def _host_of(channel: Channel) -> str | None:
    return channel.remote.host if isinstance(channel, Connection) else None


class Postponed(SystemBusy):
    """A pull or a check whose expression is compiled in `seconds`; its share is reserved."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__()


class CompileAllowances:
    """What is left of the allowances of each connection and each host."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        *,
        burst: int = BURST,
        rate: int = RATE,
        host_of: Callable[[Channel], Hashable | None] = _host_of,
    ) -> None:
        """`host_of` says where a connection comes from; None: nobody else counts as being there."""
        self._monotonic = monotonic
        self._host_of = host_of
        self._own = _Levels(burst, rate)
        self._hosts = _Levels(HOST_SHARES * burst, HOST_SHARES * rate)
        #: When what was paid for, and is not compiled yet, may be compiled; soonest first.
        self._reserved: dict[Channel, dict[Expression, float]] = {}

    def __len__(self) -> int:
        return len(self._own)

    def take(self, channel: Channel, characters: int) -> bool:
        """Whether so many characters may be compiled now; they then count as compiled."""
        now = self._monotonic()
        if self._wait(channel, characters, now) > 0:
            return False
        self._charge(channel, characters, now)
        return True

    def reserve(self, channel: Channel, expression: Expression, characters: int) -> float:
        """Seconds after which an expression may be compiled; `SystemBusy` if too many.

        It is paid for once, however often it is asked for before it is compiled (`settle`).
        """
        now = self._monotonic()
        self._forget_unused(channel, now)
        if (ready_at := self._reserved.get(channel, {}).get(expression)) is not None:
            return max(0.0, ready_at - now)
        wait = self._wait(channel, characters, now)
        if wait > LONGEST_WAIT:
            raise SystemBusy
        self._charge(channel, characters, now)
        self._reserved.setdefault(channel, {})[expression] = now + wait
        return wait

    def has_reserved(self, channel: Channel, expression: Expression) -> bool:
        return expression in self._reserved.get(channel, ())

    def settle(self, channel: Channel, expression: Expression) -> None:
        """An expression is there: nobody has to wait for it any more."""
        reserved = self._reserved.get(channel)
        if reserved is not None and reserved.pop(expression, None) is not None and not reserved:
            del self._reserved[channel]

    @contextmanager
    def compiling(self, channel: Channel | None) -> Iterator[None]:
        """Meanwhile nothing comes back: else a slow machine would compile without a break."""
        began = self._monotonic()
        try:
            yield
        finally:
            if channel is not None:
                seconds = self._monotonic() - began
                self._own.pause(channel, seconds)
                self._hosts.pause(self._host_of(channel), seconds)

    def forget(self, channel: Channel) -> None:
        """A connection has ended; its host may come back with another one."""
        self._own.forget(channel)
        self._reserved.pop(channel, None)

    def _forget_unused(self, channel: Channel, now: float) -> None:
        """What nobody has come back for, since its pull was refused for another reason."""
        reserved = self._reserved.get(channel)
        while reserved and now - reserved[oldest := next(iter(reserved))] > LONGEST_WAIT:
            self.settle(channel, oldest)

    def _wait(self, channel: Channel, characters: int, now: float) -> float:
        wait = self._own.wait(channel, characters, now)
        host = self._host_of(channel)
        return wait if host is None else max(wait, self._hosts.wait(host, characters, now))

    def _charge(self, channel: Channel, characters: int, now: float) -> None:
        self._own.charge(channel, characters, now)
        host = self._host_of(channel)
        if host is not None:
            self._hosts.charge(host, characters, now)


class _Levels:
    """What is left to each of those who have the same allowance."""

    __slots__ = ("_burst", "_left", "_rate")

    def __init__(self, burst: int, rate: int) -> None:
        self._burst = float(burst)
        self._rate = rate
        #: What is left, below 0 when it is owed, and when that was so; those without have it all.
        self._left: dict[Hashable, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def wait(self, who: Hashable, characters: int, now: float) -> float:
        """Seconds until so much is left, or all that there can be."""
        return max(0.0, (min(characters, self._burst) - self._level(who, now)) / self._rate)

    def charge(self, who: Hashable, characters: int, now: float) -> None:
        if len(self._left) >= _MANY and who not in self._left:
            self._forget_full(now)
        self._left[who] = (self._level(who, now) - characters, now)

    def pause(self, who: Hashable, seconds: float) -> None:
        """Nothing came back in the last so many seconds."""
        if (known := self._left.get(who)) is not None:
            left, at = known
            self._left[who] = (left, at + seconds)

    def forget(self, who: Hashable) -> None:
        self._left.pop(who, None)

    def _forget_full(self, now: float) -> None:
        for who in [who for who in self._left if self._level(who, now) >= self._burst]:
            del self._left[who]

    def _level(self, who: Hashable, now: float) -> float:
        left, at = self._left.get(who, (self._burst, now))
        return min(self._burst, left + (now - at) * self._rate)
