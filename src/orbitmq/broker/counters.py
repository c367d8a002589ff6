"""What went in and out, counted where it happens; rates are made of it elsewhere."""

from __future__ import annotations

from orbitmq.broker.histogram import Histogram

#: Sizes of messages, as in RocketMQ's metrics. Most are small, which costs nothing to count.
SIZE_BOUNDS = (1024.0, 4096.0, 524_288.0, 1_048_576.0, 2_097_152.0, 4_194_304.0)
SMALL = int(SIZE_BOUNDS[0])


class TopicCounts:
    """Messages put into a topic."""

    __slots__ = ("_larger", "put_bytes", "puts", "taken")

    def __init__(self) -> None:
        self.puts = 0
        self.put_bytes = 0
        #: Sizes of messages that are not written yet: see `Turns.counting`.
        self.taken: list[int] = []
        #: Sizes of those that are not small.
        self._larger: Histogram | None = None

    def settle(self, *, are_stored: bool) -> None:
        """What was taken is stored, and counts; or it is not."""
        taken, self.taken = self.taken, []
        if not are_stored or not taken:
            return
        self.puts += len(taken)
        self.put_bytes += sum(taken)
        if max(taken) > SMALL:
            if self._larger is None:
                self._larger = Histogram(SIZE_BOUNDS)
            for size in taken:
                if size > SMALL:
                    self._larger.note(size)

    def sizes(self) -> Histogram:
        """The sizes of all messages."""
        sizes = Histogram(SIZE_BOUNDS)
        if self._larger is not None:
            sizes.counts = list(self._larger.counts)
        sizes.counts[0] = self.puts - len(sizes)
        sizes.total = float(self.put_bytes)
        return sizes

    def add(self, other: TopicCounts) -> None:
        """Take over what was counted for another topic."""
        self.puts += other.puts
        self.put_bytes += other.put_bytes


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

    def add(self, other: GroupCounts) -> None:
        """Take over what was counted for another group."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


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
        # The broker's totals never go back.
        if (counts := self.topics.pop(topic, None)) is not None:
            self.gone_topics.add(counts)
        for key in [key for key in self.groups if key[0] == topic]:
            self.gone_groups.add(self.groups.pop(key))

    def forget_group(self, group: str) -> None:
        for key in [key for key in self.groups if key[1] == group]:
            self.gone_groups.add(self.groups.pop(key))
