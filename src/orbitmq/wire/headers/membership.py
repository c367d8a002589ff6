"""Who is there: heartbeats, groups and the news about them."""

from __future__ import annotations

import msgspec

from orbitmq.wire.headers.base import Header, RequestHeader


class HeartbeatRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """HEART_BEAT; the body says who."""


class HeartbeatResponse(Header, frozen=True, kw_only=True, gc=False):
    """Whether the short form of heartbeats is understood, and whether subscriptions differ."""

    supports_v2: bool | None = msgspec.field(name="IS_SUPPORT_HEART_BEAT_V2", default=None)
    is_sub_change: bool | None = msgspec.field(name="IS_SUB_CHANGE", default=None)


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
