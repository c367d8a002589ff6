"""Configuration of topics and groups, and the registration of a broker."""

from __future__ import annotations

import enum

from msgspec import field

from orbitmq.wire.bodies.base import Body, Int32, Int64
from orbitmq.wire.bodies.route import QueueMappingInfo


class DataVersion(Body, frozen=True, kw_only=True):
    """A state of configuration. Two are the same only if all three numbers are."""

    counter: Int64 = 0
    state_version: Int64 = 0
    timestamp: Int64 = 0


class TopicFilterType(enum.StrEnum):
    """How many tags a message may have; nobody uses the second."""

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
