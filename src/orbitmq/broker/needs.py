"""Which permissions each request of producers and consumers needs.

They are worked out from the same typed headers and bodies that the handlers read (see `access`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from orbitmq.broker import names
from orbitmq.broker.accounts import Grant, Kind
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.membership import (
    CheckClientRequest,
    HeartbeatData,
    LockBatch,
    QueryAssignment,
)
from orbitmq.wire.codes import RequestCode as Code
from orbitmq.wire.command import Command
from orbitmq.wire.headers.membership import GetConsumerListRequest, UnregisterClientRequest
from orbitmq.wire.headers.offsets import (
    GetEarliestStoreTimeRequest,
    GetMaxOffsetRequest,
    GetMinOffsetRequest,
    QueryConsumerOffsetRequest,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from orbitmq.wire.headers.pull import PullMessageRequest, QueryMessageRequest, ViewMessageRequest
from orbitmq.wire.headers.send import RecallMessageRequest, SendMessageRequest
from orbitmq.wire.headers.stats import GetConsumerRunningInfoRequest
from orbitmq.wire.headers.transactions import ConsumerSendBackRequest, EndTransactionRequest


class Need(NamedTuple):
    """A permission that a request needs."""

    kind: Kind
    name: str
    grant: Grant


#: Finds the topic of the message at a place of the log.
TopicAt = Callable[[int], str | None]
Needs = Callable[[Command, TopicAt], Iterable[Need]]


def topic_need(topic: str, grant: Grant) -> Need:
    """A permission on a topic; for a retry topic it is that of its group."""
    group = names.group_of_retry_topic(topic)
    return Need(Kind.TOPIC, topic, grant) if group is None else group_need(group)


def group_need(group: str) -> Need:
    return Need(Kind.GROUP, group, Grant.SUB)


def _send(request: Command, _: TopicAt) -> Iterable[Need]:
    yield topic_need(request.header(SendMessageRequest).topic, Grant.PUB)


def _recall(request: Command, _: TopicAt) -> Iterable[Need]:
    yield topic_need(request.header(RecallMessageRequest).topic, Grant.PUB)


def _end_transaction(request: Command, topic_at: TopicAt) -> Iterable[Need]:
    header = request.header(EndTransactionRequest)
    for topic in {header.topic, topic_at(header.commit_log_offset)}:
        if topic:
            yield topic_need(topic, Grant.PUB)


def _send_back(request: Command, topic_at: TopicAt) -> Iterable[Need]:
    header = request.header(ConsumerSendBackRequest)
    yield group_need(header.group)
    topic = topic_at(header.offset)
    if topic is not None:
        yield topic_need(topic, Grant.SUB)


def _pull(request: Command, _: TopicAt) -> Iterable[Need]:
    header = request.header(PullMessageRequest)
    yield group_need(header.consumer_group)
    yield topic_need(header.topic, Grant.SUB)


def _view(request: Command, topic_at: TopicAt) -> Iterable[Need]:
    topic = topic_at(request.header(ViewMessageRequest).offset)
    if topic is not None:
        yield topic_need(topic, Grant.SUB)


def _of_topic(
    kind: type[
        QueryMessageRequest
        | SearchOffsetRequest
        | GetMaxOffsetRequest
        | GetMinOffsetRequest
        | GetEarliestStoreTimeRequest
    ],
) -> Needs:
    """What is asked about a topic alone."""

    def needs(request: Command, _: TopicAt) -> Iterable[Need]:
        yield topic_need(request.header(kind).topic, Grant.SUB)

    return needs


def _progress(
    kind: type[QueryConsumerOffsetRequest | UpdateConsumerOffsetRequest],
) -> Needs:
    def needs(request: Command, _: TopicAt) -> Iterable[Need]:
        header = request.header(kind)
        yield group_need(header.consumer_group)
        yield topic_need(header.topic, Grant.SUB)

    return needs


def _heartbeat(request: Command, _: TopicAt) -> Iterable[Need]:
    """Producers' groups are free: who is asked about a transaction is looked at then."""
    for consumer in decode_body(HeartbeatData, request.body).consumer_data_set:
        yield group_need(consumer.group_name)
        own = names.retry_topic(consumer.group_name)
        for subscription in consumer.subscription_data_set:
            # A Java client to which the broker tells its share names the retry topics of popping as
            # well. Saying so gives no messages: whoever pulls them needs what that takes.
            if not subscription.topic.startswith((f"{own}_", f"{own}+")):
                yield topic_need(subscription.topic, Grant.SUB)


def _unregister(request: Command, _: TopicAt) -> Iterable[Need]:
    group = request.header(UnregisterClientRequest).consumer_group
    if group:
        yield group_need(group)


