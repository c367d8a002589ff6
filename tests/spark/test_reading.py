"""What a task makes of what brokers keep, without Spark."""

from __future__ import annotations

import logging
import random
from itertools import accumulate, pairwise

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitmq.client.ranges.read import Chunk
from orbitmq.client.routes import Queue
from orbitmq.message.properties import encode_properties
from orbitmq.message.record import BATCH_MASK, COMPRESSED, COMPRESSION_ZLIB, CodecMissing
from orbitmq.message.stored import StoredMessage, compress_body, encode_batch
from orbitmq.spark.options import DataLost, batch_options
from orbitmq.spark.partition import BATCH_BYTES, read_partition
from orbitmq.spark.source import arrow_schema, full_schema

QUEUE = Queue("orders", "broker-a", 0)
MIB = 1024 * 1024


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


@pytest.fixture
def record_batches(monkeypatch):
    """Reads a partition of which brokers give these chunks."""

    def read(*chunks: Chunk, **options: str) -> list[pa.RecordBatch]:
        monkeypatch.setattr("orbitmq.spark.partition.read_ranges", lambda *_, **__: iter(chunks))
        given = {"nameServer": "localhost:9876", "subscribe": "orders"} | options
        return list(read_partition([], batch_options(given, {}).read, full_schema()))

    return read


@pytest.fixture
def decoded(record_batches):
    """The same as one table."""

    def read(*chunks: Chunk, **options: str) -> pa.Table:
        found = record_batches(*chunks, **options)
        return pa.Table.from_batches(found, arrow_schema(full_schema()))

    return read


def offsets(table: pa.Table) -> list[int]:
    found: list[int] = table.column("queueOffset").to_pylist()
    return found


def test_a_record_with_several_messages_is_several_rows(decoded):
    found = decoded(
        Chunk(QUEUE, 3, 7, [record(3) + batch_of(4, 3)]), Chunk(QUEUE, 7, 8, [record(7)])
    )

    assert offsets(found) == [3, 4, 5, 6, 7]
    assert found.column("body").to_pylist() == [b"3", b"4", b"5", b"6", b"7"]
    assert found.column("flag").to_pylist() == [0, 4, 5, 6, 0]
    assert found.column("tags").to_pylist() == [None, "tag-4", "tag-5", "tag-6", None]
    assert found.column("reconsumeTimes").to_pylist() == [2] * 5


def test_a_filter_looks_at_the_messages_inside(decoded):
    found = decoded(Chunk(QUEUE, 0, 3, [batch_of(0, 3)]), subExpression="tag-1 || tag-7")

    assert offsets(found) == [1]


def test_a_batch_that_cannot_be_taken_apart_is_a_loss_or_left_out(decoded, caplog):
    bad = record(1, b"no batch at all", sys_flag=BATCH_MASK)
    chunk = Chunk(QUEUE, 0, 5, [record(0) + bad + batch_of(3, 2)])

    with pytest.raises(DataLost, match="broker-a:0: the batch at offset 1 cannot be taken apart"):
        decoded(chunk)
    with caplog.at_level(logging.WARNING):
        found = decoded(chunk, failOnDataLoss="false")

    assert offsets(found) == [0, 3, 4]
    assert "the batch at offset 1 cannot be taken apart" in caplog.text


def test_a_batch_whose_codec_is_missing_fails_and_is_not_left_out(decoded, monkeypatch):
    def missing(*_, **__):
        raise CodecMissing("lz4", "lz4")

    monkeypatch.setattr("orbitmq.message.stored.expand_body", missing)
    packed = record(0, b"packed", sys_flag=BATCH_MASK | COMPRESSED)

    with pytest.raises(CodecMissing):
        decoded(Chunk(QUEUE, 0, 1, [packed]), failOnDataLoss="false")


def test_compressed_messages_become_batches_of_what_they_expand_to(record_batches):
    """Some KiB at the broker may be many MiB in a column."""
    body = bytes(MIB)
    packed = compress_body(body, COMPRESSION_ZLIB)
    count = 48
    pieces = [record(at, packed, sys_flag=COMPRESSED | COMPRESSION_ZLIB) for at in range(count)]
    chunks = [
        Chunk(QUEUE, 0, 20, [b"".join(pieces[:20])]),
        Chunk(QUEUE, 20, 21, [pieces[20]]),
        Chunk(QUEUE, 21, count, [b"".join(pieces[21:])]),
    ]

    found = record_batches(*chunks)

    assert max(batch.column("body").nbytes for batch in found) <= 2 * BATCH_BYTES
    # A batch for each message would cost too much.
    assert len(found) <= count // 2
    table = pa.Table.from_batches(found)
    assert offsets(table) == list(range(count))
    assert all(each.as_py() == body for each in table.column("body"))


def test_a_message_that_is_larger_than_a_batch_comes_by_itself(record_batches):
    flag, sizes = COMPRESSED | COMPRESSION_ZLIB, [MIB, 3 * BATCH_BYTES, MIB]
    noise = random.Random(7).randbytes(16 * 1024)
    mild = [record(at, compress_body(noise, COMPRESSION_ZLIB), sys_flag=flag) for at in range(40)]
    large = [
        record(100 + number, compress_body(bytes(size), COMPRESSION_ZLIB), sys_flag=flag)
        for number, size in enumerate(sizes)
    ]

    # The first messages say nothing about the growth of the later ones.
    found = record_batches(
        Chunk(QUEUE, 0, 40, [b"".join(mild)]), Chunk(QUEUE, 100, 103, [b"".join(large)])
    )

    last = found[-3:]
    assert [batch.column("queueOffset").to_pylist() for batch in last] == [[100], [101], [102]]
    assert [len(each.as_py()) for batch in last for each in batch.column("body")] == sizes


def test_a_damaged_answer_among_compressed_messages_is_left_out_alone(decoded, caplog):
    packed = compress_body(bytes(MIB), COMPRESSION_ZLIB)
    flag = COMPRESSED | COMPRESSION_ZLIB
    chunks = [
        Chunk(QUEUE, 0, 1, [record(0, packed, sys_flag=flag)]),
        Chunk(QUEUE, 1, 2, [b"\x00" * 120]),
        Chunk(QUEUE, 2, 3, [b"\x7f\xff\xff"]),
        Chunk(QUEUE, 3, 4, [record(3, packed, sys_flag=flag)]),
    ]

    with caplog.at_level(logging.WARNING):
        found = decoded(*chunks, failOnDataLoss="false")

    assert offsets(found) == [0, 3]
    assert caplog.text.count("a damaged answer of the broker is left out") == 2
    with pytest.raises(DataLost, match="damaged"):
        decoded(*chunks)


def test_gaps_are_a_loss_or_left_out_as_in_a_compacted_topic(decoded):
    chunk = Chunk(QUEUE, 0, 5, [record(1) + record(4)])

    with pytest.raises(DataLost, match=r"2 messages instead of 5 \(a topic that its broker compac"):
        decoded(chunk)

    assert offsets(decoded(chunk, failOnDataLoss="false")) == [1, 4]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    cut=st.tuples(st.integers(0, 100), st.integers(1, 200)),
    at_once=st.integers(1, 9),
)
def test_chunks_that_begin_and_end_inside_of_batches_have_every_message_once(
    decoded, sizes, cut, at_once
):
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
