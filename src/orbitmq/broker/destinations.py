"""Where parked messages may go: not to a topic that was deleted after they were sent.

Deleting a topic deletes its messages, also those that still wait for their time or for the end of
their transaction. They carry the topic's name, and storing them under it would bring the topic
back: with Apache's broker its queues, which no consumer may read as the topic is unknown; here the
topic itself at the next start, which makes topics of such queues. So they are dropped, counted and
logged. The store notes how far every deletion reaches in the log (`Store.deleted_below`), so a
topic that was made again gets what was sent to it since, and nothing from its former life.

A topic that is unknown and was *not* deleted has been forgotten: whoever made it by sending was
answered, and the broker died before the table was saved. Then the message counts, and its topic is
made again.
"""

from __future__ import annotations

import logging

from orbitmq.broker.permissions import READ_WRITE
from orbitmq.broker.topics import TopicTable
from orbitmq.clock import Clock
from orbitmq.remoting.occurrences import Occurrences
from orbitmq.store.store import Store
from orbitmq.wire.bodies.topics import TopicConfig

log = logging.getLogger(__name__)


class Destinations:
    """The topics of a broker, as those see them who store messages a second time."""

    def __init__(self, store: Store, topics: TopicTable, clock: Clock) -> None:
        self._store = store
        self._topics = topics
        self._clock = clock
        self._seen = Occurrences()
        #: Messages that were dropped, for whatever reason.
        self.dropped = 0

    def was_deleted(self, topic: str) -> bool:
        """Whether the topic was deleted once, as far as the log remembers."""
        return self._store.deleted_below(topic) > 0

    def takes(self, topic: str, queue_id: int, sent_at: int) -> bool:
        """Whether a message that was sent at this offset of the log may still go there."""
        if sent_at < self._store.deleted_below(topic):
            if count := self._seen.note(topic):
                log.warning(
                    "a message was not delivered: its topic was deleted after it was sent "
                    "(%d so far)",
                    count,
                    extra={"topic": topic, "queue": queue_id},
                )
            return False
        if topic not in self._topics:
            adopt(self._topics, topic, queue_id + 1, now=self._clock.now())
        return True


def adopt(topics: TopicTable, topic: str, queues: int, *, now: float) -> None:
    """Make a topic that has messages and is in no table."""
    log.warning("topic found in the store only", extra={"topic": topic, "queues": queues})
    topics.ensure(
        TopicConfig(
            topic_name=topic, read_queue_nums=queues, write_queue_nums=queues, perm=READ_WRITE
        ),
        now=now,
    )
