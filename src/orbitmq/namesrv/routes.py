"""The tables of a name server: brokers, their topics, and who is alive.

A state machine without I/O: it is given registrations, departures and the time, and answers where a
topic is. The rules are Apache's:

* A master alone says which queues its broker group has. Of a group of 5.x brokers, the member with
  the lowest id may do so as well; if it stands in for a master, without the right to be written to.
* What it says is taken over when it is new: the first registration of this broker id, another
  `DataVersion` than last time, or a topic that this group did not have.
* An address has one id in its group. An id that two addresses claim belongs to the one whose
  `DataVersion` has the larger state version, and to the later one when they are equal.
* A broker that was not heard of for its own timeout is gone, and so is one whose connection ended.
  With the last member of a group its queues go too.

Invariant: every address in a group has an entry in `_live`. What ends an entry there therefore
ends everything about that broker. (Apache can keep a broker without one for ever.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from orbitmq.namesrv.settings import RegisterAllFirst
from orbitmq.wire.bodies import (
    BrokerData,
    BrokerMemberGroup,
    ClusterInfo,
    DataVersion,
    QueueData,
    QueueMappingInfo,
    TopicConfig,
    TopicList,
    TopicRouteData,
)

#: Bits of a topic's `topicSysFlag`.
FLAG_UNIT = 1
FLAG_UNIT_SUB = 2

#: Topics by which the members of a group find each other: never shown with an acting master.
_MEMBER_GROUP_TOPICS = "rmq_sys_SYNC_BROKER_MEMBER_"


@dataclass(slots=True)
class _Group:
    """A broker name: a master and its slaves."""

    cluster: str
    addresses: dict[int, str] = field(default_factory=dict)
    acting_master: bool = False
    zone: str | None = None

    @property
    def has_master(self) -> bool:
        return MASTER in self.addresses


@dataclass(slots=True)
class _Life:
    """The last sign of life of one broker."""

    name: str
    seen: float
    timeout: float
    version: DataVersion
    connection: Hashable
    ha_address: str


class RouteTable:
    """Which broker holds which topic."""

    def __init__(
        self, *, support_acting_master: bool = False, delete_unregistered_topics: bool = False
    ) -> None:
        self.support_acting_master = support_acting_master
        self.delete_unregistered_topics = delete_unregistered_topics
        self._groups: dict[str, _Group] = {}
        self._clusters: dict[str, set[str]] = {}
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._mappings: dict[str, dict[str, QueueMappingInfo]] = {}
        self._filter_servers: dict[BrokerKey, tuple[str, ...]] = {}
        self._live: dict[BrokerKey, _Life] = {}

    # Brokers come and go

    def register(self, broker: Registration, now: float, connection: Hashable = None) -> Registered:
        """Take over what a broker says. Raises `RegisterAllFirst`."""
        group = self._groups.get(broker.name)
        known = group.addresses if group is not None else {}
        if len(broker.topics) == 1 and broker.id not in known:
            raise RegisterAllFirst(broker.name, broker.address)
        if group is None:
            group = self._groups[broker.name] = _Group(broker.cluster)
        self._clusters.setdefault(broker.cluster, set()).add(broker.name)
        group.acting_master = bool(broker.acting_master)
        group.zone = broker.zone
        for other_id, address in tuple(group.addresses.items()):
            if address == broker.address and other_id != broker.id:
                del group.addresses[other_id]
        rival = self._rival(broker, group, connection)
        if self._is_outdated(broker, group):
            self._live.pop(broker.key, None)
            return Registered(rival=rival)

        is_first = broker.id not in group.addresses
        self._take_id(broker, group)
        self._take_topics(broker, group, is_first=is_first)
        self._live[broker.key] = _Life(
            broker.name, now, broker.timeout, broker.version, connection, broker.ha_address
        )
        if broker.filter_servers:
            self._filter_servers[broker.key] = broker.filter_servers
        elif broker.filter_servers is not None:
            self._filter_servers.pop(broker.key, None)
        return self._master_of(broker, group)._replace(rival=rival)

    def _rival(self, broker: Registration, group: _Group, connection: Hashable) -> str | None:
        """Who else has this id, and is not this broker by its former address."""
        holder = group.addresses.get(broker.id)
        if holder is None or holder == broker.address:
            return None
        life = self._live.get(BrokerKey(group.cluster, holder))
        return holder if life is not None and life.connection != connection else None

    def _is_outdated(self, broker: Registration, group: _Group) -> bool:
        """Whether somebody else has this id with a later state."""
        holder = group.addresses.get(broker.id)
        if holder is None or holder == broker.address:
            return False
        life = self._live.get(BrokerKey(broker.cluster, holder))
        return life is not None and life.version.state_version > broker.version.state_version

    def _take_id(self, broker: Registration, group: _Group) -> None:
        holder = group.addresses.get(broker.id)
        if holder is not None and holder != broker.address:
            # Whoever had the id is no member any more; it may register again.
            for key in [
                k for k, v in self._live.items() if (k.address, v.name) == (holder, broker.name)
            ]:
                self._forget(key)
        group.addresses[broker.id] = broker.address

    def _take_topics(self, broker: Registration, group: _Group, *, is_first: bool) -> None:
        stands_in = (
            broker.acting_master is not None
            and broker.id != MASTER
            and broker.id == min(group.addresses)
        )
        if broker.id != MASTER and not stands_in:
            return
        if self.delete_unregistered_topics and not broker.mappings:
            self._drop_other_topics(broker)
        life = self._live.get(broker.key)
        is_new = is_first or life is None or life.version != broker.version
        for topic in broker.topics:
            queues = self._topics.get(topic.topic_name)
            if is_new or queues is None or broker.name not in queues:
                perm = topic.perm
                if stands_in and group.acting_master:
                    perm &= ~PERM_WRITE
                self._put_queues(topic.topic_name, _queues_of(broker.name, topic, perm))
        if is_new:
            for name, mapping in broker.mappings.items():
                self._mappings.setdefault(name, {})[mapping.bname or broker.name] = mapping

    def _drop_other_topics(self, broker: Registration) -> None:
        names = {topic.topic_name for topic in broker.topics}
        for topic, queues in tuple(self._topics.items()):
            if broker.name in queues and topic not in names:
                self._drop_queues(topic, broker.name)

    def _master_of(self, broker: Registration, group: _Group) -> Registered:
        address = group.addresses.get(MASTER)
        if broker.id == MASTER or address is None:
            return Registered()
        life = self._live.get(BrokerKey(broker.cluster, address))
        return Registered(address, life.ha_address) if life is not None else Registered()

    def unregister(self, cluster: str, address: str, name: str) -> None:
        """A broker leaves."""
        self._forget(BrokerKey(cluster, address))
        group = self._groups.get(name)
        if group is None:
            return
        for broker_id in [each for each, known in group.addresses.items() if known == address]:
            del group.addresses[broker_id]
        if not group.addresses:
            self._drop_group(name)
        elif group.acting_master and not group.has_master:
            self._change_perm(name, lambda perm: perm & ~PERM_WRITE)

    def connection_closed(self, connection: Hashable) -> list[BrokerKey]:
        """Every broker that registered by this connection is gone; returns them."""
        gone = [key for key, life in self._live.items() if life.connection == connection]
        for key in gone:
            self._leave(key)
        return gone

    def expire(self, now: float) -> list[Expired]:
        """Every broker that was not heard of for longer than its timeout is gone."""
        late = [(key, life) for key, life in self._live.items() if life.seen + life.timeout < now]
        for key, _ in late:
            self._leave(key)
        return [Expired(key, life.connection) for key, life in late]

    def _leave(self, key: BrokerKey) -> None:
        """Have a broker leave under every name that its address was registered with.

        There is one sign of life of an address, which knows the latest name only.
        """
        names = [
            name
            for name, group in self._groups.items()
            if group.cluster == key.cluster and key.address in group.addresses.values()
        ]
        for name in names or [self._live[key].name]:
            self.unregister(*key, name)

    def touch(self, cluster: str, address: str, now: float) -> None:
        """A sign of life."""
        life = self._live.get(BrokerKey(cluster, address))
        if life is not None:
            life.seen = now

    def version_of(self, cluster: str, address: str) -> DataVersion | None:
        """The state of its topics that a broker registered last."""
        life = self._live.get(BrokerKey(cluster, address))
        return life.version if life is not None else None

    def _forget(self, key: BrokerKey) -> None:
        self._live.pop(key, None)
        self._filter_servers.pop(key, None)

    def _drop_group(self, name: str) -> None:
        cluster = self._groups.pop(name).cluster
        for each in {cluster, *(c for c, names in self._clusters.items() if name in names)}:
            names = self._clusters.get(each, set())
            names.discard(name)
            if not names:
                self._clusters.pop(each, None)
        for topic in tuple(self._topics):
            self._drop_queues(topic, name)

    # Topics

    def register_topic(self, topic: str, queues: Sequence[QueueData]) -> None:
        """Add a topic by hand; nothing happens when one of the brokers is not known."""
        if queues and all(each.broker_name in self._groups for each in queues):
            for each in queues:
                self._put_queues(topic, each)

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Remove a topic, everywhere or from the brokers of one cluster."""
        if not cluster:
            self._topics.pop(topic, None)
            return
        for name in self._clusters.get(cluster, ()):
            self._drop_queues(topic, name)

    def wipe_write_permission(self, broker: str) -> int:
        """Producers shall avoid this broker; returns how many topics that concerns."""
        return self._change_perm(broker, lambda perm: perm & ~PERM_WRITE)

    def add_write_permission(self, broker: str) -> int:
        """Producers may use this broker again; returns how many topics that concerns."""
        return self._change_perm(broker, lambda _: PERM_READ | PERM_WRITE)

    def _change_perm(self, broker: str, change: Callable[[int], int]) -> int:
        changed = 0
        for queues in self._topics.values():
            if broker in queues:
                queues[broker] = replace(queues[broker], perm=change(queues[broker].perm))
                changed += 1
        return changed

    def _put_queues(self, topic: str, queues: QueueData) -> None:
        self._topics.setdefault(topic, {})[queues.broker_name] = queues

    def _drop_queues(self, topic: str, broker: str) -> None:
        queues = self._topics.get(topic)
        if queues is None or queues.pop(broker, None) is None:
            return
        if not queues:
            del self._topics[topic]

    # Questions

    def route(self, topic: str) -> TopicRouteData | None:
        """Where a topic is; None when no living broker has it."""
        queues = self._topics.get(topic)
        if not queues:
            return None
        groups = {name: self._groups[name] for name in sorted(queues) if name in self._groups}
        if not groups:
            return None
        route = TopicRouteData(
            broker_datas=tuple(_broker_data(name, group) for name, group in groups.items()),
            filter_server_table={
                address: servers
                for group in groups.values()
                for address in group.addresses.values()
                if (servers := self._filter_servers.get(BrokerKey(group.cluster, address)))
            },
            queue_datas=tuple(queues[name] for name in sorted(queues)),
            topic_queue_mapping_by_broker=self._mappings.get(topic),
        )
        if self.support_acting_master and not topic.startswith(_MEMBER_GROUP_TOPICS):
            return with_acting_masters(route)
        return route

    def clusters(self) -> ClusterInfo:
        """Every broker and every cluster."""
        return ClusterInfo(
            broker_addr_table={n: _broker_data(n, g) for n, g in sorted(self._groups.items())},
            cluster_addr_table={c: tuple(sorted(n)) for c, n in sorted(self._clusters.items())},
        )

    def members(self, cluster: str, broker: str) -> BrokerMemberGroup:
        """The addresses of a group; none when it is not known."""
        group = self._groups.get(broker)
        addresses = dict(sorted(group.addresses.items())) if group is not None else {}
        return BrokerMemberGroup(broker_addrs=addresses, broker_name=broker, cluster=cluster)

    def topics(self) -> TopicList:
        return TopicList(topic_list=tuple(sorted(self._topics)))

    def topics_of_cluster(self, cluster: str) -> TopicList:
        names = self._clusters.get(cluster, set())
        return TopicList(
            topic_list=tuple(
                topic for topic, queues in sorted(self._topics.items()) if names & queues.keys()
            )
        )

    def system_topics(self) -> TopicList:
        """The names of clusters and brokers, which are topics too, and some broker's address."""
        names = {name for cluster, each in self._clusters.items() for name in (cluster, *each)}
        addresses = (
            address for _, group in sorted(self._groups.items()) for address in _in_order(group)
        )
        return TopicList(broker_addr=next(addresses, None), topic_list=tuple(sorted(names)))

    def topics_by_flag(self, wanted: int, unwanted: int = 0) -> TopicList:
        """Topics whose flags on their first broker have one bit and lack the other."""
        found = []
        for topic, queues in sorted(self._topics.items()):
            flags = queues[min(queues)].topic_sys_flag
            if flags & wanted and not flags & unwanted:
                found.append(topic)
        return TopicList(topic_list=tuple(found))


