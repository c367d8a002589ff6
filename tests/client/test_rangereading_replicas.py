"""A replica may have less than its master: what it lacks is asked of the master, and not lost."""

from __future__ import annotations

import struct

import pytest

from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.ranges.connections import (
    OffsetsGone,
    QueueRange,
    RangeAccess,
    RangeConnections,
    RangeFilter,
)
from orbitmq.client.ranges.read import Missing, RangeSettings, WindowLimits, read_ranges
from orbitmq.client.routes import Queue
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from tests.support.remoting import ManualClock
from tests.support.scriptedbroker import Script, ScriptedBroker, asked, brought, refused, told

QUEUE = Queue("orders", "broker-a", 0)
COUNT = 100
#: Nothing is waited for here: what counts as missing does so at once.
AT_ONCE = 1e-9
BY_TAG = RangeFilter("TagA", "TAG")
FILTERS = [RangeFilter(), BY_TAG]


def having(low: int, high: int) -> Script:
    """A broker that has these messages."""

    def answer(pull: Command) -> bytes:
        at, count = asked(pull)
        if not low <= at < high:
            return told(pull, ResponseCode.PULL_NOT_FOUND, at, low=low, high=high)
        end = min(at + min(count, 32), high)
        records = b"".join(struct.pack(">i16xq", 40, n).ljust(40, b"x") for n in range(at, end))
        return brought(pull, records, end, low=low, high=high)

    return lambda pulls: [answer(pull) for pull in pulls]


def breaking_once(script: Script) -> Script:
    """A broker whose first connection breaks."""
    broken: list[bool] = []

    def broken_first(pulls: list[Command]) -> list[bytes] | None:
        if not broken:
            broken.append(True)
            return None
        return script(pulls)

    return broken_first


def refusing(code: ResponseCode) -> Script:
    return lambda pulls: [refused(pull, code) for pull in pulls]


def away(_: list[Command]) -> None:
    """A broker that hangs up whenever it is asked."""


def read(
    master: Script,
    *replicas: Script,
    missing: Missing = Missing.RAISE,
    patience: float = 60.0,
    lag_patience: float = AT_ONCE,
    is_registered: bool = True,
    wanted: RangeFilter | None = None,
) -> tuple[list[int], list[int]]:
    """The offsets that are read, and how many connections each of the replicas has had."""
    servers = [ScriptedBroker(each) for each in replicas]
    found: list[int] = []
    try:
        with ScriptedBroker(
            master, replicas=[each.address for each in servers], is_registered=is_registered
        ) as first:
            links = RangeConnections(RangeAccess(name_servers=(first.address,), timeout=5.0))
            try:
                for chunk in read_ranges(
                    links,
                    [QueueRange(QUEUE, 0, COUNT)],
                    group="readers",
                    wanted=wanted,
                    settings=RangeSettings(
                        missing=missing, patience=patience, lag_patience=lag_patience
                    ),
                    wait=lambda _: None,
                ):
                    data = b"".join(map(bytes, chunk.pieces))
                    found += [
                        struct.unpack_from(">q", data, at + 20)[0] for at in range(0, len(data), 40)
                    ]
            finally:
                links.close()
    finally:
        for each in servers:
            each.__exit__()
    return found, [each.connections for each in servers]


@pytest.mark.parametrize("missing", list(Missing))
@pytest.mark.parametrize(
    "replica",
    [
        having(0, 90),  # it lags
        having(0, 0),  # and knows nothing of the queue yet
        having(50, 100),  # it began later, or deletes earlier
        having(50, 90),
    ],
    ids=["lags", "empty", "began late", "both"],
)
def test_what_a_replica_lacks_is_read_from_the_master(replica, missing):
    found, connections = read(breaking_once(having(0, COUNT)), replica, missing=missing)

    assert found == list(range(COUNT))
    assert connections == [1]


@pytest.mark.parametrize(
    "code",
    [
        ResponseCode.SYSTEM_BUSY,  # it does not serve reads
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.GO_AWAY,
        ResponseCode.TOPIC_NOT_EXIST,  # it has not heard of it yet
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    ],
)
def test_a_replica_that_refuses_is_left_for_the_master(code):
    found, connections = read(breaking_once(having(0, COUNT)), refusing(code))

    assert found == list(range(COUNT))
    assert connections == [1]


def passing_over(remark: str | None, *, by: int = 40) -> Script:
    """A broker that has none of its messages to give, and names the next offset."""

    def answer(pull: Command) -> bytes:
        following = min(asked(pull)[0] + by, COUNT)
        code = ResponseCode.PULL_RETRY_IMMEDIATELY
        return told(pull, code, following, high=COUNT, remark=remark)

    return lambda pulls: [answer(pull) for pull in pulls]


