"""The window of unfinished messages."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orbitmq.client.consumer.window import Window
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.message.stored import StoredMessage

QUEUE = Queue("orders", "broker-a", 0)


def message(offset: int, body: bytes = b"x") -> ReceivedMessage:
    stored = StoredMessage.build(topic="orders", stored_body=body, queue_offset=offset)
    return ReceivedMessage(stored, QUEUE, "billing")


def messages(*offsets: int) -> list[ReceivedMessage]:
    return [message(offset) for offset in offsets]


def offsets_of(found: list[ReceivedMessage]) -> list[int]:
    return [each.queue_offset for each in found]


def test_what_the_filter_left_out_moves_progress_on_when_nothing_is_unfinished():
    window = Window()
    window.add(messages(3, 9), next_offset=40)
    window.skip_to(60)
    assert window.commit_offset == 3

    window.finish([3, 9])

    assert window.commit_offset == 60


def test_what_is_withdrawn_is_new_again_and_was_never_progress():
    window = Window()
    window.add(messages(1, 2))
    new = window.add(messages(2, 3, 4), next_offset=9)

    window.withdraw(new)
    window.finish([1, 2])

    assert window.commit_offset == 3
    assert offsets_of(window.add(messages(3, 4))) == [3, 4]


class WindowModel(RuleBasedStateMachine):
    """Random pulls, finishes, takes, commits, rollbacks and resets against plain sets."""

    @initialize(start=st.integers(0, 1000))
    def begin(self, start: int) -> None:
        self.window = Window()
        self.waiting: dict[int, ReceivedMessage] = {}
        self.taken: dict[int, ReceivedMessage] = {}
        self.next = start
        self.end: int | None = None
        self.last = -1

    @rule(gaps=st.lists(st.integers(0, 5), max_size=12), skipped=st.integers(0, 9))
    def pull(self, gaps: list[int], skipped: int) -> None:
        pulled = []
        for gap in gaps:
            pulled.append(message(self.next + gap, b"x" * gap))
            self.next += gap + 1
        self.next += skipped

        new = self.window.add(pulled, self.next)

        assert new == pulled
        self.waiting |= {each.queue_offset: each for each in pulled}
        self.last = max([self.last, *offsets_of(pulled)])
        self.end = max(self.end or 0, self.next)

    @rule(back=st.integers(1, 30), count=st.integers(1, 12))
    def pull_again_from_further_back(self, back: int, count: int) -> None:
        first = max(0, self.next - back)
        pulled = [message(first + place, b"again") for place in range(count)]
        known = self.waiting.keys() | self.taken.keys()

        new = self.window.add(pulled)

        assert offsets_of(new) == [o for o in offsets_of(pulled) if o not in known]
        self.waiting |= {each.queue_offset: each for each in new}
        self.last = max([self.last, *offsets_of(pulled)])
        self.end = max(self.end or 0, first + count)
        self.next = max(self.next, first + count)

    @rule(data=st.data(), strangers=st.lists(st.integers(0, 2000), max_size=3))
    def finish(self, data: st.DataObject, strangers: list[int]) -> None:
        done = data.draw(st.lists(st.sampled_from(sorted(self.waiting)))) if self.waiting else []
        strangers = [each for each in strangers if each not in self.taken]

        self.window.finish([*done, *strangers])

        for offset in [*done, *strangers]:
            self.waiting.pop(offset, None)

    @rule(limit=st.integers(1, 8))
    def take(self, limit: int) -> None:
        expected = sorted(self.waiting)[:limit]

        assert offsets_of(self.window.take(limit)) == expected

        self.taken |= {offset: self.waiting.pop(offset) for offset in expected}

    @rule()
    def commit(self) -> None:
        position = self.window.commit()

        self.taken.clear()
        assert position == self.expected_position()

    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.taken)))) if self.taken else []
        given_all = data.draw(st.booleans())
        returned = list(self.taken) if given_all else some

        self.window.rollback(None if given_all else [self.taken[offset] for offset in some])

        for offset in set(returned):
            self.waiting[offset] = self.taken.pop(offset)

    def expected_position(self) -> int | None:
        return min(self.waiting.keys() | self.taken.keys(), default=self.end)

    @invariant()
    def progress_is_the_smallest_unfinished_offset(self) -> None:
        assert self.window.commit_offset == self.expected_position()

    @invariant()
    def sizes_and_bounds_are_those_of_the_unfinished_messages(self) -> None:
        unfinished = self.waiting | self.taken
        assert len(self.window) == len(unfinished)
        assert self.window.size == sum(each.size for each in unfinished.values())
        assert self.window.span == self.last - min(unfinished, default=self.last)
        assert self.window.taken_count == len(self.taken)
        assert all(offset in self.window for offset in unfinished)


TestWindowAgainstTheModel = WindowModel.TestCase
TestWindowAgainstTheModel.settings = settings(max_examples=80, stateful_step_count=30)
