"""What a header declaration means, and how it becomes fields on the wire and back.

A header is declared once, as a struct. Everything else follows from the declaration:

* the wire name of a field is its name in camel case, unless the field says otherwise;
* fields with a default of their own are always sent and None is not, as Java does with primitives
  and nulls;
* a field marked with `Letter` has a second, one-letter name, used by the request codes in
  `LETTERED_CODES`;
* the declared type says what is accepted: the fast way is msgspec's, the forgiving way is `coerce`.

Headers are in the wire's own units: times are epoch milliseconds, and names say `millis` for spans.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from orbitmq.wire.codes import HeaderError, RequestCode
from orbitmq.wire.javajson import Mismatch, coerce

#: Java's `int` and `long`.
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Letter(NamedTuple):
    """The one-letter name of a field, given in its annotation."""

    name: str


class Header(msgspec.Struct, frozen=True, kw_only=True, gc=False, rename="camel"):
    """The fields of one kind of request or answer."""


class RequestHeader(Header, frozen=True, kw_only=True, gc=False):
    """What most requests may carry besides their own fields."""

    broker_name: str | None = msgspec.field(name="bname", default=None)
    namespace: str | None = msgspec.field(name="ns", default=None)
    has_namespace: bool | None = msgspec.field(name="nsd", default=None)
    is_one_way: bool | None = msgspec.field(name="oway", default=None)


class TopicRequestHeader(RequestHeader, frozen=True, kw_only=True, gc=False):
    """A request about a topic, which may be addressed by its static-topic name."""

    is_logical: bool | None = msgspec.field(name="lo", default=None)


class NoFields(Header, frozen=True, kw_only=True, gc=False):
    """A request or answer that says everything by its code and body."""


H = TypeVar("H", bound=Header)

#: The requests whose fields have one-letter names. A field says whether a send is a batch
#: `batch`, not by its code.
LETTERED_CODES: frozenset[int] = frozenset(
    # Plain numbers, because every request is looked up here.
    int(code)
    for code in (
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
    )
)


class JsonDecoders(dict[type[Header], Callable[[bytes | memoryview], Any]]):
    """By kind the fast way from `extFields` as JSON; refuses what only the forgiving way reads.

    Made when it is needed first. Every request is looked up here.
    """

    def __init__(self, *, by_letters: bool) -> None:
        super().__init__()
        self._by_letters = by_letters

    def __missing__(self, kind: type[Header]) -> Callable[[bytes | memoryview], Any]:
        named = lettered(kind) if self._by_letters else kind
        decode = self[kind] = msgspec.json.Decoder(named, strict=False).decode
        return decode


def decode_fields(kind: type[H], fields: Mapping[str, str]) -> H:
    """A map of strings into a header; what does not fit is a `HeaderError` that names the field."""
    try:
        return msgspec.convert(fields, kind, strict=False)
    except (msgspec.MsgspecError, ValueError):
        pass
    try:
        return coerce(kind, fields)
    except Mismatch as mismatch:
        raise HeaderError(
            kind.__name__, mismatch.field, mismatch.allowed, mismatch.got
        ) from mismatch


def encode_fields(header: Header, kind: type[Header] | None = None) -> dict[str, str]:
    """A header as a map of strings, with the names that `kind` (else its own class) declares."""
    fields: dict[str, str] = {}
    for attribute, name in _names(kind or type(header)):
        value = getattr(header, attribute)
        if value is not None:
            fields[name] = _text_of(value)
    return fields


def _text_of(value: object) -> str:
    if isinstance(value, str):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, int) else str(value)


@functools.cache
def lettered(kind: type[H]) -> type[H]:
    """The same header under its one-letter names; `kind` itself when it declares none."""
    hints = get_type_hints(kind, include_extras=True)
    info = {field.name: field for field in msgspec.structs.fields(kind)}
    renamed = [
        (name, info[name].type, _renamed_field(info[name], letter.name))
        for name, hint in hints.items()
        if (letter := _letter(hint)) is not None
    ]
    if not renamed:
        return kind
    return msgspec.defstruct(  # type: ignore[return-value]  # a subclass of its base
        kind.__name__, renamed, bases=(kind,), frozen=True, kw_only=True, gc=False
    )


def _letter(hint: object) -> Letter | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((part for part in get_args(hint) if isinstance(part, Letter)), None)


def _renamed_field(field: msgspec.structs.FieldInfo, name: str) -> Any:
    if field.default is msgspec.NODEFAULT:
        return msgspec.field(name=name)
    return msgspec.field(name=name, default=field.default)


@functools.cache
def _names(kind: type[Header]) -> tuple[tuple[str, str], ...]:
    return tuple(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))


# Membership: heartbeats, groups and notifications about them.


class HeartbeatRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """HEART_BEAT; the body has the client and its groups."""


class HeartbeatResponse(Header, frozen=True, kw_only=True, gc=False):
    """Whether the short form of heartbeats is understood, and whether subscriptions differ."""

    supports_v2: bool | None = msgspec.field(name="IS_SUPPORT_HEART_BEAT_V2", default=None)
    is_sub_change: bool | None = msgspec.field(name="IS_SUB_CHANGE", default=None)
    #: OrbitMQ's own: for how many seconds, and for how many messages of a topic, the broker
    #: remembers `DEDUP_ID`, with a colon between.
    dedup_window: str | None = None


class UnregisterClientRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """UNREGISTER_CLIENT."""

    client_id: str = msgspec.field(name="clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


class GetConsumerListRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """GET_CONSUMER_LIST_BY_GROUP."""

    consumer_group: str


class NotifyConsumerIdsChangedRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """NOTIFY_CONSUMER_IDS_CHANGED: rebalance now."""

    consumer_group: str


class LockBatchRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """LOCK_BATCH_MQ; the body says which queues."""


class UnlockBatchRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """UNLOCK_BATCH_MQ; the body says which queues."""


class GetConsumerConnectionRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """GET_CONSUMER_CONNECTION_LIST."""

    consumer_group: str


class GetProducerConnectionRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """GET_PRODUCER_CONNECTION_LIST."""

    producer_group: str


# What brokers and clients ask of a name server.


class GetRouteInfoRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """GET_ROUTEINFO_BY_TOPIC."""

    topic: str
    #: Asks for quoted keys, whatever the version.
    accept_standard_json_only: bool | None = None


class RegisterBrokerRequest(Header, frozen=True, kw_only=True, gc=False):
    """REGISTER_BROKER."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    #: 0: the master.
    broker_id: Int64
    heartbeat_timeout_millis: Int64 | None = None
    enable_acting_master: bool | None = None
    compressed: bool = False
    #: Of the body as sent, without its sign bit; 0: not checked.
    body_crc32: Int32 = 0


