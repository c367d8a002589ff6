"""What becomes of a message whose handler failed, in words for the log.

The client does not know all of it: how often a group is tried, and after which delays, may be set
at the broker. What is said of that is Apache's default, and said to be.
"""

from __future__ import annotations

from typing import Final

from orbitmq.client.consumer.sendback import DEFAULT_RETRIES, FIRST_LEVEL
from orbitmq.client.consumer.verdict import DEAD, DELAY_LEVELS, Failure

_MINUTE: Final = 60
_HOUR: Final = 3600


def after_failure(attempt: int, failure: Failure, max_retries: int | None) -> str:
    """For a message that goes back to the broker; `max_retries` None: as the group is set there."""
    if failure.level == DEAD:
        return f"attempt {attempt}, given up: it goes to the dead letters"
    attempts = 1 + (DEFAULT_RETRIES if max_retries is None else max_retries)
    pause = failure.pause
    if attempt >= attempts:
        unless = " unless the broker allows the group more" if max_retries is None else ""
        return f"attempt {attempt} of {attempts}, the last: it goes to the dead letters{unless}"
    unless = ""
    if pause is None:
        level = min(FIRST_LEVEL + attempt - 1, len(DELAY_LEVELS))
        pause = float(DELAY_LEVELS[level - 1])
        unless = " unless the broker has other delays"
    if max_retries is None:
        unless = " unless the group is set otherwise at the broker"
    return f"attempt {attempt} of {attempts}, again in {duration(pause)}{unless}"


def after_failure_in_order(
    attempt: int, failure: Failure, max_retries: int | None, pause: float
) -> str:
    """For a message that stays where it is, and its queue with it."""
    if failure.level == DEAD:
        return f"attempt {attempt}, given up: it goes to the dead letters, and its queue goes on"
    if max_retries is None:
        return f"attempt {attempt}, without a limit; again in {duration(pause)}, its queue waits"
    attempts = 1 + max_retries
    if attempt >= attempts:
        return (
            f"attempt {attempt} of {attempts}, the last: it goes to the dead letters, and its "
            "queue goes on"
        )
    return f"attempt {attempt} of {attempts}, again in {duration(pause)}, its queue waits"


def dropped_after_failure(attempt: int) -> str:
    """For a message that was broadcast: nobody takes it back."""
    return f"attempt {attempt}, not tried again: it was broadcast"


def duration(seconds: float) -> str:
    """Seconds as people say them: 10 s, 2 min, 2 h."""
    if seconds >= _HOUR and seconds % _HOUR == 0:
        return f"{seconds / _HOUR:g} h"
    if seconds >= _MINUTE and seconds % _MINUTE == 0:
        return f"{seconds / _MINUTE:g} min"
    return f"{seconds:g} s"
