"""Consumer groups: their configuration, their members, producers, and findings about them.

A group is created by administration, or by a lookup that needs it (`find`: heartbeat, pull,
send-back, a message to its retry topic, unregistering) when auto-creation is on. Auto-creation is
limited, because a group and its retry topic stay permanently; the refusal says so. The members of a
group and its subscriptions follow from the last heartbeats of the live members alone.

Single topics may be forbidden to a group. Apache's broker drops all of a group's bits when one
topic's are cleared, and does not save that; here only that topic's are cleared, and it is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from orbitmq import names
from orbitmq.broker.errors import Refused, check_group
from orbitmq.broker.topics import (
    GROUP_ATTRIBUTES,
    LARGEST_PAGE,
    READ_BIT,
    PageRequest,
    changed_attributes,
    first_version,
    next_version,
    page,
)
from orbitmq.clock import milliseconds
from orbitmq.errors import InvalidFilter
from orbitmq.filter.tags import TAG, parse_tags
from orbitmq.logonce import LogEveryNth
from orbitmq.message.record import RecordRefused, pack_host
from orbitmq.remoting.connection import Connection
from orbitmq.wire.bodies import (
    Connection as ConnectionBody,
)
from orbitmq.wire.bodies import (
    ConsumeFromWhere,
    ConsumerConnection,
    ConsumerData,
    ConsumerList,
    ConsumeType,
    LanguageName,
    MessageModel,
    ProducerConnection,
    ProducerInfo,
    SubscriptionData,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
)
from orbitmq.wire.codes import ResponseCode

if TYPE_CHECKING:
    from orbitmq.broker.longpoll import HeldPull


log = logging.getLogger(__name__)

#: Groups that exist from the start. All may broadcast, which is also the default.
PREDEFINED_GROUPS = (*names.SYSTEM_GROUPS, "CID_RMQ_SYS_TRANS")


class GroupPage(NamedTuple):
    """An answer to GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""

    table: SubscriptionGroupTable
    total: int


