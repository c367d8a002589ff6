"""A topic that no broker has, told with the one that was probably meant."""

from __future__ import annotations

from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.errors import TopicNotFound
from orbitmq.client.similartopics import similar_topic


async def not_found(asking: Asking, topic: str) -> TopicNotFound:
    """The error to raise."""
    return TopicNotFound(topic, similar=await similar_topic(asking, topic))
