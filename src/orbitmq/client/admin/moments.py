"""Times as operators give them."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TypeAlias

from orbitmq.client.durations import Instant, epoch
from orbitmq.client.errors import BadRequest

#: Seconds since the epoch, a `datetime`, or a text: ISO 8601, or a form of RocketMQ's own tools,
#: `20260131235959` or `2026-01-31#23:59:59:000`. Without a zone it is local time.
Moment: TypeAlias = Instant | str

_DIGITS = re.compile(r"\d{14}")
_TOOLS = re.compile(r"(\d{4}-\d\d-\d\d)#(\d\d:\d\d:\d\d)(?::(\d{3}))?")


def moment(value: Moment, name: str = "a time") -> float:
    """A time in seconds since the epoch. Raises `BadRequest` or `SettingError`."""
    if not isinstance(value, str):
        return epoch(value, name)
    text = value.strip()
    if _DIGITS.fullmatch(text):
        text = f"{text[:8]}T{text[8:]}"
    elif tools := _TOOLS.fullmatch(text):
        text = f"{tools[1]}T{tools[2]}.{tools[3] or '000'}"
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise BadRequest(
            f"{name} must be like 2026-01-31T23:59:59, 20260131235959 or "
            f"2026-01-31#23:59:59:000, got {value!r}"
        ) from error
