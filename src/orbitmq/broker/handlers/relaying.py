"""Questions that only a consumer can answer, passed on to it (223, 307, 309).

Whoever asks waits for as long as the consumer may take: 10 s for the state of one consumer or for
consuming a message, 5 s for the progress of all members of a group, who are asked at the same time.
Some clients never tell their progress: such a member is asked a few times, and then no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from orbitmq.broker.consumergroup import Member
from orbitmq.broker.errors import Refused
from orbitmq.broker.parts import Parts
from orbitmq.errors import OrbitError
from orbitmq.message.errors import MessageError
from orbitmq.message.stored import decode_message
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.remoting.errors import RemotingError, RequestTimedOut
from orbitmq.store.errors import StoreError
from orbitmq.wire.bodies.base import decode_body, encode_body
from orbitmq.wire.bodies.offsets import ConsumerStatus
from orbitmq.wire.bodies.route import MessageQueue
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.errors import WireError
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers.stats import (
    ConsumeDirectlyRequest,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
)
from orbitmq.wire.versions import Gate, release_of

log = logging.getLogger(__name__)

#: How long one consumer may take.
CONSUMER_DEADLINE = 10.0
#: How long the members of a group may take.
MEMBER_DEADLINE = 5.0
#: How often a member is asked for its progress without an answer; then it is so no more.
MEMBER_TRIES = 3

#: They prove who the tool is, to us, and are nobody else's business.
_CREDENTIALS = frozenset({"AccessKey", "Signature", "SecurityToken"})


class Relaying:
    """Asks consumers what tools want to know of them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        #: How often each was asked for its progress since it told it last.
        self._untold: Counter[Connection] = Counter()
        parts.on_connection_closed(lambda closed: self._untold.pop(closed, None))

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.consumer_status,
        }

    # One consumer.

    async def running_info(self, _: Connection, request: Command) -> Command:
        """What a consumer holds and does."""
        asked = request.header(GetConsumerRunningInfoRequest)
        return await self._relay(request, asked.consumer_group, asked.client_id, {})

    async def consume_directly(self, _: Connection, request: Command) -> Command:
        """Have a consumer consume a message that we have."""
        asked = request.header(ConsumeDirectlyRequest)
        parts = self._parts
        try:
            body = bytes(parts.store.message_by_offset_id(asked.msg_id or ""))
            kept_in = decode_message(body).topic
        except (StoreError, MessageError) as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"message {asked.msg_id!r} cannot be had: {error}"
            ) from error
        fields = {"brokerName": parts.settings.name}
        topic = parts.topics.get(asked.topic or "")
        if topic is not None:
            fields["topicSysFlag"] = str(topic.topic_sys_flag)
        group = parts.groups.get(asked.consumer_group)
        if group is not None:
            fields["groupSysFlag"] = str(group.group_sys_flag)
        return await self._relay(
            request,
            asked.consumer_group,
            asked.client_id or "",
            fields,
            body=body,
            topic=kept_in,
        )

    async def _relay(
        self,
        request: Command,
        group: str,
        client_id: str,
        fields: Mapping[str, str],
        *,
        body: Bytes = b"",
        topic: str | None = None,
    ) -> Command:
        """Pass a request on, and its answer back, whatever it is; `topic` is that of the body."""
        consumer = self._consumer(request, group, client_id, topic)
        passed_on = {
            name: value for name, value in request.ext_fields.items() if name not in _CREDENTIALS
        }
        try:
            answer = await consumer.request(
                request.code,
                extra={**passed_on, **fields},
                body=body,
                timeout=CONSUMER_DEADLINE,
            )
        except RequestTimedOut as error:
            raise Refused(
                ResponseCode.CONSUME_MSG_TIMEOUT,
                f"consumer <{group}> <{client_id}> Timeout: {error}",
            ) from error
        except RemotingError as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"invoke consumer <{group}> <{client_id}> Exception: {error}",
            ) from error
        return request.answer(
            answer.code, extra=dict(answer.ext_fields), remark=answer.remark, body=answer.body
        )

    def _consumer(
        self, request: Command, group: str, client_id: str, topic: str | None
    ) -> Connection:
        """The connection to a member that can be asked."""
        members = {
            _connection(member): member
            for member in sorted(self._members(group, topic), key=lambda each: each.heard_at)
            if member.client.id == client_id
        }
        if not members:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id}> not online"
            )
        # All of them may know of the group: where nobody is nearest, the last heard of will do.
        connection = self._parts.access.nearest(tuple(members), request) or next(reversed(members))
        member = members[connection]
        if member.client.version < Gate.CLIENT_TELLS_STATE:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"The Consumer <{client_id}> Version <{_version(member)}> too low to finish, "
                "please upgrade it to V3_1_8_SNAPSHOT",
            )
        return connection

    def _members(self, group: str, topic: str | None = None) -> list[Member]:
        """The members of a group that may still consume, and see messages of a topic."""
        parts = self._parts
        return [
            member
            for member in parts.consumers.members(group)
            if parts.access.may_consume(member.channel, group, topic)
        ]

    # All consumers of a group.

    async def consumer_status(self, _: Connection, request: Command) -> Command:
        """How far each member of a group is, by its own account."""
        asked = request.header(GetConsumerStatusRequest)
        members = self._members(asked.group)
        if not members:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"No Any Consumer online in the consumer group: [{asked.group}]",
            )
        wanted = [
            member
            for member in members
            if not asked.client_addr or member.client.id == asked.client_addr
        ]
        for member in wanted:
            if member.client.version < Gate.CLIENT_RESETS_OFFSETS:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR,
                    f"the client does not support this feature. version={_version(member)}",
                )
        return await self._gather(request, asked, wanted)

    async def _gather(
        self, request: Command, asked: GetConsumerStatusRequest, members: Sequence[Member]
    ) -> Command:
        header = GetConsumerStatusRequest(topic=asked.topic, group=asked.group)
        answers = await asyncio.gather(*(self._status(member, header) for member in members))
        table = {
            member.client.id: offsets
            for member, offsets in zip(members, answers, strict=True)
            if offsets is not None
        }
        silent = sorted({member.client.id for member in members} - table.keys())
        return request.answer(
            ResponseCode.SUCCESS,
            remark=f"no answer from {', '.join(silent)}" if silent else None,
            body=encode_body(ConsumerStatus(consumer_table=table)),
        )

    async def _status(
        self, member: Member, header: GetConsumerStatusRequest
    ) -> dict[MessageQueue, int] | None:
        """What one member says; None when it says nothing of use."""
        connection = _connection(member)
        if self._untold[connection] >= MEMBER_TRIES:
            return None
        try:
            answer = await connection.request(
                RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, header, timeout=MEMBER_DEADLINE
            )
            self._untold.pop(connection, None)
            if answer.code != ResponseCode.SUCCESS or not answer.body:
                return None
            return decode_body(ConsumerStatus, answer.body).message_queue_table or {}
        except (RemotingError, WireError) as error:
            self._note_untold(connection, member.client.id, header.group, error)
            return None

    def _note_untold(
        self, connection: Connection, client_id: str, group: str, error: OrbitError
    ) -> None:
        if not connection.is_open:
            return
        self._untold[connection] += 1
        if self._untold[connection] == MEMBER_TRIES:
            log.warning(
                "a consumer does not tell its progress, and is not asked for it any more until it "
                "connects again: %s (%d times)",
                error,
                MEMBER_TRIES,
                extra={"group": group, "client": client_id},
            )


def _connection(member: Member) -> Connection:
    if not isinstance(member.channel, Connection):
        raise Refused(ResponseCode.SYSTEM_ERROR, f"{member.client.id} cannot be asked")
    return member.channel


def _version(member: Member) -> str:
    release = release_of(member.client.version)
    return str(member.client.version) if release is None else str(release)
