"""Which header each request code carries, and which one answers it.

A code without a line here has no fields beyond those that every request may carry (credentials,
zone, namespace), or belongs to a family that this package does not speak: POP, the controller,
RocksDB, cold data.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from orbitmq.wire.codes import RequestCode as Code
from orbitmq.wire.headers import (
    auth,
    membership,
    namesrv,
    offsets,
    pull,
    replication,
    send,
    stats,
    topics,
    transactions,
)
from orbitmq.wire.headers.base import Header, NoFields


class Exchange(NamedTuple):
    """The header of a request and that of its answer."""

    request: type[Header] = NoFields
    response: type[Header] = NoFields


_SEND = Exchange(send.SendMessageRequest, send.SendMessageResponse)
_PULL = Exchange(pull.PullMessageRequest, pull.PullMessageResponse)
_TOPIC = Exchange(topics.TopicRequest)
_GROUP = Exchange(topics.GroupRequest)
_USER = Exchange(auth.UserRequest)
_SUBJECT = Exchange(auth.SubjectRequest)
_STATUS = Exchange(stats.GetConsumerStatusRequest)

EXCHANGES: Mapping[int, Exchange] = MappingProxyType(
    {
        # Sending
        Code.SEND_MESSAGE: _SEND,
        Code.SEND_MESSAGE_V2: _SEND,
        Code.SEND_BATCH_MESSAGE: _SEND,
        Code.SEND_REPLY_MESSAGE: _SEND,
        Code.SEND_REPLY_MESSAGE_V2: _SEND,
        Code.PUSH_REPLY_MESSAGE_TO_CLIENT: Exchange(send.PushReplyRequest),
        Code.RECALL_MESSAGE: Exchange(send.RecallMessageRequest, send.RecallMessageResponse),
        # Pulling and looking up
        Code.PULL_MESSAGE: _PULL,
        Code.LITE_PULL_MESSAGE: _PULL,
        Code.VIEW_MESSAGE_BY_ID: Exchange(pull.ViewMessageRequest),
        Code.QUERY_MESSAGE: Exchange(pull.QueryMessageRequest, pull.QueryMessageResponse),
        # Offsets
        Code.QUERY_CONSUMER_OFFSET: Exchange(
            offsets.QueryConsumerOffsetRequest, offsets.OffsetResponse
        ),
        Code.UPDATE_CONSUMER_OFFSET: Exchange(offsets.UpdateConsumerOffsetRequest),
        Code.SEARCH_OFFSET_BY_TIMESTAMP: Exchange(
            offsets.SearchOffsetRequest, offsets.OffsetResponse
        ),
        Code.GET_MAX_OFFSET: Exchange(offsets.GetMaxOffsetRequest, offsets.OffsetResponse),
        Code.GET_MIN_OFFSET: Exchange(offsets.GetMinOffsetRequest, offsets.OffsetResponse),
        Code.GET_EARLIEST_MSG_STORETIME: Exchange(
            offsets.GetEarliestStoreTimeRequest, offsets.TimestampResponse
        ),
        Code.INVOKE_BROKER_TO_RESET_OFFSET: Exchange(offsets.ResetOffsetRequest),
        Code.RESET_CONSUMER_CLIENT_OFFSET: Exchange(offsets.ResetOffsetRequest),
        Code.QUERY_CORRECTION_OFFSET: Exchange(offsets.QueryCorrectionOffsetRequest),
        Code.CLONE_GROUP_OFFSET: Exchange(offsets.CloneGroupOffsetRequest),
        # Membership and locks
        Code.HEART_BEAT: Exchange(membership.HeartbeatRequest, membership.HeartbeatResponse),
        Code.UNREGISTER_CLIENT: Exchange(membership.UnregisterClientRequest),
        Code.GET_CONSUMER_LIST_BY_GROUP: Exchange(membership.GetConsumerListRequest),
        Code.CHECK_CLIENT_CONFIG: Exchange(),
        Code.NOTIFY_CONSUMER_IDS_CHANGED: Exchange(membership.NotifyConsumerIdsChangedRequest),
        Code.LOCK_BATCH_MQ: Exchange(membership.LockBatchRequest),
        Code.UNLOCK_BATCH_MQ: Exchange(membership.UnlockBatchRequest),
        Code.GET_CONSUMER_CONNECTION_LIST: Exchange(membership.GetConsumerConnectionRequest),
        Code.GET_PRODUCER_CONNECTION_LIST: Exchange(membership.GetProducerConnectionRequest),
        Code.GET_ALL_PRODUCER_INFO: Exchange(),
        Code.QUERY_ASSIGNMENT: Exchange(),
        Code.SET_MESSAGE_REQUEST_MODE: Exchange(),
        # Send-back and transactions
        Code.CONSUMER_SEND_MSG_BACK: Exchange(transactions.ConsumerSendBackRequest),
        Code.END_TRANSACTION: Exchange(transactions.EndTransactionRequest),
        Code.CHECK_TRANSACTION_STATE: Exchange(transactions.CheckTransactionStateRequest),
        Code.RESUME_CHECK_HALF_MESSAGE: Exchange(transactions.ResumeCheckHalfMessageRequest),
        # Name server
        Code.GET_ROUTEINFO_BY_TOPIC: Exchange(namesrv.GetRouteInfoRequest),
        Code.REGISTER_BROKER: Exchange(
            namesrv.RegisterBrokerRequest, namesrv.RegisterBrokerResponse
        ),
        Code.UNREGISTER_BROKER: Exchange(namesrv.BrokerRequest),
        Code.QUERY_DATA_VERSION: Exchange(namesrv.BrokerRequest, namesrv.QueryDataVersionResponse),
        Code.BROKER_HEARTBEAT: Exchange(namesrv.BrokerHeartbeatRequest),
        Code.GET_BROKER_MEMBER_GROUP: Exchange(namesrv.GetBrokerMemberGroupRequest),
        Code.NOTIFY_MIN_BROKER_ID_CHANGE: Exchange(namesrv.NotifyMinBrokerIdChangeRequest),
        Code.GET_BROKER_CLUSTER_INFO: Exchange(),
        Code.PUT_KV_CONFIG: Exchange(namesrv.PutKVConfigRequest),
        Code.GET_KV_CONFIG: Exchange(namesrv.KVConfigRequest, namesrv.GetKVConfigResponse),
        Code.DELETE_KV_CONFIG: Exchange(namesrv.KVConfigRequest),
        Code.GET_KVLIST_BY_NAMESPACE: Exchange(namesrv.GetKVListRequest),
        Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: Exchange(),
        Code.GET_TOPICS_BY_CLUSTER: Exchange(namesrv.GetTopicsByClusterRequest),
        Code.GET_SYSTEM_TOPIC_LIST_FROM_NS: Exchange(),
        Code.GET_UNIT_TOPIC_LIST: Exchange(),
        Code.GET_HAS_UNIT_SUB_TOPIC_LIST: Exchange(),
        Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: Exchange(),
        Code.DELETE_TOPIC_IN_NAMESRV: Exchange(namesrv.DeleteTopicInNamesrvRequest),
        Code.REGISTER_TOPIC_IN_NAMESRV: Exchange(namesrv.RegisterTopicRequest),
        Code.WIPE_WRITE_PERM_OF_BROKER: Exchange(
            namesrv.BrokerPermissionRequest, namesrv.WipeWritePermResponse
        ),
        Code.ADD_WRITE_PERM_OF_BROKER: Exchange(
            namesrv.BrokerPermissionRequest, namesrv.AddWritePermResponse
        ),
        Code.UPDATE_NAMESRV_CONFIG: Exchange(),
        Code.GET_NAMESRV_CONFIG: Exchange(),
        # Topics and groups
        Code.UPDATE_AND_CREATE_TOPIC: Exchange(topics.CreateTopicRequest),
        Code.UPDATE_AND_CREATE_TOPIC_LIST: Exchange(topics.CreateTopicListRequest),
        Code.DELETE_TOPIC_IN_BROKER: _TOPIC,
        Code.GET_TOPIC_CONFIG: _TOPIC,
        Code.GET_ALL_TOPIC_CONFIG: Exchange(
            topics.GetAllTopicConfigRequest, topics.GetAllTopicConfigResponse
        ),
        Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: Exchange(),
        Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: Exchange(),
        Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: Exchange(
            topics.GetAllGroupConfigRequest, topics.GetAllGroupConfigResponse
        ),
        Code.GET_SUBSCRIPTIONGROUP_CONFIG: _GROUP,
        Code.DELETE_SUBSCRIPTIONGROUP: Exchange(topics.DeleteGroupRequest),
        Code.UPDATE_AND_GET_GROUP_FORBIDDEN: Exchange(topics.UpdateGroupForbiddenRequest),
        # Statistics and diagnostics
        Code.UPDATE_BROKER_CONFIG: Exchange(),
        Code.GET_BROKER_CONFIG: Exchange(NoFields, stats.GetBrokerConfigResponse),
        Code.GET_BROKER_RUNTIME_INFO: Exchange(),
        Code.GET_TOPIC_STATS_INFO: _TOPIC,
        Code.GET_CONSUME_STATS: Exchange(stats.GetConsumeStatsRequest),
        Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _STATUS,
        Code.GET_CONSUMER_STATUS_FROM_CLIENT: _STATUS,
        Code.QUERY_TOPIC_CONSUME_BY_WHO: _TOPIC,
        Code.QUERY_TOPICS_BY_CONSUMER: _GROUP,
        Code.QUERY_SUBSCRIPTION_BY_CONSUMER: Exchange(stats.QuerySubscriptionRequest),
        Code.QUERY_CONSUME_TIME_SPAN: Exchange(stats.QueryConsumeTimeSpanRequest),
        Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: Exchange(),
        Code.CLEAN_EXPIRED_CONSUMEQUEUE: Exchange(),
        Code.CLEAN_UNUSED_TOPIC: Exchange(),
        Code.DELETE_EXPIRED_COMMITLOG: Exchange(),
        Code.GET_CONSUMER_RUNNING_INFO: Exchange(stats.GetConsumerRunningInfoRequest),
        Code.CONSUME_MESSAGE_DIRECTLY: Exchange(stats.ConsumeDirectlyRequest),
        Code.VIEW_BROKER_STATS_DATA: Exchange(stats.ViewBrokerStatsRequest),
        Code.GET_BROKER_CONSUME_STATS: Exchange(stats.GetBrokerConsumeStatsRequest),
        Code.QUERY_CONSUME_QUEUE: Exchange(stats.QueryConsumeQueueRequest),
        # Replication
        Code.GET_ALL_CONSUMER_OFFSET: Exchange(),
        Code.GET_ALL_DELAY_OFFSET: Exchange(),
        Code.GET_ALL_MESSAGE_REQUEST_MODE: Exchange(),
        Code.GET_TIMER_CHECK_POINT: Exchange(),
        Code.GET_TIMER_METRICS: Exchange(),
        Code.EXCHANGE_BROKER_HA_INFO: Exchange(
            replication.ExchangeHAInfo, replication.ExchangeHAInfo
        ),
        Code.GET_BROKER_HA_STATUS: Exchange(),
        Code.RESET_MASTER_FLUSH_OFFSET: Exchange(replication.ResetMasterFlushOffsetRequest),
        # Users and access rules
        Code.AUTH_CREATE_USER: _USER,
        Code.AUTH_UPDATE_USER: _USER,
        Code.AUTH_DELETE_USER: _USER,
        Code.AUTH_GET_USER: _USER,
        Code.AUTH_LIST_USER: Exchange(auth.ListUsersRequest),
        Code.AUTH_CREATE_ACL: _SUBJECT,
        Code.AUTH_UPDATE_ACL: _SUBJECT,
        Code.AUTH_DELETE_ACL: Exchange(auth.DeleteAclRequest),
        Code.AUTH_GET_ACL: _SUBJECT,
        Code.AUTH_LIST_ACL: Exchange(auth.ListAclsRequest),
    }
)
