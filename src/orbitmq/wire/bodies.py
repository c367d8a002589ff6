"""Bodies: routes, registrations, memberships, offsets, statistics and configuration."""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator

import msgspec
from msgspec import field

from orbitmq.wire.codes import DEFAULT_LIMITS, BodyError, Gate, WireLimits
from orbitmq.wire.javajson import Body, Int32, Int64, Mismatch, coerce, decode_body, encode_body

# Membership: heartbeats, subscriptions, connections, locks.


class ConsumeType(enum.StrEnum):
    """How a consumer gets its messages."""

    CONSUME_ACTIVELY = "CONSUME_ACTIVELY"
    CONSUME_PASSIVELY = "CONSUME_PASSIVELY"
    CONSUME_POP = "CONSUME_POP"


class MessageModel(enum.StrEnum):
    """Whether the members of a group share the messages or each get all of them."""

    BROADCASTING = "BROADCASTING"
    CLUSTERING = "CLUSTERING"


class ConsumeFromWhere(enum.StrEnum):
    """Where a group without progress begins."""

    CONSUME_FROM_LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST = (
        "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST"
    )
    CONSUME_FROM_MIN_OFFSET = "CONSUME_FROM_MIN_OFFSET"
    CONSUME_FROM_MAX_OFFSET = "CONSUME_FROM_MAX_OFFSET"
    CONSUME_FROM_FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    CONSUME_FROM_TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class LanguageName(enum.StrEnum):
    """What a client is written in. Members stand in the order of `codes.Language`."""

    JAVA = "JAVA"
    CPP = "CPP"
    DOTNET = "DOTNET"
    PYTHON = "PYTHON"
    DELPHI = "DELPHI"
    ERLANG = "ERLANG"
    RUBY = "RUBY"
    OTHER = "OTHER"
    HTTP = "HTTP"
    GO = "GO"
    PHP = "PHP"
    OMS = "OMS"
    RUST = "RUST"
    NODE_JS = "NODE_JS"


class SubscriptionData(Body, frozen=True, kw_only=True):
    """What a group wants of a topic."""

    class_filter_mode: bool = False
    #: Hashes of the tags. C++ clients fill in zeros: never filter by what a heartbeat says here.
    code_set: tuple[Int32, ...] = ()
    expression_type: str = "TAG"
    filter_class_source: str | None = None
    sub_string: str | None = None
    sub_version: Int64 = 0
    tags_set: tuple[str, ...] = ()
    topic: str


class ConsumerData(Body, frozen=True, kw_only=True):
    """A consumer group in a heartbeat."""

    consume_from_where: ConsumeFromWhere | None = None
    consume_type: ConsumeType | None = None
    group_name: str
    message_model: MessageModel | None = None
    subscription_data_set: tuple[SubscriptionData, ...] = ()
    unit_mode: bool = False


class ProducerData(Body, frozen=True, kw_only=True):
    """A producer group in a heartbeat."""

    group_name: str


class HeartbeatData(Body, frozen=True, kw_only=True):
    """HEART_BEAT: a client and its groups."""

    client_id: str = field(name="clientID")
    consumer_data_set: tuple[ConsumerData, ...] = ()
    heartbeat_fingerprint: Int32 = 0
    producer_data_set: tuple[ProducerData, ...] = ()
    without_sub: bool = False


class ConsumerList(Body, frozen=True, kw_only=True):
    """The answer to GET_CONSUMER_LIST_BY_GROUP."""

    consumer_id_list: tuple[str, ...] = ()


class CheckClientRequest(Body, frozen=True, kw_only=True):
    """CHECK_CLIENT_CONFIG: can this subscription be served?"""

    client_id: str | None = None
    group: str | None = None
    namespace: str | None = None
    subscription_data: SubscriptionData | None = None


