"""One consumer group: its live members, and the subscription that follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from orbitmq.broker.clients import Channel, Client
from orbitmq.wire.bodies.membership import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumeType,
    LanguageName,
    MessageModel,
    SubscriptionData,
)

#: Bytes that a group or a subscription takes with a connection, beside its texts; and each tag.
_GROUP = 1024
_SUBSCRIPTION = 512
_TAG = 64
_HASH = 40


class Member:
    """A connection of a group. Only the table changes it."""

    __slots__ = (
        "channel",
        "client",
        "data",
        "fingerprint",
        "heard_at",
        "joined_at",
        "knows_subscriptions",
        "rebalanced",
        "size",
        "subscriptions",
    )

    def __init__(self, channel: Channel, client: Client, now: float) -> None:
        self.channel = channel
        self.client = client
        self.joined_at = now
        self.heard_at = now
        #: The last full heartbeat, to see at once that the next says the same.
        self.data: ConsumerData | None = None
        self.subscriptions: dict[str, SubscriptionData] = {}
        #: Topics of which it looked up progress since it told the version of its subscription.
        self.rebalanced: set[str] = set()
        self.knows_subscriptions = False
        #: Bytes that it takes, about.
        self.size = _GROUP
        #: Of the last full heartbeat, for the short ones that refer to it.
        self.fingerprint = 0

    def say(self, data: ConsumerData) -> list[str]:
        """Take over a full heartbeat; the topics that it names, in order, or named before."""
        named = {entry.topic: entry for entry in data.subscription_data_set}
        topics = list(named | self.subscriptions)
        self.rebalanced = {
            topic
            for topic in self.rebalanced & named.keys()
            if named[topic].sub_version == self.subscriptions[topic].sub_version
        }
        self.subscriptions = named
        self.data = data
        self.size = _GROUP + sum(map(size_of, data.subscription_data_set))
        self.knows_subscriptions = True
        return topics


def fitting(data: ConsumerData, room: int) -> ConsumerData | None:
    """As much of a heartbeat as takes that many bytes; None: not even the group does."""
    room -= _GROUP
    if room < 0:
        return None
    taken: list[SubscriptionData] = []
    for each in data.subscription_data_set:
        size = size_of(each)
        if size <= room:
            room -= size
            taken.append(each)
    if len(taken) == len(data.subscription_data_set):
        return data
    return msgspec.structs.replace(data, subscription_data_set=tuple(taken))


def size_of(subscription: SubscriptionData) -> int:
    """About how many bytes a subscription takes."""
    texts = (
        subscription.topic,
        subscription.sub_string or "",
        subscription.expression_type,
        subscription.filter_class_source or "",
        *subscription.tags_set,
    )
    tags = _TAG * len(subscription.tags_set) + _HASH * len(subscription.code_set)
    return _SUBSCRIPTION + sum(map(len, texts)) + tags


class Merged(NamedTuple):
    """Topics whose subscription was worked out anew, by what that changed, in their order."""

    added: list[str]
    removed: list[str]
    #: The group wants other messages.
    replaced: list[str]
    #: It wants the same, and says so under a later version: every member that starts does.
    renewed: list[str]


class ConsumerGroup:
    """The members of a group and what follows from their heartbeats."""

    __slots__ = (
        "consume_from_where",
        "consume_type",
        "members",
        "message_model",
        "name",
        "notifies",
        "subscriptions",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: dict[Channel, Member] = {}
        self.subscriptions: dict[str, SubscriptionData] = {}
        self.consume_type: ConsumeType | None = None
        self.message_model: MessageModel | None = None
        self.consume_from_where: ConsumeFromWhere | None = None
        self.notifies = True

    def listeners(self) -> tuple[Channel, ...]:
        """Who is told of changes: everybody, unless each member has all messages anyway."""
        if not self.notifies or self.message_model is MessageModel.BROADCASTING:
            return ()
        return tuple(self.members)

    def merge(self, topics: Iterable[str]) -> Merged:
        """Work the subscription of `topics` out anew."""
        merged = Merged([], [], [], [])
        added, removed, replaced, renewed = merged
        for topic in topics:
            before = self.subscriptions.get(topic)
            after = self._best(topic, before)
            if after is None:
                if before is not None:
                    removed.append(topic)
                    del self.subscriptions[topic]
                continue
            self.subscriptions[topic] = after
            if before is None:
                added.append(topic)
            elif _wish(before) != _wish(after):
                replaced.append(topic)
            elif before.sub_version != after.sub_version:
                renewed.append(topic)
        return merged

    def may_be_ahead(self, channel: Channel, topic: str) -> bool:
        """Whether a member may quote a newer version than its heartbeat, and mean the same.

        A Java client takes a new version after each rebalance that gave it queues, and sends a
        heartbeat, which it drops when another one is under way, as often happens a second after
        its start. It has looked up the progress of the queues before. A version that comes without
        that, or of a client that takes none for a rebalance, may stand for another expression.
        """
        member = self.members.get(channel)
        if member is None or topic not in member.rebalanced:
            return False
        if member.client.language is not LanguageName.JAVA:
            return False
        return _wish(member.subscriptions[topic]) == _wish(self.subscriptions[topic])

    def _best(self, topic: str, before: SubscriptionData | None) -> SubscriptionData | None:
        best: SubscriptionData | None = None
        for member in self.members.values():
            named = member.subscriptions.get(topic)
            if named is None:
                continue
            if best is None or (named.sub_version, named == before) > (
                best.sub_version,
                best == before,
            ):
                best = named
        return best


def _wish(subscription: SubscriptionData) -> tuple[str | None, str]:
    """What messages are filtered by. Clients differ in what else they say, and in its order."""
    return subscription.sub_string, subscription.expression_type
