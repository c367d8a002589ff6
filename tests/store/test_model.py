"""The store against a list: whatever is done to it, in whatever order, both say the same."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbitmq.filter.tags import parse_tags
from orbitmq.message.stored import decode_message
from orbitmq.store.read import ReadStatus
from orbitmq.store.settings import FlushPolicy, MessageTooLarge, RetentionSettings
from orbitmq.store.store import Store
from tests.support.store import (
    BORN_HOST,
    SMALL,
    HandClock,
    QuickFiles,
    lookup,
    messages_of,
    put,
    with_policy,
)

if TYPE_CHECKING:
    from orbitmq.store.settings import StoreSettings

TOPICS = ("orders", "%RETRY%billing")
TAGS = ("", "A", "B", "Größe")

bodies_ = st.binary(max_size=300)
tags = st.sampled_from(TAGS)
topics = st.sampled_from(TOPICS)
queue_ids = st.integers(0, 1)

#: body, tag, unique key
Message = tuple[bytes, str, str]


class StoreMachine(RuleBasedStateMachine):
    policy = FlushPolicy.ASYNC

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="orbitmq-model-"))
        self.clock = HandClock()
        self.settings: StoreSettings = replace(
            with_policy(SMALL, self.policy), retention=RetentionSettings(max_bytes=20_000)
        )
        self.stored: dict[tuple[str, int], list[Message]] = {}
        self.pending: list[tuple[tuple[str, int], Message]] = []
        self.counter = 0
        self.store = self.open(self.root)

    def open(self, root: Path) -> Store:
        return Store(root, self.settings, clock=self.clock, files=QuickFiles(), background=False)

    def teardown(self) -> None:
        self.store.abandon()
        shutil.rmtree(self.root)

    # ---- writing

    def make(self, body: bytes, tag: str) -> tuple[Message, dict[str, str | None]]:
        self.counter += 1
        unique = f"{self.counter:032X}"
        return (body, tag, unique), {
            "UNIQ_KEY": unique,
            "KEYS": f"k{self.counter % 5} x",
            "TAGS": tag,
        }

    @rule(topic=topics, queue_id=queue_ids, body=bodies_, tag=tags)
    def append(self, topic: str, queue_id: int, body: bytes, tag: str) -> None:
        message, properties = self.make(body, tag)
        _, number = put(self.store, topic, queue_id, body, properties)
        assert number == self.next_number((topic, queue_id))
        self.pending.append(((topic, queue_id), message))

    @rule(topic=topics, queue_id=queue_ids, batch=st.lists(st.tuples(bodies_, tags), max_size=8))
    def append_batch(self, topic: str, queue_id: int, batch: list[tuple[bytes, str]]) -> None:
        made = [self.make(body, tag) for body, tag in batch]
        elements = [
            (message[0], 7, "".join(f"{k}\x01{v}\x02" for k, v in properties.items() if v).encode())
            for message, properties in made
        ]
        offsets, number = self.store.append_batch(topic, queue_id, elements, 5, BORN_HOST)
        assert number == self.next_number((topic, queue_id))
        assert len(offsets) == len(batch)
        self.pending += [((topic, queue_id), message) for message, _ in made]

    def next_number(self, key: tuple[str, int]) -> int:
        waiting = sum(1 for each, _ in self.pending if each == key)
        return len(self.stored.get(key, [])) + waiting

    @rule()
    def append_too_much(self) -> None:
        with pytest.raises(MessageTooLarge):
            put(self.store, "orders", 0, bytes(9000))

    @rule()
    def write(self) -> None:
        self.store.write()
        for key, message in self.pending:
            self.stored.setdefault(key, []).append(message)
        self.pending.clear()
        self.clock.advance(0.003)

    @rule()
    def discard(self) -> None:
        self.store.discard()
        self.pending.clear()

    @rule(seconds=st.sampled_from([0.1, 1.1, 11.0]))
    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.store.tick()

    @precondition(lambda self: not self.pending)
    @rule(topic=topics)
    def delete_topic(self, topic: str) -> None:
        self.make_visible()
        self.store.delete_topic(topic)
        self.stored = {key: kept for key, kept in self.stored.items() if key[0] != topic}

    # ---- life and death

    @precondition(lambda self: not self.pending)
    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.open(self.root)
        assert self.store.recovery.was_clean
        assert self.store.recovery.records == 0

    @rule()
    def crash(self) -> None:
        self.store.abandon()
        self.pending.clear()
        self.store = self.open(self.root)
        assert not self.store.recovery.was_clean
        assert self.store.recovery.damage == ()

    @rule()
    def open_a_copy_as_found_after_a_crash(self) -> None:
        copy = Path(tempfile.mkdtemp(prefix="orbitmq-copy-"))
        shutil.copytree(self.root, copy, dirs_exist_ok=True)
        live, self.store = self.store, self.open(copy)
        try:
            self.check_all()
        finally:
            self.store.abandon()
            self.store = live
            shutil.rmtree(copy)

    @rule()
    def clean(self) -> None:
        self.make_visible()
        self.store.clean()

    def make_visible(self) -> None:
        if self.policy is FlushPolicy.SYNC:
            self.store.wait_flushed(self.store.statistics().log_end)

    # ---- reading

    @rule(topic=topics, queue_id=queue_ids, data=st.data())
    def read_with_a_filter(self, topic: str, queue_id: int, data: st.DataObject) -> None:
        self.make_visible()
        messages = self.stored.get((topic, queue_id), [])
        low = self.store.min_offset(topic, queue_id)
        if low >= len(messages):
            return
        offset = data.draw(st.integers(low, len(messages) - 1))
        wanted = data.draw(st.sampled_from(["A", "A || Größe", "C"]))
        limit = data.draw(st.integers(1, 40))
        accepted = parse_tags(wanted)

        result = self.store.read(topic, queue_id, offset, limit, accepted)

        looked_at = messages[offset : result.next_offset]
        expected = [body for body, tag, _ in looked_at if accepted.accepts_tag(tag)]
        assert [message.body for message in messages_of(result)] == expected
        assert result.next_offset > offset
        assert (result.status is ReadStatus.FOUND) == bool(expected)

    @rule(data=st.data())
    def look_up(self, data: st.DataObject) -> None:
        self.make_visible()
        keys = [key for key, kept in self.stored.items() if kept]
        if not keys:
            return
        topic, queue_id = data.draw(st.sampled_from(keys))
        number = data.draw(st.integers(0, len(self.stored[topic, queue_id]) - 1))
        body, _, unique = self.stored[topic, queue_id][number]

        found = lookup(self.store, topic, unique)

        if number >= self.store.min_offset(topic, queue_id):
            assert [decode_message(record).body for record in found] == [body]
            place = decode_message(found[0])
            assert (place.queue_id, place.queue_offset) == (queue_id, number)
        else:
            assert found == []

    @invariant()
    def check_all(self) -> None:
        if self.policy is FlushPolicy.SYNC:
            return
        self.compare()

    def compare(self) -> None:
        shown = {(state.topic, state.queue_id) for state in self.store.queues()}
        waiting = {key for key, _ in self.pending}
        assert shown - waiting == set(self.stored) - waiting
        for (topic, queue_id), messages in self.stored.items():
            low = self.store.min_offset(topic, queue_id)
            assert self.store.max_offset(topic, queue_id) == len(messages)
            assert 0 <= low <= len(messages)
            offset = low
            found: list[bytes] = []
            while offset < len(messages):
                result = self.store.read(topic, queue_id, offset)
                assert result.damaged == ()
                for number, message in enumerate(messages_of(result), start=offset):
                    assert message.queue_offset == number
                    found.append(message.body)
                offset = result.next_offset
            assert found == [body for body, _, _ in messages[low:]]


class SynchronousStoreMachine(StoreMachine):
    """The same, where nothing may be seen before it is on the disk."""

    policy = FlushPolicy.SYNC

    @rule()
    def flush_and_compare(self) -> None:
        self.make_visible()
        self.compare()

    @rule()
    def nothing_is_visible_that_is_not_flushed(self) -> None:
        flushed = self.store.statistics().flushed
        for state in self.store.queues():
            if state.max_offset > state.min_offset:
                result = self.store.read(state.topic, state.queue_id, state.max_offset - 1)
                for message in messages_of(result):
                    assert message.physical_offset + message.size <= flushed


profile = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestStore = StoreMachine.TestCase
TestStore.settings = profile
TestSynchronousStore = SynchronousStoreMachine.TestCase
TestSynchronousStore.settings = profile
