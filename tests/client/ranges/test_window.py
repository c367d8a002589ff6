"""What is pulled, and the memory for it: every message once and in order."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.ranges.connections import Credentials, QueueRange, RangeFilter
from orbitmq.client.ranges.read import (
    ANSWER_BYTES,
    SCANNED,
    Chunk,
    Pulls,
    RangeWindow,
    ReceiveBuffer,
    Slot,
    WindowLimits,
)
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command, decode_command, encode_command, is_signed_by
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import PullMessageRequest

A, B = Queue("orders", "broker-a", 0), Queue("orders", "broker-b", 3)


def record(offset: int, size: int = 40) -> bytes:
    """As much of a record as the window looks at."""
    return struct.pack(">i16xq", size, offset).ljust(size, b"x")


def offsets_in(pieces: bytes) -> list[int]:
    found, at = [], 0
    while at < len(pieces):
        found.append(struct.unpack_from(">q", pieces, at + 20)[0])
        at += struct.unpack_from(">i", pieces, at)[0]
    return found


@dataclass
class Model:
    """A broker with limits, for queues that hold every offset below `end`."""

    most_messages: int
    most_bytes: int
    sizes: list[int]
    #: Which offsets match the filter; None: no filter.
    one_of: int | None

    def answer(self, slot: Slot, asked: int) -> tuple[bytes, int]:
        """The messages of a pull, and where the next one begins."""
        data, count, at = b"", 0, slot.at
        scope = slot.at + (max(SCANNED, asked) if self.one_of else asked)
        while at < scope:
            message = record(at, self.sizes[at % len(self.sizes)])
            is_full = count >= min(asked, self.most_messages) or (
                count and len(data) + len(message) > self.most_bytes
            )
            if is_full:
                break
            if self.one_of is None or at % self.one_of == 0:
                data += message
                count += 1
            at += 1
        return data, at


@given(
    data=st.data(),
    lengths=st.lists(st.integers(0, 1500), min_size=1, max_size=3),
    first=st.integers(0, 10**12),
    most_messages=st.integers(1, 100),
    most_bytes=st.integers(40, 4000),
    sizes=st.lists(st.integers(28, 400), min_size=1, max_size=5),
    one_of=st.sampled_from([None, None, 1, 3, 700]),
    limits=st.builds(
        WindowLimits,
        requests=st.integers(1, 10),
        bytes=st.integers(1, 10_000),
        messages=st.integers(1, 200),
    ),
)
def test_every_message_leaves_once_and_in_order(
    data, lengths, first, most_messages, most_bytes, sizes, one_of, limits
):
    queues = [A, B, Queue("invoices", "broker-a", 0)]
    ranges = [
        QueueRange(queue, first, first + length)
        for queue, length in zip(queues, lengths, strict=False)
    ]
    broker = Model(most_messages, most_bytes, sizes, one_of)
    window = RangeWindow(ranges, is_filtered=one_of is not None, limits=limits)
    chance = data.draw(st.randoms(use_true_random=False))
    on_their_way: list[Slot] = []
    taken: list[Chunk] = []

    while not window.is_finished:
        on_their_way += window.due()
        assert on_their_way or window.head is not None
        assert len({id(slot) for slot in on_their_way}) == len(on_their_way)
        assert len(on_their_way) <= limits.requests
        while (chunk := window.take()) is not None:
            taken.append(chunk)
        if on_their_way:
            slot = on_their_way.pop(chance.randrange(len(on_their_way)))
            if chance.random() < 0.1:
                window.lost(slot)
            else:
                window.answered(slot, *broker.answer(slot, window.wanted(slot)))

    expected = [
        (each.queue, offset)
        for each in ranges
        for offset in range(each.start, each.end)
        if one_of is None or offset % one_of == 0
    ]
    found = [
        (chunk.queue, offset)
        for chunk in taken
        for offset in offsets_in(b"".join(bytes(piece) for piece in chunk.pieces))
    ]
    assert found == expected
    covered = [(each.queue, at) for each in taken for at in range(each.start, each.end)]
    assert covered == [(each.queue, at) for each in ranges for at in range(each.start, each.end)]


@pytest.mark.parametrize(("gives", "most_pulls"), [(7, 100_000 / 7 * 1.05), (10_000, 300)])
def test_slots_take_the_size_of_the_answers(gives, most_pulls):
    window = RangeWindow([QueueRange(A, 0, 100_000)], limits=WindowLimits(requests=1))
    broker = Model(most_messages=gives, most_bytes=10**9, sizes=[100], one_of=None)
    pulls = 0

    while not window.is_finished:
        for slot in window.due():
            pulls += 1
            window.answered(slot, *broker.answer(slot, window.wanted(slot)))
        window.take()

    assert pulls < most_pulls


def test_what_is_ahead_is_bounded_by_its_bytes():
    window = RangeWindow(
        [QueueRange(A, 0, 10_000)], limits=WindowLimits(bytes=320_000, messages=32)
    )
    broker = Model(most_messages=32, most_bytes=10**9, sizes=[10_000], one_of=None)

    # Until a message was seen, its size is guessed; then one slot of 32 fills the window.
    for _ in range(50):
        for slot in window.due():
            window.answered(slot, *broker.answer(slot, window.wanted(slot)))
        assert window.take() is not None

    ahead = list(window.due())
    assert len(ahead) == 1


def test_a_missing_stretch_is_skipped():
    window = RangeWindow([QueueRange(A, 0, 20)], limits=WindowLimits(messages=10))
    first, second = window.due()

    window.skip(first, 10)
    window.skip(second, 15)
    (again,) = window.due()
    window.answered(again, record(15), 20)

    assert window.take() == Chunk(A, 0, 10, [], missing=10)
    assert window.take() == Chunk(A, 10, 20, [record(15)], missing=5)
    assert window.is_finished


@pytest.mark.parametrize("name", ["requests", "bytes", "messages"])
def test_a_limit_must_be_positive(name):
    with pytest.raises(SettingError, match=f"window.{name} must be 1 or more, got 0"):
        WindowLimits(**{name: 0})


def test_a_range_cannot_end_before_it_starts():
    with pytest.raises(SettingError, match="7 to 6 of orders@broker-a:0"):
        QueueRange(A, 7, 6)


# ---- memory: no piece is overwritten while it is in use


def test_pieces_lie_side_by_side_until_all_were_given_back():
    memory = ReceiveBuffer(100)
    first, second = memory.room(40), memory.room(30)
    first[:], second[:] = b"a" * 40, b"b" * 30

    memory.release([first])
    third = memory.room(30)
    third[:] = b"c" * 30
    assert bytes(second) == b"b" * 30

    memory.release([second, third])
    assert memory.is_unused
    assert bytes(memory.room(100)[:70]) == b"a" * 40 + b"b" * 30


@given(
    size=st.integers(0, 50),
    steps=st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=40),
    chance=st.randoms(use_true_random=False),
)
def test_pieces_keep_their_content(size, steps, chance):
    memory = ReceiveBuffer(size)
    held: list[tuple[memoryview, bytes]] = []

    for number, (length, gives_back) in enumerate(steps):
        piece, content = memory.room(length), bytes([number]) * length
        piece[:] = content
        held.append((piece, content))
        if gives_back:
            memory.release([held.pop(chance.randrange(len(held)))[0], b"from elsewhere"])
        assert all(bytes(piece) == content for piece, content in held)


# ---- pulls


@given(
    group=st.text(max_size=30),
    expression=st.one_of(st.text(max_size=30), st.just("%d %b %%")),
    kind=st.sampled_from(["TAG", "SQL92"]),
    offset=st.integers(0, 2**63 - 1),
    count=st.integers(1, 2**31 - 1),
    opaque=st.integers(0, 2**31 - 1),
)
def test_a_pull_is_what_the_ordinary_encoder_makes_and_may_be_signed(
    group, expression, kind, offset, count, opaque
):
    header = PullMessageRequest(
        consumer_group=group,
        topic=A.topic,
        queue_id=A.id,
        queue_offset=offset,
        max_msg_nums=count,
        sys_flag=4,
        commit_offset=0,
        suspend_timeout_millis=0,
        sub_version=0,
        subscription=expression,
        expression_type=kind,
        max_msg_bytes=ANSWER_BYTES,
    )
    wanted = RangeFilter(expression, kind)
    credentials = Credentials(access_key="k", secret_key="s")  # noqa: S106  # not one

    plain = Pulls(group, wanted, None).encoded(A, offset, count, opaque)
    signed = Pulls(group, wanted, credentials).encoded(A, offset, count, opaque)

    expected = Command.request(RequestCode.PULL_MESSAGE, header, opaque=opaque)
    assert plain == encode_command(expected)
    (frame,) = FrameReader().feed(signed)
    assert decode_command(frame).header(PullMessageRequest) == header
    assert is_signed_by(decode_command(frame), "s")
