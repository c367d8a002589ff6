"""One consumer group: its live members, and the subscription that follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from orbitmq.broker.clients import Channel, Client
from orbitmq.wire.bodies.membership import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumeType,
    MessageModel,
    SubscriptionData,
)


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
        self.knows_subscriptions = False
        #: Of the last full heartbeat, for the short ones that refer to it.
        self.fingerprint = 0

    def say(self, data: ConsumerData) -> set[str]:
        """Take over a full heartbeat; the topics that it names, or named before."""
        named = {entry.topic: entry for entry in data.subscription_data_set}
        topics = named.keys() | self.subscriptions.keys()
        self.subscriptions = named
        self.data = data
        self.knows_subscriptions = True
        return topics


class Merged(NamedTuple):
    """Topics whose subscription was worked out anew, by what that changed."""

    added: set[str]
    removed: set[str]
    #: The group wants other messages.
    replaced: set[str]
    #: It wants the same, and says so under a later version: every member that starts does.
    renewed: set[str]


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
        merged = Merged(set(), set(), set(), set())
        added, removed, replaced, renewed = merged
        for topic in topics:
            before = self.subscriptions.get(topic)
            after = self._best(topic, before)
            if after is None:
                if before is not None:
                    removed.add(topic)
                    del self.subscriptions[topic]
                continue
            self.subscriptions[topic] = after
            if before is None:
                added.add(topic)
            elif _wish(before) != _wish(after):
                replaced.add(topic)
            elif before.sub_version != after.sub_version:
                renewed.add(topic)
        return merged

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
