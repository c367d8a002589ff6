"""Consumers of one group that do not fit together, found before messages are missed.

Two mistakes make RocketMQ lose or multiply messages without a word:

* **Different subscriptions in a group.** Queues are shared among all members of the group, so the
  queues of a topic that one member does not subscribe to are consumed by nobody while it has
  them; and a topic has one filter for the whole group, so members with other tags miss theirs.
* **One client id for two consumers.** Both work out the same share and consume the same queues,
  and other queues are consumed by nobody.

A subscription is compared by what it means (the set of tags, the text of an SQL expression), not
by its version, which differs among members that agree. A client that reconnects has two
connections for a while: an id counts as duplicate only once both were heard of after the later
one had joined.

Findings are values. `Disagreements.check` tells which ones are new and which are over, so that
each is logged once; it looks only at groups in which something happened, and at those with a
duplicate id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from orbitmq.broker.consumergroup import Member
from orbitmq.broker.consumers import ConsumerTable
from orbitmq.filter.errors import InvalidFilter
from orbitmq.filter.subscription import TAG
from orbitmq.filter.tags import parse_tags
from orbitmq.wire.bodies.membership import SubscriptionData


@dataclass(frozen=True, slots=True)
class Variant:
    """What some members of a group say of a topic; no expression: they do not subscribe to it."""

    expression: str | None
    expression_type: str | None
    clients: tuple[str, ...]

    def __str__(self) -> str:
        who = self.clients[0]
        if len(self.clients) > 1:
            who += f" and {len(self.clients) - 1} more"
        if self.expression is None:
            return f"{who} without it"
        return f"{who} with {self.expression_type} {self.expression!r}"


@dataclass(frozen=True, slots=True)
class DifferentSubscriptions:
    """Members of a group that want different things of a topic, or do not all want it."""

    group: str
    topic: str
    variants: tuple[Variant, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        return ("subscription", self.group, self.topic)

    def __str__(self) -> str:
        return (
            f"members of group {self.group!r} subscribe differently to topic {self.topic!r}: "
            f"{', '.join(map(str, self.variants))}; messages will be missed until they agree"
        )


@dataclass(frozen=True, slots=True)
class DuplicateClient:
    """Two or more live connections of a group with one client id."""

    group: str
    client_id: str
    addresses: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        return ("client", self.group, self.client_id)

    def __str__(self) -> str:
        return (
            f"group {self.group!r} has {len(self.addresses)} consumers with the client id "
            f"{self.client_id!r} ({', '.join(self.addresses)}): they consume the same queues; "
            "give each an instance name of its own"
        )


Finding: TypeAlias = DifferentSubscriptions | DuplicateClient


@dataclass(frozen=True, slots=True)
class FindingEvent:
    """A finding that began, or ended."""

    finding: Finding
    first_seen: float
    is_resolved: bool


class Disagreements:
    """What is wrong in the groups of a table, and since when."""

    def __init__(self, consumers: ConsumerTable) -> None:
        self._consumers = consumers
        self._open: dict[str, dict[tuple[str, str, str], tuple[Finding, float]]] = {}
        #: Groups with an id on two connections, which only further heartbeats can settle.
        self._undecided: set[str] = set()

    def check(self, now: float) -> tuple[FindingEvent, ...]:
        """What began and what ended since the last check."""
        events: list[FindingEvent] = []
        for group in sorted(self._consumers.take_touched() | self._undecided):
            members = self._consumers.members(group)
            if _ids_on_two_connections(members):
                self._undecided.add(group)
            else:
                self._undecided.discard(group)
            events.extend(self._compare(group, findings(group, members), now))
        return tuple(events)

    def open_findings(self, group: str | None = None) -> tuple[Finding, ...]:
        """What is wrong, as of the last check: in one group, or in all."""
        groups: Iterable[str] = self._open if group is None else (group,)
        return tuple(finding for name in groups for finding, _ in self._open.get(name, {}).values())

    def _compare(self, group: str, found: Iterable[Finding], now: float) -> Iterable[FindingEvent]:
        before = self._open.pop(group, {})
        after: dict[tuple[str, str, str], tuple[Finding, float]] = {}
        for finding in found:
            known = before.pop(finding.key, None)
            # The members in it may change while the finding stays the same one.
            after[finding.key] = (finding, now if known is None else known[1])
            if known is None:
                yield FindingEvent(finding, now, is_resolved=False)
        for finding, first_seen in before.values():
            yield FindingEvent(finding, first_seen, is_resolved=True)
        if after:
            self._open[group] = after


def findings(group: str, members: Sequence[Member]) -> list[Finding]:
    """Everything that is wrong with a group."""
    found: list[Finding] = [*different_subscriptions(group, members)]
    found.extend(duplicate_clients(group, members))
    return found


def different_subscriptions(group: str, members: Sequence[Member]) -> list[DifferentSubscriptions]:
    """The topics that not all members subscribe to in the same way."""
    # One that sends short heartbeats may not have said yet what it wants.
    told = [member for member in members if member.knows_subscriptions]
    topics = {topic for member in told for topic in member.subscriptions}
    found = []
    for topic in sorted(topics):
        variants: dict[object, list[Member]] = {}
        for member in told:
            variants.setdefault(_meaning(member.subscriptions.get(topic)), []).append(member)
        if len(variants) > 1:
            shown = tuple(_variant(topic, group_of) for group_of in variants.values())
            found.append(DifferentSubscriptions(group, topic, shown))
    return found


def duplicate_clients(group: str, members: Sequence[Member]) -> list[DuplicateClient]:
    """The client ids that are really in use more than once."""
    found = []
    for client_id, same in _ids_on_two_connections(members).items():
        last_joined = max(member.joined_at for member in same)
        live = [member for member in same if member.heard_at > last_joined]
        if len(live) > 1:
            addresses = tuple(sorted(member.client.address for member in live))
            found.append(DuplicateClient(group, client_id, addresses))
    return found


def _ids_on_two_connections(members: Sequence[Member]) -> dict[str, list[Member]]:
    by_id: dict[str, list[Member]] = {}
    for member in members:
        by_id.setdefault(member.client.id, []).append(member)
    return {client_id: same for client_id, same in by_id.items() if len(same) > 1}


def _meaning(subscription: SubscriptionData | None) -> object:
    """Equal for subscriptions that select the same messages by what they say."""
    if subscription is None:
        return None
    text = subscription.sub_string
    if subscription.expression_type not in ("", TAG):
        return (subscription.expression_type, (text or "").strip())
    try:
        tags = parse_tags(text)
    except InvalidFilter:
        return (TAG, text)
    return (TAG, tags.tags, tags.matches_all)


def _variant(topic: str, members: Sequence[Member]) -> Variant:
    subscription = members[0].subscriptions.get(topic)
    clients = tuple(sorted({member.client.id for member in members}))
    if subscription is None:
        return Variant(None, None, clients)
    text = subscription.sub_string or "*"
    return Variant(text, subscription.expression_type or TAG, clients)
