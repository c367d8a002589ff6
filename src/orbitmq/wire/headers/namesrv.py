"""What brokers and clients ask of a name server."""

from __future__ import annotations

from orbitmq.wire.headers.base import Header, Int32, Int64, TopicRequestHeader


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


class NotifyMinBrokerIdChangeRequest(Header, frozen=True, kw_only=True, gc=False):
    """NOTIFY_MIN_BROKER_ID_CHANGE."""

    min_broker_id: Int64 | None = None
    broker_name: str | None = None
    min_broker_addr: str | None = None
    offline_broker_addr: str | None = None
    ha_broker_addr: str | None = None


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
