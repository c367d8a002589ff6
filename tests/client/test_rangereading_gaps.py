"""A range with a gap in the middle: waited for, then skipped."""

from __future__ import annotations

import struct

import pytest

from orbitmq.client.ranges.connections import OffsetsGone, QueueRange, RangeAccess, RangeConnections
from orbitmq.client.ranges.read import Missing, RangeSettings, read_ranges
from orbitmq.client.routes import Queue
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from tests.support.remoting import ManualClock
from tests.support.scriptedbroker import ScriptedBroker, asked, brought, told

QUEUE = Queue("orders", "broker-a", 0)
COUNT = 100
LAG = 5.0


class Master:
    """A broker with a gap."""

    def __init__(self, gap: range) -> None:
        self.gap = gap
        #: What it becomes after so many pulls at it.
        self.later: tuple[int, range] | None = None
        self.pulls = 0
        self.clock = ManualClock()
        #: How many pulls at its gap are left until it restarts.
        self.restarts_after: int | None = None

    def read(self, patience: float = LAG + 1.0) -> list[tuple[int, list[int]]]:
        """The chunks that come: how many offsets are missing, and the offsets that are not."""
        with ScriptedBroker(self._answers) as broker:
            links = RangeConnections(RangeAccess(name_servers=(broker.address,), timeout=5.0))
            settings = RangeSettings(missing=Missing.SKIP, patience=patience, lag_patience=LAG)
            try:
                return [
                    (
                        chunk.missing,
                        [
                            struct.unpack_from(">q", data, at + 20)[0]
                            for data in map(bytes, chunk.pieces)
                            for at in range(0, len(data), 40)
                        ],
                    )
                    for chunk in read_ranges(
                        links,
                        [QueueRange(QUEUE, 0, COUNT)],
                        group="readers",
                        settings=settings,
                        clock=self.clock,
                        wait=self._pause,
                    )
                ]
            finally:
                links.close()

    def _pause(self, seconds: float) -> None:
        self.clock.time += seconds

    def _answers(self, pulls: list[Command]) -> list[bytes] | None:
        if self.restarts_after is not None and any(asked(each)[0] in self.gap for each in pulls):
            if not self.restarts_after:
                self.restarts_after = None
                return None
            self.restarts_after -= 1
        return [self._answer(pull) for pull in pulls]

    def _answer(self, pull: Command) -> bytes:
        at, count = asked(pull)
        if at in self.gap:
            self.pulls += 1
            if self.later is not None and self.pulls > self.later[0]:
                self.gap = self.later[1]
        if at in self.gap:
            code, remark = ResponseCode.PULL_NOT_FOUND, "OFFSET_FOUND_NULL"
            return told(pull, code, self.gap.stop, high=COUNT, remark=remark)
        end = min(at + count, COUNT)
        if at < self.gap.start:
            end = min(end, self.gap.start)
        records = b"".join(struct.pack(">i16xq", 40, n).ljust(40, b"x") for n in range(at, end))
        return brought(pull, records, end, high=COUNT)


def found(chunks: list[tuple[int, list[int]]]) -> tuple[int, list[int]]:
    return sum(missing for missing, _ in chunks), [at for _, some in chunks for at in some]


def test_a_gap_is_skipped_when_its_master_has_reported_it_for_long_enough():
    master = Master(range(30, 50))
    began = master.clock.time
    with pytest.raises(OffsetsGone):
        master.read(LAG - 1.0)

    assert found(master.read()) == (20, [*range(30), *range(50, COUNT)])
    assert master.clock.time - began > LAG


def test_a_master_whose_connection_is_lost_has_to_report_a_gap_again():
    master = Master(range(30, 50))
    master.restarts_after = 4
    began = master.clock.time

    assert found(master.read(2 * LAG)) == (20, [*range(30), *range(50, COUNT)])
    assert master.clock.time - began > LAG + 0.05


@pytest.mark.parametrize(
    ("later", "missing"),
    [(range(30, 40), range(30, 40)), (range(0), range(0)), (range(30, 60), range(30, 60))],
    ids=["shrinks", "closes", "grows"],
)
def test_a_gap_that_changes_while_it_is_waited_for(later, missing):
    master = Master(range(30, 50))
    master.later = 2, later

    expected = [at for at in range(COUNT) if at not in missing]
    assert found(master.read(3 * LAG)) == (len(missing), expected)
