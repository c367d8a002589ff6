"""Whether dead letters have been dealt with: the copies that were made when they were sent again.

A letter stays where it is when it is sent again: nothing can be taken out of a queue. The copy says
which letter it was made of (`DLQ_RESENT_FROM`), and is found by the unique id that both have, in
the group's retry topic or in the topic it was sent to. That is the one record of it, whoever sent
it: command, console or a program. A copy is younger than its letter, so that it is not deleted
before it.

Who may look after a group's letters need not have the right to read the topics they came from. Such
a topic is left out: then it is known of the retry topic alone that there is no copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from typing import Final, Self

from orbitmq.client.admin.deadletters import DeadLetter
from orbitmq.client.admin.messages import AsyncMessages
from orbitmq.client.admin.resentmarks import RESENT_FROM
from orbitmq.client.admin.topology import BrokerNode
from orbitmq.client.names import retry_topic
from orbitmq.client.received import ReceivedMessage

#: Letters that are looked up together.
_TOGETHER: Final = 64


@dataclass(frozen=True, slots=True)
class LetterTrace:
    """What is needed to look for a letter's copies; small, to be kept."""

    letter_id: str
    unique_id: str | None
    #: Where copies of it are that only its group gets.
    retry: str
    #: The topic that it was sent to, where others get a copy as well.
    origin: str | None
    died_at: float

    @classmethod
    def of(cls, letter: DeadLetter) -> Self:
        return cls(
            letter.id,
            letter.message.unique_id,
            retry_topic(letter.group),
            letter.topic,
            letter.died_at,
        )

    @property
    def topics(self) -> tuple[str, ...]:
        """Where copies of it may be."""
        return (self.retry,) if self.origin is None else (self.retry, self.origin)

    async def copy(
        self,
        messages: AsyncMessages,
        *,
        topics: Collection[str] | None = None,
        brokers: Collection[BrokerNode] | None = None,
        needed: str | None = None,
    ) -> ReceivedMessage | None:
        """The latest copy that was sent of the letter; None: it has not been sent again.

        `topics` are those to look into, all by default, and `brokers` those to ask. An origin that
        may not be read is left out, unless it is the topic that is `needed`: then `BrokerRefused`
        is raised, if no broker shows a copy.
        """
        if self.unique_id is None:
            return None
        found: list[ReceivedMessage] = []
        for topic in self.topics if topics is None else topics:
            copies, refusal = await messages.readable_copies(topic, self.unique_id, brokers=brokers)
            made = [each for each in copies if each.get(RESENT_FROM) == self.letter_id]
            # One that is seen tells that it was sent again, whoever else does not show theirs.
            if refusal is not None and not made and topic in (self.retry, needed):
                raise refusal
            found += made
        return max(found, key=lambda each: each.stored_at, default=None)


async def copy_of(
    messages: AsyncMessages, letter: DeadLetter, *, needed: str | None = None
) -> ReceivedMessage | None:
    """The latest copy that was sent of a letter; None: it has not been sent again."""
    return await LetterTrace.of(letter).copy(messages, needed=needed)


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
