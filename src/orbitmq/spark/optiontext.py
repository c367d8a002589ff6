"""Texts of options as values: numbers, times, durations, JSON. Each error names its option."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from orbitmq.client.durations import epoch
from orbitmq.spark.errors import OptionRefused

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_duration = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE).fullmatch
_LAST_MS: Final = 253_402_300_799_999  # the end of the year 9999
_LARGEST: Final = 2**63 - 1


class OptionTexts:
    """The options of one query, looked up without regard to case."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._texts = {name.lower(): text for name, text in options.items()}

    def names(self) -> frozenset[str]:
        """The names that were given, in lower case."""
        return frozenset(self._texts)

    def get(self, option: str) -> str | None:
        """The text of an option; None when it is not given, or given empty."""
        text = self._texts.get(option.lower())
        return text.strip() or None if text is not None else None

    def choice(self, option: str, default: str, allowed: tuple[str, ...]) -> str:
        text = self.get(option)
        if text is None:
            return default
        for each in allowed:
            if each.lower() == text.lower():
                return each
        raise OptionRefused(option, text, f"one of {', '.join(allowed)}")

    def flag(self, option: str, *, default: bool) -> bool:
        return self.choice(option, str(default).lower(), ("true", "false")) == "true"

    def count(self, option: str, *, least: int = 1) -> int | None:
        """A whole number."""
        text = self.get(option)
        if text is None:
            return None
        return whole_number(option, text, least=least)

    def milliseconds(self, option: str, default: float) -> float:
        """A number of milliseconds, in seconds."""
        number = self.count(option)
        return default if number is None else number / 1000

    def duration(self, option: str, default: float) -> float:
        """A duration like `15m`, in seconds."""
        text = self.get(option)
        if text is None:
            return default
        found = _duration(text)
        if found is None or found[2].lower() not in _UNITS:
            raise OptionRefused(
                option, text, "a number and a unit (ms, s, m, h or d), as in 15m or 500ms"
            )
        return float(found[1]) * _UNITS[found[2].lower()]

    def time(self, option: str) -> float | None:
        """An instant in seconds since the epoch."""
        text = self.get(option)
        return None if text is None else instant(option, text)

    def json(self, option: str) -> dict[str, Any] | None:
        """A JSON object."""
        text = self.get(option)
        return None if text is None else json_object(option, text)


def whole_number(option: str, text: str, *, least: int = 0) -> int:
    """A number from `least` up to Java's largest."""
    allowed = f"a whole number from {least} up" if least else "a whole number"
    if not re.fullmatch(r"-?[0-9]{1,19}", text):
        raise OptionRefused(option, text, allowed)
    number = int(text)
    if not least <= number <= _LARGEST:
        raise OptionRefused(option, text, allowed)
    return number


def instant(option: str, value: object) -> float:
    """Milliseconds since the epoch, or an ISO time with its zone, in seconds since the epoch."""
    allowed = (
        "milliseconds since the epoch, or an ISO time with its zone, as in "
        "2026-11-15T08:00:00Z or 2026-11-15T16:00:00+08:00"
    )
    text = str(value).strip()
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise OptionRefused(option, text, allowed)
    if re.fullmatch(r"[0-9]{1,15}", text):
        if int(text) > _LAST_MS:
            raise OptionRefused(option, text, allowed)
        return int(text) / 1000
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise OptionRefused(option, text, allowed) from None
    # The zone of the session is not known here, and that of the machine is another one elsewhere.
    if time.tzinfo is None:
        raise OptionRefused(option, text, allowed)
    seconds = epoch(time)
    if seconds < 0 or not math.isfinite(seconds):
        raise OptionRefused(option, text, allowed)
    return seconds


def json_object(option: str, text: str) -> dict[str, Any]:
    """A JSON object, in which no name comes twice."""
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _once(option, text, pairs))
    except ValueError as error:
        raise OptionRefused(option, text, f"a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise OptionRefused(option, text, "a JSON object")
    return value


def _once(option: str, text: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise OptionRefused(option, text, "a JSON object with every name once")
    return found
