"""JSON text exactly as Apache's peers write it.

Two writers must agree to the byte: the C one in msgspec, which is fast, and the rules of fastjson,
which are the protocol's. They differ in few characters: fastjson writes hexadecimal digits in upper
case, and also escapes U+007F to U+009F, U+2028 and U+2029. A string without those (one search
tells) is left to msgspec; the others are escaped by the table below.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from orbitmq.wire.errors import EncodeError

if TYPE_CHECKING:
    from collections.abc import Mapping

_encode = msgspec.json.Encoder().encode

#: Output of msgspec that fastjson would write differently. May also match an escaped backslash
#: followed by such letters, which then only takes the slower way to the same bytes.
_differs = re.compile(rb"\\u00[01][a-f]|\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8\xa9]").search
#: Characters for which it writes something else. Three times as quick as looking at the output.
_is_special = re.compile("[\x0b\x0e\x0f\x1a-\x1f\x7f-\x9f\u2028\u2029]").search

_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_ESCAPES = str.maketrans(
    {chr(code): f"\\u{code:04X}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}
    | _SHORT
)


def quoted(text: str) -> bytes:
    """A string in quotes."""
    if not _is_special(text):
        try:
            return _encode(text)
        except UnicodeEncodeError:
            pass  # a lone surrogate
    return b'"%b"' % _escaped(text)


def object_of_strings(fields: Mapping[str, str]) -> bytes:
    """An object whose values are strings, in the order given."""
    return _written(fields) or b"{%b}" % b",".join(
        b'"%b":"%b"' % (_escaped(key), _escaped(value)) for key, value in fields.items()
    )


def _written(value: object) -> bytes | None:
    """What msgspec writes, or None when fastjson would not write the same."""
    try:
        text = _encode(value)
    except UnicodeEncodeError:
        return None
    return None if _differs(text) else text


def _escaped(text: str) -> bytes:
    # A lone surrogate has no UTF-8 form; Java writes a question mark.
    return text.translate(_ESCAPES).encode("utf-8", "replace")


def scalar(value: object) -> bytes:
    """Any JSON value without special keys, as msgspec writes it."""
    try:
        return _encode(value)
    except (UnicodeEncodeError, TypeError, ValueError) as error:
        raise EncodeError(f"{value!r} has no JSON form: {error}") from error
