"""The compact ROCKETMQ header: a fixed part, a remark, and a map of strings.

    code 2 | language 1 | version 2 | opaque 4 | flag 4 | remark length 4 | remark
    | map length 4 | map: (key length 2 | key | value length 4 | value)*

Java writes codes and versions cut to 16 bits; codes beyond (POP) cannot be sent in this form.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from orbitmq.wire.errors import EncodeError, FrameError, WireError
from orbitmq.wire.limits import WireLimits

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
