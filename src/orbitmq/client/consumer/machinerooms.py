"""Strategies that look at where brokers and consumers stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from orbitmq.client.consumer.allocation import (
    AllocationError,
    Averagely,
    Strategy,
    checked_place,
    java_order,
    name_of,
)
from orbitmq.client.queue import Queue

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
