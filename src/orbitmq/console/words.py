"""Numbers as people say them."""

from __future__ import annotations

_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))


def count(number: int, what: str) -> str:
    """`1 message`, `1,200 messages`"""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """`45 s`, `3 min`, `2 h`, `5 d`"""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
