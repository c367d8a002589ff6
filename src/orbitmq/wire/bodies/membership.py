"""Who is there and what they want: heartbeats, subscriptions, connections, locks."""

from __future__ import annotations

import enum

from msgspec import field

from orbitmq.wire.bodies.base import Body, Int32, Int64
from orbitmq.wire.bodies.route import MessageQueue


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


class RequestMode(enum.StrEnum):
    """Whether a group pulls or pops."""

    PULL = "PULL"
    POP = "POP"


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
    mode: RequestMode = RequestMode.PULL


class Assignments(Body, frozen=True, kw_only=True):
    """The answer to QUERY_ASSIGNMENT."""

    message_queue_assignments: tuple[QueueAssignment, ...] = ()


class SetRequestMode(Body, frozen=True, kw_only=True):
    """SET_MESSAGE_REQUEST_MODE."""

    consumer_group: str
    mode: RequestMode = RequestMode.PULL
    pop_share_queue_num: Int32 = 0
    topic: str


class RequestModes(Body, frozen=True, kw_only=True):
    """The answer to GET_ALL_MESSAGE_REQUEST_MODE: by topic, then by group."""

    message_request_mode_map: dict[str, dict[str, SetRequestMode]] = field(default_factory=dict)
