"""Which queues of a topic are whose: every member of a group works it out for itself.

There is no leader. All members see the same queues and the same client ids, put both into the same
order (`in_order`, which is Java's order of strings) and apply the same strategy; the shares are
then disjoint and cover every queue without a word between them. It follows that a strategy must be
a function of its arguments alone, and that ours must give, to the last queue, what Apache's Java
classes give: otherwise a group of mixed languages overlaps and leaves gaps.

A strategy is any callable `(queues, client_ids, me) -> queues`, both lists in order. The six of
Apache's are here and in `machinerooms`; `share` is what a consumer asks.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from orbitmq.client.routes import Queue
from orbitmq.errors import ClientError, SettingError

log = logging.getLogger(__name__)


class Strategy(Protocol):
    """Says which of a topic's queues belong to one member."""

    def __call__(
        self, queues: Sequence[Queue], client_ids: Sequence[str], me: str, /
    ) -> Iterable[Queue]: ...


class AllocationError(ClientError):
    """A strategy that cannot say who owns what, by its name."""

    def __init__(self, strategy: str, problem: str) -> None:
        self.strategy = strategy
        self.problem = problem
        super().__init__(f"allocation strategy {strategy!r}: {problem}")


def share(
    strategy: Strategy, queues: Iterable[Queue], client_ids: Iterable[str], me: str
) -> tuple[Queue, ...]:
    """The queues of `me`, out of `queues`. Raises `AllocationError` whatever the strategy raises.

    A queue that a strategy gives although the topic does not have it (a configured one, say) is
    left out: nobody could pull from it.
    """
    known = in_order(queues)
    ids = sorted(client_ids, key=java_order)
    if not known or me not in ids:
        return ()
    name = name_of(strategy)
    try:
        given = tuple(strategy(known, ids, me))
        topical = set(known)
        return tuple(queue for queue in dict.fromkeys(given) if queue in topical)
    except AllocationError:
        raise
    except Exception as error:
        # Whatever an application's own strategy does, its consumer keeps what it has.
        raise AllocationError(name, f"{type(error).__name__}: {error}") from error


def in_order(queues: Iterable[Queue]) -> list[Queue]:
    """Queues in the order in which every member sees them: topic, broker name, queue id."""
    return sorted(
        queues, key=lambda queue: (java_order(queue.topic), java_order(queue.broker), queue.id)
    )


def java_order(text: str) -> bytes:
    """A key that sorts strings as Java does: by UTF-16 units, not by code points."""
    return text.encode("utf-16-be", "surrogatepass")


def strategy_named(given: str | Strategy, name: str = "strategy") -> Strategy:
    """A strategy by the name that Apache gives it, or the callable itself.

    `name` is that of the parameter, as the user knows it.
    """
    if not isinstance(given, str):
        if not callable(given):
            raise SettingError(
                f"{name} must be a callable or one of {', '.join(NAMED)}, got {given!r}"
            )
        return given
    try:
        return NAMED[given.upper()]
    except KeyError:
        raise SettingError(
            f"{name} must be one of {', '.join(NAMED)}, got {given!r}; strategies with "
            "settings of their own (ByConfig, MachineRoom, MachineRoomNearby) are given as objects"
        ) from None


def name_of(strategy: Strategy) -> str:
    """What a strategy is called in logs and in questions to brokers."""
    name = getattr(strategy, "name", None) or getattr(strategy, "__qualname__", None)
    return name if isinstance(name, str) else type(strategy).__qualname__


def checked_place(
    strategy: str, queues: Sequence[Queue], client_ids: Sequence[str], me: str
) -> int | None:
    """The place of `me` among the members, none when it is not one of them."""
    if not me:
        raise AllocationError(strategy, "the own client id is empty")
    if not queues:
        raise AllocationError(strategy, "there are no queues")
    if not client_ids:
        raise AllocationError(strategy, "there are no client ids")
    try:
        return client_ids.index(me)
    except ValueError:
        log.info(
            "%s is not a member of its group (yet): no queues",
            me,
            extra={"client": me, "strategy": strategy},
        )
        return None


@dataclass(frozen=True, slots=True)
class Averagely:
    """Neighbouring queues in pages of equal size; the first members get one more (the default)."""

    name = "AVG"

    def __call__(
        self, queues: Sequence[Queue], client_ids: Sequence[str], me: str
    ) -> Sequence[Queue]:
        place = checked_place(self.name, queues, client_ids, me)
        if place is None:
            return ()
        if len(queues) <= len(client_ids):
            return queues[place : place + 1]
        size, left = divmod(len(queues), len(client_ids))
        start = place * size + min(place, left)
        return queues[start : start + size + (place < left)]