def _queues_of(broker: str, topic: TopicConfig, perm: int) -> QueueData:
    return QueueData(
        broker_name=broker,
        perm=perm,
        read_queue_nums=topic.read_queue_nums,
        topic_sys_flag=topic.topic_sys_flag,
        write_queue_nums=topic.write_queue_nums,
    )


def _broker_data(name: str, group: _Group) -> BrokerData:
    return BrokerData(
        broker_addrs=dict(sorted(group.addresses.items())),
        broker_name=name,
        cluster=group.cluster,
        enable_acting_master=group.acting_master,
        zone_name=group.zone,
    )


def _in_order(group: _Group) -> list[str]:
    return [address for _, address in sorted(group.addresses.items())]


# What brokers say about themselves, and what they are told in return.


#: The broker id of a master; slaves have larger ones.
MASTER = 0


class BrokerKey(NamedTuple):
    """What identifies one broker process."""

    cluster: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a broker says about itself."""

    cluster: str
    name: str
    id: int
    address: str
    ha_address: str = ""
    zone: str | None = None
    timeout: float = 120.0  #: seconds without a sign of life after which it is gone
    #: None: a broker before 5.0, which does not know of acting masters.
    acting_master: bool | None = None
    version: DataVersion = field(default_factory=DataVersion)
    topics: Sequence[TopicConfig] = ()
    mappings: Mapping[str, QueueMappingInfo] = field(default_factory=dict)
    filter_servers: tuple[str, ...] | None = None

    @property
    def key(self) -> BrokerKey:
        return BrokerKey(self.cluster, self.address)


class Registered(NamedTuple):
    """What came of a registration. A slave learns where its master is, if that is known."""

    master_address: str | None = None
    ha_address: str | None = None
    #: A living broker elsewhere that claims the same name and id; only one of them is listed.
    rival: str | None = None


class Expired(NamedTuple):
    """A broker that was not heard of for too long."""

    key: BrokerKey
    connection: Hashable


# A route as a particular reader should see it.


#: Bits of a queue's permission.
PERM_WRITE = 2
PERM_READ = 4


def only_zone(route: TopicRouteData, zone: str) -> TopicRouteData:
    """The part of a route in one zone, and broker groups without a master, wherever they are."""
    near = tuple(
        broker
        for broker in route.broker_datas
        if MASTER not in broker.broker_addrs
        or (broker.zone_name or "").casefold() == zone.casefold()
    )
    far = [broker for broker in route.broker_datas if broker not in near]
    names = {broker.broker_name for broker in far}
    addresses = {address for broker in far for address in broker.broker_addrs.values()}
    return replace(
        route,
        broker_datas=near,
        queue_datas=tuple(each for each in route.queue_datas if each.broker_name not in names),
        filter_server_table={
            address: servers
            for address, servers in route.filter_server_table.items()
            if address not in addresses
        },
    )


def with_acting_masters(route: TopicRouteData) -> TopicRouteData:
    """Shows the first slave as master in groups that have none and can only be read."""
    readable_only = {
        queues.broker_name for queues in route.queue_datas if not queues.perm & PERM_WRITE
    }
    brokers = []
    for broker in route.broker_datas:
        addresses = dict(broker.broker_addrs)
        if (
            broker.enable_acting_master
            and MASTER not in addresses
            and broker.broker_name in readable_only
        ):
            addresses = {MASTER: addresses.pop(min(addresses)), **addresses}
        brokers.append(replace(broker, broker_addrs=addresses))
    return replace(route, broker_datas=tuple(brokers))