class LockBatch(Body, frozen=True, kw_only=True):
    """LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""

    client_id: str
    consumer_group: str
    mq_set: tuple[MessageQueue, ...] = ()
    only_this_broker: bool = False


class LockedQueues(Body, frozen=True, kw_only=True):
    """The answer to LOCK_BATCH_MQ: what the client now holds."""

    lock_ok_mq_set: tuple[MessageQueue, ...] = field(name="lockOKMQSet", default=())


class Connection(Body, frozen=True, kw_only=True):
    """A client that is connected."""

    client_addr: str | None = None
    client_id: str | None = None
    language: LanguageName | None = None
    version: Int32 = 0


class ConsumerConnection(Body, frozen=True, kw_only=True):
    """The answer to GET_CONSUMER_CONNECTION_LIST."""

    connection_set: tuple[Connection, ...] = ()
    consume_from_where: ConsumeFromWhere | None = None
    consume_type: ConsumeType | None = None
    message_model: MessageModel | None = None
    subscription_table: dict[str, SubscriptionData] = field(default_factory=dict)


class ProducerConnection(Body, frozen=True, kw_only=True):
    """The answer to GET_PRODUCER_CONNECTION_LIST."""

    connection_set: tuple[Connection, ...] = ()


class ProducerInfo(Body, frozen=True, kw_only=True):
    """A producer that is connected."""

    client_id: str | None = None
    language: LanguageName | None = None
    last_update_timestamp: Int64 = 0
    remote_ip: str | None = field(name="remoteIP", default=None)
    version: Int32 = 0


class ProducerTable(Body, frozen=True, kw_only=True):
    """The answer to GET_ALL_PRODUCER_INFO, by group."""

    data: dict[str, tuple[ProducerInfo, ...]] = field(default_factory=dict)


class QueryAssignment(Body, frozen=True, kw_only=True):
    """QUERY_ASSIGNMENT: which queues are mine?"""

    client_id: str
    consumer_group: str
    message_model: MessageModel | None = None
    strategy_name: str | None = None
    topic: str


class QueueAssignment(Body, frozen=True, kw_only=True):
    """A queue given to a client."""

    attachments: dict[str, str] | None = None
    message_queue: MessageQueue
    mode: str = "PULL"  #: never POP, which is not served


class Assignments(Body, frozen=True, kw_only=True):
    """The answer to QUERY_ASSIGNMENT."""

    message_queue_assignments: tuple[QueueAssignment, ...] = ()


class RequestModes(Body, frozen=True, kw_only=True):
    """The answer to GET_ALL_MESSAGE_REQUEST_MODE: by topic, then by group; here always empty."""

    message_request_mode_map: dict[str, dict[str, str]] = field(default_factory=dict)


# Progress of groups, as tables.


class ResetOffsets(Body, frozen=True, kw_only=True):
    """INVOKE_BROKER_TO_RESET_OFFSET answered, and RESET_CONSUMER_CLIENT_OFFSET."""

    offset_table: dict[MessageQueue, Int64] = field(default_factory=dict)


class QueueOffset(Body, frozen=True, kw_only=True):
    """A queue and an offset in it, side by side."""

    broker_name: str
    offset: Int64
    queue_id: Int32
    topic: str


class ResetOffsetList(Body, frozen=True, kw_only=True):
    """RESET_CONSUMER_CLIENT_OFFSET in the form that C++ clients read."""

    offset_table: tuple[QueueOffset, ...] = ()


class ConsumerOffsets(Body, frozen=True, kw_only=True):
    """The answer to GET_ALL_CONSUMER_OFFSET: by `topic@group`, then by queue."""

    data_version: DataVersion | None = None
    offset_table: dict[str, dict[Int32, Int64]] = field(default_factory=dict)


class DelayOffsets(Body, frozen=True, kw_only=True):
    """The answer to GET_ALL_DELAY_OFFSET: by delay level."""

    data_version: DataVersion | None = None
    offset_table: dict[Int32, Int64] = field(default_factory=dict)


class CorrectionOffsets(Body, frozen=True, kw_only=True):
    """The answer to QUERY_CORRECTION_OFFSET: by queue."""

    correction_offsets: dict[Int32, Int64] = field(default_factory=dict)


class ConsumerStatus(Body, frozen=True, kw_only=True):
    """A client's own progress (second table), or that of all clients of a group (first)."""

    consumer_table: dict[str, dict[MessageQueue, Int64]] | None = None
    message_queue_table: dict[MessageQueue, Int64] | None = None


