"""Which producers are there: for transaction checks, replies and connection lists.

A producer is of interest only while it is connected, so the table is what heartbeats say, less what
left, closed its connection or has been silent for `CLIENT_LIFE`. Nobody is notified of anything.
Instants are seconds of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orbitmq.broker.clients import CLIENT_LIFE, Channel, Client
from orbitmq.wire.bodies.membership import ProducerConnection
from orbitmq.wire.bodies.membership import ProducerTable as ProducerTableBody


@dataclass(slots=True)
class _Producer:
    client: Client
    heard_at: float


class ProducerTable:
    """The producers that are connected, by group."""

    def __init__(self, *, life: float = CLIENT_LIFE) -> None:
        self._life = life
        self._groups: dict[str, dict[Channel, _Producer]] = {}
        self._of_channel: dict[Channel, set[str]] = {}
        #: The connections of each client id, who came last last.
        self._of_client: dict[str, dict[Channel, None]] = {}
        self._turns: dict[str, int] = {}

    def heartbeat(self, group: str, channel: Channel, client: Client, now: float) -> bool:
        """Note that a producer is there; whether it is new."""
        members = self._groups.get(group)
        known = None if members is None else members.get(channel)
        if known is not None and known.client.id == client.id:
            known.heard_at = now
            return False
        if known is not None:
            self._remove(group, channel)
        self._groups.setdefault(group, {})[channel] = _Producer(client, now)
        self._of_channel.setdefault(channel, set()).add(group)
        channels = self._of_client.setdefault(client.id, {})
        channels.pop(channel, None)
        channels[channel] = None
        return True

    def leave(self, group: str, channel: Channel) -> bool:
        """Forget a producer that says goodbye; whether it was known."""
        return self._remove(group, channel)

    def close(self, channel: Channel) -> frozenset[str]:
        """Forget what came over a connection that is closed; the groups that it was in."""
        groups = frozenset(self._of_channel.get(channel, ()))
        for group in groups:
            self._remove(group, channel)
        return groups

    def expire(self, now: float) -> tuple[Channel, ...]:
        """Forget who has been silent for too long; the connections to be closed."""
        silent = dict.fromkeys(
            channel
            for members in self._groups.values()
            for channel, producer in members.items()
            if now - producer.heard_at > self._life
        )
        for channel in silent:
            self.close(channel)
        return tuple(silent)

    def choose(
        self,
        group: str,
        *,
        is_active: Callable[[Channel], bool],
        is_writable: Callable[[Channel], bool],
    ) -> Channel | None:
        """A connection of the group to ask about a transaction, another one each time.

        One that is active and takes more bytes, else one that is at least active. Apache tries
        three; we try all, so that a live one is found behind any number of dead ones.
        """
        members = self._groups.get(group)
        if not members:
            return None
        channels = list(members)
        turn = self._turns.get(group, 0)
        self._turns[group] = turn + 1
        start = turn % len(channels)
        fallback: Channel | None = None
        for channel in channels[start:] + channels[:start]:
            if not is_active(channel):
                continue
            if is_writable(channel):
                return channel
            fallback = channel if fallback is None else fallback
        return fallback

    def channels_of(self, client_id: str) -> tuple[Channel, ...]:
        """The connections of a client, to push a reply over; the one that came last is last.

        There are several if it came back over a new one, or if two clients have the same id.
        """
        return tuple(self._of_client.get(client_id, ()))

    def is_online(self, group: str) -> bool:
        return group in self._groups

    def groups(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def connections(self, group: str) -> ProducerConnection | None:
        """The body for GET_PRODUCER_CONNECTION_LIST; None when nobody is there."""
        members = self._groups.get(group)
        if members is None:
            return None
        return ProducerConnection(
            connection_set=tuple(producer.client.connection() for producer in members.values())
        )

    def all_producers(self, *, now: float, wall: float) -> ProducerTableBody:
        """The body for GET_ALL_PRODUCER_INFO; `wall` is the time of day at `now`."""
        return ProducerTableBody(
            data={
                group: tuple(
                    producer.client.producer_info(wall - (now - producer.heard_at))
                    for producer in members.values()
                )
                for group, members in self._groups.items()
            }
        )

    def _remove(self, group: str, channel: Channel) -> bool:
        members = self._groups.get(group)
        producer = None if members is None else members.pop(channel, None)
        if members is None or producer is None:
            return False
        if not members:
            del self._groups[group]
            self._turns.pop(group, None)
        groups = self._of_channel[channel]
        groups.discard(group)
        if not groups:
            del self._of_channel[channel]
        self._forget_client(producer.client.id, channel)
        return True

    def _forget_client(self, client_id: str, channel: Channel) -> None:
        """Let go of a way to a client, unless it still has this connection in another group.

        A client that came back over a new connection keeps that one: closing the old connection
        late must not make it unreachable, as it does in Apache's broker.
        """
        for group in self._of_channel.get(channel, ()):
            if self._groups[group][channel].client.id == client_id:
                return
        channels = self._of_client[client_id]
        del channels[channel]
        if not channels:
            del self._of_client[client_id]
