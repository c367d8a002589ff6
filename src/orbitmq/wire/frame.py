"""Frames: where one ends and the next begins.

    total length 4 | type 1, header length 3 | header | body

`total` counts everything after itself. Lengths are checked before anything is allocated, and a
buffer only grows by what has arrived. An incomplete frame is kept as the reads that bring it, and
joined once.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from orbitmq.wire.codes import (
    DEFAULT_LIMITS,
    LARGEST_HEADER,
    EncodeError,
    FrameError,
    OtherProtocol,
    Serialization,
    WireError,
    WireLimits,
)

#: The two length words.
PREFIX_SIZE = 8

#: Bodies from this size on are views of what was received. From 8 KiB up reading with copies costs
#: 1.2 to 1.6 times as much; at 1 KiB the copy is cheaper, and a view would keep a whole read alive.
VIEW_FROM = 16 * 1024

#: A body as it was received. Both kinds are read-only, can be sliced, hashed, joined and decoded.
Bytes: TypeAlias = bytes | memoryview

#: Smaller reads of an incomplete frame are kept together: an object for each would be larger.
_PIECE = 4096

_unpack_prefix = struct.Struct(">iI").unpack_from
#: The total length, and the type with the length of the header.
pack_prefix = struct.Struct(">iI").pack
_HEADER_LENGTH = 0xFFFFFF
_LAST_TYPE = max(Serialization)
#: A type and the longest header.
_LARGEST_MARK = _LAST_TYPE << 24 | _HEADER_LENGTH
#: An answer, and requests; and records of TLS, an alert and a greeting.
_HTTP_BEGINNINGS = frozenset((b"HTTP", b"GET ", b"HEAD", b"POST", b"PUT ", b"OPTI", b"DELE"))
#: A client's greeting in HTTP/2: gRPC.
_HTTP2_BEGINNING = b"PRI "
_TLS_BEGINNINGS = (b"\x15\x03", b"\x16\x03")


#: The log line about a client that speaks gRPC.
SPEAKS_HTTP2 = (
    "this speaks HTTP/2, as gRPC clients of RocketMQ 5 do, which is not served here; use a client "
    "of the remoting protocol: orbitmq, or rocketmq-client for Java, rocketmq-client-go/v2, ..."
)


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A header and a body, cut out of the stream and not looked into yet."""

    serialization: int
    header: bytes
    body: Bytes = b""


