"""Topics and groups in numbers, as large shops have them."""

from __future__ import annotations

from orbitmq.broker.broker import Broker
from orbitmq.wire.bodies import SubscriptionGroupConfig, TopicConfig

TOPICS = 1000
GROUPS = 2500


def crowd(broker: Broker) -> None:
    """Fill a broker: each group reads one of the topics, and is at its beginning."""
    parts = broker.parts
    now = parts.clock.now()
    for number in range(TOPICS):
        name = f"topic-{number:04}"
        config = TopicConfig(topic_name=name, read_queue_nums=4, write_queue_nums=4, perm=6)
        parts.topics.update(config, now=now)
    for number in range(GROUPS):
        name = f"group-{number:04}"
        parts.groups.update(SubscriptionGroupConfig(group_name=name), now=now)
        for queue_id in range(4):
            parts.progress.reset(f"topic-{number % TOPICS:04}", name, queue_id, 0)
    parts.registration.notice()
