"""Compressed bodies, by the two fields of the system flag that speak of them.

`COMPRESSED` says that the stored body is compressed, the type bits say how; type 0 is zlib, which
is all that older clients write and all that clients in C++, Go and Node can read. A body is data
from a stranger: a few kilobytes may expand to gigabytes, so every expansion has a limit and ends
as soon as it is passed, whatever size the compressed data claims.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

from orbitmq.message.errors import BodyTooLarge, CodecMissing, CompressionFailed
from orbitmq.message.sysflag import (
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_TYPE_MASK,
    COMPRESSION_UNSPECIFIED,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from orbitmq.message.record import Buffer

    _Codec = Callable[[Buffer, int], bytes]

#: What Java's producers use.
DEFAULT_LEVEL: Final = 5
#: Producers refuse bodies above 4 MiB before they compress them. 16 times that leaves room for
#: clusters with a raised limit and still bounds what one hostile message can take.
MAX_EXPANDED_BODY: Final = 64 * 1024 * 1024
#: What the highest level of Zstandard's usual ones needs; a frame may ask for more.
_MAX_ZSTD_WINDOW: Final = 8 * 1024 * 1024


def compress_body(body: bytes, compression: int, *, level: int = DEFAULT_LEVEL) -> bytes:
    """`body` as one of the `COMPRESSION_*` types stores it; the caller sets the flag's bits."""
    return _codec(_COMPRESS, compression)(body, level)


def expand_body(stored: Buffer, sys_flag: int, *, limit: int = MAX_EXPANDED_BODY) -> bytes:
    """The body as its producer gave it: expanded if `sys_flag` says that it is compressed."""
    if not sys_flag & COMPRESSED:
        return bytes(stored)
    if not stored:
        return b""  # Java's reader does not look at the flag of an empty body either.
    return _codec(_EXPAND, sys_flag & COMPRESSION_TYPE_MASK)(stored, limit)


def _codec(table: Mapping[int, _Codec], compression: int) -> _Codec:
    codec = table.get(compression)
    if codec is None:
        text = f"compression type {compression:#x} is unknown; 0x100, 0x200, 0x300 and 0 are known"
        raise CompressionFailed(text)
    return codec


def _zlib_compress(body: Buffer, level: int) -> bytes:
    return zlib.compress(body, level)


def _zlib_expand(stored: Buffer, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        # One byte more than allowed tells "exactly the limit" from "beyond it".
        body = inflater.decompress(stored, limit + 1)
    except zlib.error as error:
        raise CompressionFailed(f"not a zlib stream: {error}") from error
    if len(body) > limit:
        raise BodyTooLarge(limit)
    if not inflater.eof:
        raise CompressionFailed("the zlib stream ends early")
    return body


def _lz4_compress(body: Buffer, level: int) -> bytes:
    # LZ4's high-compression levels begin at 3; Java's writer has the fast mode only.
    del level
    compressed: bytes = _lz4_frame().compress(body, store_size=False)
    return compressed


def _lz4_expand(stored: Buffer, limit: int) -> bytes:
    frame = _lz4_frame()
    decompressor = frame.LZ4FrameDecompressor()
    try:
        body: bytes = decompressor.decompress(bytes(stored), max_length=limit + 1)
    except (RuntimeError, ValueError, EOFError) as error:
        raise CompressionFailed(f"not an LZ4 frame: {error}") from error
    if len(body) > limit:
        raise BodyTooLarge(limit)
    if not decompressor.eof:
        raise CompressionFailed("the LZ4 frame ends early")
    return body


def _zstd_compress(body: Buffer, level: int) -> bytes:
    return _zstandard().ZstdCompressor(level=level).compress(body)  # type: ignore[no-any-return]


def _zstd_expand(stored: Buffer, limit: int) -> bytes:
    zstandard = _zstandard()
    frame = bytes(stored)
    expander = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW)
    try:
        # The one-step call sees that a frame is whole, but takes the memory that the frame claims
        # to need. So the size is found out first: from the frame, or as Java's streams do not
        # state it, by reading no further than the limit.
        size = zstandard.frame_content_size(frame)
        if size < 0:
            with expander.stream_reader(frame) as reader:
                size = len(reader.read(limit + 1))
        if size > limit:
            raise BodyTooLarge(limit)
        body: bytes = expander.decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise CompressionFailed(f"not a whole Zstandard frame: {error}") from error
    return body


def _lz4_frame() -> ModuleType:
    try:
        import lz4.frame  # noqa: PLC0415  an extra
    except ImportError as error:
        raise CodecMissing("LZ4", "lz4") from error
    return lz4.frame  # type: ignore[no-any-return]


def _zstandard() -> ModuleType:
    try:
        import zstandard  # noqa: PLC0415  an extra
    except ImportError as error:
        raise CodecMissing("Zstandard", "zstd") from error
    return zstandard


_COMPRESS: Final[Mapping[int, _Codec]] = {
    COMPRESSION_UNSPECIFIED: _zlib_compress,
    COMPRESSION_ZLIB: _zlib_compress,
    COMPRESSION_LZ4: _lz4_compress,
    COMPRESSION_ZSTD: _zstd_compress,
}
_EXPAND: Final[Mapping[int, _Codec]] = {
    COMPRESSION_UNSPECIFIED: _zlib_expand,
    COMPRESSION_ZLIB: _zlib_expand,
    COMPRESSION_LZ4: _lz4_expand,
    COMPRESSION_ZSTD: _zstd_expand,
}
