"""Statistics and diagnostics, of brokers and of single clients."""

from __future__ import annotations

import msgspec

from orbitmq.wire.headers.base import Header, Int32, Int64, RequestHeader, TopicRequestHeader


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
