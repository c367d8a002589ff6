"""What brokers answer besides messages, and what the reader of a range makes of it."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Generator
from typing import cast

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
from tests.support.scriptedbroker import Script, ScriptedBroker, asked, brought, refused, told

QUEUE = Queue("orders", "broker-a", 0)


def record(offset: int) -> bytes:
    return struct.pack(">i16xq", 40, offset).ljust(40, b"x")


def messages(pull: Command, most: int = 32) -> bytes:
    """What an honest broker answers."""
    at, count = asked(pull)
    count = min(count, most)
    return brought(pull, b"".join(map(record, range(at, at + count))), at + count)


def read(
    script: Script,
    *,
    count: int = 500,
    settings: RangeSettings | None = None,
    timeout: float = 5.0,
    waits: list[float] | None = None,
    memory: ReceiveBuffer | None = None,
    wanted: RangeFilter | None = None,
) -> list[int]:
    """The offsets that come from a broker that follows the script."""
    with ScriptedBroker(script) as broker:
        links = RangeConnections(RangeAccess(name_servers=(broker.address,), timeout=timeout))
        try:
            data = b""
            for chunk in read_ranges(
                links,
                [QueueRange(QUEUE, 0, count)],
                group="readers",
                wanted=wanted,
                settings=settings,
                memory=memory,
                wait=(waits if waits is not None else []).append,
            ):
                data += b"".join(map(bytes, chunk.pieces))
                if memory is not None:
                    memory.release(chunk.pieces)
        finally:
            links.close()
    return [struct.unpack_from(">q", data, at + 20)[0] for at in range(0, len(data), 40)]


def once(first: Callable[[Command], bytes | None]) -> Script:
    """A broker that gives its first pull a special answer, and then is honest."""
    state = {"is_first": True}

    def script(pulls: list[Command]) -> list[bytes] | None:
        answers = []
        for pull in pulls:
            if state["is_first"]:
                state["is_first"] = False
                special = first(pull)
                if special is None:
                    return None
                answers.append(special)
            else:
                answers.append(messages(pull))
        return answers

    return script


def test_answers_may_come_in_any_order():
    chance = random.Random(3)

    def script(pulls):
        chance.shuffle(pulls)
        return [messages(pull, most=chance.randint(1, 40)) for pull in pulls]

    assert read(script, count=3000) == list(range(3000))


@pytest.mark.parametrize(
    "code",
    [
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.GO_AWAY,
    ],
)
def test_a_broker_that_cannot_now_is_asked_again(code):
    waits: list[float] = []

    found = read(once(lambda pull: refused(pull, code)), waits=waits)

    assert found == list(range(500))
    assert waits


def test_a_busy_broker_is_given_more_and_more_time():
    refusals = 6
    waits: list[float] = []

    def script(pulls):
        if len(waits) < refusals:
            return [refused(pull, ResponseCode.SYSTEM_BUSY) for pull in pulls]
        return [messages(pull) for pull in pulls]

    found = read(
        script,
        settings=RangeSettings(window=WindowLimits(requests=1), longest_pause=0.4),
        waits=waits,
    )

    assert found == list(range(500))
    assert waits[:refusals] == [0.05, 0.1, 0.2, 0.4, 0.4, 0.4]


def test_a_broker_that_is_always_busy_is_an_error_with_its_words():
    settings = RangeSettings(patience=1e-9)

    with pytest.raises(BrokerRefused, match=r"come back tomorrow \(SYSTEM_BUSY"):
        read(
            lambda pulls: [
                refused(pull, ResponseCode.SYSTEM_BUSY, "come back tomorrow") for pull in pulls
            ],
            settings=settings,
        )


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
        read(lambda pulls: [refused(pull, code) for pull in pulls], waits=waits)

    assert not waits


def test_a_lost_connection_is_made_again():
    assert read(once(lambda _: None)) == list(range(500))


def test_bytes_that_are_no_answer_end_the_connection_and_not_the_reading():
    assert read(once(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n")) == list(range(500))


def test_a_silent_broker_is_given_up_and_asked_again():
    assert read(once(lambda _: b""), timeout=0.2) == list(range(500))


def test_a_broker_that_stays_silent_is_named():
    with pytest.raises(BrokerUnavailable, match=r"'broker-a' is not available: .* did not answer"):
        read(lambda _: [], timeout=0.05, settings=RangeSettings(patience=0.1))


def test_an_answer_to_a_reset_of_the_group_is_not_for_us():
    reset = once(lambda pull: told(pull, ResponseCode.PULL_OFFSET_MOVED, 77, remark="OFFSET_RESET"))

    assert read(reset) == list(range(500))


def test_nothing_that_matches_is_progress():
    def script(pulls):
        return [
            told(pull, ResponseCode.PULL_RETRY_IMMEDIATELY, min(asked(pull)[0] + 10, 100))
            if asked(pull)[0] < 100
            else messages(pull)
            for pull in pulls
        ]

    assert read(script, count=200) == list(range(100, 200))


@pytest.mark.parametrize("missing", list(Missing))
def test_messages_that_were_removed_in_the_middle_are_not_passed_over(missing):
    def script(pulls):
        return [
            told(
                pull,
                ResponseCode.PULL_RETRY_IMMEDIATELY,
                min(asked(pull)[0] + 10, 100),
                remark="MESSAGE_WAS_REMOVING",
            )
            if asked(pull)[0] < 100
            else messages(pull)
            for pull in pulls
        ]

    settings = RangeSettings(missing=missing)
    if missing is Missing.RAISE:
        with pytest.raises(OffsetsGone):
            read(script, count=200, settings=settings)
    else:
        assert read(script, count=200, settings=settings) == list(range(100, 200))


def test_a_queue_that_was_made_anew_has_nothing_of_what_is_wanted():
    settings = RangeSettings(lag_patience=1e-9)

    with pytest.raises(OffsetsGone, match=r"asked for offsets 0 to 500 .* and has 0 to 0"):
        read(
            lambda pulls: [
                told(pull, ResponseCode.PULL_NOT_FOUND, 0, low=0, high=0) for pull in pulls
            ],
            settings=settings,
        )


def cut_off(pull: Command) -> bytes:
    """An answer that lacks its end, and after which the connection is closed."""
    return messages(pull)[:-1]


def with_a_request_before(pull: Command) -> bytes:
    """Brokers may also ask something; nobody here answers."""
    request = Command.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, opaque=7, body=b"x" * 50)
    return encode_command(request) + messages(pull)


@pytest.mark.parametrize(
    "answer",
    [
        lambda pull: told(pull, ResponseCode.SYSTEM_BUSY, 0, body=b"x" * 50),
        lambda pull: told(pull, ResponseCode.PULL_NOT_FOUND, 0, body=b"x" * 50),
        lambda pull: (
            encode_command(
                Command.request(1, opaque=10**6).answer(ResponseCode.SUCCESS, body=b"of nobody")
            )
            + messages(pull)
        ),
        with_a_request_before,
    ],
    ids=["busy", "not found", "to nothing asked", "no answer"],
)
def test_the_memory_of_what_is_not_kept_is_given_back(answer):
    memory = ReceiveBuffer(100_000)

    found = read(once(answer), memory=memory)

    assert found == list(range(500))
    assert memory.is_unused


def test_the_memory_of_an_answer_that_was_cut_off_is_given_back():
    memory = ReceiveBuffer(100_000)
    state = {"cut": 0}

    def script(pulls):
        state["cut"] += 1
        if state["cut"] == 1:
            return [cut_off(pulls[0])]
        return [messages(pull) for pull in pulls]

    # It waits for the last byte, in vain.
    found = read(script, memory=memory, timeout=0.5)

    assert found == list(range(500))
    assert memory.is_unused


def test_the_memory_of_an_answer_beyond_its_slot_is_given_back():
    """What a filtered pull found may all belong to the next one."""
    memory = ReceiveBuffer(100_000)

    def script(pulls):
        return [brought(pull, record(asked(pull)[0] + 900), 10**5) for pull in pulls]

    found = read(script, memory=memory, count=500, wanted=RangeFilter("a"))

    assert found == []
    assert memory.is_unused


def test_who_stops_reading_leaves_no_memory_lent():
    memory = ReceiveBuffer(1_000_000)

    def script(pulls):
        return [messages(pull) for pull in reversed(pulls)]

    with ScriptedBroker(script) as broker:
        links = RangeConnections(RangeAccess(name_servers=(broker.address,), timeout=5.0))
        try:
            reading = read_ranges(
                links, [QueueRange(QUEUE, 0, 3000)], group="readers", memory=memory
            )
            for _ in range(2):
                memory.release(next(reading).pieces)
            was_unused = memory.is_unused
            cast("Generator[object]", reading).close()
        finally:
            links.close()

    assert not was_unused
    assert memory.is_unused
