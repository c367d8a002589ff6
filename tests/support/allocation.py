"""Generated questions to allocation strategies, the same ones for Java and for us.

Only `Random.random` is used, whose sequence for a seed Python promises to keep; a digest of the
questions lies beside the recorded answers all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from orbitmq.client.consumer import strategies
from orbitmq.client.routes import Queue

RECORDED = Path(__file__).parents[1] / "data" / "allocation.json.gz"
SEED = 20261115
CASES = 10_000

MOST_CLIENTS = 64
MOST_QUEUES = 256


@dataclass(frozen=True, slots=True)
class Case:
    """One question: which of these queues are mine?"""

    #: A name, and the strategy's settings after a colon where it has some.
    strategy: str
    me: str
    #: Neither list is in order: putting them into order is part of the question.
    client_ids: tuple[str, ...]
    queues: tuple[Queue, ...]

    @property
    def line(self) -> str:
        """As ``java/Allocation.java`` reads it."""
        queues = ",".join(f"{queue.broker}:{queue.id}" for queue in self.queues)
        topic = self.queues[0].topic if self.queues else ""
        return "\t".join((self.strategy, self.me, ",".join(self.client_ids), topic, queues))


def cases() -> Iterator[Case]:
    """All questions, one after the other."""
    chance = Random(SEED)
    for _ in range(CASES):
        yield _case(_Dice(chance))


def digest(questions: Sequence[Case]) -> str:
    """What changes when any question does."""
    text = "\n".join(question.line for question in questions)
    return hashlib.sha256(text.encode()).hexdigest()


def strategy_of(case: Case) -> strategies.Strategy:
    """Our strategy that a question is meant for."""
    return _strategy(case.strategy, case.queues)


def room_of(name: str) -> str:
    """The room is what stands before the first full stop."""
    return name[: max(name.find("."), 0)]


def _strategy(text: str, queues: Sequence[Queue]) -> strategies.Strategy:
    name, _, settings = text.partition(":")
    words = settings.split(",") if settings else []
    if name == "CONSISTENT_HASH":
        return strategies.ConsistentHash(virtual_nodes=int(settings))
    if name == "CONFIG":
        return strategies.ByConfig(tuple(queues[int(place)] for place in words))
    if name == "MACHINE_ROOM":
        return strategies.MachineRoom(frozenset(words))
    if name == "MACHINE_ROOM_NEARBY":
        return strategies.MachineRoomNearby(room_of, room_of, _strategy(settings, queues))
    return strategies.Averagely() if name == "AVG" else strategies.AveragelyByCircle()


class _Dice:
    """Choices made with `Random.random` alone."""

    def __init__(self, chance: Random) -> None:
        self._random = chance.random

    def below(self, limit: int) -> int:
        return int(self._random() * limit)

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def of(self, items: Sequence[str]) -> str:
        return items[self.below(len(items))]

    def small(self, most: int) -> int:
        """Up to `most`, small numbers more often: that is where the edges are."""
        return self.between(0, min(most, 2 ** self.between(1, most.bit_length())))

    def shuffled(self, items: Sequence[str]) -> list[str]:
        keyed = sorted((self._random(), place) for place in range(len(items)))
        return [items[place] for _, place in keyed]


_ROOMS = ("r1", "r2", "r3", "")
#: Java compares strings by UTF-16 units: the face sorts before the ligature there, after it here.
_ODD = ("", "", "", "", "\U0001f600", "\ufb01")


def _case(dice: _Dice) -> Case:
    kind = dice.of(
        (
            *("AVG", "AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH", "CONSISTENT_HASH"),
            *("CONFIG", "MACHINE_ROOM", "MACHINE_ROOM_NEARBY"),
        )
    )
    is_nearby = kind == "MACHINE_ROOM_NEARBY"
    clients = [_client(dice, is_nearby) for _ in range(max(1, dice.small(MOST_CLIENTS)))]
    if dice.below(20) == 0:
        clients.append(clients[0])
    me = "somebody else" if dice.below(50) == 0 else dice.of(clients)
    topic = dice.of(("orders", "%RETRY%billing", "a|b-c_d"))
    queues = _queues(dice, topic, kind)
    return Case(_settled(dice, kind, len(queues)), me, tuple(dice.shuffled(clients)), queues)


def _client(dice: _Dice, is_nearby: bool) -> str:
    room = f"{dice.of(_ROOMS[:3])}." if is_nearby else ""
    if is_nearby and dice.below(2000) == 0:
        room = ""
    address = ".".join(str(dice.below(256)) for _ in range(4))
    return f"{room}{address}@{dice.between(1, 40_000)}#{dice.below(10**15)}{dice.of(_ODD)}"


def _queues(dice: _Dice, topic: str, kind: str) -> tuple[Queue, ...]:
    total = dice.small(MOST_QUEUES)
    brokers = dice.between(1, 5)
    found: list[Queue] = []
    for number in range(brokers):
        name = f"{_prefix(dice, kind)}broker-{number}{dice.of(_ODD)}"
        if kind == "MACHINE_ROOM" and dice.below(10) == 0:
            name += dice.of(("@", "@x", "@@"))
        found += [Queue(topic, name, place) for place in range(-(-total // brokers))]
    by_text = {f"{queue.broker}:{queue.id}": queue for queue in found[:total]}
    return tuple(by_text[text] for text in dice.shuffled(list(by_text)))


def _prefix(dice: _Dice, kind: str) -> str:
    if kind == "MACHINE_ROOM":
        return dice.of(("r1@", "r2@", "r3@", "@", ""))
    if kind == "MACHINE_ROOM_NEARBY":
        return f"{dice.of((*_ROOMS[:3], 'r4', 'r5'))}."
    return ""


def _settled(dice: _Dice, kind: str, queues: int) -> str:
    """A strategy with its settings."""
    if kind == "CONSISTENT_HASH":
        return f"{kind}:{dice.of(('1', '10', '10', '10', '64'))}"
    if kind == "CONFIG":
        places = dice.shuffled([str(place) for place in range(queues)])
        return f"{kind}:{','.join(places[: dice.below(queues + 1)])}"
    if kind == "MACHINE_ROOM":
        return f"{kind}:{','.join(dice.shuffled(_ROOMS)[: dice.between(1, 3)])}"
    if kind == "MACHINE_ROOM_NEARBY":
        return f"{kind}:{dice.of(('AVG', 'AVG_BY_CIRCLE', 'CONSISTENT_HASH:10'))}"
    return kind
