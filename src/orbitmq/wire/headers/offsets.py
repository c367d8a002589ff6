"""Progress of groups and bounds of queues."""

from __future__ import annotations

import enum

from orbitmq.wire.headers.base import Header, Int32, Int64, TopicRequestHeader


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
