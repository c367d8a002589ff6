"""Whether dead letters have been dealt with: the copies that were made when they were sent again.

A letter stays where it is when it is sent again. The copy says which letter it was made of, and is
found by the unique id that both have, in the group's retry topic or in the topic it was sent to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.deadletters import RESENT_FROM, DeadLetter
from orbitmq.client.names import retry_topic
from orbitmq.client.received import ReceivedMessage

#: Letters of one group that are looked up at most, to count those that were sent again.
MOST_COUNTED: Final = 1000
#: Letters that are looked up together.
_TOGETHER: Final = 64


async def with_copies(
    admin: AsyncAdmin, letters: AsyncIterator[DeadLetter]
) -> AsyncIterator[tuple[DeadLetter, ReceivedMessage | None]]:
    """Each letter with its latest copy; None: it has not been sent again."""
    waiting: list[DeadLetter] = []
    async for letter in letters:
        waiting.append(letter)
        if len(waiting) == _TOGETHER:
            for each in await _looked_up(admin, waiting):
                yield each
            waiting = []
    for each in await _looked_up(admin, waiting):
        yield each


async def copy_of(admin: AsyncAdmin, letter: DeadLetter) -> ReceivedMessage | None:
    """The latest copy that was sent of a letter."""
    unique_id = letter.message.unique_id
    if unique_id is None:
        return None
    found: list[ReceivedMessage] = []
    for topic in (retry_topic(letter.group), letter.topic):
        if topic is not None:
            copies = await admin.messages.copies(topic, unique_id)
            found += (each for each in copies if each.get(RESENT_FROM) == letter.id)
    return max(found, key=lambda each: each.stored_at, default=None)


async def _looked_up(
    admin: AsyncAdmin, letters: Iterable[DeadLetter]
) -> list[tuple[DeadLetter, ReceivedMessage | None]]:
    # The admin itself limits how many requests wait at a time.
    asked = tuple(letters)
    copies = await asyncio.gather(*(copy_of(admin, each) for each in asked))
    return list(zip(asked, copies, strict=True))
