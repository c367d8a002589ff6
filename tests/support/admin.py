"""What tests of administration share: questions with their answers, peers of other versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from orbitmq.broker.broker import Broker
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher, Handler
from orbitmq.wire.bodies import MessageQueue, SubscriptionData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers import Header
from orbitmq.wire.javajson import Body, decode_body
from tests.support.broker import RawClient

B = TypeVar("B", bound=Body)

#: 4.9.3, the last release that does not promise to read quoted integer keys.
OLD_VERSION = 399


async def ask(
    client: RawClient,
    code: int,
    header: Header | None = None,
    *,
    body: Bytes = b"",
    extra: Mapping[str, str] | None = None,
) -> Command:
    """A question and its answer, whatever it says."""
    return await client.connection.request(code, header, body=body, extra=extra, timeout=20)


async def told(
    client: RawClient,
    kind: type[B],
    code: int,
    header: Header | None = None,
    *,
    body: Bytes = b"",
    extra: Mapping[str, str] | None = None,
) -> B:
    """The body of an answer that must be a success."""
    answer = await ask(client, code, header, body=body, extra=extra)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return decode_body(kind, answer.body)


def queue(topic: str, queue_id: int = 0) -> MessageQueue:
    return MessageQueue(broker_name="broker-a", queue_id=queue_id, topic=topic)


def subscription(topic: str, expression: str = "*") -> SubscriptionData:
    return SubscriptionData(topic=topic, sub_string=expression, sub_version=1)


def of_version(version: int) -> Callable[[Command], Command]:
    """Makes a connection's requests look like those of another release."""
    return lambda command: msgspec.structs.replace(command, version=version)


async def consumer_that(
    broker: Broker, answers: dict[int, Handler], *, version: int | None = None
) -> RawClient:
    """A client that answers what the broker asks it."""

    def ignored(_: Connection, __: Command) -> None:
        return None

    told_of_changes: dict[int, Handler] = {RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: ignored}
    connection = await connect(
        broker.address,
        owner=Dispatcher({**told_of_changes, **answers}),
        prepare=None if version is None else of_version(version),
    )
    return RawClient(connection, [])