class GroupTable:
    """All groups of a broker. `now` is the time of day, in seconds since the epoch."""

    def __init__(
        self,
        *,
        auto_create: bool = True,
        max_auto: int = 10_000,
        max_queues: int = 16_384,
        now: float,
    ) -> None:
        """`max_auto`: the number of groups from which on lookups create none; `max_queues`: the
        largest number of queues of a retry topic."""
        self._auto_create = auto_create
        self._max_auto = max_auto
        self._max_queues = max_queues
        self._noted = LogEveryNth()
        self._groups = {
            name: SubscriptionGroupConfig(group_name=name) for name in PREDEFINED_GROUPS
        }
        self._forbidden: dict[str, dict[str, int]] = {}
        self.data_version = first_version(now)
        #: Increases with every change of the content of the file.
        self.revision = 0

    # Lookups.

    def get(self, group: str) -> SubscriptionGroupConfig | None:
        """The group if it exists."""
        return self._groups.get(group)

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SubscriptionGroupConfig]:
        return iter(self._groups.values())

    def find(self, group: str, *, now: float) -> SubscriptionGroupConfig | None:
        """The group, created if that is allowed; None when it does not exist."""
        config = self._groups.get(group)
        if config is not None:
            return config
        if (refused := self.missing(group)) is not None:
            if count := self._noted.note("a group"):
                log.warning("a group was not created (time %d): %s", count, refused)
            return None
        return self._put(SubscriptionGroupConfig(group_name=group), now)

    def require(self, group: str, *, now: float) -> SubscriptionGroupConfig:
        """As `find`; raises `Refused` when the group does not exist."""
        config = self.find(group, now=now)
        if config is None:
            raise self._missing(group)
        return config

    def missing(self, group: str) -> Refused | None:
        """Why a group does not exist and will not be created; None when it does or may be."""
        return None if group in self._groups or self._may_create(group) else self._missing(group)

    def _may_create(self, group: str) -> bool:
        is_allowed = self._auto_create or group.startswith(names.SYSTEM_GROUP_PREFIX)
        has_room = len(self._groups) < self._max_auto
        return is_allowed and has_room and names.group_problem(group) is None

    def _missing(self, group: str) -> Refused:
        remedy = f"create it with: orbitmq group create {group}"
        if (problem := names.group_problem(group)) is not None:
            why, remedy = problem, "choose another name"
        elif self._auto_create or group.startswith(names.SYSTEM_GROUP_PREFIX):
            why = (
                f"with {len(self._groups)} groups the broker makes no more by itself "
                f"(max_auto_groups is {self._max_auto})"
            )
            remedy += ", delete unused ones, or raise that setting"
        else:
            why = "the broker makes none by itself (auto_create_group is off)"
        return Refused(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group [{names.shown(group)}] does not exist: {why}; {remedy}",
        )

    # Administration.

    def update(self, config: SubscriptionGroupConfig, *, now: float) -> SubscriptionGroupConfig:
        """Create or change a group. An update that changes nothing leaves the version as it is.

        Raises `Refused`.
        """
        self.check(config)
        present = self._groups.get(config.group_name)
        attributes = changed_attributes(
            GROUP_ATTRIBUTES, None if present is None else present.attributes, config.attributes
        )
        config = msgspec.structs.replace(config, attributes=attributes)
        return config if config == present else self._put(config, now)

    def check(self, config: SubscriptionGroupConfig) -> None:
        """Refuse a configuration that is not valid. Apache's broker checks the name only.

        As at Apache's, -1 retries (dead letters at the first failure) and no retry queues (failures
        are dropped) are valid.
        """
        check_group(config.group_name)
        for field, value, low, high in (
            ("retryQueueNums", config.retry_queue_nums, 0, self._max_queues),
            ("retryMaxTimes", config.retry_max_times, -1, 2**31 - 1),
        ):
            if not low <= value <= high:
                raise Refused(
                    ResponseCode.INVALID_PARAMETER,
                    f"group {config.group_name!r}: {field} must be from {low} to {high}, "
                    f"got {value}",
                )

    def delete(self, group: str, *, now: float) -> SubscriptionGroupConfig | None:
        """Remove a group and what it was forbidden; None when it did not exist."""
        config = self._groups.pop(group, None)
        if self._forbidden.pop(group, None) is not None or config is not None:
            self._note(now)
        return config

    def _put(self, config: SubscriptionGroupConfig, now: float) -> SubscriptionGroupConfig:
        self._groups[config.group_name] = config
        self._note(now)
        return config

    def _note(self, now: float) -> None:
        self.data_version = next_version(self.data_version, now)
        self.revision += 1

    # What is forbidden.

    def is_forbidden(self, group: str, topic: str, bit: int = READ_BIT) -> bool:
        """Whether the group may not do this with the topic; by default: pull it."""
        # Asked on every pull, and nearly always the table is empty.
        return bool(self._forbidden) and self._bits(group, topic) >> bit & 1 == 1

    def forbid(
        self, group: str, topic: str, *, bit: int = READ_BIT, is_forbidden: bool, now: float
    ) -> None:
        """Set or clear one bit."""
        before = self._bits(group, topic)
        after = before | 1 << bit if is_forbidden else before & ~(1 << bit)
        if after == before:
            return
        topics = self._forbidden.setdefault(group, {})
        if after:
            topics[topic] = after
        else:
            del topics[topic]
        if not topics:
            del self._forbidden[group]
        self._note(now)

    def _bits(self, group: str, topic: str) -> int:
        return max(0, self._forbidden.get(group, {}).get(topic, 0))

    # The file, slaves and tools.

    def load(self, file: SubscriptionGroupTable) -> None:
        """Take over a file, in place of the groups of the start."""
        self._groups.update(file.subscription_group_table)
        self._forbidden.update(
            {group: dict(topics) for group, topics in file.forbidden_table.items() if topics}
        )
        if file.data_version is not None:
            self.data_version = file.data_version
        self.revision += 1

    def replace(self, table: SubscriptionGroupTable) -> None:
        """Become a copy of a master's table."""
        if table.data_version != self.data_version:
            self._groups = {}
            self._forbidden = {}
            self.load(table)

    def file(self) -> SubscriptionGroupTable:
        """A copy for subscriptionGroup.json, which may forbid topics to groups yet to come."""
        return self._table(dict(self._groups), self._forbidden)

    def page(self, request: PageRequest, largest: int = LARGEST_PAGE) -> GroupPage:
        """The groups for GET_ALL_SUBSCRIPTIONGROUP_CONFIG, and what they are forbidden."""
        entries = page(self._groups, self.data_version, request, largest)
        groups = self._forbidden if request.is_for_all else entries
        return GroupPage(self._table(entries, groups), len(self._groups))

    def _table(
        self, entries: dict[str, SubscriptionGroupConfig], groups: Collection[str]
    ) -> SubscriptionGroupTable:
        return SubscriptionGroupTable(
            data_version=self.data_version,
            forbidden_table={
                group: dict(topics) for group, topics in self._forbidden.items() if group in groups
            },
            subscription_group_table=entries,
        )


