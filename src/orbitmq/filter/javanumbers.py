"""Java's reading of numbers and truth values from text, and its order of doubles.

Property values are text. Which texts count as numbers decides which messages match, so the rules
are Java's own: `Integer.valueOf`, `Long.valueOf`, `Double.valueOf`, `Boolean.valueOf` and
`Double.compareTo`. Python's `int` and `float` are close, but take underscores and blanks, know no
`1.5f`, and order NaN and -0.0 otherwise.
"""

from __future__ import annotations

import math
import re
import unicodedata

from orbitmq.filter.errors import IncomparableValues

INT32_MAX = 0x7FFFFFFF
INT64_MAX = 0x7FFFFFFFFFFFFFFF

#: `Double.valueOf` trims what `String.trim` trims.
_BLANKS = "".join(map(chr, range(0x21)))
# In both, no text can be divided among the parts in two ways: one that does not fit would be tried
# in all of them, which takes seconds for the longest property.
_DECIMAL = re.compile(
    r"[+-]?(?:NaN|Infinity|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?)"
)
_HEXADECIMAL = re.compile(
    r"[+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+[fFdD]?"
)


def read_int32(text: str) -> int:
    """The number that `Integer.valueOf` reads."""
    if len(text) < 10 and text.isdigit() and text.isascii():  # nearly every value there is
        return int(text)
    number = _read_integer(text)
    if number is None or not ~INT32_MAX <= number <= INT32_MAX:
        raise IncomparableValues(text, "a 32-bit integer")
    return number


def read_int64(text: str) -> int:
    """The number that `Long.valueOf` reads."""
    if len(text) < 19 and text.isdigit() and text.isascii():
        return int(text)
    number = _read_integer(text)
    if number is None or not ~INT64_MAX <= number <= INT64_MAX:
        raise IncomparableValues(text, "a 64-bit integer")
    return number


def _read_integer(text: str) -> int | None:
    """The integer with an optional sign; one with more digits than 64 bits need may be cut short.

    Digits of every script count, as in Java, but only those that are one UTF-16 unit.
    """
    digits = text[1:] if text[:1] in ("+", "-") else text
    if digits.isascii():
        if not digits.isdigit():
            return None
    else:
        values = [unicodedata.decimal(char, -1) if char < "\U00010000" else -1 for char in digits]
        if min(values) < 0:
            return None
        digits = "".join(map(str, values))
    if len(digits) > 19:
        digits = digits.lstrip("0")[:20] or "0"  # 20 digits are out of range already
    number = int(digits)
    return -number if text[0] == "-" else number


def read_double(text: str) -> float:
    """The number that `Double.valueOf` reads."""
    trimmed = text.strip(_BLANKS)
    if _DECIMAL.fullmatch(trimmed):
        return float(trimmed.rstrip("fFdD"))  # Python spells NaN and Infinity the same way
    if _HEXADECIMAL.fullmatch(trimmed):
        try:
            return float.fromhex(trimmed.rstrip("fFdD"))
        except OverflowError:
            return -math.inf if trimmed[0] == "-" else math.inf
    raise IncomparableValues(text, "a number")


def read_boolean(text: str) -> bool:
    """The truth value that `Boolean.valueOf` reads: false for everything but `true`."""
    return text.lower() == "true"


def order_doubles(left: float, right: float) -> int:
    """Negative, 0 or positive as `Double.compareTo`: -0.0 below 0.0, NaN above all and itself."""
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right:
        if left:
            return 0
        return int(math.copysign(1, left) - math.copysign(1, right))
    return math.isnan(left) - math.isnan(right)
