"""What a task makes of what brokers keep, without Spark."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.client.ranges.connections import QueueRange, RangeConnections
from orbitmq.client.ranges.read import Chunk, RangeSettings, WindowLimits, read_ranges
from orbitmq.client.routes import Queue
from orbitmq.message.properties import encode_properties
from orbitmq.message.record import BATCH_MASK, COMPRESSED, COMPRESSION_ZLIB, CodecMissing
from orbitmq.message.stored import StoredMessage, compress_body, encode_batch
from orbitmq.spark.options import DataLost, batch_options
from orbitmq.spark.read import BATCH_BYTES, _Decoder, _joined, _Stretch
from orbitmq.spark.source import full_schema
from tests.support.scriptedbroker import ScriptedBroker, asked, brought

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


def made(**options: str) -> _Decoder:
    given = {"nameServer": "localhost:9876", "subscribe": "orders"} | options
    return _Decoder(batch_options(given, {}).read, full_schema())


def record_batches(*chunks: Chunk, **options: str) -> list[pa.RecordBatch]:
    """What a query gets."""
    decoder = made(**options)
    return [batch for stretch in _joined(iter(chunks)) for batch in decoder.batches(stretch)]


def decoded(*chunks: Chunk, **options: str) -> pa.Table:
    """The rows that a query gets."""
    return pa.Table.from_batches(record_batches(*chunks, **options), made(**options)._schema)


def stretch_of(start: int, *records: bytes) -> _Stretch:
    """Neighbours in one answer."""
    chunk = Chunk(QUEUE, start, start + len(records), [b"".join(records)])
    (found,) = _joined(iter([chunk]))
    return found


def offsets(table: pa.Table) -> list[int]:
    found: list[int] = table.column("queueOffset").to_pylist()
    return found


def test_a_record_with_several_messages_is_several_rows():
    found = decoded(
        Chunk(QUEUE, 3, 7, [record(3) + batch_of(4, 3)]), Chunk(QUEUE, 7, 8, [record(7)])
    )

    assert offsets(found) == [3, 4, 5, 6, 7]
    assert found.column("body").to_pylist() == [b"3", b"4", b"5", b"6", b"7"]
    assert found.column("flag").to_pylist() == [0, 4, 5, 6, 0]
    assert found.column("tags").to_pylist() == [None, "tag-4", "tag-5", "tag-6", None]
    assert found.column("reconsumeTimes").to_pylist() == [2] * 5


def test_a_filter_looks_at_the_messages_inside():
    found = decoded(Chunk(QUEUE, 0, 3, [batch_of(0, 3)]), subExpression="tag-1 || tag-7")

    assert offsets(found) == [1]


def test_a_batch_that_cannot_be_taken_apart_is_a_loss_or_left_out(caplog):
    bad = record(1, b"no batch at all", sys_flag=BATCH_MASK)
    chunk = Chunk(QUEUE, 0, 5, [record(0) + bad + batch_of(3, 2)])

    with pytest.raises(DataLost, match="broker-a:0: the batch at offset 1 cannot be taken apart"):
        decoded(chunk)
    with caplog.at_level(logging.WARNING):
        found = decoded(chunk, failOnDataLoss="false")

    assert offsets(found) == [0, 3, 4]
    assert "the batch at offset 1 cannot be taken apart" in caplog.text


def test_a_batch_whose_codec_is_missing_fails_and_is_not_left_out(monkeypatch):
    def missing(*_, **__):
        raise CodecMissing("lz4", "lz4")

    monkeypatch.setattr("orbitmq.message.stored.expand_body", missing)
    packed = record(0, b"packed", sys_flag=BATCH_MASK | COMPRESSED)

    with pytest.raises(CodecMissing):
        decoded(Chunk(QUEUE, 0, 1, [packed]), failOnDataLoss="false")


def test_a_batch_in_two_pulls_beside_a_damaged_one_comes_once():
    chunks = [
        Chunk(QUEUE, 0, 2, [batch_of(0, 4)]),
        Chunk(QUEUE, 2, 4, [batch_of(0, 4)]),
        Chunk(QUEUE, 4, 5, [b"\x00" * 120]),
    ]

    assert offsets(decoded(*chunks, failOnDataLoss="false")) == [0, 1, 2, 3]


def test_compressed_messages_become_batches_of_what_they_expand_to():
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


def test_messages_that_grow_more_than_those_before_are_parted():
    """What was learned from others says nothing about them."""
    flag, mild = COMPRESSED | COMPRESSION_ZLIB, random.Random(7).randbytes(512 * 1024)
    packed = [compress_body(mild + bytes(len(mild)), COMPRESSION_ZLIB)] * 24
    packed += [compress_body(bytes(MIB), COMPRESSION_ZLIB)] * 60
    records = [record(at, body, sys_flag=flag) for at, body in enumerate(packed)]
    decoder = made()
    list(decoder.batches(stretch_of(0, *records[:24])))

    found = list(decoder.batches(stretch_of(24, *records[24:])))

    assert max(batch.column("body").nbytes for batch in found) <= 2 * BATCH_BYTES + MIB
    assert len(found) <= 60 // 4
    table = pa.Table.from_batches(found)
    assert offsets(table) == list(range(24, 84))
    assert all(each.as_py() == bytes(MIB) for each in table.column("body"))


def test_a_message_that_is_larger_than_a_batch_comes_by_itself():
    flag, sizes = COMPRESSED | COMPRESSION_ZLIB, [MIB, 3 * BATCH_BYTES, MIB]
    bodies = [compress_body(bytes(size), COMPRESSION_ZLIB) for size in sizes]
    pieces = [record(at, body, sys_flag=flag) for at, body in enumerate(bodies)]
    decoder = made()
    decoder._growth = 4.0

    found = list(decoder.batches(stretch_of(0, *pieces)))

    assert [batch.column("queueOffset").to_pylist() for batch in found] == [[0], [1], [2]]
    assert [len(each.as_py()) for batch in found for each in batch.column("body")] == sizes


def test_messages_that_are_not_compressed_stay_in_one_batch_also_after_others_that_are():
    packed = compress_body(bytes(MIB), COMPRESSION_ZLIB)
    plain = [record(at, bytes(1024)) for at in range(1, 3001)]
    decoder = made()
    list(decoder.batches(stretch_of(0, record(0, packed, sys_flag=COMPRESSED | COMPRESSION_ZLIB))))
    list(decoder.batches(stretch_of(1, *plain[:1])))

    found = list(decoder.batches(stretch_of(2, *plain[1:])))

    assert [batch.num_rows for batch in found] == [2999]


def test_a_body_that_does_not_expand_is_null_among_those_that_do():
    packed = compress_body(b"good", COMPRESSION_ZLIB)
    bodies = [packed, b"no zlib stream", packed]
    flag = COMPRESSED | COMPRESSION_ZLIB
    pieces = [record(at, body, sys_flag=flag) for at, body in enumerate(bodies)]

    found = decoded(Chunk(QUEUE, 0, 3, [b"".join(pieces)]))

    assert found.column("body").to_pylist() == [b"good", None, b"good"]


def test_a_damaged_answer_among_compressed_messages_is_left_out_alone(caplog):
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


def test_gaps_are_a_loss_or_left_out_as_in_a_compacted_topic():
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
def test_chunks_that_begin_and_end_inside_of_batches_have_every_message_once(sizes, cut, at_once):
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


def test_a_queue_of_batches_is_read_to_its_end_from_the_middle_of_one():
    bounds = list(pairwise(range(0, 301, 3)))

    def script(pulls):
        answers = []
        for pull in pulls:
            at, most = asked(pull)
            inside = [(low, high) for low, high in bounds if high > at and low < at + most]
            data = b"".join(batch_of(low, high - low) for low, high in inside[:20])
            answers.append(brought(pull, data, inside[:20][-1][1], high=300))
        return answers

    with ScriptedBroker(script) as broker:
        read = batch_options({"nameServer": broker.address, "subscribe": "orders"}, {}).read
        links = RangeConnections(read.access)
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