def consumption(config: SubscriptionGroupConfig) -> tuple[bool, bool]:
    """The settings that decide whether members may pull."""
    return config.consume_enable, config.consume_broadcast_enable


# Consumer groups. The table is a function of the last heartbeat of every live member:
#
# * a group has the members whose connections are open and were heard of within `CLIENT_LIFE`;
# * it subscribes to every topic that some member names;
# * its subscription to a topic is the one with the highest version among those members; of two with
#   the same version the older one;
# * how it consumes (type, model, where from) is what the last heartbeat said.
#
# Apache's broker keeps the last heartbeat's topics instead, so two members with different
# subscriptions replace each other's with every heartbeat. It also notifies no members when a silent
# one expires; this broker does. A connection has limited room for what its groups say
# (`connection_room`). Instants are seconds of a monotonic clock.


#: A connection as far as the tables care: an identity.
Channel: TypeAlias = Hashable
#: Characters of a client id; real ones have some dozens.
LONGEST_ID = 4_096
#: How long a client may be silent before it is removed.
CLIENT_LIFE = 120.0
#: How long a subscription of a pull is remembered, how many, and the characters of one.
COMPENSATION_LIFE = 600.0
_MOST_COMPENSATIONS = 10_000
_LONGEST_COMPENSATION = 4_096
#: Bytes, about, of the groups of one connection: eighty thousand subscriptions to all tags, or four
#: hundred to a thousand tags each.
CONNECTION_ROOM = 64 * 1024 * 1024
#: Bytes of a group or a subscription beside its texts, and of each tag.
_GROUP = 1024
_SUBSCRIPTION = 512
_TAG = 64
_HASH = 40


