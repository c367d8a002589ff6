"""A queue of a topic: the unit of order, of ownership and of progress."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orbitmq.errors import SettingError


@dataclass(frozen=True, slots=True, order=True)
class Queue:
    """One queue, named as brokers know it. Sorts as Java clients sort queues."""

    topic: str
    broker: str
    id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker}:{self.id}"

    @property
    def java_text(self) -> str:
        """What Java's `MessageQueue.toString` gives: consistent hashing is done over it."""
        return f"MessageQueue [topic={self.topic}, brokerName={self.broker}, queueId={self.id}]"


def each_queue(given: Iterable[Queue | Iterable[Queue]]) -> tuple[Queue, ...]:
    """Queues that are given one by one or several at once. Raises `SettingError`."""
    found: list[Queue] = []
    for part in given:
        several = [part] if isinstance(part, Queue) or not isinstance(part, Iterable) else part
        for queue in several:
            if not isinstance(queue, Queue):
                raise SettingError(f"a queue must be a Queue(topic, broker, id), got {queue!r}")
            found.append(queue)
    return tuple(found)
