"""What comes twice has to have a reason."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tools.chaos.history import Acked, Event, Fault, Invoked, Read
from tools.chaos.repetitions import SETTLING, UNSAVED, unexplained_copies, unexplained_deliveries

QUEUE = "chaos@broker-a:0"


def read(at: float, offset: int = 0, group: str = "readers", queue: str = QUEUE) -> Read:
    return Read(at, group, "c1", queue, offset, f"p/{offset}/k")


def kill(at: float, until: float | None = None) -> list[Event]:
    told: list[Event] = [Fault(at, "kill broker", "broker-a", is_over=False)]
    return told if until is None else [*told, Fault(until, "kill broker", "broker-a", is_over=True)]


def given_again(*events: Event | Sequence[Event]) -> list[str]:
    flat: list[Event] = []
    for each in events:
        flat += each if isinstance(each, Sequence) else [each]
    return unexplained_deliveries(sorted(flat, key=lambda event: event.at), ("readers",))


def test_what_was_done_just_before_a_fault_may_come_again_after_it():
    assert not given_again(read(100.0), kill(104.0, 105.0), read(106.0))
    assert not given_again(read(100.0), kill(104.0), read(106.0))


def test_what_comes_again_without_any_fault_has_no_reason():
    assert len(given_again(read(100.0), read(101.0))) == 1
    assert len(given_again(read(100.0), read(101.0), kill(102.0))) == 1


def test_what_was_done_long_before_a_fault_must_have_been_saved():
    done = 104.0 - UNSAVED - 0.1

    (found,) = given_again(read(done), kill(104.0, 105.0), read(106.0))

    assert QUEUE in found


def test_a_broker_that_is_killed_again_and_again_has_no_time_to_save():
    kills = [kill(at, at + 1.0) for at in range(102, 150, 5)]

    assert not given_again(read(100.0), *kills, read(150.0))


def test_a_calm_time_between_two_faults_is_enough_to_save():
    calm = 103.0 + max(UNSAVED, SETTLING) + 0.1

    assert given_again(read(100.0), kill(102.0, 103.0), kill(calm, calm + 1.0), read(calm + 2.0))


def test_a_fault_explains_nothing_long_after_it_was_over():
    assert given_again(read(100.0), kill(104.0, 105.0), read(105.1 + SETTLING))


def test_a_wrong_date_explains_nothing():
    jump = Fault(104.0, "clock jump", "broker-a", is_over=False)

    assert given_again(read(100.0), jump, read(106.0))


def test_other_groups_and_other_places_are_no_repetition():
    assert not given_again(read(100.0), read(101.0, group="others"), read(101.0, offset=1))


@pytest.mark.parametrize(("faults", "count"), [([], 1), (kill(101.5, 102.5), 0), (kill(50.0), 1)])
def test_a_message_stands_twice_only_when_its_sending_met_with_a_fault(faults, count):
    events: list[Event] = [
        *faults,
        Invoked(100.0, "p/0/k"),
        Acked(103.0, "p/0/k", QUEUE, 1),
        read(104.0, 0),
        Read(104.0, "readers", "c1", QUEUE, 1, "p/0/k"),
        Read(105.0, "readers", "c1", "%RETRY%readers@broker-a:0", 7, "p/0/k"),
    ]

    assert len(unexplained_copies(events)) == count


@pytest.mark.parametrize(("took", "count"), [(0.9, 1), (1.1, 0)])
def test_an_answer_that_was_not_waited_for_explains_a_copy(took, count):
    events: list[Event] = [
        Invoked(100.0, "p/0/k"),
        Acked(100.0 + took, "p/0/k", QUEUE, 1),
        Read(104.0, "readers", "c1", QUEUE, 0, "p/0/k"),
    ]

    assert len(unexplained_copies(events, patience=1.0)) == count
