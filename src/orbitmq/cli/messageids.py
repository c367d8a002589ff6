"""The message that somebody means by an id, with or without its topic.

Two kinds of id look the same. An offset id says where the message lies. A unique id, which is what
sending, finding and browsing print, is found in the index of its topic only; so without the topic
all topics are asked, as long as they are few.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from orbitmq.cli.errors import CommandError, Misused
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.errors import BadRequest, MessageNotFound
from orbitmq.client.admin.topicvalues import TopicKind
from orbitmq.client.received import ReceivedMessage

#: More topics than that are not asked one by one.
_FEW_TOPICS = 200
_COPIES = {TopicKind.RETRY, TopicKind.DEAD_LETTER}
#: What both kinds look like, for IPv4 and for IPv6.
_is_id = re.compile(r"[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56}").fullmatch


async def message_of(admin: AsyncAdmin, named: Sequence[str], topic: str | None) -> ReceivedMessage:
    """The message named by `ID` or by `TOPIC ID`. Raises `Misused`, and what `get` raises."""
    *before, message_id = named
    if len(before) > 1 or (before and topic is not None):
        raise Misused("one message is named as in: orders ID, or: ID --topic orders")
    topic = before[0] if before else topic
    try:
        return await admin.messages.get(message_id, topic=topic)
    except (BadRequest, MessageNotFound):
        if topic is not None or not _is_id(message_id):
            raise
    return await _in_any_topic(admin, message_id)


async def _in_any_topic(admin: AsyncAdmin, unique_id: str) -> ReceivedMessage:
    topics = [each for each in await admin.topics.list() if each.kind is not TopicKind.SYSTEM]
    if len(topics) > _FEW_TOPICS:
        raise Misused(
            f"no message lies where {unique_id} says; if this is a message's unique id, say its "
            "topic, as in --topic orders"
        )
    # The message as it was sent; what is left of it when that was deleted may be a copy.
    for kinds in (set(TopicKind) - _COPIES, _COPIES):
        names = [each.name for each in topics if each.kind in kinds]
        # The admin itself limits how many requests wait at a time.
        asked = (admin.messages.copies(each, unique_id) for each in names)
        for found in await asyncio.gather(*asked):
            if found:
                return found[0]
    raise CommandError(
        f"no message lies where {unique_id} says, and no topic has a message of this unique id"
    )