@pytest.mark.parametrize("missing", list(Missing))
@pytest.mark.parametrize("wanted", FILTERS, ids=str)
@pytest.mark.parametrize(
    "remark", ["MESSAGE_WAS_REMOVING", "OFFSET_FOUND_NULL", "NO_MESSAGE_IN_QUEUE", None]
)
def test_what_a_replica_passes_over_is_read_from_the_master(remark, wanted, missing):
    found, connections = read(
        breaking_once(having(0, COUNT)), passing_over(remark), missing=missing, wanted=wanted
    )

    assert found == list(range(COUNT))
    assert connections == [1]


def test_a_replica_is_believed_that_nothing_matches_a_filter():
    found, connections = read(away, passing_over("NO_MATCHED_MESSAGE"), wanted=BY_TAG)

    assert found == []
    assert connections == [1]


def test_where_nothing_is_filtered_a_replica_cannot_say_that_nothing_matches():
    found, _ = read(breaking_once(having(0, COUNT)), passing_over("NO_MATCHED_MESSAGE"))

    assert found == list(range(COUNT))


@pytest.mark.parametrize("wanted", FILTERS, ids=str)
@pytest.mark.parametrize("remark", ["MESSAGE_WAS_REMOVING", "OFFSET_FOUND_NULL"])
def test_what_the_master_passes_over_because_it_is_not_there_is_missing(remark, wanted):
    with pytest.raises(OffsetsGone, match="has 40 to 100"):
        read(passing_over(remark), wanted=wanted)

    found, _ = read(passing_over(remark), missing=Missing.SKIP, wanted=wanted)
    assert found == []


def test_a_gap_of_the_master_that_closes_soon_is_none():
    """The file of a queue that is being made has no entry yet."""
    gaps: list[Command] = []

    def script(pulls):
        if not gaps:
            gaps.extend(pulls)
            return passing_over("OFFSET_FOUND_NULL")(pulls)
        return having(0, COUNT)(pulls)

    found, _ = read(script, lag_patience=60.0)

    assert found == list(range(COUNT))


def test_a_gap_of_the_master_is_waited_for_once_however_many_pulls_it_takes():
    clock = ManualClock()

    def pause(seconds):
        clock.time += seconds

    gap = passing_over("OFFSET_FOUND_NULL", by=COUNT)
    settings = RangeSettings(
        missing=Missing.SKIP, lag_patience=5.0, window=WindowLimits(requests=1, messages=10)
    )
    with ScriptedBroker(gap) as master:
        links = RangeConnections(RangeAccess(name_servers=(master.address,), timeout=5.0))
        began = clock.time
        chunks = list(
            read_ranges(
                links,
                [QueueRange(QUEUE, 0, COUNT)],
                group="readers",
                settings=settings,
                clock=clock,
                wait=pause,
            )
        )
        links.close()

    assert sum(len(chunk.pieces) for chunk in chunks) == 0
    assert 5.0 <= clock.time - began <= 7.0


def test_a_replica_that_has_everything_is_as_good_as_the_master():
    found, connections = read(away, having(0, COUNT))

    assert found == list(range(COUNT))
    assert connections == [1]


def test_every_replica_gets_its_turn():
    found, _ = read(away, having(0, 90), refusing(ResponseCode.SYSTEM_BUSY), having(0, COUNT))

    assert found == list(range(COUNT))


@pytest.mark.parametrize("is_registered", [True, False])
@pytest.mark.parametrize("missing", list(Missing))
def test_while_the_master_is_away_nothing_counts_as_missing(missing, is_registered):
    """It is an error that passes, and says who is away."""
    with pytest.raises(BrokerUnavailable, match="'broker-a' is not available"):
        read(away, having(0, 90), missing=missing, patience=0.2, is_registered=is_registered)


def test_what_a_replica_lacks_is_told_where_no_master_is_known():
    with pytest.raises(BrokerUnavailable, match=r"a replica lacks messages: .* has 0 to 90"):
        read(away, having(0, 90), patience=0.2, is_registered=False)


@pytest.mark.parametrize(("low", "high"), [(0, 90), (10, COUNT)])
def test_what_the_master_itself_lacks_is_missing(low, high):
    with pytest.raises(OffsetsGone, match=f"has {low} to {high}"):
        read(breaking_once(having(low, high)), having(20, 80))

    found, _ = read(breaking_once(having(low, high)), having(20, 80), missing=Missing.SKIP)
    assert found == list(range(low, high))
