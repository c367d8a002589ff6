"""Replies to requests by message: pushed to who asked, and stored (324, 325; pushes 326)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from orbitmq.broker.drafts import Draft
from orbitmq.broker.errors import Refused
from orbitmq.broker.outcomes import PutResult
from orbitmq.broker.parts import Parts
from orbitmq.broker.peers import peer_of
from orbitmq.broker.permissions import may_write
from orbitmq.clock import milliseconds
from orbitmq.message.errors import MessageError
from orbitmq.message.ids import encode_offset_id
from orbitmq.message.properties import append_property, property_value
from orbitmq.message.wellknown import PUSH_REPLY_TIME, REPLY_TO_CLIENT
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.remoting.errors import RemotingError
from orbitmq.wire.bodies.topics import TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.send import PushReplyRequest, SendMessageRequest, SendMessageResponse

log = logging.getLogger(__name__)

#: Where a reply is that was pushed and not stored; clients insist on an answer with these fields.
_NOT_STORED = "0"


class Replying:
    """Brings replies to the clients that wait for them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.SEND_REPLY_MESSAGE: self.reply,
            RequestCode.SEND_REPLY_MESSAGE_V2: self.reply,
        }

    async def reply(self, connection: Connection, request: Command) -> Command:
        """Push the reply to the client that it names; the answer says whether it was taken.

        It is stored whether it was or not. What became of that only shows in where it is.
        """
        header = request.header(SendMessageRequest)
        config = self._check(request, header)
        queue_id = header.queue_id
        if queue_id < 0:
            queue_id = int(self._parts.chance.random() * max(1, config.write_queue_nums))
        problem = await self._push(connection, request, header)
        answer = SendMessageResponse(msg_id=_NOT_STORED, queue_id=queue_id, queue_offset=0)
        stored = await self._store(connection, request, header, queue_id)
        if stored is not None and stored.status.is_stored:
            answer = SendMessageResponse(
                msg_id=encode_offset_id(self._parts.store_host, stored.physical_offset),
                queue_id=queue_id,
                queue_offset=stored.queue_offset,
            )
        send = self._parts.settings.send
        return request.answer(
            ResponseCode.SUCCESS if problem is None else ResponseCode.SYSTEM_ERROR,
            answer,
            remark=problem,
            extra={"MSG_REGION": send.region, "TRACE_ON": "true" if send.trace_on else "false"},
        )

    def _check(self, request: Command, header: SendMessageRequest) -> TopicConfig:
        """The checks of a send."""
        parts = self._parts
        settings = parts.settings
        now = parts.clock.now()
        if settings.send.accept_from > now:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"broker unable to service, until {settings.send.accept_from:.3f} (seconds since "
                "the epoch)",
            )
        if settings.is_slave or (
            parts.topics.is_order(header.topic) and not may_write(settings.permission)
        ):
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the broker[{parts.address}] sending message is forbidden",
            )
        parts.topics.check_for_send(header.topic)
        config = parts.topics.for_send(
            header.topic,
            template=header.default_topic,
            queues=header.default_topic_queue_nums,
            unit_mode=bool(header.unit_mode),
            now=now,
        )
        most = max(config.write_queue_nums, config.read_queue_nums)
        if header.queue_id >= most:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"request queueId[{header.queue_id}] is illegal, topic {header.topic!r} has "
                f"{most} queues",
            )
        if len(request.body) > settings.send.max_message_size:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the message is illegal: a body of {len(request.body)} bytes, "
                f"{settings.send.max_message_size} are allowed",
            )
        return config

    # Pushing.

    async def _push(
        self, connection: Connection, request: Command, header: SendMessageRequest
    ) -> str | None:
        """Give the reply to the client that waits for it; what went wrong, None if nothing."""
        properties = header.properties or ""
        requester = property_value(properties, REPLY_TO_CLIENT)
        if requester is None:
            return f"reply message properties[{REPLY_TO_CLIENT}] is null"
        channels = [
            each
            for each in self._parts.producers.channels_of(requester)
            if isinstance(each, Connection) and each.is_open
        ]
        if not channels:
            return f"push reply message fail, channel of <{requester}> not found."
        channel = self._parts.access.requester(channels, request, requester, properties)
        if channel is None:
            log.warning(
                "reply was not pushed: its client id is, or was, another account's too",
                extra={"client": requester[:128]},
            )
            return (
                f"push reply message fail, channel of <{requester}> not found: the account that "
                "asked is gone, or cannot be told because several accounts use this client id, or "
                "did of late; set other instance names"
            )
        now_ms = milliseconds(self._parts.clock.now())
        try:
            push = self._pushed(connection, header, properties, now_ms)
            answer = await channel.request(
                RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
                push,
                body=request.body,
                timeout=self._parts.settings.replies.push_timeout,
            )
        except (RemotingError, MessageError) as error:
            log.warning("reply was not pushed: %s", error, extra={"client": requester})
            return f"push reply message to {requester} fail: {error}"
        if answer.code != ResponseCode.SUCCESS:
            return f"push reply message to {requester} fail: {answer.remark or answer.code}"
        return None

    def _pushed(
        self, connection: Connection, header: SendMessageRequest, properties: str, now_ms: int
    ) -> PushReplyRequest:
        return PushReplyRequest(
            producer_group=header.producer_group,
            topic=header.topic,
            default_topic=header.default_topic,
            default_topic_queue_nums=header.default_topic_queue_nums,
            queue_id=header.queue_id,
            sys_flag=header.sys_flag,
            born_timestamp=header.born_timestamp,
            flag=header.flag,
            born_host=str(connection.remote),
            store_host=str(self._parts.address),
            store_timestamp=now_ms,
            properties=append_property(properties, PUSH_REPLY_TIME, str(now_ms)),
            reconsume_times=header.reconsume_times,
            unit_mode=bool(header.unit_mode),
        )

    # Storing.

    async def _store(
        self, connection: Connection, request: Command, header: SendMessageRequest, queue_id: int
    ) -> PutResult | None:
        if not self._parts.settings.replies.store or not request.body:
            return None
        stored = self._parts.loop.create_future()
        draft = Draft(
            header.topic,
            queue_id,
            request.body,
            (header.properties or "").encode("utf-8", "replace"),
            header.born_timestamp,
            peer_of(connection).born_host,
            header.sys_flag,
            header.flag,
            header.reconsume_times or 0,
        )

        def done(result: PutResult) -> None:
            if not stored.done():
                stored.set_result(result)

        self._parts.turns.put(draft, done, transform=False)
        result: PutResult = await stored
        if not result.status.is_stored:
            log.warning("a reply was not stored: %s", result.error, extra={"topic": header.topic})
        return result