class TimingCount(Body, frozen=True, kw_only=True):
    """How many timer messages of a topic wait."""

    count: Int64 = 0
    time_stamp: Int64 = 0


class TimerMetrics(Body, frozen=True, kw_only=True):
    """The answer to GET_TIMER_METRICS."""

    data_version: DataVersion | None = None
    timing_count: dict[str, TimingCount] = field(default_factory=dict)


# Where topics live: routes, clusters, groups of brokers.


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
    """The answer to GET_BROKER_CLUSTER_INFO. Apache writes its keys bare for every client."""

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


# Statistics and diagnostics.


class QueueProgress(Body, frozen=True, kw_only=True):
    """How far a group is in a queue."""

    broker_offset: Int64 = 0
    consumer_offset: Int64 = 0
    last_timestamp: Int64 = 0
    pull_offset: Int64 = 0


class ConsumeStats(Body, frozen=True, kw_only=True):
    """The answer to GET_CONSUME_STATS."""

    consume_tps: float = 0.0
    offset_table: dict[MessageQueue, QueueProgress] = field(default_factory=dict)


class ConsumeStatsList(Body, frozen=True, kw_only=True):
    """The answer to GET_BROKER_CONSUME_STATS."""

    broker_addr: str | None = None
    consume_stats_list: tuple[dict[str, tuple[ConsumeStats, ...]], ...] = ()
    total_diff: Int64 = 0
    total_inflight_diff: Int64 = 0


class QueueBounds(Body, frozen=True, kw_only=True):
    """The first and the next offset of a queue."""

    last_update_timestamp: Int64 = 0
    max_offset: Int64 = 0
    min_offset: Int64 = 0


class TopicStats(Body, frozen=True, kw_only=True):
    """The answer to GET_TOPIC_STATS_INFO."""

    offset_table: dict[MessageQueue, QueueBounds] = field(default_factory=dict)
    topic_put_tps: float = 0.0


class QueueTimeSpan(Body, frozen=True, kw_only=True):
    """When the messages of a queue were stored, and up to when they were consumed."""

    consume_time_stamp: Int64 = 0
    consume_time_stamp_str: str | None = None
    delay_time: Int64 = 0
    max_time_stamp: Int64 = 0
    max_time_stamp_str: str | None = None
    message_queue: MessageQueue | None = None
    min_time_stamp: Int64 = 0
    min_time_stamp_str: str | None = None


class ConsumeTimeSpans(Body, frozen=True, kw_only=True):
    """The answer to QUERY_CONSUME_TIME_SPAN."""

    consume_time_span_set: tuple[QueueTimeSpan, ...] = ()


class ProcessQueueInfo(Body, frozen=True, kw_only=True):
    """What a client holds of a queue."""

    cached_msg_count: Int32 = 0
    cached_msg_max_offset: Int64 = 0
    cached_msg_min_offset: Int64 = 0
    cached_msg_size_in_mib: Int32 = field(name="cachedMsgSizeInMiB", default=0)
    commit_offset: Int64 = 0
    is_dropped: bool = field(name="droped", default=False)
    last_consume_timestamp: Int64 = 0
    last_lock_timestamp: Int64 = 0
    last_pull_timestamp: Int64 = 0
    locked: bool = False
    transaction_msg_count: Int32 = 0
    transaction_msg_max_offset: Int64 = 0
    transaction_msg_min_offset: Int64 = 0
    try_unlock_times: Int64 = 0


class PopProcessQueueInfo(Body, frozen=True, kw_only=True):
    """What a popping client holds of a queue."""

    is_dropped: bool = field(name="droped", default=False)
    last_pop_timestamp: Int64 = 0
    wait_ack_count: Int32 = 0


