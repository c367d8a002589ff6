"""What was fetched ahead, and the positions of a queue."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orbitmq.client.consumer.pull import Pulled, PullStatus
from orbitmq.client.consumer.settings import FlowReason
from orbitmq.client.consumer.subscriptions import Subscription
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.pullconsumer.cache import Cache, CachedQueue, Chunk, chunk_of
from orbitmq.client.pullconsumer.consumer import PollSettings
from orbitmq.client.routes import Queue
from orbitmq.message.record import RecordInvalid
from tests.support.pulling import TOPIC, record, records

EVERYTHING = Subscription.by_tags(TOPIC)


def new_cache(**changes: int) -> tuple[Cache, list[OwnedQueue]]:
    roomy: list[OwnedQueue] = []
    return Cache(PollSettings(**changes), roomy.append), roomy  # type: ignore[arg-type]  # ints only


def owned(number: int = 0, offset: int = 0) -> OwnedQueue:
    return OwnedQueue(Queue(TOPIC, "broker-a", number), offset, now=0.0)


def pull(cache: Cache, queue: OwnedQueue, *offsets: int, next_offset: int | None = None) -> None:
    end = offsets[-1] + 1 if next_offset is None else next_offset
    body = records(*offsets)
    pulled = Pulled(PullStatus.FOUND, queue.next_offset, end, 0, 100, 0, body, False)
    cache.received(queue, pulled, EVERYTHING)
    queue.next_offset = end


def moved(next_offset: int, *, is_reset: bool) -> Pulled:
    return Pulled(PullStatus.OFFSET_ILLEGAL, 0, next_offset, 0, 100, 0, b"", is_reset)


def offsets_of(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [
        (chunk.owned.queue.id, message.queue_offset)
        for chunk in chunks
        for message in chunk.messages()
    ]


def test_bytes_bound_what_is_taken_together():
    cache, _ = new_cache()
    first, second = owned(0), owned(1)
    pull(cache, first, 0, 1)
    pull(cache, second, 0)
    one = len(record(0))

    assert offsets_of(cache.take(10, 2 * one + 1)) == [(0, 0), (0, 1)]
    assert offsets_of(cache.take(10, 1)) == [(1, 0)], "a single message is never too large"


def test_bytes_hold_back_too_of_one_queue_and_of_all():
    one = len(record(0))
    cache, _ = new_cache(max_cached_bytes=2 * one)
    queue = owned()
    pull(cache, queue, 0, 1)
    assert cache.held_back(queue) is FlowReason.BYTES

    cache, _ = new_cache(max_cached_bytes_in_all=2 * one)
    queue, other = owned(0), owned(1)
    pull(cache, queue, 0, 1)
    assert cache.held_back(queue) is FlowReason.BYTES
    assert cache.held_back(other) is None, "nothing of it is here: it may be waited for"


def test_what_is_given_back_while_its_queue_is_given_up_is_neither_done_nor_cached():
    cache, _ = new_cache()
    queue = owned()
    pull(cache, queue, 0, 1, 2)
    taken = cache.take(3)
    queue.is_draining = True

    cache.give_back([taken[0].since(1)])
    cache.settle()

    cached = cache.of(queue)
    assert (cached.returned, cached.settled, cached.given) == (1, 1, 1)
    assert cached.count == 0
    assert cache.settled.is_set(), "who waits for the queue has less to wait for"


def test_an_offset_that_was_moved_keeps_what_is_cached_unless_it_was_reset():
    cache, _ = new_cache()
    queue = owned()
    pull(cache, queue, 0)

    cache.moved(queue, moved(70, is_reset=False))
    assert cache.of(queue).returned == 0

    cache.moved(queue, moved(70, is_reset=True))
    assert (cache.of(queue).returned, cache.of(queue).settled) == (70, 70)
    assert cache.take(10) == []


class CacheModel(RuleBasedStateMachine):
    """Three queues, pulled and polled at random: nothing is skipped, repeated or settled early."""

    @initialize()
    def begin(self) -> None:
        self.cache, _ = new_cache()
        self.owned = [owned(number) for number in range(3)]
        self.pulled: list[list[int]] = [[], [], []]  # not returned yet
        self.returned = [0, 0, 0]
        self.in_work: list[list[int]] = [[], [], []]

    def cached(self, number: int) -> CachedQueue:
        return self.cache.of(self.owned[number])

    @rule(number=st.integers(0, 2), count=st.integers(1, 6), skipped=st.integers(0, 4))
    def pull(self, number: int, count: int, skipped: int) -> None:
        queue = self.owned[number]
        offsets = [queue.next_offset + place for place in range(count)]
        pull(self.cache, queue, *offsets, next_offset=offsets[-1] + 1 + skipped)
        self.pulled[number] += offsets

    @rule(number=st.integers(0, 2), skipped=st.integers(1, 5))
    def pass_over(self, number: int, skipped: int) -> None:
        queue = self.owned[number]
        self.cache.passed(queue, queue.next_offset + skipped)
        queue.next_offset += skipped

    @rule(count=st.integers(1, 10), size=st.none() | st.integers(1, 600), works=st.booleans())
    def poll(self, count: int, size: int | None, works: bool) -> None:
        self.cache.settle()
        self.in_work = [[], [], []]
        given = [self.cached(number).given for number in range(3)]
        taken = self.cache.take(count, size)
        if not works:
            self.cache.give_back(taken)
            assert given == [self.cached(number).given for number in range(3)]
            return
        for number, offset in offsets_of(taken):
            assert not self.owned[number].is_paused
            assert self.pulled[number].pop(0) == offset
            self.returned[number] = offset + 1
            self.in_work[number].append(offset)

    @rule(number=st.integers(0, 2))
    def pause_or_resume(self, number: int) -> None:
        queue = self.owned[number]
        queue.is_paused = not queue.is_paused
        if not queue.is_paused:
            self.cache.resumed(queue)

    @rule(number=st.integers(0, 2), offset=st.integers(0, 50))
    def seek(self, number: int, offset: int) -> None:
        queue = self.owned[number]
        self.cache.place(queue, offset)
        queue.next_offset = offset
        self.pulled[number].clear()
        self.in_work[number].clear()
        self.returned[number] = offset

    @invariant()
    def nothing_unreturned_lies_before_the_position(self) -> None:
        for number in range(3):
            queue = self.cached(number)
            assert self.returned[number] <= queue.returned
            assert queue.returned <= min(self.pulled[number], default=1 << 60)
            assert queue.settled <= queue.returned

    @invariant()
    def what_the_last_poll_returned_is_not_settled(self) -> None:
        for number in range(3):
            assert self.cached(number).settled <= min(self.in_work[number], default=1 << 60)

    @invariant()
    def counts_are_those_of_what_is_cached(self) -> None:
        for number in range(3):
            assert self.cached(number).count == len(self.pulled[number])


TestCacheAgainstTheModel = CacheModel.TestCase
TestCacheAgainstTheModel.settings = settings(max_examples=60, stateful_step_count=30)


# Pulled bytes that are cut without being decoded.


OWNED = OwnedQueue(Queue(TOPIC, "broker-a", 0), 0, now=0.0)


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


@pytest.mark.parametrize("damage", [records(0, 1)[:-1], b"\x00" * 200, records(0) + b"\x00\x00"])
def test_bytes_that_are_no_whole_records_are_refused(damage):
    with pytest.raises(RecordInvalid):
        chunk(damage, 2)
