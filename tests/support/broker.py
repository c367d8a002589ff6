"""What tests of the broker share: a client that speaks raw requests, and waiting for conditions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import BrokerSettings
from orbitmq.message.properties import encode_properties
from orbitmq.message.stored import StoredMessage, decode_messages
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection, Prepare
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.settings import ServerSettings
from orbitmq.store.settings import IndexSettings, StoreSettings
from orbitmq.wire import bodies, headers
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import encode_body

#: Small files, so that a broker starts and ends in milliseconds.
SMALL_STORE = StoreSettings(
    file_size=8 * 1024 * 1024,
    preallocate_step=0,
    index_file=IndexSettings(slots=1024, entries=4096),
)

GROUP = "billing"


def small_settings(root: Path, **changes: Any) -> BrokerSettings:
    """Settings of a broker on a free port, with `changes`."""
    defaults: dict[str, Any] = {
        "root": root,
        "server": ServerSettings(port=0),
        "store": SMALL_STORE,
        "stop_grace": 1.0,
        "vip": False,
    }
    return BrokerSettings(**(defaults | changes))


async def until(condition: Callable[[], object], deadline: float = 30.0) -> None:
    """Return when the condition holds; fail when it does not within the deadline."""
    async with asyncio.timeout(deadline):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.001)


class RawClient:
    """One connection to a broker, with the requests that tests make most."""

    def __init__(self, connection: Connection, notices: list[Command]) -> None:
        self.connection = connection
        #: Requests that the broker has sent.
        self.notices = notices

    @classmethod
    async def open(cls, broker: Broker, prepare: Prepare | None = None) -> RawClient:
        """`prepare` changes what is sent: the version, the language."""
        notices: list[Command] = []

        def note(_: Connection, request: Command) -> None:
            notices.append(request)

        told = Dispatcher({RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: note})
        return cls(await connect(broker.address, owner=told, prepare=prepare), notices)

    async def close(self) -> None:
        self.connection.close()
        await self.connection.wait_closed()

    async def send(
        self,
        topic: str,
        body: bytes = b"hello",
        *,
        queue_id: int = 0,
        properties: Mapping[str, str | None] | str | None = None,
        code: int = RequestCode.SEND_MESSAGE_V2,
        **fields: Any,
    ) -> Command:
        return await self.connection.request(
            code, send_header(topic, queue_id, properties, **fields), body=body, timeout=30
        )

    async def stored(
        self, topic: str, body: bytes = b"hello", **fields: Any
    ) -> headers.SendMessageResponse:
        """Send, and say where the message is."""
        answer = await self.send(topic, body, **fields)
        assert answer.code == 0, answer.remark
        return answer.header(headers.SendMessageResponse)

    async def pull(self, topic: str, queue_id: int = 0, offset: int = 0, **fields: Any) -> Command:
        code = fields.pop("code", RequestCode.PULL_MESSAGE)
        header = pull_header(topic, queue_id, offset, **fields)
        return await self.connection.request(code, header, timeout=30)

    async def heartbeat(
        self,
        client_id: str,
        *subscriptions: bodies.SubscriptionData,
        group: str = GROUP,
        producers: tuple[str, ...] = (),
        **consumer: Any,
    ) -> Command:
        defaults: dict[str, Any] = {
            "consume_type": bodies.ConsumeType.CONSUME_PASSIVELY,
            "message_model": bodies.MessageModel.CLUSTERING,
            "consume_from_where": bodies.ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
        }
        data = bodies.ConsumerData(
            group_name=group, subscription_data_set=subscriptions, **(defaults | consumer)
        )
        body = bodies.HeartbeatData(
            client_id=client_id,
            consumer_data_set=(data,) if subscriptions else (),
            producer_data_set=tuple(bodies.ProducerData(group_name=name) for name in producers),
        )
        return await self.connection.request(RequestCode.HEART_BEAT, body=encode_body(body))

    async def query(self, topic: str, queue_id: int = 0, **fields: Any) -> Command:
        header = headers.QueryConsumerOffsetRequest(
            **({"consumer_group": GROUP} | fields), topic=topic, queue_id=queue_id
        )
        return await self.connection.request(RequestCode.QUERY_CONSUMER_OFFSET, header)

    async def report(self, topic: str, offset: int, queue_id: int = 0, **fields: Any) -> Command:
        header = headers.UpdateConsumerOffsetRequest(
            **({"consumer_group": GROUP} | fields),
            topic=topic,
            queue_id=queue_id,
            commit_offset=offset,
        )
        return await self.connection.request(RequestCode.UPDATE_CONSUMER_OFFSET, header)

    def report_one_way(
        self, topic: str, offset: int, queue_id: int = 0, *, group: str = GROUP
    ) -> None:
        """Report as members of Apache's clients do: without an answer."""
        header = headers.UpdateConsumerOffsetRequest(
            consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset
        )
        self.connection.notify(RequestCode.UPDATE_CONSUMER_OFFSET, header)

    async def max_offset(self, topic: str, queue_id: int = 0) -> int:
        answer = await self.connection.request(
            RequestCode.GET_MAX_OFFSET, headers.GetMaxOffsetRequest(topic=topic, queue_id=queue_id)
        )
        return int(answer.ext_fields["offset"])


def send_header(
    topic: str,
    queue_id: int = 0,
    properties: Mapping[str, str | None] | str | None = None,
    **fields: Any,
) -> headers.SendMessageRequest:
    if properties is not None and not isinstance(properties, str):
        properties = encode_properties(properties).decode()
    defaults: dict[str, Any] = {
        "producer_group": "makers",
        "default_topic": "TBW102",
        "default_topic_queue_nums": 4,
        "sys_flag": 0,
        "born_timestamp": 1_700_000_000_000,
        "flag": 0,
    }
    return headers.SendMessageRequest(
        topic=topic, queue_id=queue_id, properties=properties, **(defaults | fields)
    )


def pull_header(
    topic: str, queue_id: int = 0, offset: int = 0, *, hold: float = 0.0, **fields: Any
) -> headers.PullMessageRequest:
    """A pull that brings its subscription, unless `sys_flag` says otherwise."""
    flag = headers.PullFlag.SUBSCRIPTION | (headers.PullFlag.SUSPEND if hold else 0)
    defaults: dict[str, Any] = {
        "consumer_group": GROUP,
        "max_msg_nums": 32,
        "sys_flag": int(flag),
        "commit_offset": 0,
        "suspend_timeout_millis": round(hold * 1000),
        "sub_version": 0,
        "subscription": "*",
    }
    return headers.PullMessageRequest(
        topic=topic, queue_id=queue_id, queue_offset=offset, **(defaults | fields)
    )


def messages_in(answer: Command) -> list[StoredMessage]:
    """What a pull brought."""
    return decode_messages(bytes(answer.body))


def bodies_in(answer: Command) -> list[bytes]:
    return [bytes(message.body) for message in messages_in(answer)]
