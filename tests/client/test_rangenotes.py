"""What one reading of a range leaves to the next."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import pytest

from orbitmq.client.ranges.connections import OffsetsGone, QueueRange, RangeAccess, RangeConnections
from orbitmq.client.ranges.read import Chunk, Gap, GapTracker, Missing, RangeSettings, read_ranges
from orbitmq.client.routes import Queue
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from tests.support.remoting import ManualClock
from tests.support.scriptedbroker import ScriptedBroker, asked, brought, told

QUEUE = Queue("orders", "broker-a", 0)
COUNT = 100
WHOLE = QueueRange(QUEUE, 0, COUNT)
LAG = 5.0


class Master:
    """A broker with a gap, or without, that is read for a short time again and again."""

    def __init__(self, gap: range) -> None:
        self.gap = gap
        self.clock = ManualClock()
        #: Seconds that it takes to answer.
        self.latency = 0.0
        #: How many pulls at its gap are left until it restarts.
        self.restarts_after: int | None = None

    def read(
        self, notes: GapTracker, *, patience: float = 2.0, whole: QueueRange = WHOLE
    ) -> list[int]:
        """The offsets that come; an error when the time for it is over."""
        with ScriptedBroker(self._answers) as broker:
            links = RangeConnections(RangeAccess(name_servers=(broker.address,), timeout=5.0))
            try:
                return [
                    struct.unpack_from(">q", data, at + 20)[0]
                    for chunk in self._chunks(links, notes, patience, whole)
                    for data in map(bytes, chunk.pieces)
                    for at in range(0, len(data), 40)
                ]
            finally:
                links.close()

    def _chunks(
        self, links: RangeConnections, notes: GapTracker, patience: float, whole: QueueRange
    ) -> Iterator[Chunk]:
        return read_ranges(
            links,
            [whole],
            group="readers",
            settings=RangeSettings(missing=Missing.SKIP, patience=patience, lag_patience=LAG),
            clock=self.clock,
            wait=self._pause,
            notes=notes,
        )

    def _pause(self, seconds: float) -> None:
        self.clock.time += seconds

    def _answers(self, pulls: list[Command]) -> list[bytes] | None:
        self.clock.time += self.latency
        if self.restarts_after is not None and any(asked(each)[0] in self.gap for each in pulls):
            if not self.restarts_after:
                self.restarts_after = None
                return None
            self.restarts_after -= 1
        return [self._answer(pull) for pull in pulls]

    def _answer(self, pull: Command) -> bytes:
        at, count = asked(pull)
        if at in self.gap:
            code, remark = ResponseCode.PULL_NOT_FOUND, "OFFSET_FOUND_NULL"
            return told(pull, code, self.gap.stop, high=COUNT, remark=remark)
        end = min(at + count, COUNT)
        if at < self.gap.start:
            end = min(end, self.gap.start)
        records = b"".join(struct.pack(">i16xq", 40, n).ljust(40, b"x") for n in range(at, end))
        return brought(pull, records, end, high=COUNT)


def test_a_gap_that_is_said_for_long_enough_is_passed_by_readings_that_are_shorter():
    master = Master(range(30, 50))
    notes = GapTracker(master.clock)
    began = master.clock.time

    while master.clock.time - began < LAG - 2.5:
        with pytest.raises(OffsetsGone):
            master.read(notes)
    before = notes.left_out(WHOLE)
    found = master.read(notes, patience=LAG - 1.0)

    assert before == 0
    assert found == [*range(30), *range(50, COUNT)]
    assert notes.left_out(WHOLE) == 20
    assert notes.left_out(QueueRange(QUEUE, 0, 35)) == 5


def test_time_in_which_nobody_asks_makes_no_gap_older():
    master = Master(range(30, 50))
    notes = GapTracker(master.clock)

    said = []
    for _ in range(2):
        with pytest.raises(OffsetsGone):
            master.read(notes, patience=1.0)
        (gap,) = notes.gaps(WHOLE)
        said.append(gap.seconds)
        master.clock.time += 3600.0

    assert 0 < said[0] < LAG / 2
    assert said[1] == pytest.approx(2 * said[0])


def test_a_gap_is_passed_though_the_master_answers_once_in_each_reading():
    """Each is of another executor, which is told what was heard before."""
    master = Master(range(30, 50))
    master.latency = 2.0
    gaps: list[Gap] = []
    said: list[float] = []
    found: list[int] = []

    while not found and len(said) < 10:
        notes = GapTracker(master.clock)
        for gap in gaps:
            notes.know(QUEUE, gap)
        with contextlib.suppress(OffsetsGone):
            found = master.read(notes, patience=1.0)
        gaps = notes.gaps(WHOLE)
        said += [gap.seconds for gap in gaps]

    assert found == [*range(30), *range(50, COUNT)]
    # Of the first word nobody knows for how long it has been true.
    assert said[0] == 0.0
    assert said == sorted(said)


def test_one_word_counts_though_another_queue_was_read_before():
    """As in a task with queues of several brokers, which are read one after the other."""
    master = Master(range(30, 50))
    master.latency = 1.0
    notes = GapTracker(master.clock)
    notes.know(QUEUE, Gap(30, 50, 1.0))

    other = QueueRange(Queue("orders", "broker-a", 1), 50, COUNT)
    assert master.read(notes, whole=other) == list(range(50, COUNT))
    master.clock.time += 60.0
    with pytest.raises(OffsetsGone):
        master.read(notes, patience=1.0)
    (gap,) = notes.gaps(WHOLE)

    # Until the word came, and not while the other one was read.
    assert 1.0 + master.latency <= gap.seconds < LAG


def test_a_reading_that_hears_nothing_makes_no_gap_older():
    clock = ManualClock()
    notes = GapTracker(clock)
    notes.know(QUEUE, Gap(30, 50, 2.0))
    notes.resume([QUEUE])
    clock.time += 60.0
    notes.pause()

    assert notes.gaps(WHOLE) == [Gap(30, 50, 2.0)]


def test_a_master_whose_connection_is_lost_has_to_say_it_anew():
    """It has restarted, and its first word is not believed."""
    master = Master(range(30, 50))
    notes = GapTracker(master.clock)
    notes.know(QUEUE, Gap(30, 50, LAG - 0.01))

    master.restarts_after = 0
    with pytest.raises(OffsetsGone):
        master.read(notes)
    (gap,) = notes.gaps(WHOLE)

    assert (gap.start, gap.end) == (30, 50)
    assert 0 < gap.seconds < LAG - 1.0


def test_what_was_heard_elsewhere_counts():
    master = Master(range(30, 50))
    notes = GapTracker(master.clock)
    notes.know(QUEUE, Gap(30, 50, LAG))

    assert master.read(notes) == [*range(30), *range(50, COUNT)]


def test_a_gap_that_has_grown_is_passed_as_far_as_it_was_known():
    master = Master(range(30, 50))
    notes = GapTracker(master.clock)
    notes.know(QUEUE, Gap(30, 40, LAG))

    with pytest.raises(OffsetsGone):
        master.read(notes)
    before = notes.left_out(WHOLE)
    known, grown = notes.gaps(WHOLE)
    found = master.read(notes, patience=LAG + 1.0)

    assert before == 10
    assert [(gap.start, gap.end) for gap in (known, grown)] == [(30, 40), (40, 50)]
    assert 0 < grown.seconds < LAG
    assert found == [*range(30), *range(50, COUNT)]
    assert notes.left_out(WHOLE) == 20


def test_a_gap_that_has_shrunk_is_passed_as_far_as_it_goes():
    master = Master(range(30, 40))
    notes = GapTracker(master.clock)
    notes.know(QUEUE, Gap(30, 50, LAG))

    assert master.read(notes) == [*range(30), *range(40, COUNT)]


def test_a_gap_that_has_closed_is_waited_for_again_when_it_opens():
    master = Master(range(30, 50))
    notes = GapTracker(master.clock)
    notes.know(QUEUE, Gap(30, 50, LAG))

    master.gap = range(0)
    assert master.read(notes) == list(range(COUNT))
    assert notes.gaps(WHOLE) == []
    master.gap = range(30, 50)
    with pytest.raises(OffsetsGone):
        master.read(notes)


def test_stretches_that_were_left_out_twice_count_once():
    notes = GapTracker()
    for start, end in ((10, 20), (15, 30), (10, 20), (40, 50)):
        notes.leave_out(QUEUE, start, end)

    assert notes.left_out(WHOLE) == 30