def _members(request: Command, _: TopicAt) -> Iterable[Need]:
    yield group_need(request.header(GetConsumerListRequest).consumer_group)


def _check_client(request: Command, _: TopicAt) -> Iterable[Need]:
    asked = decode_body(CheckClientRequest, request.body)
    if asked.group:
        yield group_need(asked.group)
    if asked.subscription_data is not None:
        yield topic_need(asked.subscription_data.topic, Grant.SUB)


def _lock(request: Command, _: TopicAt) -> Iterable[Need]:
    asked = decode_body(LockBatch, request.body)
    yield group_need(asked.consumer_group)
    for topic in {queue.topic for queue in asked.mq_set}:
        yield topic_need(topic, Grant.SUB)


def _running_info(request: Command, _: TopicAt) -> Iterable[Need]:
    """Members of a group ask each other for the queues that they hold."""
    yield group_need(request.header(GetConsumerRunningInfoRequest).consumer_group)


def _assignment(request: Command, _: TopicAt) -> Iterable[Need]:
    asked = decode_body(QueryAssignment, request.body)
    yield group_need(asked.consumer_group)
    yield topic_need(asked.topic, Grant.SUB)


#: What the requests of producers and consumers need. Every other request needs an admin.
NEEDS: Mapping[int, Needs] = {
    Code.SEND_MESSAGE: _send,
    Code.SEND_MESSAGE_V2: _send,
    Code.SEND_BATCH_MESSAGE: _send,
    Code.SEND_REPLY_MESSAGE: _send,
    Code.SEND_REPLY_MESSAGE_V2: _send,
    Code.RECALL_MESSAGE: _recall,
    Code.END_TRANSACTION: _end_transaction,
    Code.CONSUMER_SEND_MSG_BACK: _send_back,
    Code.PULL_MESSAGE: _pull,
    Code.LITE_PULL_MESSAGE: _pull,
    Code.QUERY_CONSUMER_OFFSET: _progress(QueryConsumerOffsetRequest),
    Code.UPDATE_CONSUMER_OFFSET: _progress(UpdateConsumerOffsetRequest),
    Code.LOCK_BATCH_MQ: _lock,
    Code.UNLOCK_BATCH_MQ: _lock,
    Code.SEARCH_OFFSET_BY_TIMESTAMP: _of_topic(SearchOffsetRequest),
    Code.GET_MAX_OFFSET: _of_topic(GetMaxOffsetRequest),
    Code.GET_MIN_OFFSET: _of_topic(GetMinOffsetRequest),
    Code.GET_EARLIEST_MSG_STORETIME: _of_topic(GetEarliestStoreTimeRequest),
    Code.QUERY_MESSAGE: _of_topic(QueryMessageRequest),
    Code.VIEW_MESSAGE_BY_ID: _view,
    Code.HEART_BEAT: _heartbeat,
    Code.UNREGISTER_CLIENT: _unregister,
    Code.GET_CONSUMER_LIST_BY_GROUP: _members,
    Code.GET_CONSUMER_RUNNING_INFO: _running_info,
    Code.CHECK_CLIENT_CONFIG: _check_client,
    Code.QUERY_ASSIGNMENT: _assignment,
}

#: Every Java client has this producer for itself, whatever else it does.
_INNER_PRODUCER = "CLIENT_INNER_PRODUCER"


class Claim(NamedTuple):
    """The client that a request speaks for, and as a member of which groups."""

    client_id: str
    consumer_groups: frozenset[str]
    producer_groups: frozenset[str] = frozenset()

    def meets(self, other: Claim) -> bool:
        """Whether both are in one group."""
        return not (
            self.consumer_groups.isdisjoint(other.consumer_groups)
            and self.producer_groups.isdisjoint(other.producer_groups)
        )


def _claim_of_heartbeat(request: Command) -> Claim:
    data = decode_body(HeartbeatData, request.body)
    return Claim(
        data.client_id,
        frozenset(each.group_name for each in data.consumer_data_set),
        frozenset(each.group_name for each in data.producer_data_set) - {_INNER_PRODUCER},
    )


def _claim_of_lock(request: Command) -> Claim:
    asked = decode_body(LockBatch, request.body)
    return Claim(asked.client_id or "", frozenset({asked.consumer_group}))


#: The requests that speak for a client, by their code.
CLAIMS: Mapping[int, Callable[[Command], Claim]] = {
    Code.HEART_BEAT: _claim_of_heartbeat,
    Code.LOCK_BATCH_MQ: _claim_of_lock,
    Code.UNLOCK_BATCH_MQ: _claim_of_lock,
}
