"""The checker finds every anomaly that is planted in a history, and none in a history without."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from tools.chaos.checker import Analysis, analyse
from tools.chaos.history import (
    Acked,
    Assigned,
    Corrupt,
    Entered,
    Event,
    Fault,
    Invoked,
    Read,
    Refused,
    Unknown,
    Value,
)

QUEUE = "chaos@broker-a:0"
GROUP = "readers"


class Story:
    """A history that is told event by event; every event is a second after the one before."""

    def __init__(self) -> None:
        self._time = count(1.0)
        self.events: list[Event] = []

    def send(self, sequence: int, offset: int, key: str = "k") -> Story:
        text = str(Value("p", sequence, key))
        self._add(lambda at: Invoked(at, text))
        self._add(lambda at: Acked(at, text, QUEUE, offset))
        return self

    def invoke(self, sequence: int, key: str = "k") -> Story:
        return self._add(lambda at: Invoked(at, str(Value("p", sequence, key))))

    def refuse(self, sequence: int) -> Story:
        self.invoke(sequence)
        return self._add(lambda at: Refused(at, str(Value("p", sequence, "k")), "no"))

    def lose_sight(self, sequence: int) -> Story:
        self.invoke(sequence)
        return self._add(lambda at: Unknown(at, str(Value("p", sequence, "k")), "timeout"))

    def enter(self, sequence: int, offset: int, reader: str = "c1", key: str = "k") -> Story:
        text = str(Value("p", sequence, key))
        return self._add(lambda at: Entered(at, GROUP, reader, QUEUE, offset, text))

    def read(self, sequence: int, offset: int, reader: str = "c1", key: str = "k") -> Story:
        text = str(Value("p", sequence, key))
        return self._add(lambda at: Read(at, GROUP, reader, QUEUE, offset, text))

    def read_by_others(self, sequence: int, offset: int) -> Story:
        text = str(Value("p", sequence, "k"))
        return self._add(lambda at: Read(at, "others", "x", QUEUE, offset, text))

    def handle(self, sequence: int, offset: int, reader: str = "c1", key: str = "k") -> Story:
        return self.enter(sequence, offset, reader, key).read(sequence, offset, reader, key)

    def assign(self, reader: str, *queues: str) -> Story:
        return self._add(lambda at: Assigned(at, GROUP, reader, queues))

    def fault(self, what: str, target: str, *, is_over: bool = False) -> Story:
        return self._add(lambda at: Fault(at, what, target, is_over))

    def corrupt(self, offset: int) -> Story:
        return self._add(lambda at: Corrupt(at, "c1", QUEUE, offset, "changed"))

    def _add(self, make: Callable[[float], Event]) -> Story:
        self.events.append(make(next(self._time)))
        return self


def judge(story: Story) -> Analysis:
    return analyse(story.events, groups=(GROUP,), ordered=(GROUP,), contiguous=(GROUP,))


def good_story() -> Story:
    """Three messages of one key, consumed in order by one member and then by another."""
    story = Story().send(0, 0).send(1, 1).send(2, 2)
    story.assign("c1", QUEUE).handle(0, 0).handle(1, 1).assign("c1")
    return story.assign("c2", QUEUE).handle(2, 2, "c2")


def test_a_history_without_anomalies_is_clean():
    found = judge(good_story())

    assert found.is_clean
    assert (found.acked, found.reads, found.unknown, found.refused) == (3, 3, 0, 0)


def two(key: str = "k", other: str = "k") -> Story:
    """Messages 0 and 1 in their places, and a member that owns the queue."""
    return Story().send(0, 0, key).send(1, 1, other).assign("c1", QUEUE)


PLANTED = {
    "a message below one that was read": ("lost", two().handle(1, 1)),
    "a message at the end": ("unseen", two().handle(0, 0)),
    "a changed body": ("corrupt", good_story().corrupt(3)),
    "a refused message that was read": ("aborted reads", good_story().refuse(7).handle(7, 3, "c2")),
    "a message that nobody has sent": ("aborted reads", good_story().handle(99, 3, "c2")),
    "a place with two values for readers": (
        "inconsistent offsets",
        good_story().invoke(5).invoke(6).handle(5, 3, "c2").read(6, 3, "c3"),
    ),
    "a place with another value than promised": (
        "inconsistent offsets",
        two().handle(0, 0).handle(0, 1),
    ),
    "a later message stored before an earlier one": (
        "sent out of order",
        Story().send(0, 1).send(1, 0).assign("c1", QUEUE).handle(1, 0).handle(0, 1),
    ),
    "a later message begun before an earlier one was done": (
        "handled out of order",
        two().enter(0, 0).enter(1, 1).read(0, 0).read(1, 1),
    ),
    "an offset left out": (
        "skipped",
        two().send(2, 2).handle(0, 0).handle(2, 2).assign("c1").assign("c1", QUEUE).handle(1, 1),
    ),
    "an offset repeated": ("stepped back", two().handle(0, 0).handle(1, 1).handle(0, 0)),
    "two owners at once": (
        "overlaps",
        two("a", "b")
        .enter(0, 0, key="a")
        .assign("c2", QUEUE)
        .handle(1, 1, "c2", "b")
        .read(0, 0, key="a"),
    ),
    "two messages of a queue at once in its owner": (
        "overlaps",
        two("a", "b").enter(0, 0, key="a").handle(1, 1, key="b").read(0, 0, key="a"),
    ),
    "a send without outcome that another group has": (
        "lost",
        Story()
        .send(0, 0)
        .lose_sight(1)
        .send(2, 2)
        .assign("c1", QUEUE)
        .read_by_others(1, 1)
        .handle(0, 0)
        .handle(2, 2),
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_every_planted_anomaly_is_found(planted):
    kind, story = PLANTED[planted]

    found = judge(story)

    assert found.anomalies[kind], f"{planted} was not found"


def test_a_send_without_outcome_may_be_stored_or_not():
    stored = good_story().lose_sight(3).handle(3, 3, "c2")
    not_stored = good_story().lose_sight(3)

    assert judge(stored).is_clean
    assert judge(not_stored).is_clean
    assert judge(not_stored).unknown == 1


def test_messages_that_were_on_their_way_together_may_stand_in_any_order():
    story = Story().invoke(0).invoke(1)
    later = iter((10.0, 11.0))
    acks = [
        Acked(next(later), str(Value("p", 1, "k")), QUEUE, 0),
        Acked(next(later), str(Value("p", 0, "k")), QUEUE, 1),
    ]

    assert not analyse([*story.events, *acks], groups=()).sent_out_of_order


def test_what_is_stored_twice_or_delivered_again_is_counted_and_not_condemned():
    story = Story().send(0, 1).assign("c1", QUEUE).handle(0, 0).handle(0, 1).assign("c1")
    story.assign("c2", QUEUE).handle(0, 1, "c2")

    found = judge(story)

    assert found.is_clean
    assert (found.stored_twice, found.delivered_again) == (1, 1)


def test_a_copy_in_the_retry_topic_is_no_second_place():
    story = good_story()
    text = str(Value("p", 2, "k"))
    story.events.append(Read(100.0, GROUP, "c2", f"%RETRY%{GROUP}@broker-a:0", 0, text))

    assert judge(story).stored_twice == 0


def test_a_member_that_was_killed_in_a_call_overlaps_with_nobody():
    story = Story().send(0, 0).assign("c1", QUEUE).enter(0, 0).fault("kill", "c1")
    story.assign("c2", QUEUE).handle(0, 0, "c2")

    assert judge(story).is_clean


def test_a_member_that_vanished_in_a_call_without_being_killed_does_overlap():
    story = Story().send(0, 0).assign("c1", QUEUE).enter(0, 0)
    story.assign("c2", QUEUE).handle(0, 0, "c2")

    assert judge(story).overlaps


def test_a_call_that_a_pause_caught_is_counted_and_the_next_one_is_not_excused():
    story = Story().send(0, 0).send(1, 1, "other").assign("c1", QUEUE).enter(0, 0)
    story.fault("pause", "c1").assign("c2", QUEUE).handle(0, 0, "c2")
    story.fault("pause", "c1", is_over=True).read(0, 0)

    assert not judge(story).overlaps
    assert judge(story).caught_in_pause == 1

    # Awake again, it begins another message while the new owner is at work.
    story.enter(1, 1, "c2", "other").enter(1, 1, "c1", "other")
    story.read(1, 1, "c1", "other").read(1, 1, "c2", "other")

    assert judge(story).overlaps


def test_a_send_without_outcome_at_the_end_of_a_queue_may_be_on_its_way():
    story = good_story().lose_sight(3).read_by_others(3, 3)

    assert judge(story).is_clean


def test_an_absence_that_nobody_looked_for_is_not_told():
    plain, ordered = analyse(good_story().events, groups=(GROUP,)), judge(good_story())

    assert "overlaps" not in plain.anomalies
    assert "skipped" not in plain.anomalies
    assert {"overlaps", "handled out of order", "skipped", "sent out of order"} <= set(
        ordered.anomalies
    )
