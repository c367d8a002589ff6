"""What is saved about timer messages: which of them have been delivered."""

from __future__ import annotations

import logging
import struct
from pathlib import Path

from orbitmq.broker.configfile import ConfigDisk
from orbitmq.wire.bodies.base import Body, Int64

log = logging.getLogger(__name__)

FILE_NAME = "timerOffset.json"
#: The field in which masters of ours tell their slaves all of it, beside Apache's checkpoint.
TIMER_PROGRESS = "orbitmqTimerProgress"
#: The checkpoint of Apache's timer wheel.
APACHE_FILE_NAME = "timercheck"

#: Time up to which the wheel was read, place in its own log, offset in the timer queue.
_APACHE = struct.Struct(">qqq")
#: The same, the master's offset, and a version.
_CHECKPOINT = struct.Struct(">qqqqqqq")
#: Apache puts a message that comes late into the next slots of its wheel, so the last ones before
#: its time may still hold something. Better twice than never.
_APACHE_SLACK_MS = 10_000


class TimerFile(Body, frozen=True, kw_only=True):
    """timerOffset.json: what of the timer queue has been delivered."""

    #: Below are no messages that are still to be delivered.
    first_pending: Int64 = 0
    #: Of what lies here and above, this file says nothing.
    scanned: Int64 = 0
    #: Up to this time, and in the queue up to this offset, everything has been delivered.
    delivered_ms: Int64 = 0
    delivered_offset: Int64 = 0
    #: Except for these.
    late: tuple[Int64, ...] = ()


def apache_checkpoint(progress: TimerFile, read_ms: int) -> bytes:
    """The same as Apache's brokers tell it: up to `read_ms` everything has been delivered."""
    return _CHECKPOINT.pack(read_ms, 0, progress.scanned, progress.scanned, 0, 0, 0)


def from_apache(data: bytes) -> TimerFile | None:
    """What Apache's checkpoint says; None when it is none."""
    try:
        read_ms, _, queue_offset = _APACHE.unpack_from(data)
    except struct.error:
        return None
    return TimerFile(scanned=max(queue_offset, 0), delivered_ms=max(read_ms - _APACHE_SLACK_MS, 0))


def left_by_apache(root: Path, disk: ConfigDisk | None = None) -> TimerFile:
    """What a broker of Apache's, whose store this was, says about the same; else nothing."""
    try:
        data = (disk or ConfigDisk()).read_bytes(root / "config" / APACHE_FILE_NAME)
    except FileNotFoundError:
        return TimerFile()
    left = from_apache(data)
    if left is None:
        return TimerFile()
    log.info("timer progress taken over from Apache's broker", extra={"offset": left.scanned})
    return left
