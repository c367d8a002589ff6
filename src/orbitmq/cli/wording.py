"""Numbers, durations and times as people read them."""

from __future__ import annotations

import math
from datetime import datetime

NOTHING = "-"

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def count(number: int | None) -> str:
    """`1,234,567`."""
    return NOTHING if number is None else f"{number:,}"


def rate(per_second: float | None) -> str:
    """`1,234.5`: per second."""
    return NOTHING if per_second is None else f"{per_second:,.1f}"


def share(part: float | None) -> str:
    """`85 %` of 0.85."""
    return NOTHING if part is None else f"{part * 100:.0f} %"


def size(number: float | None) -> str:
    """`1.5 MiB`."""
    if number is None:
        return NOTHING
    power = 0
    while number >= 1024 and power < len(_SIZES) - 1:
        number /= 1024
        power += 1
    return f"{number:.0f} B" if power == 0 else f"{number:.1f} {_SIZES[power]}"


def duration(seconds: float | None) -> str:
    """The two largest units that matter: `2 h 5 min`, `3 min 20 s`, `4.2 s`, `350 ms`."""
    if seconds is None:
        return NOTHING
    if seconds <= 0:
        return "0 s"
    if seconds < 1:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if math.isinf(seconds):
        return "for ever"
    left = round(seconds)
    parts: list[str] = []
    for unit, length in _UNITS:
        number, left = divmod(left, length)
        if number:
            parts.append(f"{number} {unit}")
        if parts and (len(parts) == 2 or not number):
            break
    return " ".join(parts)


def moment(at: float | None, now: float, *, exact: bool = False) -> str:
    """`3 min ago`, `in 20 s`; or exactly, in the time of the place: `2026-01-31 23:59:59.123`."""
    if at is None:
        return NOTHING
    if exact:
        when = datetime.fromtimestamp(at).astimezone()
        return when.isoformat(" ", "milliseconds")
    if at > now + 1:
        return f"in {duration(at - now)}"
    return f"{duration(max(0.0, now - at))} ago"


def several(number: int, one: str, many: str | None = None) -> str:
    """`1 message`, `3 messages`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def harmless(text: str, *, keep_lines: bool = False) -> str:
    """A text of others for a terminal: what would move the cursor or colour it is spelled out."""
    if text.isprintable():
        return text
    kept = "\n\t" if keep_lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )
