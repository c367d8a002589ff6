"""Compressed bodies: every kind is expanded, and never beyond the limit."""

from __future__ import annotations

import sys
import tracemalloc
import zlib

import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.message import record
from orbitmq.message.stored import compress_body, expand_body
from tests.support.message import compressions, mutations

KINDS = [
    record.COMPRESSION_UNSPECIFIED,
    record.COMPRESSION_ZLIB,
    record.COMPRESSION_LZ4,
    record.COMPRESSION_ZSTD,
]


@given(body=st.binary(max_size=3000), compression=compressions)
def test_a_body_is_expanded_as_it_was(body, compression):
    stored = compress_body(body, compression)

    assert expand_body(stored, record.COMPRESSED | compression) == body
    assert expand_body(memoryview(stored), record.COMPRESSED | compression | 0x30) == body


@pytest.mark.parametrize("sys_flag", [0, record.COMPRESSION_ZLIB, record.COMPRESSION_LZ4])
def test_a_body_without_the_flag_is_left_alone_whatever_the_type_bits_say(sys_flag):
    assert expand_body(b"plain", sys_flag) == b"plain"


def test_a_flagged_empty_body_stays_empty():
    assert expand_body(b"", record.COMPRESSED | record.COMPRESSION_ZLIB) == b""


def test_zlib_is_written_at_javas_level():
    body = b"RocketMQ" * 1000

    assert compress_body(body, record.COMPRESSION_ZLIB) == zlib.compress(body, 5)


@pytest.mark.parametrize("compression", KINDS)
def test_a_body_of_exactly_the_limit_is_expanded_and_one_byte_more_is_not(compression):
    stored = compress_body(bytes(5000), compression)

    assert expand_body(stored, record.COMPRESSED | compression, limit=5000) == bytes(5000)
    with pytest.raises(record.BodyTooLarge, match="more than 4999 bytes") as refused:
        expand_body(stored, record.COMPRESSED | compression, limit=4999)
    assert refused.value.limit == 4999


def bomb(compression: int, size: int) -> bytes:
    """`size` zeros, written by a stream that does not state how much it holds."""
    if compression == record.COMPRESSION_ZSTD:
        writer = zstandard.ZstdCompressor().compressobj()
        return writer.compress(bytes(size)) + writer.flush()
    return compress_body(bytes(size), compression)


@pytest.mark.parametrize("compression", KINDS)
def test_a_bomb_is_given_up_at_the_limit(compression):
    stored = bomb(compression, 48 * 1024 * 1024)
    assert len(stored) < 1024 * 1024

    tracemalloc.start()
    try:
        with pytest.raises(record.BodyTooLarge):
            expand_body(stored, record.COMPRESSED | compression, limit=1024 * 1024)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 8 * 1024 * 1024


def test_a_frame_that_claims_terabytes_is_not_believed():
    honest = zstandard.ZstdCompressor().compress(bytes(300))
    # The content size of 300 is two bytes here (less 256); an eight-byte one takes their place.
    claiming = honest[:4] + b"\xe0" + (1 << 40).to_bytes(8, "little") + honest[7:]
    assert zstandard.frame_content_size(claiming) == 1 << 40

    with pytest.raises(record.BodyTooLarge):
        expand_body(claiming, record.COMPRESSED | record.COMPRESSION_ZSTD)


def test_java_zstandard_streams_without_a_stated_size_are_expanded():
    assert expand_body(
        bomb(record.COMPRESSION_ZSTD, 9999), record.COMPRESSED | record.COMPRESSION_ZSTD
    ) == bytes(9999)


@pytest.mark.parametrize("compression", KINDS)
@pytest.mark.parametrize("size", [100, 100_000])
def test_a_stream_that_ends_early_is_refused(compression, size):
    body = bytes(range(256)) * (size // 100)
    for stored in (compress_body(body, compression), bomb(compression, size)):
        for end in (1, len(stored) // 2, len(stored) - 1):
            with pytest.raises(record.CompressionFailed):
                expand_body(stored[:end], record.COMPRESSED | compression)


@pytest.mark.parametrize("compression", KINDS)
def test_what_is_no_stream_is_refused(compression):
    with pytest.raises(record.CompressionFailed, match="not a"):
        expand_body(b"this was never compressed", record.COMPRESSED | compression)


@pytest.mark.parametrize("bits", [0x400, 0x500, 0x600, 0x700])
def test_unknown_types_are_refused_by_number(bits):
    with pytest.raises(record.CompressionFailed, match=f"{bits:#x} is unknown"):
        expand_body(b"x", record.COMPRESSED | bits)
    with pytest.raises(record.CompressionFailed, match=f"{bits:#x} is unknown"):
        compress_body(b"x", bits)


@given(data=st.data(), compression=compressions)
def test_mutated_streams_raise_declared_errors_and_stay_within_the_limit(data, compression):
    whole = st.binary(max_size=600).map(lambda body: compress_body(body * 3, compression))
    stored = data.draw(mutations(whole))

    try:
        body = expand_body(stored, record.COMPRESSED | compression, limit=4000)
    except record.MessageError:
        return

    assert len(body) <= 4000


@pytest.mark.parametrize(
    ("compression", "module", "extra"),
    [(record.COMPRESSION_LZ4, "lz4.frame", "lz4"), (record.COMPRESSION_ZSTD, "zstandard", "zstd")],
)
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    monkeypatch, compression, module, extra
):
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(record.CodecMissing, match=rf"\[{extra}\]"):
        expand_body(b"x", record.COMPRESSED | compression)


def test_lz4_is_the_frame_format():
    assert lz4.frame.decompress(compress_body(b"body", record.COMPRESSION_LZ4)) == b"body"
