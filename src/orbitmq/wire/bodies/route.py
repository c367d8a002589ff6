"""Where topics live: routes, clusters, groups of brokers."""

from __future__ import annotations

from msgspec import field

from orbitmq.wire.bodies.base import Body, Int32, Int64


class MessageQueue(Body, frozen=True, kw_only=True, order=True):
    """One queue of a topic on one broker. Also the key of several maps."""

    broker_name: str
    queue_id: Int32
    topic: str


class BrokerData(Body, frozen=True, kw_only=True):
    """The addresses of a master and its slaves, by broker id."""

    broker_addrs: dict[Int64, str] = field(default_factory=dict)
    broker_name: str
    cluster: str | None = None
    enable_acting_master: bool = False
    zone_name: str | None = None


class QueueData(Body, frozen=True, kw_only=True):
    """How many queues of a topic a broker has, and what may be done with them."""

    broker_name: str
    perm: Int32 = 0
    read_queue_nums: Int32 = 0
    topic_sys_flag: Int32 = 0
    write_queue_nums: Int32 = 0


class QueueMappingInfo(Body, frozen=True, kw_only=True):
    """Where the queues of a static topic are now, as a broker sees it."""

    bname: str | None = None
    curr_id_map: dict[Int32, Int32] = field(default_factory=dict)
    dirty: bool = False
    epoch: Int64 = 0
    scope: str | None = None
    topic: str | None = None
    total_queues: Int32 = 0


class TopicRouteData(Body, frozen=True, kw_only=True):
    """The answer to GET_ROUTEINFO_BY_TOPIC."""

    broker_datas: tuple[BrokerData, ...] = ()
    filter_server_table: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: `broker-a:4;broker-b:4`.
    order_topic_conf: str | None = None
    queue_datas: tuple[QueueData, ...] = ()
    topic_queue_mapping_by_broker: dict[str, QueueMappingInfo] | None = None


class ClusterInfo(Body, frozen=True, kw_only=True):
    """The answer to GET_BROKER_CLUSTER_INFO. Apache writes its keys bare, whoever asks."""

    broker_addr_table: dict[str, BrokerData] = field(default_factory=dict)
    cluster_addr_table: dict[str, tuple[str, ...]] = field(default_factory=dict)


class BrokerMemberGroup(Body, frozen=True, kw_only=True):
    """A master and its slaves."""

    broker_addrs: dict[Int64, str] = field(default_factory=dict)
    broker_name: str
    cluster: str


class BrokerMemberGroupResponse(Body, frozen=True, kw_only=True):
    """The answer to GET_BROKER_MEMBER_GROUP."""

    broker_member_group: BrokerMemberGroup | None = None


class KVTable(Body, frozen=True, kw_only=True):
    """Texts by name: KV configuration, runtime information."""

    table: dict[str, str] = field(default_factory=dict)


class TopicList(Body, frozen=True, kw_only=True):
    """Names of topics."""

    broker_addr: str | None = None
    topic_list: tuple[str, ...] = ()


class GroupList(Body, frozen=True, kw_only=True):
    """Names of groups."""

    group_list: tuple[str, ...] = ()
