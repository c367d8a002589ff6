"""Scripted brokers for tests of producers: each send is answered as the test lays out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.message.properties import decode_properties
from orbitmq.message.stored import split_batch
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Result
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import SendMessageRequest, SendMessageResponse
from tests.support.client import ScriptedBroker, ScriptedNameServer, quick_settings, topic_route
from tests.support.remoting import DEADLINE

SEND_CODES = (
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2,
)

#: A code to answer with, "mute" for no answer at all, "hang up" for the end of the connection.
Answering: TypeAlias = int | str
SILENCE = "mute"
HANG_UP = "hang up"


@dataclass
class Sent:
    """A send as it arrived at a broker."""

    broker: str
    code: int
    header: SendMessageRequest
    body: bytes
    is_one_way: bool

    @property
    def properties(self) -> dict[str, str]:
        return decode_properties(self.header.properties or "")

    @property
    def unique_id(self) -> str:
        return self.properties["UNIQ_KEY"]

    @property
    def bodies(self) -> list[bytes]:
        """Of its messages, one or a batch."""
        if not self.header.batch:
            return [self.body]
        return [bytes(element.body) for element in split_batch(self.body)]

    @property
    def ids(self) -> list[str]:
        """The unique ids of its messages."""
        if not self.header.batch:
            return [self.unique_id]
        return [properties["UNIQ_KEY"] for properties in self.elements]

    @property
    def elements(self) -> list[dict[str, str]]:
        """The properties of the messages of a batch."""
        return [decode_properties(element.properties) for element in split_batch(self.body)]


@dataclass
class ScriptedCluster:
    """Brokers that take sends, and a name server that knows them."""

    names: tuple[str, ...]
    name_server: ScriptedNameServer
    brokers: dict[str, ScriptedBroker]
    #: All sends, in the order of their arrival anywhere.
    sent: list[Sent] = field(default_factory=list)
    #: What the next sends to each broker are answered with; success when nothing is left.
    script: dict[str, list[Answering]] = field(default_factory=dict)
    #: Bodies that make any broker refuse the send that they are in.
    refused: set[bytes] = field(default_factory=set)

    @property
    def bodies(self) -> list[bytes]:
        """Of all messages that arrived, also in batches."""
        return [body for sent in self.sent for body in sent.bodies]

    @contextlib.asynccontextmanager
    async def producer(
        self, group: str = "svc", sending: SendSettings | None = None, **client: Any
    ) -> AsyncIterator[AsyncProducer]:
        settings = quick_settings(self.name_server.address, **client)
        async with AsyncProducer(group, client=settings, sending=sending) as producer:
            yield producer

    def publish(self, topic: str, *names: str, queues: int = 4) -> None:
        """Have the name server say that these brokers (else all) have the topic."""
        self.name_server.routes[topic] = topic_route(
            {name: {0: self.brokers[name].address} for name in names or self.names}, queues=queues
        )

    def handler(self, name: str) -> Callable[[Connection, Command], Result]:
        def handle(connection: Connection, request: Command) -> Result:
            header = request.header(SendMessageRequest)
            body = bytes(request.body)
            sent = Sent(name, request.code, header, body, request.is_one_way)
            if not self.refused.isdisjoint(sent.bodies):
                return request.answer(ResponseCode.MESSAGE_ILLEGAL, remark="told to")
            self.sent.append(sent)
            script = self.script.get(name, [])
            answering = script.pop(0) if script else ResponseCode.SUCCESS
            if answering == HANG_UP:
                connection.abort("told to")
                return None
            if answering == SILENCE:
                return LATER
            assert isinstance(answering, int)
            return request.answer(
                answering, _stored(header, body, len(self.sent)), remark="told to"
            )

        return handle


def _stored(header: SendMessageRequest, body: bytes, number: int) -> SendMessageResponse:
    count = len(split_batch(body)) if header.batch else 1
    return SendMessageResponse(
        msg_id=",".join(f"7F00000100002A9F{number:08X}{place:08X}" for place in range(count)),
        queue_id=header.queue_id,
        queue_offset=100 * number,
    )


@contextlib.asynccontextmanager
async def scripted_cluster(*names: str) -> AsyncIterator[ScriptedCluster]:
    """Brokers of these names; all of them have the topic `orders` with four queues."""
    async with contextlib.AsyncExitStack() as stack:
        name_server = await stack.enter_async_context(ScriptedNameServer().serving())
        cluster = ScriptedCluster(names, name_server, {})
        for name in names:
            broker = ScriptedBroker(
                handlers=dict.fromkeys(map(int, SEND_CODES), cluster.handler(name))
            )
            cluster.brokers[name] = await stack.enter_async_context(broker.serving())
        cluster.publish("orders")
        yield cluster


def until_true(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; for tests without a loop."""
    end = time.monotonic() + DEADLINE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, "the condition did not come about"
        pause.wait(0.005)
