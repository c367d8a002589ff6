"""A queue of a topic: the unit of order, of ownership and of progress."""

from __future__ import annotations

from dataclasses import dataclass


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
