"""Commands: a request or an answer.

The outer header is decoded at once. Its extension fields stay as they came until a typed header is
requested, because code and opaque are enough for many answers. Sends and pulls are the exception:
both steps are done in one where the text begins as clients write it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from orbitmq.arguments import explained
from orbitmq.javahash import java_order
from orbitmq.wire.codes import (
    DEFAULT_LIMITS,
    OUR_VERSION,
    EncodeError,
    Flag,
    FrameError,
    Gate,
    HeaderError,
    Language,
    RequestCode,
    Serialization,
    WireError,
    WireLimits,
)
from orbitmq.wire.frame import (
    VIEW_FROM,
    Bytes,
    Frame,
    encode_frame,
    frame_head,
    frame_pieces,
    header_pieces,
    pack_header,
    pack_prefix,
    unpack_fields,
    unpack_header,
)
from orbitmq.wire.headers import (
    LETTERED_CODES,
    Header,
    Int32,
    JsonDecoders,
    PullMessageRequest,
    SendMessageRequest,
    decode_fields,
    encode_fields,
    lettered,
)
from orbitmq.wire.javajson import Value, coerce, object_of_strings, parse, quoted

H = TypeVar("H", bound=Header)

# Plain values of what every command is asked for: the operators of `IntFlag` cost as much as
# decoding a header.
_RESPONSE = int(Flag.RESPONSE)
_ONE_WAY = int(Flag.ONE_WAY)
_JSON = Serialization.JSON
_BINARY = Serialization.ROCKETMQ

_set = msgspec.structs.force_setattr
_BY_NAMES, _BY_LETTERS = JsonDecoders(by_letters=False), JsonDecoders(by_letters=True)
_NO_FIELDS: Mapping[str, str] = MappingProxyType({})


class Command(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A request, or the answer to one. Make them with `request` and `answer`."""

    code: int
    opaque: int
    flag: int = 0
    language: Language = Language.PYTHON
    version: int = OUR_VERSION
    remark: str | None = None
    body: Bytes = b""
    serialization: Serialization = _JSON
    #: The fields as they came: JSON text, or a packed map. None when there were none.
    _raw: Bytes | msgspec.Raw | None = None
    #: The fields as a map, once made.
    _fields: Mapping[str, str] | None = None
    #: The limits for unpacking the fields.
    _limits: WireLimits = DEFAULT_LIMITS
    #: The fields as a typed header, when they were read with the outer one; then that is in `_raw`.
    _header: Header | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of the received frame that this command keeps in memory."""
        return len(self.body) + (0 if self._raw is None else len(self._raw))

    @classmethod
    def request(
        cls,
        code: int,
        header: Header | None = None,
        *,
        opaque: int,
        body: Bytes = b"",
        extra: Mapping[str, str] | None = None,
        one_way: bool = False,
        serialization: Serialization = _JSON,
    ) -> Command:
        """A request of ours; `extra` are fields beyond the header: credentials, zone."""
        return cls(
            code,
            opaque,
            flag=_ONE_WAY if one_way else 0,
            body=body,
            serialization=serialization,
            _fields=_fields_of(header, extra, by_letters=code in LETTERED_CODES),
        )

    def answer(
        self,
        code: int,
        header: Header | None = None,
        *,
        remark: str | None = None,
        body: Bytes = b"",
        extra: Mapping[str, str] | None = None,
    ) -> Command:
        """The answer to this request, in the serialization that its sender reads."""
        return Command(
            code,
            self.opaque,
            flag=_RESPONSE,
            remark=remark,
            body=body,
            serialization=self.serialization,
            _fields=_fields_of(header, extra, by_letters=False),
        )

    @property
    def is_response(self) -> bool:
        return bool(self.flag & _RESPONSE)

    @property
    def is_one_way(self) -> bool:
        return bool(self.flag & _ONE_WAY)

    def header(self, kind: type[H]) -> H:
        """The fields as a typed header. Raises `HeaderError` when they do not fit it."""
        raw = self._raw
        if self._header is not None:
            if isinstance(self._header, kind):
                return self._header
            raw = None
        by_letters = not self.flag & _RESPONSE and self.code in LETTERED_CODES
        if raw is not None and self.serialization is _JSON:
            try:
                header: H = (_BY_LETTERS if by_letters else _BY_NAMES)[kind](raw)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                pass
            else:
                return header
        return decode_fields(lettered(kind) if by_letters else kind, self.ext_fields)

    @property
    def ext_fields(self) -> Mapping[str, str]:
        """All fields as strings, in the order in which they came. Raises `HeaderError`."""
        fields = self._fields
        if fields is None:
            raw = self._raw
            if raw is None:
                return _NO_FIELDS
            if self._header is not None:
                raw = _decode_envelope(raw).ext_fields
            fields = _unpacked(raw, self.serialization, self._limits)
            _set(self, "_fields", fields)
        return fields

    @property
    def has_ext_fields(self) -> bool:
        """Whether the command has a map of fields, be it an empty one."""
        return self._fields is not None or self._raw is not None

    def with_fields(self, fields: Mapping[str, str]) -> Command:
        """The same command with other fields: signed ones, for instance."""
        return msgspec.structs.replace(self, _raw=None, _fields=fields, _header=None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Command) and _comparable(self) == _comparable(other)

    __hash__ = None  # type: ignore[assignment]  # as for any value that holds a map


def _comparable(command: Command) -> tuple[Any, ...]:
    shape = (command.code, command.opaque, command.flag, command.language, command.version)
    rest = (command.remark, command.serialization, command.body)
    return (*shape, *rest, command.has_ext_fields, dict(command.ext_fields))


def _fields_of(
    header: Header | None, extra: Mapping[str, str] | None, *, by_letters: bool
) -> Mapping[str, str] | None:
    if header is None:
        return extra
    fields = encode_fields(header, lettered(type(header)) if by_letters else None)
    return {**fields, **extra} if extra else fields


# Decoding


_ABSENT = msgspec.Raw()


class _Envelope(msgspec.Struct, gc=False, rename={"ext_fields": "extFields"}):
    """The outer header as nearly every peer writes it."""

    code: Int32 = 0
    opaque: Int32 = 0
    flag: Int32 = 0
    language: str | int = "JAVA"
    version: Int32 = 0
    remark: str | None = None
    ext_fields: msgspec.Raw = _ABSENT


class _LooseEnvelope(msgspec.Struct, gc=False, rename={"ext_fields": "extFields"}):
    """The outer header in any form that Java would still read."""

    code: Int32 = 0
    opaque: Int32 = 0
    flag: Int32 = 0
    language: str = "JAVA"
    version: Int32 = 0
    remark: str | None = None
    ext_fields: dict[str, str] | None = None


class _WholeEnvelope(msgspec.Struct, gc=False, rename={"ext_fields": "extFields"}):
    """The same of a request whose fields are read with it."""

    ext_fields: Header
    code: Int32 = 0
    opaque: Int32 = 0
    flag: Int32 = 0
    language: str | int = "JAVA"
    version: Int32 = 0
    remark: str | None = None


def _whole_decoder(kind: type[Header]) -> Callable[[bytes], _WholeEnvelope]:
    return msgspec.json.Decoder(  # type: ignore[return-value]  # a subclass of its base
        msgspec.defstruct(
            f"_{kind.__name__}Envelope",
            [("ext_fields", kind, msgspec.field(name="extFields"))],
            bases=(_WholeEnvelope,),
            gc=False,
        ),
        strict=False,
    ).decode


_decode_envelope = msgspec.json.Decoder(_Envelope, strict=False).decode
_SEND, _PULL = int(RequestCode.SEND_MESSAGE_V2), int(RequestCode.PULL_MESSAGE)
#: Headers that one decoder reads completely, by the beginning of their text.
_IN_ONE_GO: Mapping[bytes, tuple[int, Callable[[bytes], _WholeEnvelope]]] = {
    b'{"code":%d,' % _SEND: (_SEND, _whole_decoder(lettered(SendMessageRequest))),
    b'{"code":%d,"' % _PULL: (_PULL, _whole_decoder(PullMessageRequest)),
}
(_START,) = {len(start) for start in _IN_ONE_GO}
_LANGUAGES: Mapping[str | int, Language] = {
    **{language.name: language for language in Language},
    **{language.value: language for language in Language},
    **{str(language.value): language for language in Language},
}
_NULL = b"null"
_OTHER = Language.OTHER


def decode_command(frame: Frame, limits: WireLimits = DEFAULT_LIMITS) -> Command:
    """Decode a frame. Raises `FrameError` when its header cannot be read at all."""
    if frame.serialization:
        return _decode_binary(frame, limits)
    text = frame.header
    in_one_go = _IN_ONE_GO.get(text[:_START])
    if in_one_go is not None:
        code, decode = in_one_go
        try:
            whole = decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass
        else:
            if whole.code == code and not whole.flag & _RESPONSE:
                return Command(
                    code,
                    whole.opaque,
                    whole.flag,
                    _LANGUAGES.get(whole.language, _OTHER),
                    whole.version,
                    whole.remark,
                    frame.body,
                    _JSON,
                    text,
                    None,
                    limits,
                    whole.ext_fields,
                )
    try:
        envelope = _decode_envelope(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _decode_loosely(frame, limits)
    fields = envelope.ext_fields
    is_null = fields is _ABSENT or (len(fields) == len(_NULL) and bytes(fields) == _NULL)
    return Command(
        envelope.code,
        envelope.opaque,
        envelope.flag,
        _LANGUAGES.get(envelope.language, _OTHER),
        envelope.version,
        envelope.remark,
        frame.body,
        _JSON,
        None if is_null else fields,
        None,
        limits,
    )


def _decode_binary(frame: Frame, limits: WireLimits) -> Command:
    header = unpack_header(frame.header, limits)
    return Command(
        header.code,
        header.opaque,
        header.flag,
        _LANGUAGES.get(header.language, Language.OTHER),
        header.version,
        header.remark,
        frame.body,
        _BINARY,
        header.fields,
        None,
        limits,
    )


def _decode_loosely(frame: Frame, limits: WireLimits) -> Command:
    try:
        envelope = coerce(_LooseEnvelope, parse(frame.header.decode(), limits), limits)
        _check_sizes(envelope.ext_fields or _NO_FIELDS, limits)
    except (WireError, UnicodeDecodeError) as error:
        raise FrameError(f"a header that is not a command: {error}") from error
    return Command(
        envelope.code,
        envelope.opaque,
        envelope.flag,
        _LANGUAGES.get(envelope.language, Language.OTHER),
        envelope.version,
        envelope.remark,
        frame.body,
        _JSON,
        None,
        envelope.ext_fields,
    )


class _LooseFields(msgspec.Struct, gc=False):
    fields: dict[str, str]


_decode_strings = msgspec.json.Decoder(dict[str, str]).decode


def _unpacked(
    raw: Bytes | msgspec.Raw, serialization: Serialization, limits: WireLimits
) -> dict[str, str]:
    """The fields as a map of strings, whatever JSON types the peer gave them."""
    try:
        if serialization is _BINARY:
            return unpack_fields(bytes(raw), limits)
        try:
            fields = _decode_strings(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            text = bytes(raw).decode()
            loose: Value = {"fields": parse(text, limits)}
            fields = coerce(_LooseFields, loose, limits).fields
        _check_sizes(fields, limits)
    except (WireError, UnicodeDecodeError) as error:
        raise HeaderError("command", "extFields", "a map of strings", str(error)) from error
    return fields


def _check_sizes(fields: Mapping[str, str], limits: WireLimits) -> None:
    if len(fields) > limits.ext_fields:
        raise WireError(f"{len(fields)} fields, {limits.ext_fields} are allowed")
    for name, text in fields.items():
        if len(name) > limits.ext_key:
            raise WireError(f"a name of {len(name)} characters, {limits.ext_key} are allowed")
        if len(text) > limits.ext_value:
            raise WireError(f"a field of {len(text)} characters, {limits.ext_value} are allowed")


# Encoding

#: What stands for each `%` in the remark of an answer, the longer signs first.
_PERCENT_IN_WORDS: Mapping[str, str] = {
    "%RETRY%": "RETRY of ",
    "%DLQ%": "DLQ of ",
    "%": "(percent)",
}


def encode_command(command: Command, *, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    """A command as one run of bytes."""
    return encode_frame(to_frame(command), limits=limits)


def command_pieces(command: Command, *, limits: WireLimits = DEFAULT_LIMITS) -> list[Bytes]:
    """A command as the pieces to write one after the other; the body is not copied."""
    return frame_pieces(to_frame(command), limits=limits)


def to_frame(command: Command) -> Frame:
    """A command with its header written out, the way Java writes it."""
    return Frame(command.serialization, encode_header(command), command.body)


def encode_header(command: Command) -> bytes:
    """The header of a command, the way Java writes it: keys in alphabetical order, no nulls."""
    fields = command.ext_fields if command.has_ext_fields else None
    remark = command.remark
    if remark is not None and "%" in remark and command.flag & _RESPONSE:
        remark = _without_percent(remark)
    if command.serialization is _BINARY:
        return pack_header(
            command.code,
            command.language,
            command.version,
            command.opaque,
            command.flag,
            remark,
            fields,
        )
    return b'{"code":%d%b,"flag":%d,"language":"%b","opaque":%d%b,%b,"version":%d}' % (
        command.code,
        b"" if fields is None else b',"extFields":' + object_of_strings(fields),
        command.flag,
        command.language.name.encode(),
        command.opaque,
        b"" if remark is None else b',"remark":' + quoted(remark),
        b'"serializeTypeCurrentRPC":"JSON"',
        command.version,
    )


def _without_percent(remark: str) -> str:
    """The remark of an answer in words that no client takes for a format.

    Some clients hand remarks to a function like `printf`, and end when one has a `%` in it, as the
    names of retry and dead-letter topics do.
    """
    for sign, words in _PERCENT_IN_WORDS.items():
        remark = remark.replace(sign, words)
    return remark


# ACL 1.0. The signature is HMAC-SHA1 over the values of all fields, in the order of their names,
# and the body. Names are not included, so a value can be moved between fields: a weakness of the
# protocol. It authenticates and hides nothing; use TLS beside it.

ACCESS_KEY = "AccessKey"
SIGNATURE = "Signature"
SECURITY_TOKEN = "SecurityToken"  # noqa: S105  # the name of a field
UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"


@explained()
@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a client signs with."""

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = field(default=None, repr=False)


