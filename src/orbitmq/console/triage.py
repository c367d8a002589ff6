"""Dead letters sorted by what killed them: the exception and its first line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from orbitmq.client.admin import DeadLetter

#: Letters that are looked at, the newest first; of more than that it is said how many were left.
LOOKED_AT = 20_000


@dataclass(slots=True)
class Reason:
    """A pile of letters with the same reason."""

    name: str
    count: int = 0
    first_died_at: float = 0.0
    last_died_at: float = 0.0
    #: How often letters of it were sent again and died again.
    resent: int = 0
    topics: dict[str, int] = field(default_factory=dict)
    #: The newest.
    sample: DeadLetter | None = None
    #: By age: within the hour, the day, the week, and before.
    ages: list[int] = field(default_factory=lambda: [0, 0, 0, 0])


@dataclass(slots=True)
class Triage:
    """The letters of a group, in piles."""

    count: int = 0
    is_complete: bool = True
    reasons: dict[str, Reason] = field(default_factory=dict)

    @property
    def piles(self) -> list[Reason]:
        """The largest first."""
        return sorted(self.reasons.values(), key=lambda pile: (-pile.count, pile.name))


_AGES = (3600.0, 86_400.0, 604_800.0)


async def triage(letters: AsyncIterator[DeadLetter], now: float) -> Triage:
    """Sort letters, which come the newest first."""
    found = Triage()
    async for letter in letters:
        if found.count == LOOKED_AT:
            found.is_complete = False
            break
        found.count += 1
        _add(found.reasons, letter, now)
    return found


def _add(piles: dict[str, Reason], letter: DeadLetter, now: float) -> None:
    name = letter.pile
    pile = piles.get(name)
    if pile is None:
        pile = piles[name] = Reason(name, sample=letter, last_died_at=letter.died_at)
    pile.count += 1
    pile.first_died_at = letter.died_at
    pile.resent += letter.resent_times > 0
    topic = letter.topic or "unknown"
    pile.topics[topic] = pile.topics.get(topic, 0) + 1
    pile.ages[_place(_AGES, now - letter.died_at)] += 1


def _place(limits: Iterable[float], age: float) -> int:
    return sum(age >= limit for limit in limits)