@dataclass(frozen=True, slots=True)
class Client:
    """The client that a connection belongs to."""

    id: str
    language: LanguageName = LanguageName.OTHER
    version: int = 0
    #: `host:port` of the connection.
    address: str = ""

    def connection(self) -> ConnectionBody:
        """An entry of a connection list."""
        return ConnectionBody(
            client_addr=self.address,
            client_id=self.id,
            language=self.language,
            version=self.version,
        )

    def producer_info(self, heard_at: float) -> ProducerInfo:
        """An entry of the list of all producers; `heard_at` is a time of day."""
        return ProducerInfo(
            client_id=self.id,
            language=self.language,
            last_update_timestamp=milliseconds(heard_at),
            remote_ip=self.address,
            version=self.version,
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
        "rebalanced",
        "size",
        "subscriptions",
    )

    def __init__(self, channel: Channel, client: Client, now: float) -> None:
        self.channel = channel
        self.client = client
        self.joined_at = now
        self.heard_at = now
        #: The last full heartbeat, to recognise an equal one quickly.
        self.data: ConsumerData | None = None
        self.subscriptions: dict[str, SubscriptionData] = {}
        #: Topics whose progress it queried since it reported the version of its subscription.
        self.rebalanced: set[str] = set()
        self.knows_subscriptions = False
        #: Bytes that it takes, about.
        self.size = _GROUP
        #: Of the last full heartbeat, for short ones that refer to it.
        self.fingerprint = 0

    def say(self, data: ConsumerData) -> list[str]:
        """Take over a full heartbeat; the topics that it names or named before, in order of it."""
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
    """The part of a heartbeat that fits into `room` bytes; None: not even the group does."""
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
    """Topics whose subscription was derived again, by what changed, in their order."""

    added: list[str]
    removed: list[str]
    #: The group wants other messages.
    replaced: list[str]


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
        """The members to notify of changes; none if each has all messages anyway."""
        if not self.notifies or self.message_model is MessageModel.BROADCASTING:
            return ()
        return tuple(self.members)

    def merge(self, topics: Iterable[str]) -> Merged:
        """Derive the subscription of `topics` again."""
        merged = Merged([], [], [])
        added, removed, replaced = merged
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
            elif _wanted(before) != _wanted(after):
                replaced.append(topic)
        return merged

    def may_be_ahead(self, channel: Channel, topic: str) -> bool:
        """Whether a member may quote a newer version than its heartbeat, and mean the same.

        A Java client takes a new version after each rebalance that gave it queues. It sends a
        heartbeat with it, but drops that when another one is under way, as often happens after its
        start. It has queried the progress of the queues before. A version without such a query may
        stand for another expression.
        """
        member = self.members.get(channel)
        if member is None or topic not in member.rebalanced:
            return False
        if member.client.language is not LanguageName.JAVA:
            return False
        return _wanted(member.subscriptions[topic]) == _wanted(self.subscriptions[topic])

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


def _wanted(subscription: SubscriptionData) -> tuple[str | None, str]:
    """What messages are filtered by, without what clients say differently."""
    return subscription.sub_string, subscription.expression_type


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """The effect of an event on a group, and the members to notify (NOTIFY_CONSUMER_IDS_CHANGED).

    Topics are in the order of the heartbeat, in which the expressions of held pulls are compiled.
    """

    group: str
    notify: tuple[Channel, ...] = ()
    joined: tuple[Client, ...] = ()
    left: tuple[Client, ...] = ()
    topics_added: tuple[str, ...] = ()
    topics_removed: tuple[str, ...] = ()
    #: Topics of which other messages are wanted now; not by itself a reason to notify.
    topics_replaced: tuple[str, ...] = ()
    #: Whether no member is left.
    is_gone: bool = False


class HeartbeatResult(NamedTuple):
    """The effect of a heartbeat."""

    change: GroupChange | None
    #: Whether a client that sends short heartbeats has to send a full one next.
    wants_subscriptions: bool = False


