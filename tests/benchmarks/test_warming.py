"""How long a peer works before it is measured, by a clock that stands still between slots."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from benchmarks.client_bench import again
from benchmarks.load.clientwork import Spent
from benchmarks.runner import NoMoreRounds, Sample, Scale
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


def test_what_rounds_differ_by_does_not_count_as_rising():
    assert len(warmed(chain((100, 90, 104, 60, 103), repeat(101)))) == 6


def test_a_peer_that_rises_for_ever_is_measured_nevertheless():
    rising = (float(2**number) for number in range(100))

    assert len(warmed(rising)) == 20


def test_a_peer_is_not_taken_for_warm_too_soon():
    patient = Warming(slot=1.0, least=12.0, longest=20.0)

    assert len(warmed(repeat(100.0), patient)) == 12


@pytest.mark.parametrize("choose", [Scale, Scale.quick])
def test_a_run_warms_up_before_it_gives_up(choose):
    warming = choose().warming

    assert 0 < warming.slot < warming.least < warming.longest


def test_a_full_run_gives_java_time_to_compile():
    assert Scale().warming.least >= 10
    assert Scale().java_round >= 1


def test_rounds_that_are_looked_at_again_are_seen_once_each():
    rounds = [Spent(messages=6, began=0.0, ended=3.0, cpu=cpu) for cpu in (1.0, 2.0)]
    look = again(rounds, lambda done: Sample(done.messages, done.cpu, done.cpu))

    assert [look(), look()] == [Sample(6, 1.0, 1.0), Sample(6, 2.0, 2.0)]
    with pytest.raises(NoMoreRounds):
        look()