class ConsumeStatus(Body, frozen=True, kw_only=True):
    """How fast a client consumes a topic."""

    consume_failed_msgs: Int64 = 0
    consume_failed_tps: float = field(name="consumeFailedTPS", default=0.0)
    consume_ok_tps: float = field(name="consumeOKTPS", default=0.0)
    consume_rt: float = field(name="consumeRT", default=0.0)
    pull_rt: float = field(name="pullRT", default=0.0)
    pull_tps: float = field(name="pullTPS", default=0.0)


class ConsumerRunningInfo(Body, frozen=True, kw_only=True):
    """The answer to GET_CONSUMER_RUNNING_INFO."""

    jstack: str | None = None
    mq_pop_table: dict[MessageQueue, PopProcessQueueInfo] = field(default_factory=dict)
    mq_table: dict[MessageQueue, ProcessQueueInfo] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    status_table: dict[str, ConsumeStatus] = field(default_factory=dict)
    subscription_set: tuple[SubscriptionData, ...] = ()
    user_consumer_info: dict[str, str] = field(default_factory=dict)


class ConsumeResult(enum.StrEnum):
    """What a listener made of a message."""

    CR_SUCCESS = "CR_SUCCESS"
    CR_LATER = "CR_LATER"
    CR_ROLLBACK = "CR_ROLLBACK"
    CR_COMMIT = "CR_COMMIT"
    CR_THROW_EXCEPTION = "CR_THROW_EXCEPTION"
    CR_RETURN_NULL = "CR_RETURN_NULL"


class ConsumeDirectlyResult(Body, frozen=True, kw_only=True):
    """The answer to CONSUME_MESSAGE_DIRECTLY."""

    auto_commit: bool = True
    consume_result: ConsumeResult | None = None
    order: bool = False
    remark: str | None = None
    spent_time_mills: Int64 = 0


class ConsumeQueueEntry(Body, frozen=True, kw_only=True):
    """An entry of a consume queue."""

    bit_map: str | None = None
    eval: bool = False
    extend_data_json: str | None = None
    msg: str | None = None
    physic_offset: Int64 = 0
    physic_size: Int32 = 0
    tags_code: Int64 = 0


class ConsumeQueueEntries(Body, frozen=True, kw_only=True):
    """The answer to QUERY_CONSUME_QUEUE."""

    filter_data: str | None = None
    max_queue_index: Int64 = 0
    min_queue_index: Int64 = 0
    queue_data: tuple[ConsumeQueueEntry, ...] = ()
    subscription_data: SubscriptionData | None = None


class QuerySubscription(Body, frozen=True, kw_only=True):
    """The answer to QUERY_SUBSCRIPTION_BY_CONSUMER."""

    group: str | None = None
    subscription_data: SubscriptionData | None = None
    topic: str | None = None


class BrokerStatsItem(Body, frozen=True, kw_only=True):
    """A count over some time."""

    avgpt: float = 0.0
    sum: Int64 = 0
    tps: float = 0.0


class BrokerStatsData(Body, frozen=True, kw_only=True):
    """The answer to VIEW_BROKER_STATS_DATA."""

    stats_day: BrokerStatsItem = BrokerStatsItem()
    stats_hour: BrokerStatsItem = BrokerStatsItem()
    stats_minute: BrokerStatsItem = BrokerStatsItem()


class HAConnectionInfo(Body, frozen=True, kw_only=True):
    """A slave, as its master sees it."""

    addr: str | None = None
    diff: Int64 = 0
    in_sync: bool = False
    slave_ack_offset: Int64 = 0
    transfer_from_where: Int64 = 0
    transferred_byte_in_second: Int64 = 0


