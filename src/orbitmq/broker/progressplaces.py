"""Which queues may have progress.

A group has progress in the queues that its topic has, for reading or for writing, and in those that
it had: a topic that got fewer queues keeps their messages, and members with an older route finish
them. Nobody can have consumed from any other queue. A broker that stored such progress all the same
would keep whatever a faulty client makes up, for good and in every copy of the table.

A topic that is not known is another matter: its progress may be older than the topic (a broker
that was set up anew, with the file of the former one), and no report adds to it.
"""

from __future__ import annotations

from orbitmq.broker.progress import ProgressTable
from orbitmq.broker.topics import TopicTable
from orbitmq.store.store import Store
from orbitmq.wire.bodies.topics import TopicConfig


class ProgressPlaces:
    """Tells the queues that there are, or were, from those that never existed."""

    def __init__(self, topics: TopicTable, progress: ProgressTable, store: Store) -> None:
        self._topics = topics
        self._progress = progress
        self._store = store

    def problem(self, topic: TopicConfig, group: str, queue_id: int) -> str | None:
        """Why a group cannot have consumed from this queue; None when it can."""
        if has_number(topic, queue_id):
            return None
        name = topic.topic_name
        if queue_id >= 0 and (
            self._store.max_offset(name, queue_id)
            # It had the queue when the group was assigned to it, though nothing came.
            or self._progress.stored(name, group, queue_id) is not None
        ):
            return None
        return f"topic {name!r} has no queue {queue_id} and never had; it has {_numbers(topic)}"

    def may_keep(self, topic: str, queue_id: int) -> bool:
        """Whether progress that a file tells of can be about something."""
        if queue_id < 0:
            return False
        config = self._topics.get(topic)
        return (
            config is None
            or has_number(config, queue_id)
            or self._store.max_offset(topic, queue_id) > 0
        )


def has_number(topic: TopicConfig, queue_id: int) -> bool:
    """Whether the topic has this queue now."""
    return 0 <= queue_id < max(topic.read_queue_nums, topic.write_queue_nums)


def _numbers(topic: TopicConfig) -> str:
    count = max(topic.read_queue_nums, topic.write_queue_nums)
    return f"0 to {count - 1}" if count else "none"
