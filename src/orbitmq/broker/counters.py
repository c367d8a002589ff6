"""What went in and out, counted where it happens; rates are made of it elsewhere."""

from __future__ import annotations

from typing import TypeVar

C = TypeVar("C", "TopicCounts", "GroupCounts")


class TopicCounts:
    """Messages put into a topic."""

    __slots__ = ("put_bytes", "puts")

    def __init__(self) -> None:
        self.puts = 0
        self.put_bytes = 0


class GroupCounts:
    """Messages that a group got of a topic."""

    __slots__ = ("dead_letters", "get_bytes", "gets", "hits", "pulls", "sent_back")

    def __init__(self) -> None:
        self.gets = 0
        self.get_bytes = 0
        self.pulls = 0
        self.hits = 0  #: pulls that brought something
        self.sent_back = 0
        self.dead_letters = 0


class Counters:
    """All counts of a broker since its start."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicCounts] = {}
        self.groups: dict[tuple[str, str], GroupCounts] = {}  #: by topic and group
        #: What was counted for topics and groups that are gone.
        self.gone_topics = TopicCounts()
        self.gone_groups = GroupCounts()
        self.failed_puts = 0
        self.busy_puts = 0  #: refused by flow control

    def topic(self, topic: str) -> TopicCounts:
        counts = self.topics.get(topic)
        if counts is None:
            counts = self.topics[topic] = TopicCounts()
        return counts

    def group(self, topic: str, group: str) -> GroupCounts:
        counts = self.groups.get((topic, group))
        if counts is None:
            counts = self.groups[topic, group] = GroupCounts()
        return counts

    def forget_topic(self, topic: str) -> None:
        _move(self.topics.pop(topic, None), self.gone_topics)
        for key in [key for key in self.groups if key[0] == topic]:
            _move(self.groups.pop(key), self.gone_groups)

    def forget_group(self, group: str) -> None:
        for key in [key for key in self.groups if key[1] == group]:
            _move(self.groups.pop(key), self.gone_groups)


def _move(counts: C | None, into: C) -> None:
    """Add counts to others of their kind: the broker's totals never go back."""
    if counts is not None:
        for name in counts.__slots__:
            setattr(into, name, getattr(into, name) + getattr(counts, name))