class ConsumerTable:
    """The consumers that are connected, by group."""

    def __init__(
        self,
        *,
        life: float = CLIENT_LIFE,
        connection_room: int = CONNECTION_ROOM,
    ) -> None:
        self._life = life
        self._groups: dict[str, ConsumerGroup] = {}
        #: Bytes, about, that one connection may take.
        self.connection_room = connection_room
        self._of_channel: dict[Channel, set[str]] = {}
        #: Bytes that each connection takes.
        self._said: dict[Channel, int] = {}
        self._of_topic: dict[str, set[str]] = {}
        #: In the order in which they were noted.
        self._compensations: dict[tuple[str, str], tuple[SubscriptionData, float]] = {}
        self._touched: set[str] = set()
        #: Increases with what may change the answer to a pull: members, subscriptions, models.
        self.revision = 0

    # Events.

    def within_room(self, channel: Channel, data: ConsumerData) -> ConsumerData | None:
        """The part of a heartbeat that fits; None: not even the group does."""
        group = self._groups.get(data.group_name)
        member = None if group is None else group.members.get(channel)
        if member is not None and member.data == data:
            return data
        said = self._said.get(channel, 0) - (0 if member is None else member.size)
        return fitting(data, self.connection_room - said)

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
        """Note a heartbeat for one group.

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
                return HeartbeatResult(None, wants_subscriptions=is_stale)
            before.fingerprint = fingerprint
            if before.data == data:
                return HeartbeatResult(None)
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
        """Take over a full heartbeat; the topics that it names or named before."""
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
        """Update the group after its members changed; None when that changed nothing."""
        added, removed, replaced = group.merge(topics)
        self.revision += 1
        for topic in added:
            self._of_topic.setdefault(topic, set()).add(group.name)
        for topic in removed:
            self._of_topic[topic].discard(group.name)
            if not self._of_topic[topic]:
                del self._of_topic[topic]
        # Also when the group's subscription is the same: a member may differ from it now.
        self._touched.add(group.name)
        if not group.members:
            del self._groups[group.name]
        is_news = bool(joined or left or added or removed)
        if not is_news and not replaced:
            return None
        return GroupChange(
            group=group.name,
            notify=group.listeners() if is_news else (),
            joined=joined,
            left=left,
            topics_added=tuple(added),
            topics_removed=tuple(removed),
            topics_replaced=tuple(replaced),
            is_gone=not group.members,
        )

    def leave(self, group_name: str, channel: Channel) -> GroupChange | None:
        """A consumer unregisters from one group; None when it was not a member."""
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
        """A connection was closed: remove it from all its groups."""
        changes = (
            self.leave(group, channel) for group in sorted(self._of_channel.get(channel, ()))
        )
        return tuple(change for change in changes if change is not None)

    def expire(self, now: float) -> tuple[tuple[Channel, ...], tuple[GroupChange, ...]]:
        """Remove silent members: the connections to close, and the changes."""
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
        self._compensations = {
            key: known
            for key, known in self._compensations.items()
            if now - known[1] <= COMPENSATION_LIFE
        }
        return tuple(silent), tuple(changes.values())

    # Subscriptions of pulls.

    def compensate(self, group: str, subscription: SubscriptionData, now: float) -> None:
        """Remember the subscription of a pull whose group need not send heartbeats."""
        key = (group, subscription.topic)
        self._compensations.pop(key, None)
        if len(subscription.sub_string or "") <= _LONGEST_COMPENSATION:
            self._compensations[key] = (subscription, now)
        if len(self._compensations) > _MOST_COMPENSATIONS:
            del self._compensations[next(iter(self._compensations))]

    # Queries.

    def subscription(
        self, group: str, topic: str, *, with_compensation: bool = True
    ) -> SubscriptionData | None:
        """The group's subscription to a topic."""
        known = self._groups.get(group)
        found = None if known is None else known.subscriptions.get(topic)
        if found is None and with_compensation:
            compensation = self._compensations.get((group, topic))
            return None if compensation is None else compensation[0]
        return found

    def note_lookup(self, channel: Channel, group: str, topic: str) -> None:
        """A connection queried progress, as a member does after a rebalance."""
        known = self._groups.get(group)
        member = None if known is None else known.members.get(channel)
        if member is not None and topic in member.subscriptions:
            member.rebalanced.add(topic)

    def may_be_ahead(self, channel: Channel, group: str, topic: str) -> bool:
        """Whether a pull may quote a newer version than the group's, and mean the same."""
        known = self._groups.get(group)
        return known is not None and known.may_be_ahead(channel, topic)

    def subscriptions(self, group: str) -> dict[str, SubscriptionData]:
        """The group's subscriptions, by topic."""
        known = self._groups.get(group)
        return {} if known is None else dict(known.subscriptions)

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

    def consumer_list(self, group: str) -> ConsumerList | None:
        """The body for GET_CONSUMER_LIST_BY_GROUP; None for a group without members.

        An id is listed once for each of its connections, as Apache does: clients sort the list and
        cut it by its length, so all brokers of a group have to show the same one.
        """
        members = self.members(group)
        if not members:
            return None
        return ConsumerList(consumer_id_list=tuple(member.client.id for member in members))

    def connections(self, group: str) -> ConsumerConnection | None:
        """The body for GET_CONSUMER_CONNECTION_LIST; None for a group without members."""
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
        """The groups whose members changed since the last call."""
        touched = frozenset(self._touched)
        self._touched.clear()
        return touched


