"""Message ids: the place of a record, and the identity of a message.

The broker's *offset id* has the store host and the commit-log offset, which are enough to fetch the
record. Each retry of a message has another one. The producer's *unique id* is created before the
send, travels in the property UNIQ_KEY and stays the same through all retries.

    offset id   address(4 or 16) port(4) offset(8)
    unique id   address(4 or 16) pid(2) process(4) milliseconds since the month began(4) counter(2)

Both are upper-case hexadecimal, 32 characters with an IPv4 address and 56 with an IPv6 one. Peers
treat unique ids as opaque, except that tools read the time in them.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import secrets
import struct
import sys
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Final, TypeAlias

from orbitmq.clock import SystemClock
from orbitmq.message.record import MessageIdInvalid, RecordRefused, unpack_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orbitmq.clock import Clock


_ID_SIZES: Final = (16, 28)
#: A clock that was set back by less than this gives 0 as the time instead of a negative number.
_SMALL_STEP_BACK: Final = 1000.0


# ---- offset ids


@dataclass(frozen=True, slots=True)
class OffsetId:
    """The place of a record: a broker and an offset in its commit log."""

    address: str
    port: int
    offset: int


def encode_offset_id(store_host: bytes, offset: int) -> str:
    """The offset id of the record at `offset` of the broker with this packed host."""
    try:
        return f"{store_host.hex()}{offset.to_bytes(8, 'big', signed=True).hex()}".upper()
    except OverflowError as error:
        raise RecordRefused(f"{offset} is not a 64-bit commit-log offset") from error


def decode_offset_id(text: str) -> OffsetId:
    """The place in an offset id."""
    raw = _id_bytes(text)
    address, port = unpack_host(raw[:-8])
    offset = int.from_bytes(raw[-8:], "big", signed=True)
    if port < 0 or offset < 0:
        raise MessageIdInvalid(text, "an offset message id: its port or its offset is negative")
    return OffsetId(address, port, offset)


# ---- unique ids

#: The common parts of 65536 ids of a process within a month: the process id and the random number
#: of the process, the upper bits of the counter, the text of the fields before the time, and the
#: bounds of the month.
_Beginning: TypeAlias = tuple[int, int, int, str, float, float]


class UniqueIds:
    """Creates unique ids. Any thread may call it, also after a fork.

    The ids of a process are unique even if its clock stands still: the counter has 48 bits. Its low
    16 bits are the counter field; the rest is added to the process field, which starts at a random
    number. There is no lock, which a fork could leave locked: every step is atomic, and repeated
    work of two threads does no harm.
    """

    __slots__ = ("_address", "_beginning", "_now", "_numbers", "_process_id", "_timezone")

    def __init__(
        self,
        address: str,
        *,
        clock: Clock | None = None,
        process_id: Callable[[], int] = os.getpid,
        process_number: int | None = None,
        timezone: tzinfo | None = None,
    ) -> None:
        self._address = _packed(address).hex().upper()
        self._now = (SystemClock() if clock is None else clock).now
        self._process_id = process_id
        self._timezone = timezone
        self._numbers = itertools.count()
        self._beginning = self._begin(process_id(), process_number, 0, self._now())

    def __call__(self) -> str:
        """The next id."""
        pid, process_number, high, text, begin, end = self._beginning
        is_other_process = pid != self._process_id()
        now = self._now()
        number = next(self._numbers)
        if is_other_process or number >> 16 != high or not begin - _SMALL_STEP_BACK < now < end:
            self._beginning = _, _, _, text, begin, _ = self._begin(
                self._process_id(), None if is_other_process else process_number, number >> 16, now
            )
        milliseconds = int((now - begin) * 1000) if now > begin else 0
        # Formatting a number costs twice as much as this.
        low = (milliseconds & 0xFFFFFFFF) << 16 | number & 0xFFFF
        return text + low.to_bytes(6, "big").hex().upper()

    def many(self, count: int) -> tuple[bytes, int, int, Iterator[int]]:
        """What the next ids are made of: address and process id, the number of the process, the
        milliseconds, and the counters."""
        pid, process_number, high, _, begin, end = self._beginning
        is_other_process = pid != self._process_id()
        now = self._now()
        if is_other_process or not begin - _SMALL_STEP_BACK < now < end:
            self._beginning = pid, process_number, _, _, begin, _ = self._begin(
                self._process_id(), None if is_other_process else process_number, high, now
            )
        milliseconds = int((now - begin) * 1000) if now > begin else 0
        fixed = bytes.fromhex(f"{self._address}{pid & 0xFFFF:04X}")
        return fixed, process_number, milliseconds, itertools.islice(self._numbers, count)

    @property
    def size(self) -> int:
        """The characters of an id."""
        return len(self._address) + 24

    def texts(self, count: int) -> list[str]:
        """The next ids, at a fraction of the cost of single ones."""
        fixed, process_number, milliseconds, drawn = self.many(count)
        numbers = list(drawn)
        found: list[str] = []
        while numbers:
            high = numbers[0] >> 16
            process = process_number + high & 0xFFFFFFFF
            begin = f"{fixed.hex().upper()}{process:08X}{milliseconds & 0xFFFFFFFF:08X}"
            end = bisect_left(numbers, high + 1 << 16)
            lows = array("H", [number & 0xFFFF for number in numbers[:end]])
            if sys.byteorder == "little":
                lows.byteswap()
            found += [begin + low for low in lows.tobytes().hex(",", 2).upper().split(",")]
            del numbers[:end]
        return found

    def _begin(self, pid: int, process_number: int | None, high: int, now: float) -> _Beginning:
        if process_number is None:
            process_number = secrets.randbits(32)
        process = process_number + high & 0xFFFFFFFF
        begin, end = month_bounds(now, self._timezone)
        text = f"{self._address}{pid & 0xFFFF:04X}{process:08X}"
        return pid, process_number, high, text, begin, end


@dataclass(frozen=True, slots=True)
class UniqueId:
    """The parts of a unique id in Java's format."""

    address: str
    pid: int
    process_number: int
    #: Since the first day of a month, which the id does not name.
    milliseconds: int
    counter: int


def decode_unique_id(text: str) -> UniqueId:
    """The parts of a unique id; for ids in another format they have no meaning."""
    raw = _id_bytes(text)
    address = str(ipaddress.ip_address(raw[:-12]))
    return UniqueId(address, *struct.unpack(">HIIH", raw[-12:]))


def month_bounds(now: float, timezone: tzinfo | None = None) -> tuple[float, float]:
    """The starts of the month of `now` and of the next month; local time by default."""
    here = datetime.fromtimestamp(now, UTC).astimezone(timezone)
    first = here.replace(day=1, hour=0, minute=0, second=0, microsecond=0, tzinfo=None, fold=0)
    following = (first + timedelta(days=32)).replace(day=1)
    return _instant(first, timezone), _instant(following, timezone)


def _instant(local: datetime, timezone: tzinfo | None) -> float:
    # The UTC offset of that day, which may differ from today's.
    return local.replace(tzinfo=timezone).timestamp() if timezone else local.timestamp()


def _id_bytes(text: str) -> bytes:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    # fromhex skips blanks, so the length of the text is checked as well.
    if len(raw) not in _ID_SIZES or len(text) != 2 * len(raw):
        raise MessageIdInvalid(text, "a message id: 32 or 56 hexadecimal digits")
    return raw


def _packed(address: str) -> bytes:
    try:
        return ipaddress.ip_address(address).packed
    except ValueError as error:
        raise RecordRefused(f"{address!r} is not an IPv4 or IPv6 address") from error
