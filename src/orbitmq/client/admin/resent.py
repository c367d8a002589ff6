"""Whether dead letters have been dealt with: the copies that were made when they were sent again.

A letter stays where it is when it is sent again: nothing can be taken out of a queue. The copy says
which letter it was made of (`DLQ_RESENT_FROM`), and is found by the unique id that both have, in
the group's retry topic or in the topic it was sent to. That is the one record of it, whoever sent
it: command, console or a program. A copy is younger than its letter, so that it is not deleted
before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Final, Self

from orbitmq.client.admin.deadletters import RESENT_FROM, DeadLetter
from orbitmq.client.admin.messages import AsyncMessages
from orbitmq.client.names import retry_topic
from orbitmq.client.received import ReceivedMessage

#: Letters that are looked up together.
_TOGETHER: Final = 64


@dataclass(frozen=True, slots=True)
class LetterTrace:
    """What is needed to look for a letter's copies; small, to be kept."""

    letter_id: str
    unique_id: str | None
    #: Where copies of it may be.
    topics: tuple[str, ...]
    died_at: float

    @classmethod
    def of(cls, letter: DeadLetter) -> Self:
        topics = (retry_topic(letter.group), letter.topic)
        return cls(
            letter.id,
            letter.message.unique_id,
            tuple(topic for topic in topics if topic is not None),
            letter.died_at,
        )

    async def copy(self, messages: AsyncMessages) -> ReceivedMessage | None:
        """The latest copy that was sent of the letter; None: it has not been sent again."""
        if self.unique_id is None:
            return None
        found = [
            each
            for topic in self.topics
            for each in await messages.copies(topic, self.unique_id)
            if each.get(RESENT_FROM) == self.letter_id
        ]
        return max(found, key=lambda each: each.stored_at, default=None)


async def copy_of(messages: AsyncMessages, letter: DeadLetter) -> ReceivedMessage | None:
    """The latest copy that was sent of a letter; None: it has not been sent again."""
    return await LetterTrace.of(letter).copy(messages)


async def with_copies(
    messages: AsyncMessages, letters: AsyncIterator[DeadLetter]
) -> AsyncIterator[tuple[DeadLetter, ReceivedMessage | None]]:
    """Each letter with its latest copy; None: it has not been sent again."""
    waiting: list[DeadLetter] = []
    async for letter in letters:
        waiting.append(letter)
        if len(waiting) == _TOGETHER:
            for each in await looked_up(messages, waiting):
                yield each
            waiting = []
    for each in await looked_up(messages, waiting):
        yield each


async def looked_up(
    messages: AsyncMessages, letters: Iterable[DeadLetter]
) -> list[tuple[DeadLetter, ReceivedMessage | None]]:
    """The same of a few letters at once."""
    # The admin itself limits how many requests wait at a time.
    asked = tuple(letters)
    copies = await asyncio.gather(*(copy_of(messages, each) for each in asked))
    return list(zip(asked, copies, strict=True))
