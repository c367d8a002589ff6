"""Requests that are made a hundred thousand times a second.

As with `templates` for answers: an ordinary request, encoded once by the ordinary encoder with
marks in the place of what varies, and filled in with one `%`. Texts are escaped on their way in,
so every value can be filled in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, get_type_hints

from orbitmq.wire.codes import Serialization
from orbitmq.wire.command import Command, encode_header
from orbitmq.wire.errors import EncodeError
from orbitmq.wire.frame import VIEW_FROM, Bytes, header_pieces, pack_prefix
from orbitmq.wire.headers.base import Header
from orbitmq.wire.jsontext import quoted
from orbitmq.wire.limits import DEFAULT_LIMITS, WireLimits

H = TypeVar("H", bound=Header)

#: What stands for the opaque, and for the first varying field, until they are filled in.
_OPAQUE_MARK = 1_870_352_147
_FIELD_MARK = 1_970_352_100
_JSON = int(Serialization.JSON)


class RequestTemplate(Generic[H]):
    """The head (length words and JSON header) of one kind of request, to be filled in."""

    __slots__ = ("_joined_below", "_limits", "_text", "_texts", "code")

    def __init__(
        self,
        code: int,
        kind: type[H],
        varying: tuple[str, ...],
        *,
        constant: Mapping[str, object],
        limits: WireLimits = DEFAULT_LIMITS,
    ) -> None:
        """`varying` are whole numbers and texts, in the order of their declaration."""
        self.code = int(code)
        self._limits = limits
        #: Frames up to this size are within all limits, and copied as a whole.
        self._joined_below = min(VIEW_FROM, limits.frame)
        #: Places of the fields that are texts, which have to be escaped.
        self._texts = tuple(place for place, name in enumerate(varying) if name in _texts_of(kind))
        marks = [_FIELD_MARK + place for place in range(len(varying))]
        values = {
            name: str(mark) if place in self._texts else mark
            for place, (name, mark) in enumerate(zip(varying, marks, strict=True))
        }
        request = Command.request(self.code, kind(**constant, **values), opaque=_OPAQUE_MARK)
        text = encode_header(request).replace(b"%", b"%%")
        if sorted(marks, key=lambda mark: text.find(b'"%d"' % mark)) != marks:
            raise EncodeError(f"{varying} are not fields of {kind.__name__} in their order")
        for place, mark in enumerate(marks):
            filler = b"%b" if place in self._texts else b'"%d"'
            text = _replaced(text, b'"%d"' % mark, filler)
        self._text = _replaced(text, b"%d" % _OPAQUE_MARK, b"%d")

    def pieces(self, opaque: int, *values: int | str, body: Bytes = b"") -> list[Bytes]:
        """The request as the pieces to write one after the other; a large body is not copied."""
        filled: list[Any] = [*values, opaque]
        for place in self._texts:
            filled[place] = quoted(str(values[place]))
        return self.filled(tuple(filled), body)

    def filled(self, values: tuple[int | bytes, ...], body: Bytes) -> list[Bytes]:
        """The same, of values as the text takes them: `quoted` texts, and the opaque last."""
        header = self._text % values
        size = len(header)
        total = 4 + size + len(body)
        if total < self._joined_below:
            # What `header_pieces` does, where there is nothing to be judged or left uncopied.
            return [b"".join((pack_prefix(total, size), header, body))]
        return header_pieces(_JSON, header, body, limits=self._limits)


@functools.cache  # a consumer makes a template for every queue
def _texts_of(kind: type[Header]) -> frozenset[str]:
    """The fields of a header that are texts."""
    types = get_type_hints(kind)
    return frozenset(name for name, type_ in types.items() if type_ in (str, str | None))


def _replaced(text: bytes, mark: bytes, place: bytes) -> bytes:
    if text.count(mark) != 1:
        raise EncodeError(f"a constant of the request looks like a mark of the template: {mark!r}")
    return text.replace(mark, place)
