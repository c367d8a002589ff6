"""Statistics and diagnostics."""

from __future__ import annotations

import enum

from msgspec import field

from orbitmq.wire.bodies.base import Body, Int32, Int64
from orbitmq.wire.bodies.membership import SubscriptionData
from orbitmq.wire.bodies.route import MessageQueue


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
