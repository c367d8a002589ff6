"""What tests of administration share: a cluster of two brokers, senders, and consumers to order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.routes import Queue
from orbitmq.message.stored import StoredMessage
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher, Handler
from orbitmq.remoting.settings import Address, parse_address
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire import bodies, headers
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.broker import RawClient

GROUP = "billing"
BROKERS = ("broker-a", "broker-b")


class World:
    """A cluster with two brokers, an admin, and raw clients of both brokers."""

    def __init__(self, cluster: AsyncEmbeddedCluster, admin: AsyncAdmin) -> None:
        self.cluster = cluster
        self.admin = admin
        self._clients: dict[str, RawClient] = {}
        self._consumers: list[FakeConsumer] = []

    async def client(self, broker: str = "broker-a") -> RawClient:
        if broker not in self._clients:
            place = BROKERS.index(broker)
            self._clients[broker] = await RawClient.open(self.cluster.brokers[place])
        return self._clients[broker]

    async def send(
        self, queue: Queue, body: bytes = b"hello", **properties: str
    ) -> headers.SendMessageResponse:
        """Store one message; where it is."""
        client = await self.client(queue.broker)
        return await client.stored(
            queue.topic, body, queue_id=queue.id, properties={"UNIQ_KEY": "", **properties}
        )

    async def fill(self, queue: Queue, count: int, *, name: str = "m") -> list[StoredMessage]:
        """Store some messages, a second apart by the cluster's clock; the records."""
        for number in range(count):
            await self.send(queue, f"{name}{number}".encode(), KEYS=f"{name}-{number}")
            self.cluster.advance(1.0)
        return [
            each
            for each in self.cluster.messages(queue.topic)
            if each.queue_id == queue.id and each.store_host == self._host(queue.broker)
        ]

    def _host(self, broker: str) -> tuple[str, int]:
        address = self.cluster.brokers[BROKERS.index(broker)].address
        return (address.host, address.port)

    async def report(self, queue: Queue, offset: int, group: str = GROUP) -> None:
        """Let a group have progress."""
        client = await self.client(queue.broker)
        answer = await client.report(queue.topic, offset, queue.id, consumer_group=group)
        assert answer.code == 0, answer.remark

    def progress(self, queue: Queue, group: str = GROUP) -> int | None:
        return self.cluster.progress(group, queue.topic).get((queue.broker, queue.id))

    async def die(
        self, queue: Queue, body: bytes, reason: str = "", group: str = GROUP, **properties: str
    ) -> None:
        """Send a message that the group gives up at once."""
        sent = await self.send(queue, body, **properties)
        await self.fail(queue, sent.msg_id, group, -1, extra={"reason": reason} if reason else None)

    async def fail(
        self,
        queue: Queue,
        msg_id: str,
        group: str = GROUP,
        level: int = 0,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """Send a stored message back for another attempt."""
        client = await self.client(queue.broker)
        offset = int(msg_id[-16:], 16)
        header = headers.ConsumerSendBackRequest(offset=offset, group=group, delay_level=level)
        code = RequestCode.CONSUMER_SEND_MSG_BACK
        answer = await client.connection.request(code, header, extra=extra)
        assert answer.code == 0, answer.remark

    async def consumer(self, client_id: str, **fields: Any) -> FakeConsumer:
        consumer = FakeConsumer(client_id, **fields)
        await consumer.start(broker.address for broker in self.cluster.brokers)
        self._consumers.append(consumer)
        return consumer

    async def register_ghost(self, name: str) -> None:
        """Let the name server know a broker that nobody can connect to."""
        connection = await connect(parse_address(self.cluster.name_server), owner=Dispatcher({}))
        topics = {topic: bodies.TopicConfig(topic_name=topic) for topic in ("orders", "TBW102")}
        table = bodies.TopicConfigTable(
            data_version=bodies.DataVersion(counter=1), topic_config_table=topics
        )
        header = headers.RegisterBrokerRequest(
            broker_name=name,
            broker_addr="127.0.0.1:1",
            cluster_name="DefaultCluster",
            ha_server_addr="127.0.0.1:2",
            broker_id=0,
        )
        body = encode_body(bodies.RegisterBroker(topic_config_serialize_wrapper=table))
        answer = await connection.request(RequestCode.REGISTER_BROKER, header, body=body)
        assert answer.code == 0, answer.remark
        self._clients[name] = RawClient(connection, [])

    async def close(self) -> None:
        for consumer in self._consumers:
            await consumer.stop()
        for client in self._clients.values():
            await client.close()


def forget_code(monkeypatch: pytest.MonkeyPatch, broker: Broker, code: int) -> None:
    """Let a broker not know a request, as an older one."""
    dispatcher = broker.dispatcher
    assert dispatcher is not None
    monkeypatch.delitem(dispatcher.handlers, code)


class FakeConsumer:
    """A member of a group that says what a test wants it to say."""

    def __init__(
        self,
        client_id: str,
        *,
        group: str = GROUP,
        subscriptions: Mapping[str, str] | None = None,
        owns: Mapping[Queue, bodies.ProcessQueueInfo] | None = None,
        model: bodies.MessageModel = bodies.MessageModel.CLUSTERING,
        result: bodies.ConsumeResult = bodies.ConsumeResult.CR_SUCCESS,
    ) -> None:
        self.client_id = client_id
        self.group = group
        self.subscriptions = tuple(
            bodies.SubscriptionData(topic=topic, sub_string=text, sub_version=1)
            for topic, text in (subscriptions or {"orders": "*"}).items()
        )
        self.owns = dict(owns or {})
        self.model = model
        self.result = result
        #: Messages that it was told to consume.
        self.consumed: list[bytes] = []
        self._clients: list[RawClient] = []

    async def start(self, brokers: Iterable[Address]) -> None:
        answers: dict[int, Handler] = {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: lambda *_: None,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._go,
        }
        for address in brokers:
            connection = await connect(address, owner=Dispatcher(answers))
            self._clients.append(RawClient(connection, []))
        await self.beat()

    async def beat(self) -> None:
        for client in self._clients:
            await client.heartbeat(
                self.client_id,
                *self.subscriptions,
                group=self.group,
                message_model=self.model,
                consume_type=bodies.ConsumeType.CONSUME_PASSIVELY,
            )

    async def stop(self) -> None:
        clients, self._clients = self._clients, []
        for client in clients:
            await client.close()

    def running_info(self, _: Connection, request: Command) -> Command:
        body = bodies.ConsumerRunningInfo(
            jstack="main: waiting" if request.ext_fields.get("jstackEnable") == "true" else None,
            mq_table={
                bodies.MessageQueue(broker_name=q.broker, queue_id=q.id, topic=q.topic): info
                for q, info in self.owns.items()
            },
            properties={"PROP_CONSUMEORDERLY": "false"},
            status_table={"orders": bodies.ConsumeStatus(consume_ok_tps=2.5, pull_rt=20.0)},
            subscription_set=self.subscriptions,
        )
        return request.answer(0, body=encode_body(body))

    def _go(self, connection: Connection, request: Command) -> None:
        """A pushed reset: report at once to be where one was told to go."""
        for queue, offset in decode_body(bodies.ResetOffsets, request.body).offset_table.items():
            header = headers.UpdateConsumerOffsetRequest(
                consumer_group=self.group,
                topic=queue.topic,
                queue_id=queue.queue_id,
                commit_offset=offset,
            )
            connection.notify(RequestCode.UPDATE_CONSUMER_OFFSET, header)

    def _consume(self, _: Connection, request: Command) -> Command:
        self.consumed.append(bytes(request.body))
        body = bodies.ConsumeDirectlyResult(
            consume_result=self.result, remark="as told", spent_time_mills=1500
        )
        return request.answer(0, body=encode_body(body))
