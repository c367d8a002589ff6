"""Administration of topics and consumer groups."""

from __future__ import annotations

from orbitmq.wire.headers.base import Header, Int32, RequestHeader, TopicRequestHeader


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


class CreateTopicListRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """UPDATE_AND_CREATE_TOPIC_LIST; the body lists them."""


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
