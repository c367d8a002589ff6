"""Allocation strategies: which queues of a topic belong to which member of a group.

There is no leader. All members see the same queues and client ids, sort both in the same order
(`in_order`, Java's order of strings) and apply the same strategy. So the shares are disjoint and
cover every queue. A strategy must depend on its arguments only, and ours must return exactly what
Apache's Java classes return, for groups of mixed languages.

A strategy is any callable `(queues, client_ids, me) -> queues`. Consumers call `share`.
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
from orbitmq.javahash import java_order

log = logging.getLogger(__name__)


class Strategy(Protocol):
    """Computes the queues of one member."""

    def __call__(
        self, queues: Sequence[Queue], client_ids: Sequence[str], me: str, /
    ) -> Iterable[Queue]: ...


class AllocationError(ClientError):
    """A strategy cannot compute a share."""

    def __init__(self, strategy: str, problem: str) -> None:
        self.strategy = strategy
        self.problem = problem
        super().__init__(f"allocation strategy {strategy!r}: {problem}")


def share(
    strategy: Strategy, queues: Iterable[Queue], client_ids: Iterable[str], me: str
) -> tuple[Queue, ...]:
    """The queues of `me`, out of `queues`. Raises `AllocationError` whatever the strategy raises.

    Queues that the topic does not have are left out, for example configured ones.
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
        # Whatever an application's strategy raises, its consumer keeps its queues.
        raise AllocationError(name, f"{type(error).__name__}: {error}") from error


def in_order(queues: Iterable[Queue]) -> list[Queue]:
    """Queues in the order in which every member sees them: topic, broker name, queue id."""
    return sorted(
        queues, key=lambda queue: (java_order(queue.topic), java_order(queue.broker), queue.id)
    )


def strategy_named(given: str | Strategy, name: str = "strategy") -> Strategy:
    """The strategy of a name that Apache uses, or the callable itself.

    `name` is the parameter's name for errors.
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
    """The name of a strategy in logs and requests to brokers."""
    name = getattr(strategy, "name", None) or getattr(strategy, "__qualname__", None)
    return name if isinstance(name, str) else type(strategy).__qualname__


def checked_place(
    strategy: str, queues: Sequence[Queue], client_ids: Sequence[str], me: str
) -> int | None:
    """The index of `me` among the members; None if it is not among them."""
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
    """Adjacent queues in pages of equal size; the first members get one more (the default)."""

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
    """Queues to the next member on a hash ring: a join or leave moves few of them."""

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
    """Fixed queues, whatever the other members have; overlaps are the user's responsibility."""

    queues: tuple[Queue, ...]

    name = "CONFIG"

    def __call__(self, _: Sequence[Queue], __: Sequence[str], ___: str) -> Sequence[Queue]:
        return self.queues


#: The strategies that need no settings of their own, by Apache's names.
NAMED: Mapping[str, Callable[[Sequence[Queue], Sequence[str], str], Sequence[Queue]]] = {
    strategy.name: strategy for strategy in (Averagely(), AveragelyByCircle(), ConsistentHash())
}


# ---- machine rooms


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """Queues of brokers named `room@name` in given rooms, in pages; the remainder in turn."""

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
    """The room in a broker's name; None unless the name has exactly two parts.

    Parts are counted as by Java's `split`, which drops empty ones at the end.
    """
    parts = broker.split("@")
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return parts[0] if len(parts) == 2 else None


@dataclass(frozen=True, slots=True)
class MachineRoomNearby:
    """Queues to consumers of the same room; queues of a room without consumers to all.

    `room_of_broker` and `room_of_client` return the room of a broker's name and of a client id;
    `inner` divides the queues of a room.
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


# ---- hash ring


class HashRing:
    """A hash ring with several places for each member, equal to Apache's.

    The hash is the first four bytes of MD5, the places of a member are the hashes of `<id>-0`,
    `<id>-1`, ..., and a place of two members belongs to the later one. A client id that is listed
    twice gets further places.
    """

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
        """The member with the first place at or after the key's, cyclically."""
        at = bisect.bisect_left(self._places, place_of(key))
        return self._members[at % len(self._members)]


def place_of(key: str) -> int:
    """The place of a key on the ring: 0 to 2**32 - 1."""
    # Java encodes a lone surrogate as a question mark.
    digest = hashlib.md5(key.encode("utf-8", "replace"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")
