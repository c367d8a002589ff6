"""Durations and times as users give them, as seconds."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import TypeAlias

from orbitmq.errors import SettingError

#: Seconds, or a `timedelta`.
Duration: TypeAlias = float | timedelta
#: Seconds since the epoch, or a `datetime`; one without a zone is in local time, as in Python.
Instant: TypeAlias = float | datetime


def seconds(value: Duration, name: str = "duration") -> float:
    """A duration in seconds; refuses what is none, under the name that the user knows."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    return _number(value, name, "seconds or a timedelta")


def positive_seconds(value: Duration, name: str) -> float:
    """As `seconds`; refuses zero and less as well."""
    found = seconds(value, name)
    if found <= 0:
        raise SettingError(f"{name} must be positive, got {value!r}")
    return found


def epoch(value: Instant, name: str = "time") -> float:
    """A time in seconds since the epoch; refuses what is none, as `seconds` does."""
    if isinstance(value, datetime):
        return value.timestamp()
    return _number(value, name, "seconds since the epoch or a datetime")


def _number(value: object, name: str, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingError(f"{name} must be {allowed}, got {value!r}")
    return float(value)
