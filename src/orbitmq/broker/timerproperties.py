"""The time that a message asks to be delivered at."""

from __future__ import annotations

import re

from orbitmq.broker.errors import Refused
from orbitmq.clock import milliseconds, milliseconds_up
from orbitmq.message.properties import property_value
from orbitmq.message.wellknown import TIMER_DELAY_MS, TIMER_DELAY_SEC, TIMER_DELIVER_MS
from orbitmq.wire.codes import ResponseCode

#: The properties that ask for a time.
ASKED = (TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS)

_is_number = re.compile(r"[+-]?[0-9]{1,18}").fullmatch


def asked_time(properties: bytes, now: float) -> int | None:
    """The time that a message asks for, in milliseconds; None when it asks for none."""
    for name, unit, is_delay in (
        (TIMER_DELAY_SEC, 1000, True),
        (TIMER_DELAY_MS, 1, True),
        (TIMER_DELIVER_MS, 1, False),
    ):
        text = property_value(properties, name)
        if text is None:
            continue
        number = number_in(text)
        if number is None:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"timer message illegal, property {name} must be a number, got {text[:64]!r}",
            )
        if not is_delay:
            return number * unit
        # A delay must not end early, and none at all is over at once.
        return number * unit + (milliseconds_up(now) if number > 0 else milliseconds(now))
    return None


def number_in(text: str | None) -> int | None:
    """A number of at most 18 digits; None when the text is none."""
    return int(text) if text is not None and _is_number(text) else None