@dataclass(frozen=True, slots=True)
class AveragelyByCircle:
    """One queue after the other to each member in turn."""

    name = "AVG_BY_CIRCLE"

    def __call__(
        self, queues: Sequence[Queue], client_ids: Sequence[str], me: str
    ) -> Sequence[Queue]:
        place = checked_place(self.name, queues, client_ids, me)
        return () if place is None else queues[place :: len(client_ids)]


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """Queues to the next member on a ring of hashes: a join or leave moves few of them."""

    virtual_nodes: int = 10

    name = "CONSISTENT_HASH"

    def __post_init__(self) -> None:
        if self.virtual_nodes < 1:
            raise SettingError(f"virtual_nodes must be at least 1, got {self.virtual_nodes}")

    def __call__(
        self, queues: Sequence[Queue], client_ids: Sequence[str], me: str
    ) -> Sequence[Queue]:
        if checked_place(self.name, queues, client_ids, me) is None:
            return ()
        ring = HashRing(client_ids, self.virtual_nodes)
        return [queue for queue in queues if ring.owner(queue.java_text) == me]


@dataclass(frozen=True, slots=True)
class ByConfig:
    """Fixed queues, whoever else there is; that members do not overlap is the user's business."""

    queues: tuple[Queue, ...]

    name = "CONFIG"

    def __call__(self, _: Sequence[Queue], __: Sequence[str], ___: str) -> Sequence[Queue]:
        return self.queues


#: The strategies that need no settings of their own, by Apache's names.
NAMED: Mapping[str, Callable[[Sequence[Queue], Sequence[str], str], Sequence[Queue]]] = {
    strategy.name: strategy for strategy in (Averagely(), AveragelyByCircle(), ConsistentHash())
}


# Strategies that look at where brokers and consumers stand.


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """Queues of brokers called `room@name` in given rooms, in pages; what is left over, in turn."""

    rooms: frozenset[str]

    name = "MACHINE_ROOM"

    def __call__(
        self, queues: Sequence[Queue], client_ids: Sequence[str], me: str
    ) -> Sequence[Queue]:
        place = checked_place(self.name, queues, client_ids, me)
        if place is None:
            return ()
        near = [queue for queue in queues if _room(queue.broker) in self.rooms]
        size, left = divmod(len(near), len(client_ids))
        own = near[place * size : (place + 1) * size]
        if place < left:
            own.append(near[size * len(client_ids) + place])
        return own


def _room(broker: str) -> str | None:
    """The room in a broker's name; none unless the name has exactly two parts.

    Parts are counted as Java's `split` does it, which forgets empty ones at the end.
    """
    parts = broker.split("@")
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return parts[0] if len(parts) == 2 else None


@dataclass(frozen=True, slots=True)
class MachineRoomNearby:
    """Queues to consumers of the same room; those of a room without consumers to everybody.

    `room_of_broker` and `room_of_client` say where a broker (by its name) and a consumer (by its
    client id) stand; `inner` shares the queues among those who may have them.
    """

    room_of_broker: Callable[[str], str]
    room_of_client: Callable[[str], str]
    inner: Strategy = field(default_factory=Averagely)

    @property
    def name(self) -> str:
        return f"MACHINE_ROOM_NEARBY-{name_of(self.inner)}"

    def __call__(
        self, queues: Sequence[Queue], client_ids: Sequence[str], me: str
    ) -> Sequence[Queue]:
        if checked_place(self.name, queues, client_ids, me) is None:
            return ()
        queues_by_room = self._by_room(queues, lambda queue: self.room_of_broker(queue.broker))
        clients_by_room = self._by_room(client_ids, self.room_of_client)
        mine = self.room_of_client(me)
        own: list[Queue] = []
        if mine in queues_by_room:
            own += self.inner(queues_by_room.pop(mine), clients_by_room[mine], me)
        for room in sorted(queues_by_room, key=java_order):
            if room not in clients_by_room:
                own += self.inner(queues_by_room[room], client_ids, me)
        return own

    def _by_room(
        self, items: Iterable[Item], room_of: Callable[[Item], str]
    ) -> dict[str, list[Item]]:
        rooms: dict[str, list[Item]] = {}
        for item in items:
            room = room_of(item)
            if not room:
                raise AllocationError(self.name, f"no machine room is known for {item}")
            rooms.setdefault(room, []).append(item)
        return rooms


# A ring of hashes on which every member has several places and a key belongs to the next one.
#
# Apache's ring, to the bit: the hash is the first four bytes of an MD5 digest, a member's places
# are the hashes of `<id>-0`, `<id>-1`, ..., and a place that two members share belongs to the later
# one. A broker lists a client that has two connections twice; its second entry adds further places,
# which are numbered after those that the member still has.


class HashRing:
    """Members on a ring."""

    __slots__ = ("_members", "_places")

    def __init__(self, members: Iterable[str], places_each: int) -> None:
        ring: dict[int, str] = {}
        seen: set[str] = set()
        for member in members:
            first = sum(owner == member for owner in ring.values()) if member in seen else 0
            seen.add(member)
            for number in range(first, first + places_each):
                ring[place_of(f"{member}-{number}")] = member
        self._places = sorted(ring)
        self._members = [ring[place] for place in self._places]

    def owner(self, key: str) -> str:
        """The member with the first place at or after the key's, going round."""
        at = bisect.bisect_left(self._places, place_of(key))
        return self._members[at % len(self._members)]


def place_of(key: str) -> int:
    """Where a key stands on the ring: 0 to 2**32 - 1."""
    # Java writes a lone half of a character as a question mark.
    digest = hashlib.md5(key.encode("utf-8", "replace"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")
