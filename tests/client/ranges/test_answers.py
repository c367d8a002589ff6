"""What masters and replicas answer to pulls, and what the reader of a range makes of it."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.ranges.connections import (
    OffsetsGone,
    QueueRange,
    RangeAccess,
    RangeConnections,
    RangeFilter,
)
from orbitmq.client.ranges.read import (
    Missing,
    RangeSettings,
    ReceiveBuffer,
    WindowLimits,
    read_ranges,
)
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command, encode_command
from tests.support.remoting import ManualClock
from tests.support.scriptedbroker import Script, ScriptedBroker, asked, brought, refused, told

QUEUE = Queue("orders", "broker-a", 0)
COUNT = 100
BY_TAG = RangeFilter("TagA", "TAG")
LAG = 5.0


class Reading(NamedTuple):
    """What was read, after which pauses, and the number of connections to each replica."""

    offsets: list[int]
    waits: list[float]
    connections: list[int]


def read(
    master: Script,
    *replicas: Script,
    count: int = COUNT,
    timeout: float = 5.0,
    is_registered: bool = True,
    wanted: RangeFilter | None = None,
    memory: ReceiveBuffer | None = None,
    waits: list[float] | None = None,
    **settings: Any,
) -> Reading:
    """Read a range of scripted brokers. Pauses pass on a clock that is moved by hand."""
    clock, found = ManualClock(), Reading([], [] if waits is None else waits, [])

    def wait(seconds: float) -> None:
        found.waits.append(seconds)
        clock.time += seconds

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ScriptedBroker(each)) for each in replicas]
        addresses = [each.address for each in servers]
        first = stack.enter_context(
            ScriptedBroker(master, replicas=addresses, is_registered=is_registered)
        )
        links = RangeConnections(RangeAccess(name_servers=(first.address,), timeout=timeout))
        stack.callback(links.close)
        for chunk in read_ranges(
            links,
            [QueueRange(QUEUE, 0, count)],
            group="readers",
            wanted=wanted,
            settings=RangeSettings(**({"lag_patience": 1e-9} | settings)),
            memory=memory,
            clock=clock,
            wait=wait,
        ):
            data = b"".join(map(bytes, chunk.pieces))
            found.offsets.extend(
                struct.unpack_from(">q", data, at + 20)[0] for at in range(0, len(data), 40)
            )
            if memory is not None:
                memory.release(chunk.pieces)
        found.connections.extend(each.connections for each in servers)
    return found


def records(offsets: range) -> bytes:
    return b"".join(struct.pack(">i16xq", 40, offset).ljust(40, b"x") for offset in offsets)


def each(answer: Callable[[Command], bytes]) -> Script:
    return lambda pulls: [answer(pull) for pull in pulls]


def held(pull: Command, low: int, high: int) -> bytes:
    """The answer of a broker that has these messages."""
    at, count = asked(pull)
    if not low <= at < high:
        return told(pull, ResponseCode.PULL_NOT_FOUND, at, low=low, high=high)
    end = min(at + min(count, 32), high)
    return brought(pull, records(range(at, end)), end, low=low, high=high)


def having(low: int, high: int) -> Script:
    return each(lambda pull: held(pull, low, high))


def refusing(code: ResponseCode) -> Script:
    return each(lambda pull: refused(pull, code))


def passing_over(remark: str | None, *, by: int = 40) -> Script:
    """A broker that has none of its messages to give, and names the next offset."""

    def answer(pull: Command) -> bytes:
        following = min(asked(pull)[0] + by, COUNT)
        code = ResponseCode.PULL_RETRY_IMMEDIATELY
        return told(pull, code, following, high=COUNT, remark=remark)

    return each(answer)


def once(first: Callable[[Command], bytes | None], then: Script) -> Script:
    """A broker with a special answer to its first pull; None ends the connection."""
    pulled: list[Command] = []

    def script(pulls: list[Command]) -> list[bytes] | None:
        if pulled:
            return then(pulls)
        pulled.extend(pulls)
        special = first(pulls[0])
        return None if special is None else [special, *(then(pulls[1:]) or [])]

    return script


def breaking_once(script: Script) -> Script:
    return once(lambda _: None, script)


def away(_: list[Command]) -> None:
    """A broker that hangs up whenever it is asked."""


# ---- a master in trouble


@pytest.mark.parametrize(
    "first",
    [
        lambda pull: refused(pull, ResponseCode.SYSTEM_BUSY),
        lambda pull: refused(pull, ResponseCode.FLOW_CONTROL),
        lambda pull: refused(pull, ResponseCode.SYSTEM_ERROR),
        lambda pull: refused(pull, ResponseCode.SERVICE_NOT_AVAILABLE),
        lambda pull: refused(pull, ResponseCode.GO_AWAY),
        lambda _: None,
        lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n",
        lambda _: b"",
        lambda pull: told(pull, ResponseCode.PULL_OFFSET_MOVED, 77, remark="OFFSET_RESET"),
    ],
    ids=["busy", "flow", "error", "unavailable", "go away", "lost", "http", "silent", "reset"],
)
def test_a_broker_that_cannot_answer_now_is_asked_again(first):
    found = read(once(first, having(0, 500)), count=500, timeout=0.2)

    assert found.offsets == list(range(500))
    assert found.waits


def test_a_busy_broker_is_given_more_and_more_time():
    answered: list[Command] = []

    def script(pulls):
        answered.extend(pulls)
        return (refusing(ResponseCode.SYSTEM_BUSY) if len(answered) < 7 else having(0, 500))(pulls)

    found = read(script, count=500, window=WindowLimits(requests=1))

    assert found.offsets == list(range(500))
    assert found.waits[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (
            each(lambda pull: refused(pull, ResponseCode.SYSTEM_BUSY, "come back tomorrow")),
            BrokerRefused,
            r"come back tomorrow \(SYSTEM_BUSY",
        ),
        (lambda _: [], BrokerUnavailable, r"'broker-a' is not available: .* did not answer"),
    ],
    ids=["busy", "silent"],
)
def test_a_broker_that_never_answers_is_an_error_with_its_reason(script, error, message):
    with pytest.raises(error, match=message):
        read(script, timeout=0.05, patience=0.1)


@pytest.mark.parametrize(
    "code",
    [
        ResponseCode.NO_PERMISSION,
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_PARSE_FAILED,
        ResponseCode.TOPIC_NOT_EXIST,
    ],
)
def test_a_refusal_that_time_does_not_change_is_raised_at_once(code):
    waits: list[float] = []

    with pytest.raises(BrokerRefused, match=code.name):
        read(refusing(code), waits=waits)

    assert waits == []


def test_nothing_that_matches_is_progress():
    def answer(pull):
        at, _ = asked(pull)
        if at >= 100:
            return held(pull, 0, 200)
        return told(pull, ResponseCode.PULL_RETRY_IMMEDIATELY, min(at + 10, 100))

    assert read(each(answer), count=200).offsets == list(range(100, 200))


def test_a_queue_that_was_made_anew_has_nothing_of_what_is_wanted():
    with pytest.raises(OffsetsGone, match=r"asked for offsets 0 to 100 .* and has 0 to 0"):
        read(having(0, 0))


# ---- memory


@pytest.mark.parametrize(
    "first",
    [
        lambda pull: told(pull, ResponseCode.SYSTEM_BUSY, 0, body=b"x" * 50),
        lambda pull: told(pull, ResponseCode.PULL_NOT_FOUND, 0, body=b"x" * 50),
        lambda pull: (
            encode_command(
                Command.request(1, opaque=10**6).answer(ResponseCode.SUCCESS, body=b"of nobody")
            )
            + held(pull, 0, 500)
        ),
        lambda pull: (
            encode_command(
                Command.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, opaque=7, body=b"x" * 50)
            )
            + held(pull, 0, 500)
        ),
        lambda pull: held(pull, 0, 500)[:-1],
    ],
    ids=["busy", "not found", "to nothing asked", "no answer", "cut off"],
)
def test_the_memory_of_what_is_not_kept_is_given_back(first):
    memory = ReceiveBuffer(100_000)

    found = read(once(first, having(0, 500)), count=500, memory=memory, timeout=0.5)

    assert found.offsets == list(range(500))
    assert memory.is_unused


def test_who_stops_reading_leaves_no_memory_lent():
    memory = ReceiveBuffer(1_000_000)
    with ScriptedBroker(lambda pulls: having(0, 3000)(pulls[::-1])) as broker:
        links = RangeConnections(RangeAccess(name_servers=(broker.address,), timeout=5.0))
        whole = [QueueRange(QUEUE, 0, 3000)]
        reading = read_ranges(links, whole, group="readers", memory=memory)
        for _ in range(2):
            memory.release(next(reading).pieces)
        was_unused = memory.is_unused

        reading.close()  # type: ignore[attr-defined]  # it is a generator
        links.close()

    assert not was_unused
    assert memory.is_unused


# ---- replicas, which may have less than their master


@pytest.mark.parametrize("missing", list(Missing))
@pytest.mark.parametrize(
    ("replica", "wanted"),
    [
        (having(0, 90), None),  # it lags
        (having(0, 0), None),  # and knows nothing of the queue yet
        (having(50, 100), None),  # it began later, or deletes earlier
        (refusing(ResponseCode.SYSTEM_BUSY), None),  # it does not serve reads
        (refusing(ResponseCode.GO_AWAY), None),
        (refusing(ResponseCode.TOPIC_NOT_EXIST), None),  # it has not heard of it yet
        (refusing(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST), None),
        (passing_over("MESSAGE_WAS_REMOVING"), None),
        (passing_over("MESSAGE_WAS_REMOVING"), BY_TAG),
        (passing_over("OFFSET_FOUND_NULL"), BY_TAG),
        (passing_over("NO_MESSAGE_IN_QUEUE"), BY_TAG),
        (passing_over(None), BY_TAG),
        (passing_over("NO_MATCHED_MESSAGE"), None),  # nothing is filtered
    ],
)
def test_what_a_replica_does_not_give_is_read_from_the_master(replica, wanted, missing):
    found = read(breaking_once(having(0, COUNT)), replica, missing=missing, wanted=wanted)

    assert found.offsets == list(range(COUNT))


def test_a_replica_is_believed_that_nothing_matches_a_filter():
    found = read(away, passing_over("NO_MATCHED_MESSAGE"), wanted=BY_TAG)

    assert (found.offsets, found.connections) == ([], [1])


def test_every_replica_gets_its_turn_while_the_master_is_away():
    found = read(away, having(0, 90), refusing(ResponseCode.SYSTEM_BUSY), having(0, COUNT))

    assert found.offsets == list(range(COUNT))
    assert found.connections[2] == 1


@pytest.mark.parametrize("is_registered", [True, False])
@pytest.mark.parametrize("missing", list(Missing))
def test_while_the_master_is_away_nothing_counts_as_missing(missing, is_registered):
    """It is an error that passes, and says who is away."""
    reason = "" if is_registered else r"a replica lacks messages: .* has 0 to 90"

    with pytest.raises(BrokerUnavailable, match=f"'broker-a' is not available: .*{reason}"):
        read(away, having(0, 90), missing=missing, patience=0.2, is_registered=is_registered)


@pytest.mark.parametrize(
    ("master", "bounds", "kept"),
    [
        (breaking_once(having(0, 90)), "0 to 90", range(90)),
        (breaking_once(having(10, COUNT)), "10 to 100", range(10, COUNT)),
        (passing_over("MESSAGE_WAS_REMOVING"), "40 to 100", range(0)),
        (passing_over("OFFSET_FOUND_NULL"), "40 to 100", range(0)),
    ],
)
@pytest.mark.parametrize("wanted", [RangeFilter(), BY_TAG], ids=str)
def test_what_the_master_itself_lacks_is_missing(master, bounds, kept, wanted):
    with pytest.raises(OffsetsGone, match=f"has {bounds}"):
        read(master, having(20, 80), wanted=wanted)

    found = read(master, having(20, 80), missing=Missing.SKIP, wanted=wanted)

    assert found.offsets == list(kept)


# ---- gaps, which a master has to report for a while: it may be recovering


class Gap:
    """A broker with a gap, which becomes another one after some pulls at it."""

    def __init__(self, gap: range, *, later: range | None = None, breaks_at: int = 0) -> None:
        self._gap = gap
        self._later = gap if later is None else later
        self._breaks_at = breaks_at
        self._pulls = 0

    def __call__(self, pulls: list[Command]) -> list[bytes] | None:
        at_gap = sum(asked(pull)[0] in self._gap for pull in pulls)
        self._pulls += at_gap
        if at_gap and self._pulls == self._breaks_at:
            return None
        if self._pulls > 2:
            self._gap = self._later
        return [self._answer(pull) for pull in pulls]

    def _answer(self, pull: Command) -> bytes:
        at, count = asked(pull)
        if at in self._gap:
            code, remark = ResponseCode.PULL_NOT_FOUND, "OFFSET_FOUND_NULL"
            return told(pull, code, self._gap.stop, high=COUNT, remark=remark)
        end = min(at + count, COUNT)
        if at < self._gap.start:
            end = min(end, self._gap.start)
        return brought(pull, records(range(at, end)), end, high=COUNT)


@pytest.mark.parametrize(
    ("later", "missing"),
    [
        (range(30, 50), range(30, 50)),
        (range(30, 40), range(30, 40)),
        (range(0), range(0)),
        (range(30, 60), range(30, 60)),
    ],
    ids=["stays", "shrinks", "closes", "grows"],
)
def test_a_gap_is_skipped_when_its_master_has_reported_it_for_long_enough(later, missing):
    gap = Gap(range(30, 50), later=later)

    found = read(gap, missing=Missing.SKIP, patience=3 * LAG, lag_patience=LAG)

    assert found.offsets == [at for at in range(COUNT) if at not in missing]
    assert not missing or sum(found.waits) >= LAG


def test_a_gap_that_was_not_reported_for_long_enough_is_an_error():
    with pytest.raises(OffsetsGone):
        read(Gap(range(30, 50)), missing=Missing.SKIP, patience=LAG - 1, lag_patience=LAG)


def test_a_master_whose_connection_is_lost_has_to_report_a_gap_again():
    gap = Gap(range(30, 50), breaks_at=5)

    found = read(gap, missing=Missing.SKIP, patience=2 * LAG, lag_patience=LAG)

    assert found.offsets == [*range(30), *range(50, COUNT)]
    assert sum(found.waits) > LAG + 0.05


# ---- which server is asked
