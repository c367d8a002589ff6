"""Rounds of our client and of another one, in turns, each alone in its process.

The same rounds are looked at twice: by wall time, which is what a user gets, and by the CPU time of
the client's process, which is what it costs him.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.load.clientprocesses import ClientProcess
from benchmarks.load.clientwork import Spent
from benchmarks.runner import NoMoreRounds, NotAtHand, Sample, Scale, Work
from benchmarks.warming import warm_up

NO_ROUNDS = "the line before this one failed, or was not asked for"

T = TypeVar("T")
Load = Callable[[ClientProcess, Scale], Spent]


def by_wall(done: Spent) -> Sample:
    return Sample(done.messages, done.seconds, done.seconds)


def per_cpu(done: Spent) -> Sample:
    return Sample(done.messages, done.cpu, done.cpu)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: a client, made when it is needed, and what it is asked to do."""

    client: Callable[[], ClientProcess]
    load: Load

    def once(self, scale: Scale) -> Spent:
        return self.load(self.client(), scale)

    def for_a_round(self, scale: Scale) -> Spent:
        """The same again until it has taken as long as a round has to: what it was together."""
        messages, seconds, cpu = 0, 0.0, 0.0
        while seconds < scale.java_round:
            done = self.once(scale)
            messages += done.messages
            seconds += done.seconds
            cpu += done.cpu
        return Spent(messages=messages, began=0.0, ended=seconds, cpu=cpu)


class RoundsBeside:
    """The set-ups of two benches: the first makes the rounds, the second looks at them again."""

    def __init__(
        self, ours: Side, other: Side, *, warm: Callable[[Spent], Sample] | None = None
    ) -> None:
        """With `warm` the other side works until what that says of it rises no more."""
        self._ours = ours
        self._other = other
        self._warm = warm
        self._kept: tuple[deque[Spent], deque[Spent]] = (deque(), deque())

    @contextmanager
    def by_wall(self, scale: Scale) -> Iterator[tuple[Work, Work]]:
        for rounds in self._kept:
            rounds.clear()
        if self._warm is not None:
            warm_up(lambda: self._rate(scale), scale.warming)
        for side in (self._other, self._ours):  # without the other, nothing need be done
            side.once(scale)
        ours, other = (
            self._work(side, kept, scale)
            for side, kept in zip((self._ours, self._other), self._kept, strict=True)
        )
        yield ours, other

    @contextmanager
    def by_cpu(self, _: Scale) -> Iterator[tuple[Work, Work]]:
        """The same rounds by CPU time, each once."""
        ours, other = self._kept
        if not ours:
            raise NotAtHand(NO_ROUNDS)
        yield again(ours, per_cpu), again(other, per_cpu)

    def _rate(self, scale: Scale) -> float:
        assert self._warm is not None
        seen = self._warm(self._other.once(scale))
        return seen.units / seen.cost

    def _work(self, side: Side, kept: deque[Spent], scale: Scale) -> Work:
        def run() -> Sample:
            done = side.for_a_round(scale)
            kept.append(done)
            return by_wall(done)

        return run


def again(rounds: Iterable[T], sample: Callable[[T], Sample]) -> Work:
    """Rounds that were made before, seen in another way, one after the other and none twice."""
    left = deque(rounds)

    def look() -> Sample:
        if not left:
            raise NoMoreRounds
        return sample(left.popleft())

    return look
