"""Namespaces of the old style: `orders` of namespace `shop` is the topic `shop%orders` everywhere.

Brokers know nothing of it; clients of the same namespace agree on the names. A retry topic keeps
its prefix in front (`%RETRY%shop%billing`), or brokers would not know it for one. What belongs to
the system keeps its name, and a name that has the namespace already is not given it twice.
"""

from __future__ import annotations

from typing import Final

from orbitmq.client.names import (
    DEAD_LETTER_PREFIX,
    RETRY_PREFIX,
    is_system_group,
    is_system_topic,
)
from orbitmq.client.routes import Queue

SEPARATOR: Final = "%"


def wrap_topic(namespace: str | None, topic: str) -> str:
    """The topic as brokers know it."""
    if not namespace or is_system_topic(topic):
        return topic
    return _wrapped(namespace, topic)


def wrap_group(namespace: str | None, group: str) -> str:
    """The group as brokers know it."""
    if not namespace or is_system_group(group):
        return group
    return _wrapped(namespace, group)


def wrap_queue(namespace: str | None, queue: Queue) -> Queue:
    """The queue as brokers know it."""
    topic = wrap_topic(namespace, queue.topic)
    return queue if topic == queue.topic else Queue(topic, queue.broker, queue.id)


def unwrap(namespace: str | None, name: str) -> str:
    """The topic or group as the application knows it."""
    if not namespace:
        return name
    prefix, rest = _split(name)
    return prefix + rest.removeprefix(namespace + SEPARATOR)


def _wrapped(namespace: str, name: str) -> str:
    prefix, rest = _split(name)
    front = namespace + SEPARATOR
    return name if rest.startswith(front) else prefix + front + rest


def _split(name: str) -> tuple[str, str]:
    for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX):
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name
