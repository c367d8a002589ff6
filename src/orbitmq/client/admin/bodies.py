"""Message bodies for people: as text, as JSON, or as what they are."""

from __future__ import annotations

import enum

import msgspec

from orbitmq.client.admin.errors import BadRequest


class BodyForm(enum.StrEnum):
    """How a body is shown."""

    #: JSON if it is, else text if it is, else hexadecimal.
    AUTO = "auto"
    TEXT = "text"
    JSON = "json"
    HEX = "hex"


_ROW = 16


def shown_body(body: bytes, form: BodyForm | str = BodyForm.AUTO) -> str:
    """A body as text for people. Raises `BadRequest` when it is not of the form asked for."""
    try:
        wanted = BodyForm(form)
    except ValueError:
        raise BadRequest(
            f"a body is shown as one of {', '.join(BodyForm)}, not as {form!r}"
        ) from None
    match wanted:
        case BodyForm.TEXT:
            text = _text(body)
            if text is None:
                raise BadRequest("the body is not UTF-8 text; show it as hex")
            return text
        case BodyForm.JSON:
            json = _json(body)
            if json is None:
                raise BadRequest("the body is not JSON; show it as text or hex")
            return json
        case BodyForm.HEX:
            return _hex(body)
        case BodyForm.AUTO:
            # A single number or word is JSON as well; nobody gains from seeing it as such.
            json = _json(body) if body[:1] in (b"{", b"[") else None
            text = _text(body) if json is None else json
            return _hex(body) if text is None else text


def _text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _json(body: bytes) -> str | None:
    try:
        return msgspec.json.format(body, indent=2).decode()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _hex(body: bytes) -> str:
    """Offsets, bytes and characters, as `hexdump -C` has them."""
    rows = []
    for start in range(0, len(body), _ROW):
        row = body[start : start + _ROW]
        letters = "".join(chr(each) if 32 <= each < 127 else "." for each in row)
        rows.append(f"{start:08x}  {row.hex(' '):<{_ROW * 3 - 1}}  |{letters}|")
    return "\n".join(rows)
