"""Numbers as people say them, and the words that the console and the command line share.

One word for one thing, in tables, faults and pages alike:

| word | what it is |
|---|---|
| lag | messages that wait for a group: stored, and not finished |
| oldest | the age of the oldest of them |
| in flight | of the lag, what members have pulled and not finished |
| retries | of the lag, what failed before and is due again |
| later | what failed and waits for the delay before its next attempt; not in the lag |
| empty in | how long until none waits, at the present pace |
| finished up to | when the last message was stored that a group has finished |
| in, out | messages per second that are stored, and that are finished |
| pulled | messages per second that brokers hand out, by their own count |
| dead letters | messages that a group gave up; `dlq` is only typed |
| resend | to send a dead letter again; what that was done to is resent |
| member | a consumer that is online in a group |
| pipeline | what runs on Spark and reports to a console |
| unread | messages that the source of a pipeline has not read |
| failing | a pipeline whose messages come back |
"""

from __future__ import annotations

import math

NOTHING = "-"

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def several(number: int, one: str, many: str | None = None) -> str:
    """`1 message`, `3 messages`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


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


def share(part: float | None) -> str:
    """`85 %` of 0.85."""
    return NOTHING if part is None else f"{part * 100:.0f} %"
