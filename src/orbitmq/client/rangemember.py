"""A reader of ranges as a member of its group: seen by brokers and by the people who watch them."""

from __future__ import annotations

from collections.abc import Iterable

from orbitmq.client.consumer.subscription import Subscription, Subscriptions
from orbitmq.client.engine import NOT_MINE, Engine
from orbitmq.client.queue import Queue
from orbitmq.client.ranges import RangeFilter
from orbitmq.client.serving import MemberHandler, NotMine
from orbitmq.clock import milliseconds
from orbitmq.remoting.connection import Connection
from orbitmq.wire.bodies.base import encode_body
from orbitmq.wire.bodies.membership import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumeType,
    MessageModel,
)
from orbitmq.wire.bodies.route import MessageQueue
from orbitmq.wire.bodies.stats import ConsumerRunningInfo, ProcessQueueInfo
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.stats import GetConsumerRunningInfoRequest


class RangeMember:
    """Says in heartbeats what the group wants, and when asked, where it stands."""

    producer_group: str | None = None

    def __init__(self, engine: Engine, group: str) -> None:
        self._engine = engine
        self._group = group
        self._subscriptions = Subscriptions(engine.clock.now)
        self._started = engine.clock.now()
        #: Where the group stands.
        self.positions: dict[Queue, int] = {}
        handlers: dict[RequestCode, MemberHandler] = {
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._tell_state,
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._ignore,
        }
        for code, handler in handlers.items():
            engine.serve(code, handler)

    def subscribe(self, topics: Iterable[str], wanted: RangeFilter) -> None:
        """Want these topics, and no others any more; brokers are told of them in this order."""
        topics = dict.fromkeys(topics)
        for topic in self._subscriptions.topics:
            if topic not in topics:
                self._subscriptions.remove(topic)
        for topic in topics:
            if topic in self._subscriptions:
                continue
            if wanted.kind == "TAG":
                self._subscriptions.put(Subscription.by_tags(topic, wanted.expression))
            else:
                self._subscriptions.put(Subscription.by_sql(topic, wanted.expression))

    def consumer_data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self._group,
            consume_type=ConsumeType.CONSUME_ACTIVELY,
            message_model=MessageModel.CLUSTERING,
            consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
            subscription_data_set=self._subscriptions.to_data(),
        )

    def _tell_state(self, _connection: Connection, request: Command) -> Command | NotMine:
        header = request.header(GetConsumerRunningInfoRequest)
        if header.consumer_group != self._group:
            return NOT_MINE
        info = ConsumerRunningInfo(
            properties={
                "PROP_CONSUME_TYPE": ConsumeType.CONSUME_ACTIVELY.value,
                "PROP_CONSUMER_START_TIMESTAMP": str(milliseconds(self._started)),
                "PROP_CLIENT_VERSION": "orbitmq-spark",
            },
            subscription_set=self._subscriptions.to_data(),
            mq_table={
                MessageQueue(
                    topic=queue.topic, broker_name=queue.broker, queue_id=queue.id
                ): ProcessQueueInfo(commit_offset=offset)
                for queue, offset in self.positions.items()
            },
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(info))

    def _ignore(self, _connection: Connection, _request: Command) -> None:
        """Who else is in the group changes nothing: all queues are read here."""
