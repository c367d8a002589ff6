"""Numbers, durations and times as people read them."""

from __future__ import annotations

from datetime import datetime

from orbitmq.console.words import NOTHING, duration, several, share

# Those of sentences are the console's as well.
__all__ = [
    "NOTHING",
    "count",
    "duration",
    "fine",
    "harmless",
    "moment",
    "rate",
    "several",
    "share",
    "size",
]

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def count(number: int | None) -> str:
    """`1,234,567`."""
    return NOTHING if number is None else f"{number:,}"


def rate(per_second: float | None) -> str:
    """`1,234.5`: per second."""
    return NOTHING if per_second is None else f"{per_second:,.1f}"


def fine(seconds: float | None) -> str:
    """`80 µs`, `4 ms`, `1.2 s`: of what is mostly short."""
    if seconds is None:
        return NOTHING
    if 0 < seconds < 0.001:
        return f"{max(1, round(seconds * 1e6))} µs"
    return f"{seconds * 1000:.1f} ms" if 0 < seconds < 0.01 else duration(seconds)


def size(number: float | None) -> str:
    """`1.5 MiB`."""
    if number is None:
        return NOTHING
    power = 0
    while number >= 1024 and power < len(_SIZES) - 1:
        number /= 1024
        power += 1
    return f"{number:.0f} B" if power == 0 else f"{number:.1f} {_SIZES[power]}"


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


def harmless(text: str, *, keep_lines: bool = False) -> str:
    """A text of others for a terminal: what would move the cursor or colour it is spelled out."""
    if text.isprintable():
        return text
    kept = "\n\t" if keep_lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )
