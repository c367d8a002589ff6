"""Pulling messages, and looking single ones up."""

from __future__ import annotations

import enum

import msgspec

from orbitmq.wire.headers.base import Header, Int32, Int64, TopicRequestHeader


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
    #: Ours: a reset of the group's progress that this pull is told of is to be told again. It is
    #: from somebody who may be lost before he has passed it on.
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
