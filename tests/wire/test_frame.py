"""Where one frame ends and the next begins."""

from __future__ import annotations

import itertools
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.wire.codes import EncodeError, FrameError, LimitError, WireLimits
from orbitmq.wire.frame import VIEW_FROM, Frame, FrameReader, encode_frame, frame_head, frame_pieces

frames = st.builds(Frame, st.sampled_from([0, 1]), st.binary(max_size=40), st.binary(max_size=60))


def prefix(total: int, mark: int) -> bytes:
    return struct.pack(">iI", total, mark)


@given(sent=st.lists(frames, max_size=6), cuts=st.lists(st.integers(0, 700), max_size=12))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(sent, cuts):
    stream = b"".join(map(encode_frame, sent))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader = FrameReader()

    received = [
        frame
        for start, end in itertools.pairwise(edges)
        for frame in reader.feed(stream[start:end])
    ]

    assert received == sent


@given(sent=frames, cut=st.integers(0, 120))
def test_the_reader_says_how_much_it_needs_to_go_on(sent, cut):
    stream = encode_frame(sent)
    reader = FrameReader()
    received: list[Frame] = []
    at = min(cut, len(stream) - 1)
    received += reader.feed(stream[:at])

    rounds = 0
    while not received:
        assert reader.missing >= 1
        step = reader.missing
        received += reader.feed(stream[at : at + step])
        at += step
        rounds += 1

    assert received == [sent]
    assert at == len(stream)
    assert rounds <= 2


@pytest.mark.feature("J1")
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (prefix(3, 0), "4 to 16777216 bytes, got 3"),
        (prefix(-1, 0), "got -1"),
        (prefix(16 * 1024 * 1024 + 1, 0), "got 16777217"),
        (prefix(0x7FFFFFFF, 0), "got 2147483647"),
        (prefix(20, 17), "a header of 17 bytes does not fit a frame of 20"),
        (prefix(9_000_000, 4 * 1024 * 1024 + 1), "a header may have 4194304 bytes"),
        (prefix(20, 2 << 24 | 5), "type must be 0 .JSON. or 1 .ROCKETMQ., got 2"),
        (prefix(20, 0xFF << 24 | 5), "got 255"),
        (b"HTTP/1.1 400 Bad Request\r\n", "this speaks HTTP, not the protocol of RocketMQ"),
        (b"GET / HTTP/1.1\r\n", "this speaks HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "this speaks HTTP/2, as gRPC clients of RocketMQ 5"),
        (bytes.fromhex("15030300020246 00"), "this speaks TLS"),
    ],
)
def test_a_bad_length_is_refused_before_anything_is_allocated_for_it(words, complaint):
    reader = FrameReader()
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match=complaint):
            reader.feed(words)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    # What other threads of this process take meanwhile is in it.
    assert peak < 1024 * 1024


def test_a_long_frame_takes_memory_only_for_what_has_arrived():
    reader = FrameReader()
    tracemalloc.start()
    try:
        reader.feed(prefix(16 * 1024 * 1024, 100))
        reader.feed(b"x" * 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    # What other threads of this process take meanwhile is in it.
    assert peak < 1024 * 1024
    assert reader.missing == 4 + 16 * 1024 * 1024 - 8 - 1000


def test_a_reader_says_how_much_of_which_frame_it_keeps():
    reader = FrameReader()
    stream = encode_frame(Frame(0, b"{}", b"x" * 100))

    seen = [(reader.unfinished, reader.announced)]
    for piece in (stream[:5], stream[5:50], stream[50:] + stream[:3]):
        reader.feed(piece)
        seen.append((reader.unfinished, reader.announced))
    reader.abandon()

    assert seen == [(0, 0), (5, 0), (50, len(stream)), (3, 0)]
    assert (reader.unfinished, reader.announced) == (0, 0)
    assert len(reader.feed(stream)) == 1


def test_a_long_frame_in_many_small_reads_is_held_once():
    size = 4 * 1024 * 1024
    stream = encode_frame(Frame(0, b"{}", bytes(size)))
    chunks = [stream[at : at + 1000] for at in range(0, len(stream), 1000)]
    reader = FrameReader()
    received: list[Frame] = []
    tracemalloc.start()
    try:
        for chunk in chunks:
            received += reader.feed(chunk)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(received[0].body) == size
    # The buffer grows by an eighth at a time, and growing may need the old and the new one.
    assert peak < 2.5 * size


def test_what_came_before_a_bad_frame_is_not_lost_and_nothing_comes_after_it():
    good = Frame(0, b"{}", b"paid for")
    reader = FrameReader()

    with pytest.raises(FrameError) as caught:
        reader.feed(encode_frame(good) + prefix(2, 0) + encode_frame(good))

    assert caught.value.frames == [good]
    with pytest.raises(FrameError, match="ended at a bad frame"):
        reader.feed(encode_frame(good))


@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_a_large_body_of_one_read_is_a_view_and_others_are_plain_bytes(chunk):
    stream = encode_frame(Frame(0, b"{}", b"s")) + encode_frame(Frame(0, b"{}", b"l" * VIEW_FROM))
    reader = FrameReader()

    small, large = (
        frame
        for at in range(0, len(stream), chunk)
        for frame in reader.feed(stream[at : at + chunk])
    )

    assert type(small.body) is bytes
    assert isinstance(large.body, memoryview if chunk > VIEW_FROM else bytes)
    assert memoryview(large.body).readonly
    assert type(large.header) is bytes


def test_pieces_do_not_copy_the_body():
    body = bytes(100_000)

    head, written = frame_pieces(Frame(0, b"{}", body))

    assert written is body
    assert bytes(head) + body == encode_frame(Frame(0, b"{}", body))
    assert frame_pieces(Frame(0, b"{}")) == [prefix(6, 2) + b"{}"]


def test_a_frame_beyond_the_limit_is_not_written():
    with pytest.raises(EncodeError, match="a frame may have 100 bytes"):
        encode_frame(Frame(0, b"{}", b"x" * 100), limits=WireLimits(frame=100, header=50))
    with pytest.raises(EncodeError, match="a header may have 16777215 bytes"):
        frame_head(0, bytes(1 << 24), limits=WireLimits(frame=1 << 26))


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"frame": 0}, "frame"), ({"header": 1 << 24}, "header"), ({"ext_fields": -1}, "ext_fields")],
)
def test_a_senseless_limit_is_refused_by_name(settings, named):
    with pytest.raises(LimitError, match=named):
        WireLimits(**settings)