def _joined(first: GroupChange, then: GroupChange) -> GroupChange:
    """Two changes of one group as one, so that members are notified once."""
    return replace(
        then,
        left=first.left + then.left,
        topics_removed=first.topics_removed + then.topics_removed,
        topics_replaced=tuple(dict.fromkeys(first.topics_replaced + then.topics_replaced)),
    )


# Producers by group, for transaction checks, replies and connection lists. The table is what
# heartbeats say, without producers that left, closed their connection or were silent for
# `CLIENT_LIFE`. A connection may be in a limited number of groups, and every event costs as much as
# the groups that it is in, not their square.


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
        """`most`: groups that one connection may be in."""
        self._life = life
        self.most = most
        self._groups: dict[str, dict[Channel, _Producer]] = {}
        self._of_channel: dict[Channel, set[str]] = {}
        #: The connections of each client id, latest last, with the number of groups each is in.
        self._of_client: dict[str, dict[Channel, int]] = {}
        self._turns: dict[str, int] = {}

    def has_room(self, group: str, channel: Channel) -> bool:
        """Whether the connection is in this group, or may join it."""
        groups = self._of_channel.get(channel)
        if groups is not None and (group in groups or len(groups) >= self.most):
            return group in groups
        return len(group) <= LONGEST_NAME

    def heartbeat(self, group: str, channel: Channel, client: Client, now: float) -> bool:
        """Note a producer; whether it is new."""
        members = self._groups.get(group)
        known = None if members is None else members.get(channel)
        if known is not None and known.client.id == client.id:
            known.heard_at = now
            return False
        if known is not None:
            self.leave(group, channel)
        self._groups.setdefault(group, {})[channel] = _Producer(client, now)
        self._of_channel.setdefault(channel, set()).add(group)
        channels = self._of_client.setdefault(client.id, {})
        channels[channel] = channels.pop(channel, 0) + 1
        return True

    def leave(self, group: str, channel: Channel) -> bool:
        """Remove a producer that unregisters; whether it was known."""
        groups = self._of_channel.get(channel)
        if groups is None or group not in groups:
            return False
        groups.discard(group)
        if not groups:
            del self._of_channel[channel]
        self._forget(group, channel)
        return True

    def close(self, channel: Channel) -> frozenset[str]:
        """Remove the producers of a closed connection; the groups that it was in."""
        groups = frozenset(self._of_channel.pop(channel, ()))
        for group in groups:
            self._forget(group, channel)
        return groups

    def expire(self, now: float) -> tuple[Channel, ...]:
        """Remove silent producers; the connections to close."""
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
        """A connection of the group for a transaction check, another one each time.

        One that is open and accepts more bytes, else one that is open. Apache tries three; all are
        tried here, so that a live one is found behind any number of dead ones.
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
        """The connections of a client, for a reply; the latest is last.

        There are several if it reconnected, or if two clients have the same id.
        """
        return tuple(self._of_client.get(client_id, ()))

    def channels(self, group: str) -> tuple[Channel, ...]:
        """The connections of a group, including closed ones that were not removed yet."""
        return tuple(self._groups.get(group, ()))

    def is_online(self, group: str) -> bool:
        return group in self._groups

    def groups(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def connections(self, group: str) -> ProducerConnection | None:
        """The body for GET_PRODUCER_CONNECTION_LIST; None for a group without producers."""
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

    def _forget(self, group: str, channel: Channel) -> None:
        """Remove a producer whose connection has left the group."""
        members = self._groups[group]
        producer = members.pop(channel)
        if not members:
            del self._groups[group]
            self._turns.pop(group, None)
        # A client that reconnected stays reachable when its old connection is closed late, which it
        # does not in Apache's broker.
        channels = self._of_client[producer.client.id]
        channels[channel] -= 1
        if not channels[channel]:
            del channels[channel]
        if not channels:
            del self._of_client[producer.client.id]


# The broker's state of a connection.


_UNKNOWN_HOST = pack_host("0.0.0.0", 0)  # noqa: S104  # says "not known", nothing binds it


class Peer:
    """One connection's part of the broker's memory; `Connection.context` of every connection."""

    __slots__ = ("account", "born_host", "client_id", "held", "held_weight", "name")

    def __init__(self, name: str, born_host: bytes) -> None:
        #: `host:port`, for logs and as the reporter of progress.
        self.name = name
        #: The peer's address as its messages have it.
        self.born_host = born_host
        #: Its held pulls, oldest first, and their weight.
        self.held: dict[HeldPull, None] = {}
        self.held_weight = 0
        #: The account and client of its last heartbeat; None before, and without access rules.
        self.account: str | None = None
        self.client_id: str | None = None


def attach(connection: Connection) -> None:
    """Give a new connection its state."""
    try:
        born_host = pack_host(connection.remote.host.partition("%")[0], connection.remote.port)
    except RecordRefused:
        born_host = _UNKNOWN_HOST
    connection.context = Peer(str(connection.remote), born_host)


def peer_of(connection: Connection) -> Peer:
    """The state of a connection."""
    peer: Peer = connection.context
    return peer


# Findings: consumers of one group that contradict each other, so that messages are missed.
#
# * **Different subscriptions.** Queues are shared among all members, so those of a topic that one
#   member does not subscribe to are not consumed while it has them; and a topic has one filter for
#   the whole group, so members with other tags miss their messages.
# * **One client id for two consumers.** Both get the same queues, and others are not consumed.
#
# Subscriptions are compared by their meaning, not by their version. A client that reconnects has
# two connections for a while, so an id counts as duplicate only when both were heard of after the
# later one joined. `Disagreements.check` returns new and resolved findings, to be logged once.


#: The kinds of findings.
DIFFERENT_SUBSCRIPTIONS = "different subscriptions"
DUPLICATE_CLIENT = "duplicate client"


class Variant(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What some members of a group subscribe to; without an expression not to the topic at all."""

    clients: tuple[str, ...]
    expression: str | None = None
    expression_type: str | None = None

    def __str__(self) -> str:
        who = self.clients[0]
        if len(self.clients) > 1:
            who += f" and {len(self.clients) - 1} more"
        if self.expression is None:
            return f"{who} without it"
        return f"{who} with {self.expression_type} {self.expression!r}"


