"""Dead letters: what a group could not process, found, grouped and looked at.

A broker of ours keeps why a message died and where it came from (`DLQ_REASON`, `DLQ_ORIGIN_*`);
Apache's keeps the topic and the id of the original, so that letters of its have no reason here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass, field

from orbitmq.client.admin.arguments import whole_number
from orbitmq.client.admin.errors import BadRequest, TopicNotFound
from orbitmq.client.admin.messages import AsyncMessages
from orbitmq.client.admin.moments import Moment, moment
from orbitmq.client.admin.resentmarks import RESENT_TIMES
from orbitmq.client.names import check_group, dead_letter_topic
from orbitmq.client.received import ReceivedMessage
from orbitmq.message.wellknown import (
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
)

#: Why a dead letter is dead.
DLQ_REASON = "DLQ_REASON"

UNKNOWN_REASON = "unknown"
#: Characters of a reason that name a pile.
LONGEST_NAME = 200
#: Letters are counted by their age up to these seconds.
AGES: tuple[tuple[str, float], ...] = (
    ("last hour", 3600.0),
    ("last day", 86_400.0),
    ("last week", 604_800.0),
    ("older", float("inf")),
)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group gave up."""

    group: str
    message: ReceivedMessage

    @property
    def id(self) -> str:
        """Names this letter: the offset id of the copy among the dead letters."""
        return self.message.offset_id

    @property
    def topic(self) -> str | None:
        """The topic that the message was sent to."""
        return self.message.get(DLQ_ORIGIN_TOPIC) or self.message.get(RETRY_TOPIC)

    @property
    def origin_id(self) -> str | None:
        """The offset id of the message as it was sent."""
        return self.message.get(DLQ_ORIGIN_MESSAGE_ID) or self.message.get(ORIGIN_MESSAGE_ID)

    @property
    def reason(self) -> str:
        """What went wrong, as the consumer said it."""
        return self.message.get(DLQ_REASON, UNKNOWN_REASON)

    @property
    def pile(self) -> str:
        """The letters that it lies with: the first line of its reason names them."""
        lines = self.reason.strip().splitlines()
        return lines[0].strip()[:LONGEST_NAME] if lines else UNKNOWN_REASON

    @property
    def attempts(self) -> int:
        """How often it was tried."""
        return self.message.reconsume_times

    @property
    def died_at(self) -> float:
        return self.message.stored_at

    @property
    def keys(self) -> tuple[str, ...]:
        return self.message.keys

    @property
    def resent_times(self) -> int:
        """How often it had been sent again before it died this time."""
        text = self.message.get(RESENT_TIMES, "0")
        return int(text) if text.isdecimal() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """Which dead letters. Everything that is given must hold."""

    since: Moment | None = None  #: died at or after
    until: Moment | None = None  #: died before
    keys: Collection[str] = ()  #: has one of these keys
    topic: str | None = None  #: was sent to this topic
    reason: str | None = None  #: its reason contains this, in any case
    pile: str | None = None  #: the first line of its reason is this, as `DeadLetter.pile` has it
    min_attempts: int | None = None
    max_attempts: int | None = None
    ids: Collection[str] = ()  #: is one of these letters, by `DeadLetter.id` or unique id

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            value = getattr(self, name)
            if value is not None:
                moment(value, f"filter.{name}")
        for name in ("min_attempts", "max_attempts"):
            value = getattr(self, name)
            if value is not None:
                whole_number(f"filter.{name}", value, 0)
        for name in ("keys", "ids"):
            if isinstance(getattr(self, name), str):
                raise BadRequest(f"filter.{name} must be several texts, not one")

    def matches(self, letter: DeadLetter) -> bool:
        """Whether a letter is meant; the times are not looked at here."""
        if self.keys and not set(self.keys).intersection(letter.keys):
            return False
        if self.topic is not None and letter.topic != self.topic:
            return False
        if self.reason is not None and self.reason.lower() not in letter.reason.lower():
            return False
        if self.pile is not None and letter.pile != self.pile:
            return False
        if self.min_attempts is not None and letter.attempts < self.min_attempts:
            return False
        if self.max_attempts is not None and letter.attempts > self.max_attempts:
            return False
        return not self.ids or letter.id in self.ids or letter.message.unique_id in self.ids


@dataclass(frozen=True, slots=True)
class Pile:
    """Dead letters that have something in common."""

    name: str
    count: int
    first_died_at: float
    last_died_at: float
    #: The latest of them.
    sample: DeadLetter


@dataclass(frozen=True, slots=True)
class DeadLetterSummary:
    """The dead letters of a group, in piles; the largest pile first."""

    group: str
    count: int
    by_reason: tuple[Pile, ...]
    by_topic: tuple[Pile, ...]
    by_age: tuple[Pile, ...]


class AsyncDeadLetterReading:
    """Finds dead letters."""

    def __init__(self, messages: AsyncMessages, now: Callable[[], float]) -> None:
        self._messages = messages
        self._now = now

    async def list(
        self,
        group: str,
        where: DeadLetterFilter | None = None,
        *,
        newest_first: bool = False,
    ) -> AsyncGenerator[DeadLetter, None]:
        """The dead letters of a group by the time of their death; none when there is no topic."""
        check_group(group)
        chosen = where or DeadLetterFilter()
        try:
            async for message in self._messages.browse(
                dead_letter_topic(group),
                since=chosen.since,
                until=chosen.until,
                newest_first=newest_first,
            ):
                letter = DeadLetter(group, message)
                if chosen.matches(letter):
                    yield letter
        except TopicNotFound:
            # The topic is made for the first letter.
            return

    async def sample(
        self, group: str, count: int = 1, where: DeadLetterFilter | None = None
    ) -> tuple[DeadLetter, ...]:
        """The latest letters, to look at."""
        whole_number("count", count, 1)
        found: list[DeadLetter] = []
        async for letter in self.list(group, where, newest_first=True):
            found.append(letter)
            if len(found) == count:
                break
        return tuple(found)

    async def summary(self, group: str, where: DeadLetterFilter | None = None) -> DeadLetterSummary:
        """How many letters there are of each reason, topic and age."""
        reasons, topics, ages = _Piles(), _Piles(), _Piles()
        now = self._now()
        count = 0
        async for letter in self.list(group, where):
            count += 1
            reasons.add(letter.pile, letter)
            topics.add(letter.topic or UNKNOWN_REASON, letter)
            age = now - letter.died_at
            ages.add(next(name for name, limit in AGES if age < limit), letter)
        return DeadLetterSummary(group, count, reasons.all(), topics.all(), ages.all())


@dataclass(slots=True)
class _Piles:
    """Sorts letters into piles."""

    piles: dict[str, Pile] = field(default_factory=dict)

    def add(self, name: str, letter: DeadLetter) -> None:
        pile = self.piles.get(name)
        died = letter.died_at
        if pile is None:
            self.piles[name] = Pile(name, 1, died, died, letter)
        else:
            # Letters come by their time.
            self.piles[name] = Pile(name, pile.count + 1, pile.first_died_at, died, letter)

    def all(self) -> tuple[Pile, ...]:
        return tuple(sorted(self.piles.values(), key=lambda pile: (-pile.count, pile.name)))
