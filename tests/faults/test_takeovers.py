"""Which pauses let others take queues over."""

from __future__ import annotations

from tools.chaos.history import Assigned, Entered, Event, Fault, Read
from tools.chaos.scenarios.consumers import bound
from tools.chaos.takeovers import Takeover, is_taken_over, takeovers

GROUP = "readers"
OWNED: list[Event] = [Assigned(1.0, GROUP, "c1", ("q0", "q1")), Assigned(1.0, GROUP, "c2", ("q2",))]


def read(at: float, reader: str, queue: str, offset: int = 0, group: str = GROUP) -> Read:
    return Read(at, group, reader, queue, offset, f"p/{offset}/k")


def paused(*meanwhile: Event) -> list[Event]:
    return [*OWNED, Fault(10.0, "pause", "c1", False), *meanwhile, Fault(20.0, "pause", "c1", True)]


def test_a_queue_that_another_member_worked_on_meanwhile_was_taken_over():
    entered = Entered(15.0, GROUP, "c2", "q0", 3, "p/3/k")

    found = takeovers(paused(entered, read(16.0, "c2", "q0", 3)), GROUP)

    assert found == [Takeover("c1", 10.0, "q0", done=1)]


def test_the_pause_that_counts_is_the_last_one():
    first = paused(read(15.0, "c2", "q0"))
    again: list[Event] = [*first, Fault(30.0, "pause", "c1", False)]

    assert is_taken_over(first[:-1], GROUP)
    assert not is_taken_over(again, GROUP)
    assert is_taken_over([*again, read(35.0, "c2", "q1")], GROUP)


def test_a_pause_allows_repetitions_only_if_it_moved_queues():
    done = [read(5.0 + number, "c1", "q0", number) for number in range(5)]

    unmoved = bound([*done, *paused()])
    moved = bound([*done, *paused(read(15.0, "c2", "q0", 4))])
    moved_further = bound([*done, *paused(*(read(15.0, "c2", "q0", 4 + n) for n in range(9)))])

    assert unmoved == 0
    assert moved > len(done)
    assert moved_further == moved + 8


def test_a_kill_allows_what_was_done_since_the_last_report():
    long_ago = [read(1.0, "c1", "q0", number) for number in range(100)]
    before = [read(18.0, "c1", "q0", 100 + number) for number in range(5)]
    kill = Fault(20.0, "kill", "c1", False)

    assert bound([*long_ago, *before, kill]) == bound([*before, kill]) == bound([kill]) + 5
