"""Requests by message: sent like any other, answered by a message that finds its way back.

The reply goes to a broker that the asking client is connected to, which pushes it over that
connection. So the asker must be known there, by a heartbeat, before it asks.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ipaddress
import logging
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

from orbitmq.client.engine import NOT_MINE, Engine, NotMine
from orbitmq.client.errors import RecallHandleInvalid
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import WrongUse
from orbitmq.message.properties import (
    CLUSTER,
    CORRELATION_ID,
    MESSAGE_TTL,
    MESSAGE_TYPE,
    REPLY_TO_CLIENT,
)
from orbitmq.message.record import BORN_HOST_V6, HOSTS_V6_MASK, STORE_HOST_V6
from orbitmq.message.stored import StoredMessage
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import AddressError, parse_address
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import PushReplyRequest

log = logging.getLogger(__name__)

#: Requests without a reply in time that are remembered: a late reply is then known as such.
_REMEMBERED: Final = 10_000
_NOBODY: Final = ("0.0.0.0", 0)  # noqa: S104  # an address without a listener


class Requests:
    """Requests of one producer that wait for their replies."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[str, asyncio.Future[ReceivedMessage]] = {}
        self._late: OrderedDict[str, None] = OrderedDict()
        self._known_for: set[str] = set()
        self.close = engine.serve(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, self._handle)

    async def introduce(self, topic: str, *, within: float) -> None:
        """Make sure that the brokers of a topic know this client; waits no longer for bad ones."""
        if topic not in self._known_for:
            self._known_for.add(topic)
            saying = self._engine.spawn(self._engine.heartbeat(), "introduce the asker")
            await asyncio.wait((saying,), timeout=within)

    @contextlib.contextmanager
    def waiting(
        self, timeout: float
    ) -> Iterator[tuple[dict[str, str], asyncio.Future[ReceivedMessage]]]:
        """The properties of a new request, and the future that its reply comes in."""
        number = str(uuid.uuid4())
        reply: asyncio.Future[ReceivedMessage] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        properties = {
            CORRELATION_ID: number,
            REPLY_TO_CLIENT: self._engine.client_id,
            MESSAGE_TTL: str(round(timeout * 1000)),
        }
        try:
            yield properties, reply
        finally:
            if self._waiting.pop(number, None) is not None:
                self._remember(number)

    def _remember(self, number: str) -> None:
        """Its reply, if one comes, comes too late."""
        self._late[number] = None
        if len(self._late) > _REMEMBERED:
            self._late.popitem(last=False)

    def _handle(self, _: Connection, request: Command) -> Command | NotMine:
        header = request.header(PushReplyRequest)
        stored = _stored(header, bytes(request.body))
        number = stored.get_property(CORRELATION_ID) or ""
        reply = self._waiting.pop(number, None)
        if reply is None and number not in self._late:
            return NOT_MINE
        if reply is None or reply.done():
            # The service that replied has done its work: it gets no error.
            log.info(
                "a reply came too late: request %s, from %s",
                number,
                header.topic,
                extra={"topic": header.topic},
            )
        else:
            queue = Queue(header.topic, header.broker_name or "", header.queue_id)
            reply.set_result(ReceivedMessage(stored, queue))
        return request.answer(ResponseCode.SUCCESS)


def reply_properties(request: ReceivedMessage) -> tuple[str, dict[str, str]]:
    """The topic and the properties of a reply. Raises `WrongUse`."""
    found = {}
    for name in (CLUSTER, REPLY_TO_CLIENT, CORRELATION_ID):
        value = request.get(name)
        if value is None:
            raise WrongUse(
                f"message {request.msg_id} is no request: it has no property {name}; only messages "
                "sent with `request` can be replied to"
            )
        found[name] = value
    properties = {
        MESSAGE_TYPE: "reply",
        CORRELATION_ID: found[CORRELATION_ID],
        REPLY_TO_CLIENT: found[REPLY_TO_CLIENT],
        MESSAGE_TTL: request.get(MESSAGE_TTL, ""),
    }
    return f"{found[CLUSTER]}_REPLY_TOPIC", properties


def _stored(header: PushReplyRequest, body: bytes) -> StoredMessage:
    born_host, store_host = _host(header.born_host), _host(header.store_host)
    sys_flag = header.sys_flag & ~HOSTS_V6_MASK
    if ":" in born_host[0]:
        sys_flag |= BORN_HOST_V6
    if ":" in store_host[0]:
        sys_flag |= STORE_HOST_V6
    return StoredMessage.build(
        topic=header.topic,
        stored_body=body,
        properties=(header.properties or "").encode("utf-8", "replace"),
        queue_id=header.queue_id,
        flag=header.flag,
        sys_flag=sys_flag,
        born_ms=header.born_timestamp,
        born_host=born_host,
        store_ms=header.store_timestamp,
        store_host=store_host,
        reconsume_times=header.reconsume_times or 0,
    )


def _host(text: str) -> tuple[str, int]:
    """Address and port as the broker writes them; it may write a name, which counts as unknown."""
    try:
        host, port = parse_address(text.removeprefix("/"))
        return str(ipaddress.ip_address(host)), port
    except (AddressError, ValueError):
        return _NOBODY


_PARTS: Final = 5


class RecallHandle(NamedTuple):
    """Which message it is, and which broker has it."""

    topic: str
    broker: str
    deliver_at: float
    unique_id: str


def decode_recall_handle(text: str) -> RecallHandle:
    """What a handle says. Raises `RecallHandleInvalid`."""
    # `recall_handle` of a result may be None, and that is where handles come from.
    if not isinstance(text, str):
        raise RecallHandleInvalid(text, "it is no text")
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except (binascii.Error, ValueError) as error:
        raise RecallHandleInvalid(text, "it is not URL-safe Base64 of a text") from error
    parts = raw.split(" ")
    if len(parts) != _PARTS or parts[0] != "v1" or not parts[3].isdecimal():
        raise RecallHandleInvalid(text, "it does not say version, topic, broker, time and id")
    return RecallHandle(parts[1], parts[2], int(parts[3]) / 1000, parts[4])
