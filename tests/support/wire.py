"""Hypothesis strategies that follow from the declarations of the wire room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from orbitmq.wire import bodies
from orbitmq.wire import headers as h
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers import Header, NoFields
from orbitmq.wire.javajson import Body

if TYPE_CHECKING:
    from types import ModuleType

S = TypeVar("S", bound=msgspec.Struct)

texts = st.text(max_size=20)


def instances(kind: type[S]) -> st.SearchStrategy[S]:
    """Any value of a declared header or body."""
    return _values(inspect.type_info(kind))


def _values(declared: inspect.Type) -> st.SearchStrategy[Any]:
    match declared:
        case inspect.StructType():
            fields = {field.name: _values(field.type) for field in declared.fields}
            return st.builds(declared.cls, **fields)
        case inspect.UnionType():
            return st.one_of(*(_values(part) for part in declared.types))
        case inspect.VarTupleType():
            return st.lists(_values(declared.item_type), max_size=2).map(tuple)
        case inspect.DictType():
            return st.dictionaries(
                _values(declared.key_type), _values(declared.value_type), max_size=2
            )
        case inspect.EnumType():
            return st.sampled_from(list(declared.cls))
        case inspect.IntType():
            return st.integers(declared.ge, declared.le)
        case inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.StrType():
            return texts
        case _:
            raise AssertionError(f"no strategy for {declared}")


def declared_in(module: ModuleType, base: type[S]) -> list[type[S]]:
    """Every class that a module declares, in the order of their names."""
    found = {
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    return sorted(found, key=lambda kind: kind.__name__)


HEADERS: list[type[Header]] = declared_in(h, Header)
BODIES: list[type[Body]] = declared_in(bodies, Body)

# Which header each request code carries, and which one answers it.
#
# A code without a line here has no fields beyond those that every request may carry (credentials,
# zone, namespace), or belongs to a family that this package does not speak: POP, the controller,
# RocksDB, cold data.


class Exchange(NamedTuple):
    """The header of a request and that of its answer."""

    request: type[Header] = NoFields
    response: type[Header] = NoFields


_SEND = Exchange(h.SendMessageRequest, h.SendMessageResponse)
_PULL = Exchange(h.PullMessageRequest, h.PullMessageResponse)
_TOPIC = Exchange(h.TopicRequest)
_GROUP = Exchange(h.GroupRequest)
_STATUS = Exchange(h.GetConsumerStatusRequest)

EXCHANGES: Mapping[int, Exchange] = {
    # Sending
    RequestCode.SEND_MESSAGE: _SEND,
    RequestCode.SEND_MESSAGE_V2: _SEND,
    RequestCode.SEND_BATCH_MESSAGE: _SEND,
    RequestCode.SEND_REPLY_MESSAGE: _SEND,
    RequestCode.SEND_REPLY_MESSAGE_V2: _SEND,
    RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: Exchange(h.PushReplyRequest),
    RequestCode.RECALL_MESSAGE: Exchange(h.RecallMessageRequest, h.RecallMessageResponse),
    # Pulling and looking up
    RequestCode.PULL_MESSAGE: _PULL,
    RequestCode.LITE_PULL_MESSAGE: _PULL,
    RequestCode.VIEW_MESSAGE_BY_ID: Exchange(h.ViewMessageRequest),
    RequestCode.QUERY_MESSAGE: Exchange(h.QueryMessageRequest, h.QueryMessageResponse),
    # Offsets
    RequestCode.QUERY_CONSUMER_OFFSET: Exchange(h.QueryConsumerOffsetRequest, h.OffsetResponse),
    RequestCode.UPDATE_CONSUMER_OFFSET: Exchange(h.UpdateConsumerOffsetRequest),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: Exchange(h.SearchOffsetRequest, h.OffsetResponse),
    RequestCode.GET_MAX_OFFSET: Exchange(h.GetMaxOffsetRequest, h.OffsetResponse),
    RequestCode.GET_MIN_OFFSET: Exchange(h.GetMinOffsetRequest, h.OffsetResponse),
    RequestCode.GET_EARLIEST_MSG_STORETIME: Exchange(
        h.GetEarliestStoreTimeRequest, h.TimestampResponse
    ),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: Exchange(h.ResetOffsetRequest),
    RequestCode.RESET_CONSUMER_CLIENT_OFFSET: Exchange(h.ResetOffsetRequest),
    RequestCode.QUERY_CORRECTION_OFFSET: Exchange(h.QueryCorrectionOffsetRequest),
    RequestCode.CLONE_GROUP_OFFSET: Exchange(h.CloneGroupOffsetRequest),
    # Membership and locks
    RequestCode.HEART_BEAT: Exchange(h.HeartbeatRequest, h.HeartbeatResponse),
    RequestCode.UNREGISTER_CLIENT: Exchange(h.UnregisterClientRequest),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: Exchange(h.GetConsumerListRequest),
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: Exchange(h.NotifyConsumerIdsChangedRequest),
    RequestCode.LOCK_BATCH_MQ: Exchange(h.LockBatchRequest),
    RequestCode.UNLOCK_BATCH_MQ: Exchange(h.UnlockBatchRequest),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: Exchange(h.GetConsumerConnectionRequest),
    RequestCode.GET_PRODUCER_CONNECTION_LIST: Exchange(h.GetProducerConnectionRequest),
    # Send-back and transactions
    RequestCode.CONSUMER_SEND_MSG_BACK: Exchange(h.ConsumerSendBackRequest),
    RequestCode.END_TRANSACTION: Exchange(h.EndTransactionRequest),
    RequestCode.CHECK_TRANSACTION_STATE: Exchange(h.CheckTransactionStateRequest),
    RequestCode.RESUME_CHECK_HALF_MESSAGE: Exchange(h.ResumeCheckHalfMessageRequest),
    # Name server
    RequestCode.GET_ROUTEINFO_BY_TOPIC: Exchange(h.GetRouteInfoRequest),
    RequestCode.REGISTER_BROKER: Exchange(h.RegisterBrokerRequest, h.RegisterBrokerResponse),
    RequestCode.UNREGISTER_BROKER: Exchange(h.BrokerRequest),
    RequestCode.QUERY_DATA_VERSION: Exchange(h.BrokerRequest, h.QueryDataVersionResponse),
    RequestCode.BROKER_HEARTBEAT: Exchange(h.BrokerHeartbeatRequest),
    RequestCode.GET_BROKER_MEMBER_GROUP: Exchange(h.GetBrokerMemberGroupRequest),
    RequestCode.PUT_KV_CONFIG: Exchange(h.PutKVConfigRequest),
    RequestCode.GET_KV_CONFIG: Exchange(h.KVConfigRequest, h.GetKVConfigResponse),
    RequestCode.DELETE_KV_CONFIG: Exchange(h.KVConfigRequest),
    RequestCode.GET_KVLIST_BY_NAMESPACE: Exchange(h.GetKVListRequest),
    RequestCode.GET_TOPICS_BY_CLUSTER: Exchange(h.GetTopicsByClusterRequest),
    RequestCode.DELETE_TOPIC_IN_NAMESRV: Exchange(h.DeleteTopicInNamesrvRequest),
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: Exchange(h.RegisterTopicRequest),
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: Exchange(
        h.BrokerPermissionRequest, h.WipeWritePermResponse
    ),
    RequestCode.ADD_WRITE_PERM_OF_BROKER: Exchange(
        h.BrokerPermissionRequest, h.AddWritePermResponse
    ),
    # Topics and groups
    RequestCode.UPDATE_AND_CREATE_TOPIC: Exchange(h.CreateTopicRequest),
    RequestCode.DELETE_TOPIC_IN_BROKER: _TOPIC,
    RequestCode.GET_TOPIC_CONFIG: _TOPIC,
    RequestCode.GET_ALL_TOPIC_CONFIG: Exchange(
        h.GetAllTopicConfigRequest, h.GetAllTopicConfigResponse
    ),
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: Exchange(
        h.GetAllGroupConfigRequest, h.GetAllGroupConfigResponse
    ),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: _GROUP,
    RequestCode.DELETE_SUBSCRIPTIONGROUP: Exchange(h.DeleteGroupRequest),
    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: Exchange(h.UpdateGroupForbiddenRequest),
    # Statistics and diagnostics
    RequestCode.GET_BROKER_CONFIG: Exchange(NoFields, h.GetBrokerConfigResponse),
    RequestCode.GET_TOPIC_STATS_INFO: _TOPIC,
    RequestCode.GET_CONSUME_STATS: Exchange(h.GetConsumeStatsRequest),
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _STATUS,
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: _STATUS,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: _TOPIC,
    RequestCode.QUERY_TOPICS_BY_CONSUMER: _GROUP,
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: Exchange(h.QuerySubscriptionRequest),
    RequestCode.QUERY_CONSUME_TIME_SPAN: Exchange(h.QueryConsumeTimeSpanRequest),
    RequestCode.GET_CONSUMER_RUNNING_INFO: Exchange(h.GetConsumerRunningInfoRequest),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: Exchange(h.ConsumeDirectlyRequest),
    RequestCode.VIEW_BROKER_STATS_DATA: Exchange(h.ViewBrokerStatsRequest),
    RequestCode.GET_BROKER_CONSUME_STATS: Exchange(h.GetBrokerConsumeStatsRequest),
    RequestCode.QUERY_CONSUME_QUEUE: Exchange(h.QueryConsumeQueueRequest),
    # Replication
    RequestCode.EXCHANGE_BROKER_HA_INFO: Exchange(h.ExchangeHAInfo, h.ExchangeHAInfo),
}
