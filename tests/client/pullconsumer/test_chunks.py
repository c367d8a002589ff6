"""Pulled bytes that are cut without being decoded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.consumer.pull import Pulled, PullStatus, Subscription
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.pullconsumer.cache import Chunk, chunk_of
from orbitmq.client.routes import Queue
from orbitmq.message.record import INNER_BATCH, NEED_UNWRAP, RecordInvalid
from orbitmq.message.stored import encode_batch
from tests.support.pulling import TOPIC, record, records

OWNED = OwnedQueue(Queue(TOPIC, "broker-a", 0), 0, now=0.0)
EVERYTHING = Subscription.by_tags(TOPIC)


def chunk(body: bytes, next_offset: int, offset: int = 0) -> Chunk:
    pulled = Pulled(PullStatus.FOUND, offset, next_offset, 0, 100, 0, body, False)
    return chunk_of(OWNED, pulled, EVERYTHING)


def offsets(part: Chunk) -> list[int]:
    return [message.queue_offset for message in part.messages()]


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    cuts=st.lists(st.tuples(st.integers(1, 6), st.none() | st.integers(1, 1500)), min_size=20),
)
def test_however_a_chunk_is_cut_nothing_is_lost_or_repeated(sizes, cuts):
    body = b"".join(record(2 * place, b"x" * size) for place, size in enumerate(sizes))
    rest: Chunk | None = chunk(body, 100)
    parts: list[Chunk] = []

    for count, size in cuts:
        if rest is None:
            break
        head, rest = rest.split(count, size)
        parts.append(head)
        assert 1 <= head.count <= count
        assert size is None or head.count == 1 or head.size <= size
    if rest is not None:
        parts.append(rest)

    assert b"".join(bytes(part.body) for part in parts) == body
    assert [offset for part in parts for offset in offsets(part)] == [
        2 * place for place in range(len(sizes))
    ]
    assert [part.next_offset for part in parts] == [part.first_offset for part in parts[1:]] + [100]


def test_the_rest_from_a_message_on_holds_that_message():
    rest = chunk(records(3, 5, 9), 40).since(5)

    assert (offsets(rest), rest.count, rest.next_offset) == ([5, 9], 2, 40)


@pytest.mark.parametrize("damage", [records(0, 1)[:-1], b"\x00" * 200, records(0) + b"\x00\x00"])
def test_bytes_that_are_no_whole_records_are_refused(damage):
    with pytest.raises(RecordInvalid):
        chunk(damage, 2)


def test_records_of_several_messages_are_taken_apart():
    batch = encode_batch([(b"one", 0, b""), (b"two", 0, b"")])
    body = record(10, batch, sys_flag=INNER_BATCH | NEED_UNWRAP) + record(12)

    whole = chunk(body, 13, offset=11)

    assert offsets(whole) == [11, 12]
    assert whole.count == 2


def test_messages_that_only_share_a_hash_with_the_wanted_tag_are_left_out():
    body = record(0, properties={"TAGS": "BB"}) + record(1, properties={"TAGS": "Aa"})
    pulled = Pulled(PullStatus.FOUND, 0, 2, 0, 2, 0, body, False)

    wanted = chunk_of(OWNED, pulled, Subscription.by_tags(TOPIC, "Aa"))

    assert offsets(wanted) == [1]
