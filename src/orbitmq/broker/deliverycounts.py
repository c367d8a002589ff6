"""What is counted about half messages and timer messages, by the topics where they belong."""

from __future__ import annotations

from collections import Counter

from orbitmq.broker.histogram import Histogram

#: RocketMQ's, which calls them milliseconds and chose them as if they were seconds.
FINISH_BOUNDS = (5.0, 60.0, 600.0, 3600.0, 43_200.0, 86_400.0)
#: Seconds.
DELAY_BOUNDS = (60.0, 600.0, 3600.0, 43_200.0, 86_400.0, 259_200.0)


class TransactionCounts:
    """Ends of transactions since the start."""

    __slots__ = ("committed", "latencies", "rolled_back")

    def __init__(self) -> None:
        self.committed: Counter[str] = Counter()
        self.rolled_back: Counter[str] = Counter()
        #: From the birth of a half message to its end.
        self.latencies: dict[str, Histogram] = {}

    def ended(self, topic: str, *, is_commit: bool, seconds: float) -> None:
        (self.committed if is_commit else self.rolled_back)[topic] += 1
        histogram = self.latencies.get(topic)
        if histogram is None:
            histogram = self.latencies[topic] = Histogram(FINISH_BOUNDS)
        histogram.note(max(0.0, seconds * 1000))

    def forget(self, topic: str) -> None:
        """A topic was deleted."""
        for table in (self.committed, self.rolled_back, self.latencies):
            table.pop(topic, None)


class TimerCounts:
    """Timer messages that came, waited and went."""

    __slots__ = ("delays", "given", "taken", "waiting")

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.given: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        #: How long messages were asked to wait, in seconds.
        self.delays: dict[str, Histogram] = {}

    def took(self, topic: str, seconds: float) -> None:
        """A message was parked for so long."""
        self.taken[topic] += 1
        histogram = self.delays.get(topic)
        if histogram is None:
            histogram = self.delays[topic] = Histogram(DELAY_BOUNDS)
        histogram.note(seconds)

    def left(self, topic: str, *, is_known: bool = True) -> None:
        """A message was delivered, or its time came after it was recalled or its topic deleted."""
        self.waiting[topic] -= 1
        if is_known:
            self.given[topic] += 1
        elif not self.waiting[topic]:
            del self.waiting[topic]

    def forget(self, topic: str) -> None:
        """A topic was deleted: what still waits for it is all there is to say."""
        for table in (self.taken, self.given, self.delays):
            table.pop(topic, None)
