"""Handles by which a message that is delivered later can be taken back.

URL-safe Base64 of: v1 topic broker time-of-delivery-in-ms unique-id
"""

from __future__ import annotations

import base64
import binascii
from typing import Final, NamedTuple

from orbitmq.client.producer.errors import RecallHandleInvalid

_PARTS: Final = 5


class RecallHandle(NamedTuple):
    """Which message it is, and which broker has it."""

    topic: str
    broker: str
    deliver_at: float
    unique_id: str


def decode_recall_handle(text: str) -> RecallHandle:
    """What a handle says. Raises `RecallHandleInvalid`."""
    # `recall_handle` of a result may be None, and that is where handles come from.
    if not isinstance(text, str):
        raise RecallHandleInvalid(text, "it is no text")
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except (binascii.Error, ValueError) as error:
        raise RecallHandleInvalid(text, "it is not URL-safe Base64 of a text") from error
    parts = raw.split(" ")
    if len(parts) != _PARTS or parts[0] != "v1" or not parts[3].isdecimal():
        raise RecallHandleInvalid(text, "it does not say version, topic, broker, time and id")
    return RecallHandle(parts[1], parts[2], int(parts[3]) / 1000, parts[4])
