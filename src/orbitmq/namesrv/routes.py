"""The tables of a name server: brokers, their topics, and which brokers are alive. No I/O.

The rules are Apache's. A registration replaces a broker's topics when it is new: the first one of
this id, another `DataVersion`, or an unknown topic. Only a master registers queues; in a group of
5.x brokers without a master, the member with the lowest id does, without write permission. If two
addresses claim one id, the larger state version wins, then the later registration. A broker leaves
when its connection closes or its timeout passes; the last of a group takes the queues with it.

Invariant: every address in a group has an entry in `_live`. Removing that removes the broker.
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

#: Bits of a queue's permission.
PERM_WRITE = 2
PERM_READ = 4

#: The broker id of a master; slaves have larger ones.
MASTER = 0


class BrokerKey(NamedTuple):
    """What identifies one broker process."""

    cluster: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A broker's registration."""

    cluster: str
    name: str
    id: int
    address: str
    ha_address: str = ""
    zone: str | None = None
    timeout: float = 120.0  #: seconds without a heartbeat after which it is removed
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
    """The result of a registration. A slave learns the address of its master, if known."""

    master_address: str | None = None
    ha_address: str | None = None
    #: A living broker elsewhere that claims the same name and id; only one of them is listed.
    rival: str | None = None


class Expired(NamedTuple):
    """A broker whose timeout has passed."""

    key: BrokerKey
    connection: Hashable


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
    """The last heartbeat of one broker."""

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

    # Registration

    def register(self, broker: Registration, now: float, connection: Hashable = None) -> Registered:
        """Store the registration of a broker. Raises `RegisterAllFirst`."""
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
        """The address of a living broker that claims the same id over another connection."""
        holder = group.addresses.get(broker.id)
        if holder is None or holder == broker.address:
            return None
        life = self._live.get(BrokerKey(group.cluster, holder))
        return holder if life is not None and life.connection != connection else None

    def _is_outdated(self, broker: Registration, group: _Group) -> bool:
        """Whether another address holds this id with a later state."""
        holder = group.addresses.get(broker.id)
        if holder is None or holder == broker.address:
            return False
        life = self._live.get(BrokerKey(broker.cluster, holder))
        return life is not None and life.version.state_version > broker.version.state_version

    def _take_id(self, broker: Registration, group: _Group) -> None:
        holder = group.addresses.get(broker.id)
        if holder is not None and holder != broker.address:
            # The former holder of the id leaves the group; it may register again.
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
        """Remove a broker."""
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
        """Remove every broker that registered over this connection, and return their keys."""
        gone = [key for key, life in self._live.items() if life.connection == connection]
        for key in gone:
            self._leave(key)
        return gone

    def expire(self, now: float) -> list[Expired]:
        """Remove and return every broker whose timeout has passed."""
        late = [(key, life) for key, life in self._live.items() if life.seen + life.timeout < now]
        for key, _ in late:
            self._leave(key)
        return [Expired(key, life.connection) for key, life in late]

    def _leave(self, key: BrokerKey) -> None:
        """Remove a broker under every name that its address registered with.

        `_live` has one entry for an address, with the latest name only.
        """
        names = [
            name
            for name, group in self._groups.items()
            if group.cluster == key.cluster and key.address in group.addresses.values()
        ]
        for name in names or [self._live[key].name]:
            self.unregister(*key, name)

    def touch(self, cluster: str, address: str, now: float) -> None:
        """Note a heartbeat."""
        life = self._live.get(BrokerKey(cluster, address))
        if life is not None:
            life.seen = now

    def version_of(self, cluster: str, address: str) -> DataVersion | None:
        """The data version of the latest registration of a broker."""
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
        """Add a topic by administration; ignored when one of the brokers is unknown."""
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
        """Make producers avoid this broker; returns the number of its topics."""
        return self._change_perm(broker, lambda perm: perm & ~PERM_WRITE)

    def add_write_permission(self, broker: str) -> int:
        """Let producers use this broker again; returns the number of its topics."""
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

    # Queries

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
        """The addresses of a group; empty when the group is unknown."""
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


def only_zone(route: TopicRouteData, zone: str) -> TopicRouteData:
    """The part of a route in one zone, plus broker groups without a master in any zone."""
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
    """Shows the first slave as master in groups that have no master and no write permission."""
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