class HAClientInfo(Body, frozen=True, kw_only=True):
    """A master, as its slave sees it."""

    activated: bool = False
    last_read_timestamp: Int64 = 0
    last_write_timestamp: Int64 = 0
    master_addr: str | None = None
    master_flush_offset: Int64 = 0
    max_offset: Int64 = 0
    transferred_byte_in_second: Int64 = 0


class HARuntimeInfo(Body, frozen=True, kw_only=True):
    """The answer to GET_BROKER_HA_STATUS."""

    ha_client_runtime_info: HAClientInfo = HAClientInfo()
    ha_connection_info: tuple[HAConnectionInfo, ...] = ()
    in_sync_slave_nums: Int32 = 0
    master: bool = False
    master_commit_log_max_offset: Int64 = 0


# Configuration of topics and groups, and the registration of a broker.


class DataVersion(Body, frozen=True, kw_only=True):
    """A state of configuration. Two are the same only if all three numbers are."""

    counter: Int64 = 0
    state_version: Int64 = 0
    timestamp: Int64 = 0


class TopicFilterType(enum.StrEnum):
    """How many tags a message may have; the second is not used."""

    SINGLE_TAG = "SINGLE_TAG"
    MULTI_TAG = "MULTI_TAG"


class TopicConfig(Body, frozen=True, kw_only=True):
    """A topic on a broker."""

    attributes: dict[str, str] = field(default_factory=dict)
    order: bool = False
    perm: Int32 = 6
    read_queue_nums: Int32 = 16
    topic_filter_type: TopicFilterType = TopicFilterType.SINGLE_TAG
    topic_name: str
    topic_sys_flag: Int32 = 0
    write_queue_nums: Int32 = 16


class QueueMappingItem(Body, frozen=True, kw_only=True):
    """A stretch of a static topic's queue on one broker."""

    bname: str | None = None
    end_offset: Int64 = -1
    gen: Int32 = 0
    logic_offset: Int64 = 0
    queue_id: Int32 = 0
    start_offset: Int64 = 0
    time_of_end: Int64 = -1
    time_of_start: Int64 = -1


class QueueMappingDetail(Body, frozen=True, kw_only=True):
    """The stretches of a static topic's queues that a broker hosts."""

    bname: str | None = None
    curr_id_map: dict[Int32, Int32] = field(default_factory=dict)
    dirty: bool = False
    epoch: Int64 = 0
    hosted_queues: dict[Int32, tuple[QueueMappingItem, ...]] = field(default_factory=dict)
    scope: str | None = None
    topic: str | None = None
    total_queues: Int32 = 0


class TopicConfigTable(Body, frozen=True, kw_only=True):
    """All topics of a broker: the answer to GET_ALL_TOPIC_CONFIG, and part of a registration.

    Brokers of 4.x write neither of the mapping keys. `deleted_topics` is ours, for slaves: the
    offset of the log below which the messages of a topic are deleted, though it may be there again.
    """

    data_version: DataVersion | None = None
    deleted_topics: dict[str, Int64] | None = None
    mapping_data_version: DataVersion | None = None
    topic_config_table: dict[str, TopicConfig] = field(default_factory=dict)
    topic_queue_mapping_detail_map: dict[str, QueueMappingDetail] | None = None
    topic_queue_mapping_info_map: dict[str, QueueMappingInfo] | None = None


class RegisterBroker(Body, frozen=True, kw_only=True):
    """REGISTER_BROKER; see `registration` for the compressed form."""

    filter_server_list: tuple[str, ...] = ()
    topic_config_serialize_wrapper: TopicConfigTable = TopicConfigTable()


class CreateTopicList(Body, frozen=True, kw_only=True):
    """UPDATE_AND_CREATE_TOPIC_LIST."""

    topic_config_list: tuple[TopicConfig, ...] = ()


class TopicConfigDetail(Body, frozen=True, kw_only=True):
    """The answer to GET_TOPIC_CONFIG: a topic, and its mapping when it is a static one."""

    attributes: dict[str, str] = field(default_factory=dict)
    order: bool = False
    perm: Int32 = 6
    read_queue_nums: Int32 = 16
    topic_filter_type: TopicFilterType = TopicFilterType.SINGLE_TAG
    topic_name: str
    topic_queue_mapping_detail: QueueMappingDetail | None = None
    topic_sys_flag: Int32 = 0
    write_queue_nums: Int32 = 16


