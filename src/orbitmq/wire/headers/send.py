"""Sending a message, taking one back, answering a request by message."""

from __future__ import annotations

from typing import Annotated

import msgspec

from orbitmq.wire.headers.base import Header, Int32, Int64, Letter, TopicRequestHeader


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


class RecallMessageRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """RECALL_MESSAGE: take a timer message back before it is delivered."""

    topic: str
    recall_handle: str
    producer_group: str | None = None


class RecallMessageResponse(Header, frozen=True, kw_only=True, gc=False):
    """The id of the message that was taken back."""

    msg_id: str


class PushReplyRequest(TopicRequestHeader, frozen=True, kw_only=True, gc=False):
    """PUSH_REPLY_MESSAGE_TO_CLIENT: a reply on its way to the one who asked."""

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
