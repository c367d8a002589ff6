"""How long a peer works before it is measured, by a clock that stands still between slots."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from benchmarks.beside import again
from benchmarks.load.clientwork import Spent
from benchmarks.runner import NoMoreRounds, Sample
from benchmarks.warming import Warming, warm_up

WARMING = Warming(slot=1.0, least=3.0, longest=20.0)


class Peer:
    """Works for a second of its own clock in every slot."""

    def __init__(self, rates: Iterator[float]) -> None:
        self._rates = rates
        self.now = 0.0

    def slot(self) -> float:
        self.now += 1.0
        return next(self._rates)

    def clock(self) -> float:
        return self.now


def warmed(rates: Iterator[float], warming: Warming = WARMING) -> list[float]:
    peer = Peer(rates)
    return warm_up(peer.slot, warming, clock=peer.clock)


def test_a_peer_is_warm_when_it_has_stopped_rising():
    rates = warmed(chain((10, 20, 40, 80), repeat(100)))

    assert rates == [10, 20, 40, 80] + [100] * 6


def test_a_peer_that_rises_for_ever_is_measured_nevertheless():
    rising = (float(2**number) for number in range(100))

    assert len(warmed(rising)) == 20


def test_rounds_that_are_looked_at_again_are_seen_once_each():
    rounds = [Spent(messages=6, began=0.0, ended=3.0, cpu=cpu) for cpu in (1.0, 2.0)]
    look = again(rounds, lambda done: Sample(done.messages, done.cpu, done.cpu))

    assert [look(), look()] == [Sample(6, 1.0, 1.0), Sample(6, 2.0, 2.0)]
    with pytest.raises(NoMoreRounds):
        look()