class RetryPolicyType(enum.StrEnum):
    """How the pauses between attempts grow."""

    EXPONENTIAL = "EXPONENTIAL"
    CUSTOMIZED = "CUSTOMIZED"


class ExponentialRetryPolicy(Body, frozen=True, kw_only=True):
    """Pauses that grow by a factor; milliseconds."""

    initial: Int64 = 5_000
    max: Int64 = 7_200_000
    multiplier: Int64 = 2


class CustomizedRetryPolicy(Body, frozen=True, kw_only=True):
    """Pauses one by one; milliseconds."""

    next: tuple[Int64, ...] = ()


class GroupRetryPolicy(Body, frozen=True, kw_only=True):
    """When a group's failed messages come again."""

    customized_retry_policy: CustomizedRetryPolicy | None = None
    exponential_retry_policy: ExponentialRetryPolicy | None = None
    type: RetryPolicyType = RetryPolicyType.CUSTOMIZED


class SimpleSubscription(Body, frozen=True, kw_only=True):
    """What a group is configured to want of a topic."""

    expression: str | None = None
    expression_type: str | None = None
    topic: str | None = None
    version: Int64 = 0


class SubscriptionGroupConfig(Body, frozen=True, kw_only=True):
    """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, and the answer to GET_SUBSCRIPTIONGROUP_CONFIG."""

    attributes: dict[str, str] = field(default_factory=dict)
    broker_id: Int64 = 0
    consume_broadcast_enable: bool = True
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_message_orderly: bool = False
    consume_timeout_minute: Int32 = 15
    group_name: str
    group_retry_policy: GroupRetryPolicy = GroupRetryPolicy()
    group_sys_flag: Int32 = 0
    notify_consumer_ids_changed_enable: bool = True
    retry_max_times: Int32 = 16
    retry_queue_nums: Int32 = 1
    subscription_data_set: tuple[SimpleSubscription, ...] | None = None
    which_broker_when_consume_slowly: Int64 = 1


class CreateGroupList(Body, frozen=True, kw_only=True):
    """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST."""

    group_config_list: tuple[SubscriptionGroupConfig, ...] = ()