class FrameReader:
    """Cuts a byte stream into frames, however the bytes are chunked. Holds no socket."""

    __slots__ = ("_broken", "_limits", "_needed", "_pieces", "_unfinished")

    def __init__(self, limits: WireLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        #: Of the frame that is not complete; the first one begins with its prefix.
        self._pieces: list[bytes | bytearray] = []
        self._unfinished = 0
        self._needed = PREFIX_SIZE
        self._broken = False

    @property
    def missing(self) -> int:
        """How many more bytes are needed before `feed` can make progress. Never 0."""
        return self._needed - self._unfinished

    @property
    def unfinished(self) -> int:
        """How many bytes of a frame are kept that is not complete yet."""
        return self._unfinished

    @property
    def announced(self) -> int:
        """How long that frame will be; 0 while it has not said so."""
        return self._needed if self._needed > PREFIX_SIZE else 0

    def feed(self, data: bytes) -> list[Frame]:
        """Take what was received and return the frames that it completes.

        A stream with a bad length has no next frame: the error carries the frames that came before
        it, and every later call fails as well.
        """
        if self._broken:
            raise FrameError("the stream ended at a bad frame; open a new connection")
        frames: list[Frame] = []
        try:
            if not self._unfinished:
                self._split(data, 0, frames)
            elif self._needed == PREFIX_SIZE:
                self._split(self._joined() + data, 0, frames)
            elif self._unfinished + len(data) < self._needed:
                self._keep(data)
            else:
                frame, start = self._finish(data)
                frames.append(frame)
                self._split(data, start, frames)
        except FrameError as error:
            self._broken = True
            self.abandon()
            error.frames = frames
            raise
        return frames

    def abandon(self) -> None:
        """Let go of a frame that will never be complete, because the stream has ended."""
        self._pieces, self._unfinished, self._needed = [], 0, PREFIX_SIZE

    def _keep(self, data: bytes) -> None:
        """Add to the frame that earlier data began."""
        self._unfinished += len(data)
        if len(data) >= _PIECE or not self._pieces:
            self._pieces.append(data)
        elif isinstance(last := self._pieces[-1], bytearray):
            last += data
        else:
            self._pieces.append(bytearray(data))

    def _joined(self) -> bytes:
        """Take what is there of the incomplete frame."""
        whole = b"".join(self._pieces)
        self.abandon()
        return whole

    def _finish(self, data: bytes) -> tuple[Frame, int]:
        """The incomplete frame with the beginning of `data`, and where the rest begins."""
        stop = self._needed - self._unfinished
        first = self._pieces[0]
        _, mark = _unpack_prefix(first)
        body = PREFIX_SIZE + (mark & _HEADER_LENGTH)
        if len(first) < body:
            first = b"".join((*self._pieces, memoryview(data)[:stop]))
            frame = Frame(mark >> 24, first[PREFIX_SIZE:body], first[body:])
        else:
            rest = (memoryview(first)[body:], *self._pieces[1:], memoryview(data)[:stop])
            frame = Frame(mark >> 24, bytes(first[PREFIX_SIZE:body]), b"".join(rest))
        self.abandon()
        return frame, stop

    def _split(self, data: bytes, start: int, frames: list[Frame]) -> None:
        """The fast way: frames that lie in `data` from end to end."""
        end = len(data)
        needed = PREFIX_SIZE
        # What `_check` allows, in places that are quick to reach: most frames are honest.
        longest_frame, longest_header = self._limits.frame, self._limits.header
        add = frames.append
        while (begin := start + PREFIX_SIZE) <= end:
            total, mark = _unpack_prefix(data, start)
            body = begin + (mark & _HEADER_LENGTH)
            stop = start + 4 + total
            if (
                total > longest_frame
                or body - begin > longest_header
                or not (body <= stop and mark <= _LARGEST_MARK)
            ):
                self._check(total, mark)
            if stop > end:
                needed = 4 + total
                break
            if stop - body < VIEW_FROM:
                add(Frame(mark >> 24, data[begin:body], data[body:stop]))
            else:
                add(Frame(mark >> 24, data[begin:body], memoryview(data)[body:stop]))
            start = stop
        if start < end:
            self._keep(data[start:])
            self._needed = needed

    def _check(self, total: int, mark: int) -> None:
        header = mark & _HEADER_LENGTH
        if 4 + header <= total <= self._limits.frame and (
            header <= self._limits.header and mark >> 24 <= _LAST_TYPE
        ):
            return
        if total > self._limits.frame or total < 4:
            if (other := other_protocol(total)) is not None:
                raise OtherProtocol(other)
            raise FrameError(f"a frame must have 4 to {self._limits.frame} bytes, got {total}")
        if header > self._limits.header:
            raise FrameError(f"a header may have {self._limits.header} bytes, got {header}")
        if mark >> 24 > _LAST_TYPE:
            raise FrameError(f"a header's type must be 0 (JSON) or 1 (ROCKETMQ), got {mark >> 24}")
        raise FrameError(f"a header of {header} bytes does not fit a frame of {total}")


def other_protocol(total: int) -> str | None:
    """What to say if a length that cannot be is how another protocol begins: a wrong address."""
    first = (total & 0xFFFFFFFF).to_bytes(4, "big")
    if first in _HTTP_BEGINNINGS:
        return "this speaks HTTP, not the protocol of RocketMQ"
    if first == _HTTP2_BEGINNING:
        return SPEAKS_HTTP2
    if first.startswith(_TLS_BEGINNINGS):
        return "this speaks TLS, and the connection is without"
    return None


def frame_head(
    serialization: int, header: bytes, body_size: int = 0, *, limits: WireLimits = DEFAULT_LIMITS
) -> bytes:
    """The prefix and header of a frame whose body of `body_size` bytes is written separately."""
    return _prefix(serialization, len(header), body_size, limits) + header


def header_pieces(
    serialization: int, header: bytes, body: Bytes, *, limits: WireLimits = DEFAULT_LIMITS
) -> list[Bytes]:
    """A frame as the pieces to write one after the other: one piece, if the body is not large."""
    prefix = _prefix(serialization, len(header), len(body), limits)
    if len(body) < VIEW_FROM:
        return [b"".join((prefix, header, body))]
    return [prefix + header, body]


def frame_pieces(frame: Frame, *, limits: WireLimits = DEFAULT_LIMITS) -> list[Bytes]:
    """A frame as the pieces to write one after the other; the body is not copied."""
    head = frame_head(frame.serialization, frame.header, len(frame.body), limits=limits)
    return [head, frame.body] if frame.body else [head]


def _prefix(serialization: int, header_size: int, body_size: int, limits: WireLimits) -> bytes:
    total = 4 + header_size + body_size
    if total > limits.frame:
        raise EncodeError(f"a frame may have {limits.frame} bytes, this one would have {total}")
    if header_size > LARGEST_HEADER:
        raise EncodeError(f"a header may have {LARGEST_HEADER} bytes, this one has {header_size}")
    return pack_prefix(total, serialization << 24 | header_size)


def encode_frame(frame: Frame, *, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    """A frame as one run of bytes."""
    return b"".join(frame_pieces(frame, limits=limits))


# The compact ROCKETMQ header. Java cuts codes and versions to 16 bits, so codes beyond (POP) cannot
# be sent in this form.
#
#     code 2 | language 1 | version 2 | opaque 4 | flag 4 | remark length 4 | remark
#     | map length 4 | map: (key length 2 | key | value length 4 | value)*

_FIXED = struct.Struct(">hbhiii")
_unpack_fixed = _FIXED.unpack_from
_pack_fixed = _FIXED.pack
_unpack_int = struct.Struct(">i").unpack_from
_pack_int = struct.Struct(">i").pack
_unpack_short = struct.Struct(">h").unpack_from
_pack_short = struct.Struct(">h").pack
_LONGEST_KEY = 32767


class BinaryHeader(NamedTuple):
    """A header with its map of fields still packed."""

    code: int
    language: int
    version: int
    opaque: int
    flag: int
    remark: str | None
    fields: bytes | None


def unpack_header(data: bytes, limits: WireLimits) -> BinaryHeader:
    """The fixed part and the remark, and the map as it is."""
    try:
        code, language, version, opaque, flag, remark_size = _unpack_fixed(data)
        at = _FIXED.size
        if not 0 <= remark_size <= min(limits.ext_value, len(data) - at):
            raise FrameError(f"a remark of {remark_size} bytes in a header of {len(data)}")
        remark = data[at : at + remark_size].decode() if remark_size else None
        at += remark_size
        (fields_size,) = _unpack_int(data, at)
    except struct.error:
        raise FrameError(f"a binary header needs 21 bytes and more, got {len(data)}") from None
    except UnicodeDecodeError as error:
        raise FrameError(f"a remark that is not UTF-8: {error}") from error
    at += 4
    if fields_size != len(data) - at:
        raise FrameError(f"{fields_size} bytes of fields announced, {len(data) - at} present")
    return BinaryHeader(code, language, version, opaque, flag, remark, data[at:] or None)


def unpack_fields(data: bytes, limits: WireLimits) -> dict[str, str]:
    """The map of fields. Empty texts, which Java reads as nulls, stay what the peer wrote."""
    fields: dict[str, str] = {}
    at, end = 0, len(data)
    longest_key, longest_value = limits.ext_key, limits.ext_value
    try:
        while at < end:
            (size,) = _unpack_short(data, at)
            key = at + 2
            key_end = key + size
            (value_size,) = _unpack_int(data, key_end)
            value = key_end + 4
            at = value + value_size
            if not (0 <= size <= longest_key and 0 <= value_size <= longest_value and at <= end):
                raise WireError(_bad_sizes(size, value_size, end - value, limits))
            fields[data[key:key_end].decode()] = data[value:at].decode()
    except struct.error:
        raise WireError("the map of fields ends within a length") from None
    except UnicodeDecodeError as error:
        raise WireError(f"a field that is not UTF-8: {error}") from error
    if len(fields) > limits.ext_fields:
        raise WireError(f"{len(fields)} fields, {limits.ext_fields} are allowed")
    return fields


def _bad_sizes(key: int, value: int, left: int, limits: WireLimits) -> str:
    if not 0 <= key <= limits.ext_key:
        return f"a field's name may have {limits.ext_key} bytes, got {key}"
    if not 0 <= value <= limits.ext_value:
        return f"a field may have {limits.ext_value} bytes, got {value}"
    return f"a field of {value} bytes with {left} left"


def pack_header(
    code: int,
    language: int,
    version: int,
    opaque: int,
    flag: int,
    remark: str | None,
    fields: Mapping[str, str] | None,
) -> bytes:
    """A header in bytes."""
    text = remark.encode("utf-8", "replace") if remark else b""
    packed = _pack_fields(fields) if fields else b""
    try:
        fixed = _pack_fixed(code, language, version, opaque, flag, len(text))
    except struct.error as error:
        raise EncodeError(
            f"code {code} or version {version} does not fit the binary header; send JSON"
        ) from error
    return b"".join((fixed, text, _pack_int(len(packed)), packed))


def _pack_fields(fields: Mapping[str, str]) -> bytes:
    pieces: list[bytes] = []
    for name, text in fields.items():
        key = name.encode("utf-8", "replace")
        value = text.encode("utf-8", "replace")
        if len(key) > _LONGEST_KEY:
            raise EncodeError(f"a field's name may have {_LONGEST_KEY} bytes, got {len(key)}")
        pieces += (_pack_short(len(key)), key, _pack_int(len(value)), value)
    return b"".join(pieces)
