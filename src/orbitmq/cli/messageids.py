"""The message that somebody means by an id, with or without its topic.

Two kinds of id look the same. An offset id says where the message lies. A unique id, which is what
sending, finding and browsing print, is found in the index of its topic only; so without the topic
all topics are asked, as long as they are few. Copies of a message are in topics for retries and
dead letters, of which every group may have two: those are asked last, and left out when they are
many.
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
FEW_TOPICS = 200
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
    own = [each.name for each in topics if each.kind not in _COPIES]
    copies = [each.name for each in topics if each.kind in _COPIES]
    if len(own) > FEW_TOPICS:
        raise Misused(
            f"no message lies where {unique_id} says; if this is a message's unique id, say its "
            "topic, as in --topic orders"
        )
    # The message as it was sent; what is left of it when that was deleted may be a copy.
    for names in (own, copies) if len(copies) <= FEW_TOPICS else (own,):
        # The admin itself limits how many requests wait at a time.
        asked = (admin.messages.copies(each, unique_id) for each in names)
        for found in await asyncio.gather(*asked):
            if found:
                return found[0]
    problem = f"no message lies where {unique_id} says, and no topic has one of this unique id"
    if len(copies) > FEW_TOPICS:
        problem += (
            f"; the {len(copies):,} topics for retries and dead letters are too many to ask: name "
            "one, as in --topic %DLQ%billing"
        )
    raise CommandError(problem)