class SubscriptionGroupTable(Body, frozen=True, kw_only=True):
    """The answer to GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""

    data_version: DataVersion | None = None
    forbidden_table: dict[str, dict[str, Int32]] = field(default_factory=dict)
    subscription_group_table: dict[str, SubscriptionGroupConfig] = field(default_factory=dict)


class GroupForbidden(Body, frozen=True, kw_only=True):
    """The answer to UPDATE_AND_GET_GROUP_FORBIDDEN."""

    group: str | None = None
    readable: bool | None = None
    topic: str | None = None


# The compressed form of a broker's registration.
#
# zlib over: the DataVersion, the topics as lines of text, the filter servers and, from 5.0.0 on,
# the queue mappings; each with its length before it. A name server has to accept it, though brokers
# of today send the JSON form. What it inflates to is limited: two kilobytes can promise two
# megabytes.


_unpack_int = struct.Struct(">i").unpack_from
_pack_int = struct.Struct(">i").pack
_NAME = RegisterBroker.__name__


def body_crc32(body: bytes | memoryview) -> int:
    """The checksum that a registration carries in `body_crc32`."""
    return zlib.crc32(body) & 0x7FFFFFFF


def compress_registration(registration: RegisterBroker) -> bytes:
    """A registration in the compressed form."""
    table = registration.topic_config_serialize_wrapper
    mappings = table.topic_queue_mapping_info_map or {}
    pieces = [
        *_sized(encode_body(table.data_version or DataVersion())),
        _pack_int(len(table.topic_config_table)),
        *(p for topic in table.topic_config_table.values() for p in _sized(_line(topic))),
        *_sized(msgspec.json.encode(registration.filter_server_list)),
        _pack_int(len(mappings)),
        *(p for mapping in mappings.values() for p in _sized(encode_body(mapping))),
    ]
    return zlib.compress(b"".join(pieces), 9)


def decompress_registration(
    data: bytes | memoryview, version: int, limits: WireLimits = DEFAULT_LIMITS
) -> RegisterBroker:
    """A compressed registration of a broker that announces `version`. Raises `BodyError`."""
    rest = _Rest(_inflated(data, limits))
    data_version = decode_body(DataVersion, rest.sized(), limits)
    topics = [_topic(rest.sized(), limits) for _ in rest.counted()]
    try:
        filter_servers = msgspec.json.decode(rest.sized(), type=tuple[str, ...])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BodyError(_NAME, f"a list of filter servers that is not one: {error}") from error
    mappings = []
    if version >= Gate.QUEUE_MAPPINGS:
        mappings = [decode_body(QueueMappingInfo, rest.sized(), limits) for _ in rest.counted()]
    return RegisterBroker(
        filter_server_list=filter_servers,
        topic_config_serialize_wrapper=TopicConfigTable(
            data_version=data_version,
            topic_config_table={topic.topic_name: topic for topic in topics},
            topic_queue_mapping_info_map={
                mapping.topic: mapping for mapping in mappings if mapping.topic is not None
            },
        ),
    )


def _inflated(data: bytes | memoryview, limits: WireLimits) -> bytes:
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(data, limits.inflated)
    except zlib.error as error:
        raise BodyError(_NAME, f"not zlib: {error}") from error
    if not inflater.eof:
        # Either the stream was cut, or it would go on beyond the limit.
        raise BodyError(_NAME, f"cut short, or of more than {limits.inflated} bytes")
    return inflated


class _Rest:
    """What of an inflated body has not been read yet."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def sized(self) -> bytes:
        size = self._integer()
        start = self._at
        if not 0 <= size <= len(self._data) - start:
            raise BodyError(_NAME, f"{size} bytes announced, {len(self._data) - start} left")
        self._at = start + size
        return self._data[start : self._at]

    def counted(self) -> Iterator[int]:
        count = self._integer()
        if count < 0:
            raise BodyError(_NAME, f"a count of {count}")
        # Not a list: the count is only a claim, and every entry must still be there to be read.
        return iter(range(count))

    def _integer(self) -> int:
        try:
            (number,) = _unpack_int(self._data, self._at)
        except struct.error:
            raise BodyError(_NAME, "ends within a length") from None
        self._at += 4
        return int(number)


def _topic(line: bytes, limits: WireLimits) -> TopicConfig:
    """`name readQueues writeQueues perm filterType {attributes}`; the last may be missing."""
    try:
        name, reads, writes, perm, filter_type, *attributes = line.decode().split(" ", 5)
        topic = coerce(
            TopicConfig,
            {
                "topicName": name,
                "readQueueNums": reads,
                "writeQueueNums": writes,
                "perm": perm,
                "topicFilterType": filter_type,
            },
            limits,
        )
    except (ValueError, Mismatch) as error:
        raise BodyError(_NAME, f"a topic that cannot be read: {line[:80]!r}") from error
    return msgspec.structs.replace(
        topic, attributes=_attributes(attributes[0] if attributes else "")
    )


def _attributes(text: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # Apache's name server registers a topic without the attributes that it cannot read.
        return {}


def _line(topic: TopicConfig) -> bytes:
    return b"%b %d %d %d %b %b" % (
        topic.topic_name.encode(),
        topic.read_queue_nums,
        topic.write_queue_nums,
        topic.perm,
        topic.topic_filter_type.encode(),
        msgspec.json.encode(topic.attributes),
    )


def _sized(data: bytes) -> tuple[bytes, bytes]:
    return _pack_int(len(data)), data
