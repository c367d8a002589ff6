"""Who is connected, and who consumes what (203, 204, 300, 305, 328, 343, 345)."""

from __future__ import annotations

from collections.abc import Mapping

from orbitmq.broker.disagreements import findings
from orbitmq.broker.errors import Refused
from orbitmq.broker.findings import FIELD, findings_text
from orbitmq.broker.handlers.apart import Steps, answered
from orbitmq.broker.parts import Parts
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.wire.bodies.base import encode_body
from orbitmq.wire.bodies.membership import ProducerInfo, ProducerTable
from orbitmq.wire.bodies.route import GroupList, TopicList
from orbitmq.wire.bodies.stats import QuerySubscription
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.membership import (
    GetConsumerConnectionRequest,
    GetProducerConnectionRequest,
)
from orbitmq.wire.headers.stats import QuerySubscriptionRequest
from orbitmq.wire.headers.topics import GroupRequest, TopicRequest
from orbitmq.wire.jsontext import quoted

#: Bytes of the longest list of producers; clients take frames of 16 MiB.
LARGEST_ANSWER = 15 * 1024 * 1024
#: Bytes of an entry of it, beside its texts.
_ENTRY = 128


class Connections:
    """Answers from the tables of clients and of progress."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self.consumers,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self.producers,
            RequestCode.GET_ALL_PRODUCER_INFO: self.all_producers,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self.topics_of_group,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self.subscription,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self.system_topics,
        }

    def consumers(self, _: Connection, request: Command) -> Command:
        """The members of a group, what it subscribes to, and what does not fit together."""
        group = request.header(GetConsumerConnectionRequest).consumer_group
        consumers = self._parts.consumers
        body = consumers.connections(group)
        if body is None:
            raise Refused(
                ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{group}] not online"
            )
        found = findings(group, consumers.members(group))
        return request.answer(
            ResponseCode.SUCCESS,
            extra={FIELD: findings_text(found)} if found else None,
            body=encode_body(body),
        )

    def producers(self, _: Connection, request: Command) -> Command:
        group = request.header(GetProducerConnectionRequest).producer_group
        body = self._parts.producers.connections(group)
        if body is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"the producer group[{group}] not exist")
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    async def all_producers(self, _: Connection, request: Command) -> Command:
        """All producers, by group; as many groups as an answer has room for."""
        clock = self._parts.clock
        now, wall = clock.monotonic(), clock.now()
        producers = self._parts.producers
        data: dict[str, tuple[ProducerInfo, ...]] = {}
        remark = None
        entries = size = 0
        steps = Steps()
        groups = producers.groups()
        for group in groups:
            if not (infos := producers.infos(group, now=now, wall=wall)):
                continue  # it left while others were looked at
            size += _size(group, infos)
            if size > LARGEST_ANSWER:
                remark = f"{len(data)} of {len(groups)} groups are shown, more are too long"
                break
            data[group] = infos
            entries += len(infos)
            await steps.did(len(infos))
        return await answered(request, ProducerTable(data=data), entries=entries, remark=remark)

    def groups_of_topic(self, _: Connection, request: Command) -> Command:
        """The groups that subscribe to a topic now, and those that have progress in it."""
        topic = request.header(TopicRequest).topic
        groups = self._parts.consumers.groups_of(topic) | self._parts.progress.groups_of(topic)
        body = GroupList(group_list=tuple(sorted(groups)))
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def topics_of_group(self, _: Connection, request: Command) -> Command:
        """The topics that a group has progress in."""
        topics = self._parts.progress.topics_of(request.header(GroupRequest).group)
        body = TopicList(broker_addr=str(self._parts.address), topic_list=tuple(sorted(topics)))
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def subscription(self, _: Connection, request: Command) -> Command:
        """What a group wants of a topic; nothing when it is not there."""
        asked = request.header(QuerySubscriptionRequest)
        body = QuerySubscription(
            group=asked.group,
            topic=asked.topic,
            subscription_data=self._parts.consumers.subscription(asked.group, asked.topic or ""),
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def system_topics(self, _: Connection, request: Command) -> Command:
        body = TopicList(topic_list=tuple(sorted(self._parts.topics.system_topics())))
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))


def _size(group: str, infos: tuple[ProducerInfo, ...]) -> int:
    """Bytes that a group takes in the list of all producers, at most."""
    return len(quoted(group)) + sum(
        _ENTRY + len(quoted(info.client_id or "")) + len(quoted(info.remote_ip or ""))
        for info in infos
    )
