"""How much a connection may have compiled: SQL expressions, in characters.

Compiling one takes up to some tens of milliseconds, and a broker has one loop. So each connection
has an allowance of `BURST` characters, which comes back at `RATE`: that is about a seventh of a
core. An expression that is longer than the whole allowance is compiled when all of it is there, and
leaves a debt.

What there is no allowance for is put off. A heartbeat's expression is registered uncompiled, and
left to the first pull that needs it. A pull reserves its share and waits until that is there
(`Postponed`), or is refused if that takes more than `LONGEST_WAIT`. It reserves for its connection:
the pulls for other queues that need the same expression meanwhile wait for it, and pay nothing.
The check before a consumer begins waits in the same way, but is never refused for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orbitmq.broker.clients import Channel
from orbitmq.broker.errors import SystemBusy

#: Characters that may be compiled at once; up to 35 milliseconds.
BURST = 8_192
#: Characters that may be compiled in a second.
RATE = 32_768
#: Seconds that a pull waits for its expression.
LONGEST_WAIT = 3.0

#: What is compiled: a text, and the language that it is in.
Expression = tuple[str | None, str]


class Postponed(SystemBusy):
    """A pull or a check whose expression is compiled in `seconds`; its share is reserved."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__()


class CompileAllowances:
    """What is left of each connection's allowance."""

    def __init__(
        self, monotonic: Callable[[], float], *, burst: int = BURST, rate: int = RATE
    ) -> None:
        self._monotonic = monotonic
        self._burst = burst
        self._rate = rate
        #: What is left, below 0 when it is owed, and when that was so; those without have it all.
        self._left: dict[Channel, tuple[float, float]] = {}
        #: When what was paid for, and is not compiled yet, may be compiled; soonest first.
        self._reserved: dict[Channel, dict[Expression, float]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def take(self, channel: Channel, characters: int) -> bool:
        """Whether so many characters may be compiled now; they then count as compiled."""
        left, now = self._level(channel)
        if left < min(characters, self._burst):
            return False
        self._left[channel] = (left - characters, now)
        return True

    def reserve(self, channel: Channel, expression: Expression, characters: int) -> float:
        """Seconds after which an expression may be compiled; `SystemBusy` if too many.

        It is paid for once, however often it is asked for before it is compiled (`settle`).
        """
        left, now = self._level(channel)
        self._forget_unused(channel, now)
        if (ready_at := self._reserved.get(channel, {}).get(expression)) is not None:
            return max(0.0, ready_at - now)
        wait = max(0.0, (min(characters, self._burst) - left) / self._rate)
        if wait > LONGEST_WAIT:
            raise SystemBusy
        self._left[channel] = (left - characters, now)
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
            if channel is not None and (known := self._left.get(channel)) is not None:
                left, at = known
                self._left[channel] = (left, at + self._monotonic() - began)

    def forget(self, channel: Channel) -> None:
        """A connection has ended."""
        self._left.pop(channel, None)
        self._reserved.pop(channel, None)

    def _forget_unused(self, channel: Channel, now: float) -> None:
        """What nobody has come back for, since its pull was refused for another reason."""
        reserved = self._reserved.get(channel)
        while reserved and now - reserved[oldest := next(iter(reserved))] > LONGEST_WAIT:
            self.settle(channel, oldest)

    def _level(self, channel: Channel) -> tuple[float, float]:
        now = self._monotonic()
        left, at = self._left.get(channel, (float(self._burst), now))
        return min(float(self._burst), left + (now - at) * self._rate), now