def sign(command: Command, credentials: Credentials) -> Command:
    """The same request with the fields that prove the identity of the sender."""
    fields = {
        name: text
        for name, text in command.ext_fields.items()
        if name not in (ACCESS_KEY, SIGNATURE, SECURITY_TOKEN)
    }
    fields[ACCESS_KEY] = credentials.access_key
    if credentials.security_token is not None:
        fields[SECURITY_TOKEN] = credentials.security_token
    content = signed_content(fields, command.body, command.version)
    fields[SIGNATURE] = signature(content, credentials.secret_key)
    return command.with_fields(fields)


def access_key_of(command: Command) -> str | None:
    """Under whose name a request comes; None when it has no credentials.

    C++ clients without credentials send an empty key: that is none, too.
    """
    return command.ext_fields.get(ACCESS_KEY) or None


def is_signed_by(command: Command, secret_key: str) -> bool:
    """Whether the request was signed with this secret. Takes the same time, right or wrong."""
    claimed = command.ext_fields.get(SIGNATURE, "")
    content = signed_content(command.ext_fields, command.body, command.version)
    return hmac.compare_digest(claimed.encode("utf-8", "replace"), _digest(content, secret_key))


def signed_content(fields: Mapping[str, str], body: Bytes, version: int) -> bytes:
    """What is signed: the values in the order of their names, then the body."""
    skipped = {SIGNATURE}
    if version <= Gate.UNSIGNED_UNIQUE_KEY_QUERY:
        skipped.add(UNIQUE_KEY_QUERY)
    names = sorted(fields.keys() - skipped, key=java_order)
    text = "".join(fields[name] for name in names)
    return text.encode("utf-8", "replace") + body


