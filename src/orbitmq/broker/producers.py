"""Which producers are there: for transaction checks, replies and connection lists.

A producer is of interest only while it is connected, so the table is what heartbeats say, less what
left, closed its connection or has been silent for `CLIENT_LIFE`. Nobody is notified of anything.
Instants are seconds of a clock that never goes back.

A client is in a handful of groups, and one that misbehaves may name half a million in a heartbeat.
So a connection has room for `PRODUCER_GROUPS` of them, and whatever happens to it costs as much as
the groups that it is in, not their square.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orbitmq.broker.clients import CLIENT_LIFE, Channel, Client
from orbitmq.wire.bodies.membership import ProducerConnection, ProducerInfo

#: Groups that one connection may be in; a busy application server has dozens.
PRODUCER_GROUPS = 2_000
#: Characters of a group's name. Clients allow 255; nothing here depends on which characters.
LONGEST_NAME = 255


@dataclass(slots=True)
class _Producer:
    client: Client
    heard_at: float


class ProducerTable:
    """The producers that are connected, by group."""

    def __init__(self, *, life: float = CLIENT_LIFE, most: int = PRODUCER_GROUPS) -> None:
        """`most` is the number of groups that one connection may be in."""
        self._life = life
        self.most = most
        self._groups: dict[str, dict[Channel, _Producer]] = {}
        self._of_channel: dict[Channel, set[str]] = {}
        #: The connections of each client id, who came last last, with how many groups each is in.
        self._of_client: dict[str, dict[Channel, int]] = {}
        self._turns: dict[str, int] = {}

    def has_room(self, group: str, channel: Channel) -> bool:
        """Whether the connection is in this group, or may join it."""
        groups = self._of_channel.get(channel)
        if groups is not None and (group in groups or len(groups) >= self.most):
            return group in groups
        return len(group) <= LONGEST_NAME

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
        channels[channel] = channels.pop(channel, 0) + 1
        return True

    def leave(self, group: str, channel: Channel) -> bool:
        """Forget a producer that says goodbye; whether it was known."""
        return self._remove(group, channel)

    def close(self, channel: Channel) -> frozenset[str]:
        """Forget what came over a connection that is closed; the groups that it was in."""
        groups = frozenset(self._of_channel.pop(channel, ()))
        for group in groups:
            self._forget(group, channel)
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

    def channels(self, group: str) -> tuple[Channel, ...]:
        """The connections of a group; some may be closed, and not be known to be so yet."""
        return tuple(self._groups.get(group, ()))

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

    def clients(self, group: str) -> tuple[Client, ...]:
        """The producers of a group."""
        return tuple(producer.client for producer in self._groups.get(group, {}).values())

    def infos(self, group: str, *, now: float, wall: float) -> tuple[ProducerInfo, ...]:
        """A group's part of GET_ALL_PRODUCER_INFO; `wall` is the time of day at `now`."""
        return tuple(
            producer.client.producer_info(wall - (now - producer.heard_at))
            for producer in self._groups.get(group, {}).values()
        )

    def _remove(self, group: str, channel: Channel) -> bool:
        groups = self._of_channel.get(channel)
        if groups is None or group not in groups:
            return False
        groups.discard(group)
        if not groups:
            del self._of_channel[channel]
        self._forget(group, channel)
        return True

    def _forget(self, group: str, channel: Channel) -> None:
        """Let go of a producer, whose connection is not in the group any more."""
        members = self._groups[group]
        producer = members.pop(channel)
        if not members:
            del self._groups[group]
            self._turns.pop(group, None)
        self._forget_client(producer.client.id, channel)

    def _forget_client(self, client_id: str, channel: Channel) -> None:
        """Let go of a way to a client, unless it still has this connection in another group.

        A client that came back over a new connection keeps that one: closing the old connection
        late must not make it unreachable, as it does in Apache's broker.
        """
        channels = self._of_client[client_id]
        if channels[channel] > 1:
            channels[channel] -= 1
            return
        del channels[channel]
        if not channels:
            del self._of_client[client_id]
