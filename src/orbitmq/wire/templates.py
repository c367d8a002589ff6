"""Requests and answers that are encoded a hundred thousand times a second.

A template is a command that the ordinary encoder encoded once, with marks in the place of what
varies. Filling it in is one `%`, several times faster than encoding, and gives the same bytes. An
answer with a text that needs escaping is encoded the ordinary way.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from orbitmq.wire.codes import (
    DEFAULT_LIMITS,
    OUR_VERSION,
    EncodeError,
    Flag,
    Language,
    Serialization,
    WireLimits,
)
from orbitmq.wire.command import Command, encode_header
from orbitmq.wire.frame import VIEW_FROM, Bytes, frame_head, header_pieces, pack_prefix
from orbitmq.wire.headers import Header, encode_fields
from orbitmq.wire.javajson import quoted

H = TypeVar("H", bound=Header)

_JSON = int(Serialization.JSON)
_RESPONSE = int(Flag.RESPONSE)

#: What stands for the opaque, and for the first varying field, until they are filled in.
_OPAQUE_MARK = 1_870_352_147
_FIELD_MARK = 1_970_352_100


class AnswerTemplate(Generic[H]):
    """The head (length words and JSON header) of one kind of answer, to be filled in."""

    __slots__ = ("_answer", "_constant", "_forms", "_kind", "_texts", "_varying", "text")

    def __init__(
        self,
        kind: type[H],
        varying: tuple[str, ...],
        *,
        constant: Mapping[str, object] | None = None,
        forms: Mapping[str, str] | None = None,
        code: int = 0,
        remark: str | None = None,
        language: Language = Language.PYTHON,
        version: int = OUR_VERSION,
    ) -> None:
        """`varying` fields, in the order of their declaration, are given for every answer.

        A text that is made of one number is given as that number, with its format (as for `%`)
        here. The text must not need escaping.
        """
        self._kind = kind
        self._varying = varying
        self._constant = dict(constant or {})
        self._forms = dict(forms or {})
        self._answer = Command(code, 0, _RESPONSE, language, version, remark)
        if varying != tuple(name for name in kind.__struct_fields__ if name in varying):
            raise EncodeError(f"{varying} are not fields of {kind.__name__} in their order")
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        #: Places of the fields that are texts, the only ones that might need escaping.
        self._texts = tuple(
            place
            for place, name in enumerate(varying)
            if _is_text(types[name]) and name not in self._forms
        )
        #: The header, for `%` with the varying fields and the opaque; texts as bytes.
        self.text = self._compiled()

    def head(self, opaque: int, *values: int | str, body_size: int = 0) -> bytes:
        """The answer up to its body, which has `body_size` bytes and is written by the caller."""
        filled: Sequence[int | str | bytes] = values
        if self._texts:
            filled = list(values)
            for place in self._texts:
                text = values[place]
                if type(text) is not str or not text.isascii():
                    return self._encoded(opaque, values, body_size)
                # Letters and digits need no escaping; of bytes it is quicker to tell.
                letters = text.encode()
                if not letters.isalnum():
                    return self._encoded(opaque, values, body_size)
                filled[place] = letters
        return frame_head(_JSON, self.text % (*filled, opaque), body_size)

    def command(self, opaque: int, *values: int | str) -> Command:
        """The same answer as an ordinary command."""
        fields = dict(zip(self._varying, values, strict=True))
        for name, form in self._forms.items():
            fields[name] = form % fields[name]
        header = self._kind(**self._constant, **fields)
        return msgspec.structs.replace(self._answer, opaque=opaque, _fields=encode_fields(header))

    def _encoded(self, opaque: int, values: tuple[int | str, ...], body_size: int) -> bytes:
        header = encode_header(self.command(opaque, *values))
        return frame_head(_JSON, header, body_size)

    def _compiled(self) -> bytes:
        marks = [_FIELD_MARK + place for place in range(len(self._varying))]
        values = (str(mark) if place in self._texts else mark for place, mark in enumerate(marks))
        text = encode_header(self.command(_OPAQUE_MARK, *values)).replace(b"%", b"%%")
        for place, (name, mark) in enumerate(zip(self._varying, marks, strict=True)):
            form = self._forms.get(name, "%d")
            new = b"%b" if place in self._texts else form.encode()
            text = _replaced(text, b'"%b"' % (form % mark).encode(), b'"%b"' % new)
        return _replaced(text, b"%d" % _OPAQUE_MARK, b"%d")


def _is_text(declared: object) -> bool:
    return declared in (str, str | None)


def _replaced(text: bytes, mark: bytes, place: bytes) -> bytes:
    if text.count(mark) != 1:
        raise EncodeError(f"a constant of the answer looks like a mark of the template: {mark!r}")
    return text.replace(mark, place)


# Requests. Texts are escaped when they are filled in, so every value is possible.


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
            text = _request_with(text, b'"%d"' % mark, filler)
        # In a text the quotation marks would be escaped.
        self._text = _request_with(text, b'"opaque":%d' % _OPAQUE_MARK, b'"opaque":%d')

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


def _request_with(text: bytes, mark: bytes, place: bytes) -> bytes:
    if text.count(mark) != 1:
        raise EncodeError(f"a constant of the request looks like a mark of the template: {mark!r}")
    return text.replace(mark, place)