def signature(content: bytes, secret_key: str) -> str:
    """The signature as it stands in its field."""
    return _digest(content, secret_key).decode()


def _digest(content: bytes, secret_key: str) -> bytes:
    # SHA-1 is what the protocol has; as an HMAC it is not broken.
    mac = hmac.digest(secret_key.encode("utf-8", "replace"), content, hashlib.sha1)
    return base64.b64encode(mac)


# Templates, for requests and answers that are encoded a hundred thousand times a second. A template
# is a command that the ordinary encoder encoded once, with marks in the place of what varies.
# Filling it in is one `%`, several times faster than encoding, and gives the same bytes. An answer
# with a text that needs escaping is encoded the ordinary way.

_JSON_NUMBER = int(Serialization.JSON)
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
        return frame_head(_JSON_NUMBER, self.text % (*filled, opaque), body_size)

    def command(self, opaque: int, *values: int | str) -> Command:
        """The same answer as an ordinary command."""
        fields = dict(zip(self._varying, values, strict=True))
        for name, form in self._forms.items():
            fields[name] = form % fields[name]
        header = self._kind(**self._constant, **fields)
        return msgspec.structs.replace(self._answer, opaque=opaque, _fields=encode_fields(header))

    def _encoded(self, opaque: int, values: tuple[int | str, ...], body_size: int) -> bytes:
        header = encode_header(self.command(opaque, *values))
        return frame_head(_JSON_NUMBER, header, body_size)

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
        return header_pieces(_JSON_NUMBER, header, body, limits=self._limits)


@functools.cache  # a consumer makes a template for every queue
def _texts_of(kind: type[Header]) -> frozenset[str]:
    """The fields of a header that are texts."""
    types = get_type_hints(kind)
    return frozenset(name for name, type_ in types.items() if type_ in (str, str | None))


def _request_with(text: bytes, mark: bytes, place: bytes) -> bytes:
    if text.count(mark) != 1:
        raise EncodeError(f"a constant of the request looks like a mark of the template: {mark!r}")
    return text.replace(mark, place)
