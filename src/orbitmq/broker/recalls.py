"""Recall handles: what a producer needs to take a timer message back.

A handle is the URL-safe Base64 of `v1 <topic> <broker> <time> <unique id>`. Its time is a
millisecond later than that of the message: Apache's brokers round times down, and a recall has to
be rounded to where the message was.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from orbitmq.broker.errors import Refused
from orbitmq.wire.codes import ResponseCode

_VERSION = "v1"
_PARTS = 5
_LATER_MS = 1
_LONGEST_TIME = 18


@dataclass(frozen=True, slots=True)
class RecallHandle:
    """Which message is meant."""

    topic: str
    broker: str
    due_ms: int  #: of the message
    unique_id: str

    def encode(self) -> str:
        """The handle as producers are given it."""
        text = f"{_VERSION} {self.topic} {self.broker} {self.due_ms + _LATER_MS} {self.unique_id}"
        return base64.urlsafe_b64encode(text.encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """The handle in a text. Raises `Refused`."""
    try:
        raw = base64.b64decode(_padded(text), altchars=b"-_", validate=True)
        parts = raw.decode().split(" ")
    except (binascii.Error, ValueError):
        parts = []
    if len(parts) < _PARTS or parts[0] != _VERSION:
        raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall handle is invalid")
    _, topic, broker, time, unique_id = parts[:_PARTS]
    if not time.isascii() or not time.isdecimal() or len(time) > _LONGEST_TIME:
        raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall failed, timestamp invalid")
    return RecallHandle(topic, broker, int(time) - _LATER_MS, unique_id)


def recall_key(topic: str, unique_id: str) -> str:
    """What a recall says about the message it takes back."""
    return f"{topic}_{unique_id}"


def _padded(text: str) -> bytes:
    # Java's decoder does not insist on the padding either.
    return text.encode("ascii", "replace") + b"=" * (-len(text) % 4)
