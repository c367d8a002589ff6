"""How far groups are behind, worked out from the tables and the ends of queues when asked.

Apache shows this for groups that are online only, and for the topics that they subscribe to. A
group that is gone, with messages waiting for it, is what an alarm is for: here it is shown for
all topics in which it has progress, and for its retry topic also when it has none there: whatever
is in that topic is the group's own, and it would begin with the first message. Messages that were
deleted before the group read them do not wait any more and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from orbitmq.broker import names
from orbitmq.broker.parts import Parts
from orbitmq.wire.bodies.membership import MessageModel
from orbitmq.wire.bodies.topics import TopicConfig


class Lag(NamedTuple):
    """A group in a topic. Times are how long the oldest message has waited, in milliseconds."""

    messages: int = 0  #: not consumed
    latency_ms: int = 0  #: of those
    in_flight: int = 0  #: pulled and not consumed
    ready: int = 0  #: not pulled
    queueing_ms: int = 0  #: of those


def consumed_topics(parts: Parts) -> Iterator[tuple[str, TopicConfig]]:
    """Every group with each topic that it is behind in or could be.

    Groups that broadcast are left out: how far they are is known to their members alone. The tables
    may change between two pairs.
    """
    for group in [config.group_name for config in parts.groups]:
        if parts.consumers.model(group) is MessageModel.BROADCASTING:
            continue
        if parts.consumers.is_online(group):
            topics = sorted(parts.consumers.subscriptions(group))
        else:
            topics = topics_behind(parts, group)
        for name in topics:
            topic = parts.topics.get(name)
            if topic is not None:
                yield group, topic


def topics_behind(parts: Parts, group: str) -> list[str]:
    """The topics that a group has progress in, then its retry topic if anything is in it.

    What Apache would list stands where Apache lists it.
    """
    found = sorted(parts.progress.topics_of(group))
    retries = names.retry_topic(group)
    topic = None if retries in found else parts.topics.get(retries)
    if topic is not None and any(
        parts.store.max_offset(retries, queue_id) > parts.store.min_offset(retries, queue_id)
        for queue_id in range(topic.read_queue_nums)
    ):
        found.append(retries)
    return found


def next_offset(parts: Parts, group: str, topic: str, queue_id: int) -> int | None:
    """The message that a group goes on with; None where only its members know where they begin."""
    consumed = parts.progress.query(topic, group, queue_id)
    if consumed is None and topic == names.retry_topic(group):
        return parts.store.min_offset(topic, queue_id)
    return consumed


def lag_of(parts: Parts, group: str, topic: TopicConfig, now_ms: int) -> Lag:
    """How far a group is behind in a topic."""
    store, progress, name = parts.store, parts.progress, topic.topic_name
    messages = in_flight = ready = 0
    oldest_lagging = oldest_ready = now_ms
    for queue_id in range(max(topic.write_queue_nums, topic.read_queue_nums)):
        consumed = next_offset(parts, group, name, queue_id)
        if consumed is None:
            continue
        end = store.max_offset(name, queue_id)
        if consumed >= end:
            continue
        first = store.min_offset(name, queue_id)
        consumed = max(consumed, first)
        pulled = min(max(progress.pulled(name, group, queue_id) or 0, consumed), end)
        messages += end - consumed
        in_flight += pulled - consumed
        ready += end - pulled
        oldest_lagging = min(oldest_lagging, _time(parts, name, queue_id, consumed, now_ms))
        if pulled < end:
            oldest_ready = min(oldest_ready, _time(parts, name, queue_id, pulled, now_ms))
    return Lag(messages, now_ms - oldest_lagging, in_flight, ready, now_ms - oldest_ready)


def _time(parts: Parts, topic: str, queue_id: int, offset: int, now_ms: int) -> int:
    """When a message was stored; now, when that cannot be told."""
    stored = parts.store.store_time(topic, queue_id, offset)
    return stored if stored >= 0 else now_ms
