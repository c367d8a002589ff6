"""A replica may have less than its master: what it lacks is asked of the master, and not lost."""

from __future__ import annotations

import struct

import pytest

from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.queue import Queue
from orbitmq.client.rangeaccess import RangeAccess
from orbitmq.client.rangelinks import RangeLinks
from orbitmq.client.rangereading import Missing, RangeSettings, read_ranges
from orbitmq.client.ranges import OffsetsGone, QueueRange
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from tests.support.scriptedbroker import Script, ScriptedBroker, asked, brought, refused, told

QUEUE = Queue("orders", "broker-a", 0)
COUNT = 100
#: Nothing is waited for here: what counts as missing does so at once.
AT_ONCE = 1e-9


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
) -> tuple[list[int], list[int]]:
    """The offsets that are read, and how many connections each of the replicas has had."""
    servers = [ScriptedBroker(each) for each in replicas]
    found: list[int] = []
    try:
        with ScriptedBroker(
            master, replicas=[each.address for each in servers], is_registered=is_registered
        ) as first:
            links = RangeLinks(RangeAccess(name_servers=(first.address,), timeout=5.0))
            try:
                for chunk in read_ranges(
                    links,
                    [QueueRange(QUEUE, 0, COUNT)],
                    group="readers",
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
def test_what_a_replica_lacks_is_read_from_the_master(replica: Script, missing: Missing) -> None:
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
def test_a_replica_that_refuses_is_left_for_the_master(code: ResponseCode) -> None:
    found, connections = read(breaking_once(having(0, COUNT)), refusing(code))

    assert found == list(range(COUNT))
    assert connections == [1]


def test_messages_that_were_removed_from_a_replica_are_read_from_the_master() -> None:
    def removed(pulls: list[Command]) -> list[bytes]:
        return [
            told(
                pull,
                ResponseCode.PULL_RETRY_IMMEDIATELY,
                asked(pull)[0] + 10,
                remark="MESSAGE_WAS_REMOVING",
            )
            for pull in pulls
        ]

    found, _ = read(breaking_once(having(0, COUNT)), removed, missing=Missing.SKIP)

    assert found == list(range(COUNT))


def test_a_replica_that_has_everything_is_as_good_as_the_master() -> None:
    found, connections = read(away, having(0, COUNT))

    assert found == list(range(COUNT))
    assert connections == [1]


def test_every_replica_gets_its_turn() -> None:
    found, _ = read(away, having(0, 90), refusing(ResponseCode.SYSTEM_BUSY), having(0, COUNT))

    assert found == list(range(COUNT))


@pytest.mark.parametrize("is_registered", [True, False])
@pytest.mark.parametrize("missing", list(Missing))
def test_while_the_master_is_away_nothing_counts_as_missing(
    missing: Missing, is_registered: bool
) -> None:
    """It is an error that passes, and says who is away."""
    with pytest.raises(BrokerUnavailable, match="'broker-a' is not available"):
        read(away, having(0, 90), missing=missing, patience=0.2, is_registered=is_registered)


def test_what_a_replica_lacks_is_told_where_no_master_is_known() -> None:
    with pytest.raises(BrokerUnavailable, match=r"a replica lacks messages: .* has 0 to 90"):
        read(away, having(0, 90), patience=0.2, is_registered=False)


@pytest.mark.parametrize(("low", "high"), [(0, 90), (10, COUNT)])
def test_what_the_master_itself_lacks_is_missing(low: int, high: int) -> None:
    with pytest.raises(OffsetsGone, match=f"has {low} to {high}"):
        read(breaking_once(having(low, high)), having(20, 80))

    found, _ = read(breaking_once(having(low, high)), having(20, 80), missing=Missing.SKIP)
    assert found == list(range(low, high))