class Finding(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A finding, as answers have it: about a topic with its variants, or about a client id."""

    kind: str
    group: str
    text: str
    topic: str | None = None
    variants: tuple[Variant, ...] = ()
    client_id: str | None = None
    addresses: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The same while the members of a finding change."""
        return self.kind, self.topic or self.client_id or ""


class Disagreements:
    """The findings in the groups of a table."""

    def __init__(self, consumers: ConsumerTable) -> None:
        self._consumers = consumers
        self._open: dict[str, dict[tuple[str, str], Finding]] = {}
        #: Groups with an id on two connections, which further heartbeats will settle.
        self._undecided: set[str] = set()

    def check(self) -> tuple[list[Finding], list[Finding]]:
        """The findings that began, and those that ended, since the last check."""
        began: list[Finding] = []
        ended: list[Finding] = []
        for group in sorted(self._consumers.take_touched() | self._undecided):
            members = self._consumers.members(group)
            if _ids_on_two_connections(members):
                self._undecided.add(group)
            else:
                self._undecided.discard(group)
            before = self._open.pop(group, {})
            after = {finding.key: finding for finding in findings(group, members)}
            began += [finding for key, finding in after.items() if key not in before]
            ended += [finding for key, finding in before.items() if key not in after]
            if after:
                self._open[group] = after
        return began, ended

    def open_findings(self, group: str | None = None) -> tuple[Finding, ...]:
        """The findings of the last check: of one group, or of all."""
        groups: Iterable[str] = self._open if group is None else (group,)
        return tuple(finding for name in groups for finding in self._open.get(name, {}).values())


def findings(group: str, members: Sequence[Member]) -> list[Finding]:
    """All findings of a group."""
    return [*_different_subscriptions(group, members), *_duplicate_clients(group, members)]


def _different_subscriptions(group: str, members: Sequence[Member]) -> Iterator[Finding]:
    """The topics that not all members subscribe to in the same way."""
    # A member that sends short heartbeats may not have said yet what it wants.
    known = [member for member in members if member.knows_subscriptions]
    topics = {topic for member in known for topic in member.subscriptions}
    for topic in sorted(topics):
        variants: dict[object, list[Member]] = {}
        for member in known:
            variants.setdefault(_meaning(member.subscriptions.get(topic)), []).append(member)
        if len(variants) > 1:
            shown = tuple(_variant(topic, like) for like in variants.values())
            yield Finding(
                kind=DIFFERENT_SUBSCRIPTIONS,
                group=group,
                text=f"members of group {group!r} subscribe differently to topic {topic!r}: "
                f"{', '.join(map(str, shown))}; messages will be missed until they agree",
                topic=topic,
                variants=shown,
            )


def _duplicate_clients(group: str, members: Sequence[Member]) -> Iterator[Finding]:
    """The client ids that are in use more than once."""
    for client_id, same in _ids_on_two_connections(members).items():
        last_joined = max(member.joined_at for member in same)
        live = [member for member in same if member.heard_at > last_joined]
        if len(live) > 1:
            addresses = tuple(sorted(member.client.address for member in live))
            yield Finding(
                kind=DUPLICATE_CLIENT,
                group=group,
                text=f"group {group!r} has {len(live)} consumers with the client id {client_id!r} "
                f"({', '.join(addresses)}): they consume the same queues; give each an instance "
                "name of its own",
                client_id=client_id,
                addresses=addresses,
            )


def _ids_on_two_connections(members: Sequence[Member]) -> dict[str, list[Member]]:
    by_id: dict[str, list[Member]] = {}
    for member in members:
        by_id.setdefault(member.client.id, []).append(member)
    return {client_id: same for client_id, same in by_id.items() if len(same) > 1}


def _meaning(subscription: SubscriptionData | None) -> object:
    """Equal for subscriptions that select the same messages."""
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
        return Variant(clients=clients)
    return Variant(
        clients=clients,
        expression=subscription.sub_string or "*",
        expression_type=subscription.expression_type or TAG,
    )


# Findings on the wire. RocketMQ has no request for them, so they are in answers with room for more:
#
# * GET_CONSUMER_CONNECTION_LIST (203): the extra field `findings`, a JSON list;
# * GET_CONSUMER_LIST_BY_GROUP (38), which members request every 20 s: the same field, in words,
#   which a consumer logs;
# * runtime information (28): an entry `groupFinding_<n>` for each, in words, and `groupFindings`.


#: The field of an answer.
FIELD = "findings"
#: The keys of runtime information.
COUNT_KEY = "groupFindings"
ENTRY_KEY = "groupFinding_"
#: Findings that members of a group get.
MOST_TOLD = 10
#: Findings that runtime information lists.
MOST_LISTED = 100


def findings_text(found: Iterable[Finding]) -> str:
    """Findings as the text of a field."""
    return msgspec.json.encode(list(found)).decode()


def findings_words(found: Iterable[Finding]) -> str:
    """Findings as the text of a field, in words only: short, however large the group is."""
    short = [msgspec.structs.replace(each, variants=(), addresses=()) for each in found]
    return findings_text(short[:MOST_TOLD])


def findings_table(found: Sequence[Finding]) -> dict[str, str]:
    """Findings as entries of runtime information."""
    entries = {f"{ENTRY_KEY}{n}": each.text for n, each in enumerate(found[:MOST_LISTED], 1)}
    return {COUNT_KEY: str(len(found)), **entries}