class RegisterBrokerResponse(Header, frozen=True, kw_only=True, gc=False):
    """The master of a slave."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class BrokerRequest(Header, frozen=True, kw_only=True, gc=False):
    """UNREGISTER_BROKER and QUERY_DATA_VERSION: one broker."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


class QueryDataVersionResponse(Header, frozen=True, kw_only=True, gc=False):
    """Whether the name server knows another state of the broker's topics."""

    changed: bool


class BrokerHeartbeatRequest(Header, frozen=True, kw_only=True, gc=False):
    """BROKER_HEARTBEAT."""

    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: Int64 | None = None
    epoch: Int32 | None = None
    max_offset: Int64 | None = None
    confirm_offset: Int64 | None = None
    heartbeat_timeout_mills: Int64 | None = None
    election_priority: Int32 | None = None


class GetBrokerMemberGroupRequest(Header, frozen=True, kw_only=True, gc=False):
    """GET_BROKER_MEMBER_GROUP."""

    cluster_name: str
    broker_name: str


class PutKVConfigRequest(Header, frozen=True, kw_only=True, gc=False):
    """PUT_KV_CONFIG."""

    namespace: str
    key: str
    value: str


class KVConfigRequest(Header, frozen=True, kw_only=True, gc=False):
    """GET_KV_CONFIG and DELETE_KV_CONFIG."""

    namespace: str
    key: str


class GetKVConfigResponse(Header, frozen=True, kw_only=True, gc=False):
    """The value of a key."""

    value: str | None = None


class GetKVListRequest(Header, frozen=True, kw_only=True, gc=False):
    """GET_KVLIST_BY_NAMESPACE."""

    namespace: str


class GetTopicsByClusterRequest(Header, frozen=True, kw_only=True, gc=False):
    """GET_TOPICS_BY_CLUSTER."""

    cluster: str


class DeleteTopicInNamesrvRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """DELETE_TOPIC_IN_NAMESRV."""

    topic: str
    cluster_name: str | None = None


class RegisterTopicRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """REGISTER_TOPIC_IN_NAMESRV."""

    topic: str


class BrokerPermissionRequest(Header, frozen=True, kw_only=True, gc=False):
    """WIPE_WRITE_PERM_OF_BROKER and ADD_WRITE_PERM_OF_BROKER."""

    broker_name: str


class WipeWritePermResponse(Header, frozen=True, kw_only=True, gc=False):
    """How many topics can no longer be written there."""

    wipe_topic_count: Int32


class AddWritePermResponse(Header, frozen=True, kw_only=True, gc=False):
    """How many topics can be written there again."""

    add_topic_count: Int32


# Progress of groups and bounds of queues.


class BoundaryType(enum.StrEnum):
    """Which of several messages with one time is meant."""

    LOWER = "LOWER"
    UPPER = "UPPER"


class QueryConsumerOffsetRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """QUERY_CONSUMER_OFFSET."""

    consumer_group: str
    topic: str
    queue_id: Int32
    set_zero_if_not_found: bool | None = None


class UpdateConsumerOffsetRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """UPDATE_CONSUMER_OFFSET."""

    consumer_group: str
    topic: str
    queue_id: Int32
    commit_offset: Int64


class OffsetResponse(Header, frozen=True, kw_only=True, gc=False):
    """One offset: the answer to every question for one."""

    offset: Int64


class SearchOffsetRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """SEARCH_OFFSET_BY_TIMESTAMP."""

    topic: str
    queue_id: Int32
    timestamp: Int64
    boundary_type: BoundaryType | None = None


class GetMaxOffsetRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """GET_MAX_OFFSET: the offset that the next message will get."""

    topic: str
    queue_id: Int32
    committed: bool = True


class GetMinOffsetRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """GET_MIN_OFFSET."""

    topic: str
    queue_id: Int32


class GetEarliestStoreTimeRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """GET_EARLIEST_MSG_STORETIME."""

    topic: str
    queue_id: Int32


class TimestampResponse(Header, frozen=True, kw_only=True, gc=False):
    """One time."""

    timestamp: Int64


class ResetOffsetRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """INVOKE_BROKER_TO_RESET_OFFSET, and RESET_CONSUMER_CLIENT_OFFSET on its way to a client."""

    group: str
    topic: str
    #: -1: all queues.
    queue_id: Int32 = -1
    offset: Int64 | None = None
    timestamp: Int64 = 0
    is_force: bool = False


class QueryCorrectionOffsetRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """QUERY_CORRECTION_OFFSET."""

    compare_group: str
    topic: str
    #: Names with commas between.
    filter_groups: str | None = None


class CloneGroupOffsetRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """CLONE_GROUP_OFFSET."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


# Pulling messages, and looking single ones up.


class PullFlag(enum.IntFlag):
    """Bits of `sys_flag` in a pull."""

    COMMIT_OFFSET = 1
    SUSPEND = 2
    SUBSCRIPTION = 4
    CLASS_FILTER = 8
    LITE_PULL = 16


class PullMessageRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """PULL_MESSAGE and LITE_PULL_MESSAGE."""

    consumer_group: str
    topic: str
    queue_id: Int32
    queue_offset: Int64
    max_msg_nums: Int32
    #: See `PullFlag`.
    sys_flag: Int32
    #: Progress to store, when the flag says so.
    commit_offset: Int64
    suspend_timeout_millis: Int64
    sub_version: Int64
    subscription: str | None = None
    #: `TAG` (also when absent) or `SQL92`.
    expression_type: str | None = None
    max_msg_bytes: Int32 | None = None
    request_source: Int32 | None = None
    proxy_forward_client_id: str | None = msgspec.field(name="proxyFrowardClientId", default=None)
    #: Ours: a reset that the answer reports stays pending at the broker until it is followed: the
    #: answer may be lost.
    keep_reset: bool | None = None


class PullMessageResponse(Header, frozen=True, kw_only=True, gc=False):
    """Where to go on; sent with every result, also an empty one."""

    suggest_which_broker_id: Int64
    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64
    offset_delta: Int64 | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
    #: See `codes.ForbiddenType`.
    forbidden_type: Int32 | None = None


class ViewMessageRequest(Header, frozen=True, kw_only=True, gc=False):
    """VIEW_MESSAGE_BY_ID: the message at a place of the commit log."""

    offset: Int64
    topic: str | None = None


class QueryMessageRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """QUERY_MESSAGE: messages of a topic by key, through the index."""

    topic: str
    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64
    is_unique_key: bool | None = msgspec.field(name="_UNIQUE_KEY_QUERY", default=None)


class QueryMessageResponse(Header, frozen=True, kw_only=True, gc=False):
    """How far the index had come."""

    index_last_update_timestamp: Int64
    index_last_update_phyoffset: Int64
    #: Ours: there were more messages, but not all that were asked for fit into an answer.
    cut_short: bool | None = None


# Between brokers of one group.


class ExchangeHAInfo(Header, frozen=True, kw_only=True, gc=False):
    """EXCHANGE_BROKER_HA_INFO, both ways."""

    master_ha_address: str | None = None
    master_flush_offset: Int64 | None = None
    master_address: str | None = None


# Sending a message, taking one back, answering a request by message.


class SendMessageRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """SEND_MESSAGE, and by letters SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE; also replies."""

    producer_group: Annotated[str, Letter("a")]
    topic: Annotated[str, Letter("b")]
    #: Template for a topic that does not exist yet.
    default_topic: Annotated[str, Letter("c")]
    default_topic_queue_nums: Annotated[Int32, Letter("d")]
    #: Negative: the broker picks one.
    queue_id: Annotated[Int32, Letter("e")]
    sys_flag: Annotated[Int32, Letter("f")]
    born_timestamp: Annotated[Int64, Letter("g")]
    flag: Annotated[Int32, Letter("h")]
    properties: Annotated[str | None, Letter("i")] = None
    reconsume_times: Annotated[Int32 | None, Letter("j")] = None
    unit_mode: Annotated[bool | None, Letter("k")] = None
    max_reconsume_times: Annotated[Int32 | None, Letter("l")] = None
    #: Whether the body is a batch.
    batch: Annotated[bool | None, Letter("m")] = None
    broker_name: Annotated[str | None, Letter("n")] = msgspec.field(name="bname", default=None)


class SendMessageResponse(Header, frozen=True, kw_only=True, gc=False):
    """Where a message was stored."""

    #: The offset id; for a batch the ids of all its messages, with commas between.
    msg_id: str
    queue_id: Int32
    queue_offset: Int64
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None
    region: str | None = msgspec.field(name="MSG_REGION", default=None)
    trace_on: bool | None = msgspec.field(name="TRACE_ON", default=None)
    #: OrbitMQ's own: the messages that were stored before, by their `DEDUP_ID`. For each, with
    #: commas between: its place in the request, and queue, queue offset and unique id of the first
    #: copy, with colons between.
    duplicates: str | None = None


class RecallMessageRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """RECALL_MESSAGE: take a timer message back before it is delivered."""

    topic: str
    recall_handle: str
    producer_group: str | None = None


class RecallMessageResponse(Header, frozen=True, kw_only=True, gc=False):
    """The id of the message that was taken back."""

    msg_id: str


class PushReplyRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """PUSH_REPLY_MESSAGE_TO_CLIENT: a reply on its way to the requester."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    #: `ip:port` without a leading slash.
    born_host: str
    store_host: str
    store_timestamp: Int64 = 0
    properties: str | None = None
    reconsume_times: Int32 | None = None
    unit_mode: bool = False


# Statistics and diagnostics, of brokers and of single clients.


class GetBrokerConfigResponse(Header, frozen=True, kw_only=True, gc=False):
    """The state of the configuration, a DataVersion as JSON text."""

    version: str


class GetConsumeStatsRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """GET_CONSUME_STATS."""

    consumer_group: str
    topic: str | None = None
    #: Names with semicolons between.
    topic_list: str | None = None


class GetConsumerStatusRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """INVOKE_BROKER_TO_GET_CONSUMER_STATUS and GET_CONSUMER_STATUS_FROM_CLIENT."""

    topic: str
    group: str
    #: In truth a client id; absent: all clients.
    client_addr: str | None = None


class QueryConsumeTimeSpanRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """QUERY_CONSUME_TIME_SPAN."""

    topic: str
    group: str


class GetConsumerRunningInfoRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """GET_CONSUMER_RUNNING_INFO."""

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class ConsumeDirectlyRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """CONSUME_MESSAGE_DIRECTLY."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    #: The broker that holds the message; a field of its own beside `bname`.
    message_broker: str | None = msgspec.field(name="brokerName", default=None)
    topic: str | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None


class ViewBrokerStatsRequest(Header, frozen=True, kw_only=True, gc=False):
    """VIEW_BROKER_STATS_DATA."""

    stats_name: str
    stats_key: str


class GetBrokerConsumeStatsRequest(Header, frozen=True, kw_only=True, gc=False):
    """GET_BROKER_CONSUME_STATS."""

    is_order: bool = False


class QueryConsumeQueueRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """QUERY_CONSUME_QUEUE."""

    topic: str
    queue_id: Int32 = 0
    index: Int64 = 0
    count: Int32 = 0
    consumer_group: str | None = None


class QuerySubscriptionRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """QUERY_SUBSCRIPTION_BY_CONSUMER."""

    group: str
    topic: str | None = None


# Administration of topics and consumer groups.


class CreateTopicRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """UPDATE_AND_CREATE_TOPIC."""

    topic: str
    default_topic: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_filter_type: str
    topic_sys_flag: Int32 | None = None
    order: bool = False
    #: `+key=value,-key`.
    attributes: str | None = None
    force: bool = False


class TopicRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """A request about one topic: DELETE_TOPIC_IN_BROKER, GET_TOPIC_CONFIG and others."""

    topic: str


class GetAllTopicConfigRequest(Header, frozen=True, kw_only=True, gc=False):
    """GET_ALL_TOPIC_CONFIG; without fields it asks for everything."""

    topic_seq: Int32 | None = None
    data_version: str | None = None
    max_topic_num: Int32 | None = None


class GetAllTopicConfigResponse(Header, frozen=True, kw_only=True, gc=False):
    """How many there are in all; absent: the body is everything."""

    total_topic_num: Int32 | None = None


class GetAllGroupConfigRequest(Header, frozen=True, kw_only=True, gc=False):
    """GET_ALL_SUBSCRIPTIONGROUP_CONFIG; without fields it asks for everything."""

    group_seq: Int32 | None = None
    data_version: str | None = None
    max_group_num: Int32 | None = None


class GetAllGroupConfigResponse(Header, frozen=True, kw_only=True, gc=False):
    """How many there are in all; absent: the body is everything."""

    total_group_num: Int32 | None = None


class GroupRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """A request about one group: GET_SUBSCRIPTIONGROUP_CONFIG, QUERY_TOPICS_BY_CONSUMER."""

    group: str


class DeleteGroupRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """DELETE_SUBSCRIPTIONGROUP."""

    group_name: str
    clean_offset: bool = False


class UpdateGroupForbiddenRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """UPDATE_AND_GET_GROUP_FORBIDDEN."""

    group: str
    topic: str
    readable: bool | None = None


# Messages that come back: failed ones, and half messages of transactions.


class ConsumerSendBackRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """CONSUMER_SEND_MSG_BACK: deliver this message again later."""

    #: Place in the commit log.
    offset: Int64
    group: str
    #: Negative: to the dead letters; 0: the broker chooses by the number of attempts.
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None


class EndTransactionRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """END_TRANSACTION: the outcome of the transaction of a half message."""

    producer_group: str
    #: Queue offset of the half message.
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    #: See `codes.TransactionState`.
    commit_or_rollback: Int32
    msg_id: str
    from_transaction_check: bool = False
    topic: str | None = None
    transaction_id: str | None = None


class CheckTransactionStateRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """CHECK_TRANSACTION_STATE: the broker asks for the outcome of a transaction."""

    tran_state_table_offset: Int64
    commit_log_offset: Int64
    topic: str | None = None
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None


class ResumeCheckHalfMessageRequest(Header, frozen=True, kw_only=True, gc=False):
    """RESUME_CHECK_HALF_MESSAGE: a half message that was given up is asked about again."""

    topic: str | None = None
    msg_id: str | None = None
