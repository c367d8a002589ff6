"""What a task makes of what brokers keep, without Spark."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.client.queue import Queue
from orbitmq.client.rangelinks import RangeLinks
from orbitmq.client.rangereading import RangeSettings, read_ranges
from orbitmq.client.ranges import QueueRange
from orbitmq.client.rangewindow import Chunk, WindowLimits
from orbitmq.message.batch import encode_batch
from orbitmq.message.errors import CodecMissing
from orbitmq.message.properties import encode_properties
from orbitmq.message.stored import StoredMessage
from orbitmq.message.sysflag import BATCH_MASK, COMPRESSED, INNER_BATCH
from orbitmq.spark.errors import DataLost
from orbitmq.spark.options import batch_options
from orbitmq.spark.reading import _Decoder, _joined
from orbitmq.spark.schema import full_schema
from orbitmq.wire.command import Command
from tests.support.scriptedbroker import ScriptedBroker, asked, brought

QUEUE = Queue("orders", "broker-a", 0)


def record(offset: int, body: bytes = b"", *, sys_flag: int = 0) -> bytes:
    return StoredMessage.build(
        topic="orders",
        stored_body=body or str(offset).encode(),
        queue_offset=offset,
        sys_flag=sys_flag,
        reconsume_times=2,
    ).encode()


def batch_of(offset: int, count: int) -> bytes:
    """A record with so many messages inside, each with its own offset as body, tag and flag."""
    return record(
        offset,
        encode_batch(
            (str(each).encode(), each, encode_properties({"TAGS": f"tag-{each}"}))
            for each in range(offset, offset + count)
        ),
        sys_flag=BATCH_MASK,
    )


def decoded(*chunks: Chunk, **options: str) -> pa.Table:
    """The rows that a query gets."""
    given = {"nameServer": "localhost:9876", "subscribe": "orders"} | options
    decoder = _Decoder(batch_options(given, {}).read, full_schema())
    found = [batch for stretch in _joined(iter(chunks)) for batch in decoder.batches(stretch)]
    return pa.Table.from_batches(found, decoder._schema)


def offsets(table: pa.Table) -> list[int]:
    found: list[int] = table.column("queueOffset").to_pylist()
    return found


def test_a_record_with_several_messages_is_several_rows() -> None:
    found = decoded(
        Chunk(QUEUE, 3, 7, [record(3) + batch_of(4, 3)]), Chunk(QUEUE, 7, 8, [record(7)])
    )

    assert offsets(found) == [3, 4, 5, 6, 7]
    assert found.column("body").to_pylist() == [b"3", b"4", b"5", b"6", b"7"]
    assert found.column("flag").to_pylist() == [0, 4, 5, 6, 0]
    assert found.column("tags").to_pylist() == [None, "tag-4", "tag-5", "tag-6", None]
    assert found.column("reconsumeTimes").to_pylist() == [2] * 5


def test_a_filter_looks_at_the_messages_inside() -> None:
    found = decoded(Chunk(QUEUE, 0, 3, [batch_of(0, 3)]), subExpression="tag-1 || tag-7")

    assert offsets(found) == [1]


def test_one_of_the_two_bits_alone_makes_no_batch() -> None:
    found = decoded(
        Chunk(QUEUE, 0, 1, [record(0, b"plain", sys_flag=INNER_BATCH)]),
        Chunk(QUEUE, 1, 2, [record(1, b"too", sys_flag=BATCH_MASK & ~INNER_BATCH)]),
    )

    assert found.column("body").to_pylist() == [b"plain", b"too"]


def test_a_batch_that_cannot_be_taken_apart_is_a_loss_or_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = record(1, b"no batch at all", sys_flag=BATCH_MASK)
    chunk = Chunk(QUEUE, 0, 5, [record(0) + bad + batch_of(3, 2)])

    with pytest.raises(DataLost, match="broker-a:0: the batch at offset 1 cannot be taken apart"):
        decoded(chunk)
    with caplog.at_level(logging.WARNING):
        found = decoded(chunk, failOnDataLoss="false")

    assert offsets(found) == [0, 3, 4]
    assert "the batch at offset 1 cannot be taken apart" in caplog.text


def test_a_batch_whose_codec_is_missing_fails_and_is_not_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: object, **__: object) -> bytes:
        raise CodecMissing("lz4", "lz4")

    monkeypatch.setattr("orbitmq.message.stored.expand_body", missing)
    packed = record(0, b"packed", sys_flag=BATCH_MASK | COMPRESSED)

    with pytest.raises(CodecMissing):
        decoded(Chunk(QUEUE, 0, 1, [packed]), failOnDataLoss="false")


def test_beside_a_batch_a_damaged_body_is_still_null() -> None:
    damaged = bytearray(record(2, b"0123456789"))
    damaged[damaged.index(b"0123456789")] ^= 1

    found = decoded(Chunk(QUEUE, 0, 3, [batch_of(0, 2) + bytes(damaged)]))

    assert found.column("body").to_pylist() == [b"0", b"1", None]


def test_a_batch_in_two_pulls_beside_a_damaged_one_comes_once() -> None:
    chunks = [
        Chunk(QUEUE, 0, 2, [batch_of(0, 4)]),
        Chunk(QUEUE, 2, 4, [batch_of(0, 4)]),
        Chunk(QUEUE, 4, 5, [b"\x00" * 120]),
    ]

    assert offsets(decoded(*chunks, failOnDataLoss="false")) == [0, 1, 2, 3]


def test_gaps_are_a_loss_or_left_out_as_in_a_compacted_topic() -> None:
    chunk = Chunk(QUEUE, 0, 5, [record(1) + record(4)])

    with pytest.raises(DataLost, match=r"2 messages instead of 5 \(a topic that its broker compac"):
        decoded(chunk)

    assert offsets(decoded(chunk, failOnDataLoss="false")) == [1, 4]


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    cut=st.tuples(st.integers(0, 100), st.integers(1, 200)),
    at_once=st.integers(1, 9),
)
def test_chunks_that_begin_and_end_inside_of_batches_have_every_message_once(
    sizes: list[int], cut: tuple[int, int], at_once: int
) -> None:
    """As a broker answers that keeps batches: with the record that the wanted offset is in."""
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    end = min(sum(sizes), cut[0] + cut[1])
    start = min(cut[0], end - 1)
    chunks = []
    for begin in range(start, end, at_once):
        upto = min(begin + at_once, end)
        touched = [batch_of(low, high - low) for low, high in bounds if low < upto and high > begin]
        chunks.append(Chunk(QUEUE, begin, upto, [b"".join(touched)]))

    assert offsets(decoded(*chunks)) == list(range(start, end))


def test_a_queue_of_batches_is_read_to_its_end_from_the_middle_of_one() -> None:
    bounds = list(pairwise(range(0, 301, 3)))

    def script(pulls: list[Command]) -> list[bytes]:
        answers = []
        for pull in pulls:
            at, most = asked(pull)
            inside = [(low, high) for low, high in bounds if high > at and low < at + most]
            data = b"".join(batch_of(low, high - low) for low, high in inside[:20])
            answers.append(brought(pull, data, inside[:20][-1][1], high=300))
        return answers

    with ScriptedBroker(script) as broker:
        read = batch_options({"nameServer": broker.address, "subscribe": "orders"}, {}).read
        links = RangeLinks(read.access)
        chunks: Sequence[Chunk] = list(
            read_ranges(
                links,
                [QueueRange(QUEUE, 100, 299)],
                group="billing",
                settings=RangeSettings(patience=10, window=WindowLimits(messages=50)),
            )
        )
        links.close()

    assert len(chunks) > 2
    assert offsets(decoded(*chunks)) == list(range(100, 299))
