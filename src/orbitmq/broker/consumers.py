"""Which consumers are there and what their groups subscribe to.

The table is a function of the last heartbeat of every live member, nothing else:

* a group has the members whose connections are open and were heard of within `CLIENT_LIFE`;
* it subscribes to every topic that some member names;
* its subscription to a topic is the one with the highest version among those members; of two with
  the same version the one that was there first;
* how it consumes (type, model, where from) is what was said last.

Apache's broker keeps the last heartbeat's topics instead, so that two members with different
subscriptions undo each other's with every heartbeat, all members are notified each time, and
pulls are refused in between; and it keeps the subscription of a member that has left. Groups
whose members agree behave the same in both. Whether they agree is looked at in `disagreements`.

Every change comes back as a value that says whom to notify. Apache's broker does not tell the
others when a silent member expires; here they are told (they would wait for their own rebalance
otherwise).

A connection has room for what its groups say (`connection_room`): whoever makes up groups, or
topics, without end does not use up the memory. Whether something was left out is remembered, for
the pulls that miss it.

A heartbeat that says what the one before said costs few lookups and comparisons; there are many of
them and hardly any others. Channels are opaque. Instants are seconds of a clock that
never goes back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from orbitmq.broker.clients import CLIENT_LIFE, Channel, Client
from orbitmq.broker.consumergroup import ConsumerGroup, Member, fitting
from orbitmq.wire.bodies.membership import (
    ConsumerConnection,
    ConsumerData,
    ConsumerList,
    MessageModel,
    SubscriptionData,
)

log = logging.getLogger(__name__)

#: How long a subscription that came with a pull is remembered, and of how many characters all are.
COMPENSATION_LIFE = 600.0
COMPENSATION_ROOM = 16 * 1024 * 1024
#: Bytes, about, that the groups of one connection take: eighty thousand subscriptions to all tags,
#: or four hundred to a thousand tags each.
CONNECTION_ROOM = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """What an event did to a group, and who is to be told (NOTIFY_CONSUMER_IDS_CHANGED).

    Topics are in the order of the heartbeat: whose pulls are looked at first has its expression
    compiled first, and of too many the last have to wait.
    """

    group: str
    notify: tuple[Channel, ...] = ()
    joined: tuple[Client, ...] = ()
    left: tuple[Client, ...] = ()
    topics_added: tuple[str, ...] = ()
    topics_removed: tuple[str, ...] = ()
    #: Topics of which other messages are wanted now; not by itself a reason to notify.
    topics_replaced: tuple[str, ...] = ()
    #: Topics of which the same messages are wanted under another version: nobody's business.
    topics_renewed: tuple[str, ...] = ()
    #: Whether nobody is left.
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatResult:
    """What a heartbeat did."""

    change: GroupChange | None
    #: Whether a client that sends short heartbeats has to send a full one next.
    wants_subscriptions: bool = False


_NOTHING_NEW = HeartbeatResult(None)
_TELL_US = HeartbeatResult(None, wants_subscriptions=True)


class ConsumerTable:
    """The consumers that are connected, by group."""

    def __init__(
        self,
        *,
        life: float = CLIENT_LIFE,
        compensation_life: float = COMPENSATION_LIFE,
        compensation_room: int = COMPENSATION_ROOM,
        connection_room: int = CONNECTION_ROOM,
    ) -> None:
        self._life = life
        self._compensation_life = compensation_life
        self._compensation_room = compensation_room
        self._groups: dict[str, ConsumerGroup] = {}
        #: Bytes, about, that one connection may take.
        self.connection_room = connection_room
        #: Connections of whose last full heartbeat something was left out.
        self._crowded: set[Channel] = set()
        self._of_channel: dict[Channel, set[str]] = {}
        #: Bytes that each connection takes.
        self._said: dict[Channel, int] = {}
        self._of_topic: dict[str, set[str]] = {}
        #: Who was noted last is last.
        self._compensations: dict[tuple[str, str], tuple[SubscriptionData, float]] = {}
        self._compensated = 0  #: characters of them
        self._touched: set[str] = set()
        #: Counts what may change the answer to a pull: members, subscriptions, models.
        self.revision = 0

    # Events.

    def within_room(self, channel: Channel, data: ConsumerData) -> ConsumerData | None:
        """What of a heartbeat the connection has room for; None: not even for the group."""
        group = self._groups.get(data.group_name)
        member = None if group is None else group.members.get(channel)
        if member is not None and member.data == data:
            return data
        said = self._said.get(channel, 0) - (0 if member is None else member.size)
        return fitting(data, self.connection_room - said)

    def note_crowded(self, channel: Channel, *, is_crowded: bool) -> None:
        """Whether a connection had no room for something that its last full heartbeat said."""
        if is_crowded:
            self._crowded.add(channel)
        else:
            self._crowded.discard(channel)

    def heartbeat(
        self,
        channel: Channel,
        client: Client,
        data: ConsumerData,
        *,
        now: float,
        notifies: bool = True,
        fingerprint: int = 0,
        without_subscriptions: bool = False,
    ) -> HeartbeatResult:
        """Note what a consumer says of one of its groups.

        `notifies` is the group's setting; `fingerprint` and `without_subscriptions` belong to short
        heartbeats, which say only that nothing changed.
        """
        group = self._groups.get(data.group_name)
        if group is None:
            group = self._groups[data.group_name] = ConsumerGroup(data.group_name)
        group.notifies = notifies
        group.consume_type = data.consume_type
        if group.message_model is not data.message_model:
            group.message_model = data.message_model
            self.revision += 1
        group.consume_from_where = data.consume_from_where
        before = group.members.get(channel)
        if before is not None and before.client.id == client.id:
            before.heard_at = now
            if without_subscriptions:
                is_stale = not before.knows_subscriptions or before.fingerprint != fingerprint
                return _TELL_US if is_stale else _NOTHING_NEW
            before.fingerprint = fingerprint
            if before.data == data:
                return _NOTHING_NEW
            return HeartbeatResult(self._merged(group, self._say(before, data)))
        member = self._join(group, before, channel, client, now)
        topics = [] if before is None else list(before.subscriptions)
        if not without_subscriptions:
            member.fingerprint = fingerprint
            topics = list(dict.fromkeys([*self._say(member, data), *topics]))
        left = () if before is None else (before.client,)
        change = self._merged(group, topics, joined=(client,), left=left)
        return HeartbeatResult(change, wants_subscriptions=without_subscriptions)

    def _join(
        self,
        group: ConsumerGroup,
        before: Member | None,
        channel: Channel,
        client: Client,
        now: float,
    ) -> Member:
        if before is not None:
            log.error(
                "a connection changed its client id from %s",
                before.client.id,
                extra={"group": group.name, "client": client.id},
            )
        member = group.members[channel] = Member(channel, client, now)
        self._of_channel.setdefault(channel, set()).add(group.name)
        self._said[channel] = (
            self._said.get(channel, 0) + member.size - (0 if before is None else before.size)
        )
        return member

    def _say(self, member: Member, data: ConsumerData) -> list[str]:
        """Take over a full heartbeat; the topics that it names, in order, or named before."""
        size = member.size
        topics = member.say(data)
        self._said[member.channel] += member.size - size
        return topics

    def _merged(
        self,
        group: ConsumerGroup,
        topics: Iterable[str],
        joined: tuple[Client, ...] = (),
        left: tuple[Client, ...] = (),
    ) -> GroupChange | None:
        """Bring the group up to date after its members changed; None when that changed nothing."""
        added, removed, replaced, renewed = group.merge(topics)
        self.revision += 1
        for topic in added:
            self._of_topic.setdefault(topic, set()).add(group.name)
        for topic in removed:
            self._of_topic[topic].discard(group.name)
            if not self._of_topic[topic]:
                del self._of_topic[topic]
        # Also when the group's subscription stays as it was: a member may differ from it now.
        self._touched.add(group.name)
        if not group.members:
            del self._groups[group.name]
        is_news = bool(joined or left or added or removed)
        if not is_news and not replaced and not renewed:
            return None
        return GroupChange(
            group=group.name,
            notify=group.listeners() if is_news else (),
            joined=joined,
            left=left,
            topics_added=tuple(added),
            topics_removed=tuple(removed),
            topics_replaced=tuple(replaced),
            topics_renewed=tuple(renewed),
            is_gone=not group.members,
        )

    def leave(self, group_name: str, channel: Channel) -> GroupChange | None:
        """A consumer says goodbye to one group; None when it was not there."""
        group = self._groups.get(group_name)
        member = None if group is None else group.members.pop(channel, None)
        if group is None or member is None:
            return None
        groups = self._of_channel[channel]
        groups.discard(group_name)
        self._said[channel] -= member.size
        if not groups:
            del self._of_channel[channel]
            del self._said[channel]
        return self._merged(group, member.subscriptions, left=(member.client,))

    def close(self, channel: Channel) -> tuple[GroupChange, ...]:
        """A connection was closed: its client leaves all its groups."""
        self._crowded.discard(channel)
        changes = (
            self.leave(group, channel) for group in sorted(self._of_channel.get(channel, ()))
        )
        return tuple(change for change in changes if change is not None)

    def expire(self, now: float) -> tuple[tuple[Channel, ...], tuple[GroupChange, ...]]:
        """Let go of who was silent for too long: connections to close, and what that changed."""
        silent = dict.fromkeys(
            channel
            for group in self._groups.values()
            for channel, member in group.members.items()
            if now - member.heard_at > self._life
        )
        changes: dict[str, GroupChange] = {}
        for channel in silent:
            for change in self.close(channel):
                before = changes.get(change.group)
                changes[change.group] = change if before is None else _joined(before, change)
        for key in [
            key
            for key, (_, at) in self._compensations.items()
            if now - at > self._compensation_life
        ]:
            self._forget_compensation(key)
        return tuple(silent), tuple(changes.values())

    # Subscriptions that came with pulls.

    def compensate(self, group: str, subscription: SubscriptionData, now: float) -> None:
        """Remember what a pull said of a group that need not send heartbeats."""
        key = (group, subscription.topic)
        self._forget_compensation(key)
        self._compensations[key] = (subscription, now)
        self._compensated += _characters(key, subscription)
        while self._compensated > self._compensation_room:
            self._forget_compensation(next(iter(self._compensations)))

    def _forget_compensation(self, key: tuple[str, str]) -> None:
        known = self._compensations.pop(key, None)
        if known is not None:
            self._compensated -= _characters(key, known[0])

    # Queries.

    def subscription(
        self, group: str, topic: str, *, with_compensation: bool = True
    ) -> SubscriptionData | None:
        """What a group wants of a topic."""
        known = self._groups.get(group)
        found = None if known is None else known.subscriptions.get(topic)
        if found is None and with_compensation:
            compensation = self._compensations.get((group, topic))
            return None if compensation is None else compensation[0]
        return found

    def note_lookup(self, channel: Channel, group: str, topic: str) -> None:
        """A connection looked up progress: a member does, whose rebalance gave it queues."""
        known = self._groups.get(group)
        member = None if known is None else known.members.get(channel)
        if member is not None and topic in member.subscriptions:
            member.rebalanced.add(topic)

    def may_be_ahead(self, channel: Channel, group: str, topic: str) -> bool:
        """Whether a pull may quote a newer version than the group's, and mean the same."""
        known = self._groups.get(group)
        return known is not None and known.may_be_ahead(channel, topic)

    def subscriptions(self, group: str) -> dict[str, SubscriptionData]:
        """What a group wants, by topic."""
        known = self._groups.get(group)
        return {} if known is None else dict(known.subscriptions)

    def is_crowded(self, channel: Channel) -> bool:
        """Whether a connection says more about its groups than there is room for."""
        return channel in self._crowded

    def is_online(self, group: str) -> bool:
        return group in self._groups

    def model(self, group: str) -> MessageModel | None:
        """Whether the group shares its messages; None when it is not online."""
        known = self._groups.get(group)
        return None if known is None else known.message_model

    def groups(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def groups_of(self, topic: str) -> frozenset[str]:
        """The groups online that subscribe to a topic."""
        return frozenset(self._of_topic.get(topic, ()))

    def members(self, group: str) -> tuple[Member, ...]:
        known = self._groups.get(group)
        return () if known is None else tuple(known.members.values())

    def channel_of(self, group: str, client_id: str) -> Channel | None:
        """The connection of a member; of two with one id the one heard of last."""
        found = [member for member in self.members(group) if member.client.id == client_id]
        return max(found, key=lambda member: member.heard_at).channel if found else None

    def consumer_list(self, group: str) -> ConsumerList | None:
        """The body for GET_CONSUMER_LIST_BY_GROUP; None when nobody is there.

        An id is listed once for each of its connections, as Apache does: clients sort the list and
        cut it by its length, so all brokers of a group have to show the same one.
        """
        members = self.members(group)
        if not members:
            return None
        return ConsumerList(consumer_id_list=tuple(member.client.id for member in members))

    def connections(self, group: str) -> ConsumerConnection | None:
        """The body for GET_CONSUMER_CONNECTION_LIST; None when nobody is there."""
        known = self._groups.get(group)
        if known is None:
            return None
        return ConsumerConnection(
            connection_set=tuple(member.client.connection() for member in known.members.values()),
            consume_from_where=known.consume_from_where,
            consume_type=known.consume_type,
            message_model=known.message_model,
            subscription_table=dict(known.subscriptions),
        )

    def take_touched(self) -> frozenset[str]:
        """The groups in which a member came, went or said something new since the last time."""
        touched = frozenset(self._touched)
        self._touched.clear()
        return touched


def _characters(key: tuple[str, str], subscription: SubscriptionData) -> int:
    return len(key[0]) + len(key[1]) + len(subscription.sub_string or "")


def _joined(first: GroupChange, then: GroupChange) -> GroupChange:
    """Two changes of one group as one, so that the members who stay are told once."""
    removed = then.topics_removed
    return replace(
        then,
        left=first.left + then.left,
        topics_removed=_union(first.topics_removed, removed),
        topics_replaced=_union(first.topics_replaced, then.topics_replaced, without=removed),
        topics_renewed=_union(first.topics_renewed, then.topics_renewed, without=removed),
    )


def _union(
    first: tuple[str, ...], then: tuple[str, ...], *, without: tuple[str, ...] = ()
) -> tuple[str, ...]:
    gone = frozenset(without)
    return tuple(topic for topic in dict.fromkeys(first + then) if topic not in gone)
