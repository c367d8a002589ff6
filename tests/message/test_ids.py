"""Message ids: the broker's, which say where, and the producer's, which say which."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta, timezone, tzinfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.message.ids import (
    OffsetId,
    UniqueIds,
    decode_offset_id,
    decode_unique_id,
    encode_offset_id,
    month_bounds,
)
from orbitmq.message.record import MessageIdInvalid, RecordRefused, pack_host
from tests.support.message import hosts

SHANGHAI = timezone(timedelta(hours=8))


class SetClock:
    """A clock that shows what it was set to."""

    def __init__(self, now: float) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def instant(
    year: int,
    month: int,
    day: int,
    hour: int = 0,
    minute: int = 0,
    second: int = 0,
    zone: tzinfo = SHANGHAI,
) -> float:
    return datetime(year, month, day, hour, minute, second, tzinfo=zone).timestamp()


def test_the_documented_offset_ids():
    v4 = encode_offset_id(pack_host("127.0.0.1", 10911), 100)
    v6 = encode_offset_id(pack_host("::1", 10911), 100)

    assert v4 == "7F00000100002A9F0000000000000064"
    assert v6 == "0000000000000000000000000000000100002A9F0000000000000064"


@given(host=hosts, offset=st.integers(0, 2**63 - 1))
def test_an_offset_id_names_the_place_it_was_made_of(host, offset):
    text = encode_offset_id(pack_host(*host), offset)

    assert (
        decode_offset_id(text)
        == decode_offset_id(text.lower())
        == OffsetId(host[0], host[1], offset)
    )
    assert len(text) in (32, 56)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7F00000100002A9F00000000000000",
        "7F00000100002A9F000000000000006G",
        "7F 00 00 01 00 00 2A 9F 00 00 00",
        "7F00000100002A9F0000000000000064" * 2,
        "7F000001FFFFFFFF0000000000000064",
        "7F00000100002A9FFFFFFFFFFFFFFFFF",
        "名" * 32,
    ],
)
def test_what_is_no_offset_id_is_refused(text):
    with pytest.raises(MessageIdInvalid, match="is not a"):
        decode_offset_id(text)


@given(text=st.text(max_size=60))
def test_any_text_is_an_id_or_refused(text):
    for decode in (decode_offset_id, decode_unique_id):
        try:
            decode(text)
        except MessageIdInvalid:
            continue
        assert len(text) in (32, 56)


def test_an_offset_beyond_64_bits_has_no_id():
    with pytest.raises(RecordRefused, match="64-bit"):
        encode_offset_id(pack_host("127.0.0.1", 1), 2**63)


def test_a_unique_id_has_the_parts_that_java_writes():
    clock = SetClock(instant(2023, 11, 1) + 12.345)
    ids = UniqueIds(
        "10.1.2.3", clock=clock, process_id=lambda: 0x1ABCD, process_number=7, timezone=SHANGHAI
    )

    first, second = ids(), ids()

    assert first == "0A010203" + "ABCD" + "00000007" + "00003039" + "0000"
    assert second == "0A010203" + "ABCD" + "00000007" + "00003039" + "0001"


def test_an_ipv6_address_makes_longer_ids():
    text = UniqueIds("fd00::7")()

    assert len(text) == 56
    assert decode_unique_id(text).address == "fd00::7"


def test_an_address_that_is_none_is_refused():
    with pytest.raises(RecordRefused, match="not an IPv4 or IPv6 address"):
        UniqueIds("localhost")


def test_time_starts_anew_with_the_month_and_goes_on_in_the_next():
    clock = SetClock(instant(2024, 2, 29, 23, 59, 59))
    ids = UniqueIds("10.0.0.1", clock=clock, timezone=SHANGHAI)
    before = decode_unique_id(ids())

    clock.time += 1.5
    after = decode_unique_id(ids())

    assert before.milliseconds == (29 * 86400 - 1) * 1000
    assert after.milliseconds == 500


def test_a_clock_that_steps_back_over_the_month_writes_zero_or_the_month_before():
    clock = SetClock(instant(2024, 3, 1))
    ids = UniqueIds("10.0.0.1", clock=clock, timezone=SHANGHAI)

    clock.time -= 10
    little = decode_unique_id(ids())
    clock.time -= 10_000
    much = decode_unique_id(ids())

    assert little.milliseconds == 0
    assert much.milliseconds == (29 * 86400 - 10_010) * 1000


def test_many_ids_are_those_that_single_calls_would_make():
    def maker() -> UniqueIds:
        clock = SetClock(instant(2024, 3, 5))
        return UniqueIds("fd00::7", clock=clock, process_number=2**32 - 1)

    one_by_one, at_once = maker(), maker()

    together = [*at_once.texts(3), at_once(), *at_once.texts(70_000), *at_once.texts(0)]

    assert together == [one_by_one() for _ in range(70_004)]


def test_ids_stay_unique_when_the_counter_wraps_and_the_clock_stands_still():
    ids = UniqueIds("10.0.0.1", clock=SetClock(instant(2024, 3, 5)))

    made = [ids() for _ in range(70_000)]

    assert len(set(made)) == 70_000


def test_ids_of_many_threads_are_unique():
    ids = UniqueIds("10.0.0.1")
    made: list[list[str]] = [[] for _ in range(8)]

    def make(into):
        into += [ids() for _ in range(2_000)]

    threads = [threading.Thread(target=make, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({text for into in made for text in into}) == 16_000


def test_a_forked_child_makes_other_ids_than_its_parent():
    pid = 4711
    ids = UniqueIds("10.0.0.1", process_id=lambda: pid, clock=SetClock(instant(2024, 3, 5)))
    parent = decode_unique_id(ids())

    pid = 4711 + 65536  # the same 16 bits, which is all of it that an id holds
    child = decode_unique_id(ids())

    assert child.pid == parent.pid
    assert child.process_number != parent.process_number


FORK = """
import os
from orbitmq.message.ids import UniqueIds
ids = UniqueIds("10.0.0.1")
ids()
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, ids().encode())
    os._exit(0)
os.close(writing)
print(child, os.read(reading, 100).decode())
os.waitpid(child, 0)
"""


def test_a_real_fork_makes_ids_with_the_childs_process_id():
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=True
    )
    child, made = done.stdout.split()

    assert decode_unique_id(made).pid == int(child) & 0xFFFF


class SummerFromTheTwentieth(tzinfo):
    """A zone whose clocks go forward within the month, from one hour ahead of UTC to two."""

    def utcoffset(self, at: datetime | None) -> timedelta:
        return timedelta(hours=2 if at is not None and at.day >= 20 else 1)

    def dst(self, at: datetime | None) -> timedelta:
        return self.utcoffset(at) - timedelta(hours=1)

    def tzname(self, at: datetime | None) -> str:
        return f"UTC+{self.utcoffset(at)}"


def test_a_month_begins_with_the_offset_of_its_first_day():
    zone = SummerFromTheTwentieth()

    begin, end = month_bounds(instant(2024, 3, 25, 12, zone=zone), zone)

    assert begin == datetime(2024, 2, 29, 23, tzinfo=UTC).timestamp()
    assert end == datetime(2024, 3, 31, 23, tzinfo=UTC).timestamp()


def test_the_local_time_zone_is_the_default():
    now = instant(2024, 7, 15)
    begin, end = month_bounds(now)

    assert datetime.fromtimestamp(begin, UTC).astimezone().day == 1
    assert datetime.fromtimestamp(end, UTC).astimezone().hour == 0
    assert begin < now < end
