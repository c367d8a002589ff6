"""Queries of single messages, requests that are passed on to consumers, and replies.

A query by key (12) may have to look at millions of index entries, so it is done in slices. A
connection has `_SIDE_BY_SIDE` queries under way; further ones wait without delaying other
connections. An answer has to fit into a frame; if messages are left out, it says so, and the client
can ask for an earlier time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from orbitmq.broker.errors import PutResult, Refused
from orbitmq.broker.groups import Member, peer_of
from orbitmq.broker.scheduler import Slices
from orbitmq.broker.topics import may_write
from orbitmq.broker.writes import Draft
from orbitmq.clock import milliseconds
from orbitmq.message.ids import encode_offset_id
from orbitmq.message.properties import (
    PUSH_REPLY_TIME,
    REPLY_TO_CLIENT,
    append_property,
    property_value,
)
from orbitmq.message.record import MessageError
from orbitmq.message.stored import decode_message
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result, refusal
from orbitmq.remoting.settings import RemotingError, RequestTimedOut
from orbitmq.store.settings import DamagedRecord, NoSuchRecord, StoreError
from orbitmq.store.verify import store_time
from orbitmq.wire.bodies import ConsumerStatus, MessageQueue, TopicConfig
from orbitmq.wire.codes import (
    DEFAULT_LIMITS,
    Gate,
    RequestCode,
    ResponseCode,
    WireError,
    named,
    release_of,
)
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers import (
    ConsumeDirectlyRequest,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
    PushReplyRequest,
    QueryMessageRequest,
    QueryMessageResponse,
    SendMessageRequest,
    SendMessageResponse,
    ViewMessageRequest,
)
from orbitmq.wire.javajson import decode_body, encode_body

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts


#: The most messages of a query by key (`maxMsgsNumBatch`).
MOST_RESULTS = 64
#: The most messages of a query by unique id (`defaultQueryMaxNum`).
MOST_WITH_ONE_ID = 32
#: Bytes of them that fit into a frame.
_MOST_BYTES = DEFAULT_LIMITS.frame - 64 * 1024
#: Rounds of a query that are done immediately; few need more.
_AT_ONCE = 64
#: Queries of one connection that are under way together.
_SIDE_BY_SIDE = 16


class _Line:
    """The open queries of a connection."""

    __slots__ = ("under_way", "waiting")

    def __init__(self) -> None:
        self.under_way = 0
        self.waiting: deque[Command] = deque()


class MessageHandler:
    """Finds messages."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._slices = Slices(parts.loop, at_once=_AT_ONCE)
        self._lines: dict[Connection, _Line] = {}

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.QUERY_MESSAGE: self.query,
            RequestCode.VIEW_MESSAGE_BY_ID: self.view,
        }

    def query(self, connection: Connection, request: Command) -> Result:
        """Messages of a topic with a key or a unique id, within a span of time, newest first."""
        line = self._lines.get(connection)
        if line is None:
            line = self._lines[connection] = _Line()
        line.waiting.append(request)
        if line.under_way < _SIDE_BY_SIDE:
            line.under_way += 1
            self._slices.in_slices(self._serving(connection, line))
        return LATER

    def _serving(self, connection: Connection, line: _Line) -> Iterator[None]:
        """Answer one query after the other, until none waits."""
        try:
            while line.waiting:
                yield from self._querying(connection, line.waiting.popleft())
                if not connection.is_open:
                    line.waiting.clear()
                yield
        finally:
            line.under_way -= 1
            if not line.under_way:
                del self._lines[connection]

    def _querying(self, connection: Connection, request: Command) -> Iterator[None]:
        try:
            answer = yield from self._queried(connection, request)
        except Exception as error:  # noqa: BLE001  # as the dispatcher does
            answer = refusal(request, error)
        connection.reply(request, answer)

    def _queried(self, connection: Connection, request: Command) -> Generator[None, None, Command]:
        asked = request.header(QueryMessageRequest)
        most = MOST_WITH_ONE_ID if asked.is_unique_key else min(asked.max_num, MOST_RESULTS)
        store = self._parts.store
        rounds = store.looking_up(
            asked.topic, asked.key, asked.begin_timestamp, asked.end_timestamp
        )
        # As of now: later messages are not searched.
        state = store.statistics()
        found: list[memoryview] = []
        size = 0
        is_cut_short = False
        for record in rounds if most > 0 else ():
            if record is not None:
                is_cut_short = bool(found) and size + len(record) > _MOST_BYTES
                if is_cut_short:
                    break
                found.append(record)
                size += len(record)
                if len(found) == most:
                    break
            yield
            if not connection.is_open:
                break
        header = QueryMessageResponse(
            index_last_update_timestamp=state.indexed_ms,
            index_last_update_phyoffset=state.indexed,
            cut_short=is_cut_short or None,
        )
        if not found:
            return request.answer(
                ResponseCode.QUERY_NOT_FOUND,
                header,
                remark="can not find message, maybe time range not correct",
            )
        return request.answer(
            ResponseCode.SUCCESS,
            header,
            remark=_cut_short(found) if is_cut_short else None,
            body=b"".join(found),
        )

    def view(self, _: Connection, request: Command) -> Command:
        """The message at an offset of the log; clients take it from an offset id."""
        asked = request.header(ViewMessageRequest)
        try:
            record = self._parts.store.message_at(asked.offset)
        except (NoSuchRecord, DamagedRecord) as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"can not find message by the offset, {asked.offset}: {error}",
            ) from error
        return request.answer(ResponseCode.SUCCESS, body=bytes(record))


def _cut_short(found: Sequence[memoryview]) -> str:
    return (
        f"the newest {len(found)} messages are as much as an answer may hold; for those before "
        f"ask for a time up to {store_time(found[-1])}"
    )


# Requests that are passed on to consumers (223, 307, 309). The tool waits as long as the consumer
# may take: 10 s for the state of one consumer or for consuming a message, 5 s for the progress of
# all members of a group, who are asked in parallel. Some clients never answer the question for
# their progress: such a member is asked a few times only.


log = logging.getLogger(__name__)

#: Seconds for one consumer.
CONSUMER_DEADLINE = 10.0
#: Seconds for the members of a group.
MEMBER_DEADLINE = 5.0

#: The tool's credentials, which are not passed on.
_CREDENTIALS = frozenset({"AccessKey", "Signature", "SecurityToken"})


class RelayHandler:
    """Passes requests of tools on to consumers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.consumer_status,
        }

    # One consumer.

    async def running_info(self, _: Connection, request: Command) -> Command:
        """The running information of a consumer."""
        asked = request.header(GetConsumerRunningInfoRequest)
        return await self._relay(request, asked.consumer_group, asked.client_id, {})

    async def consume_directly(self, _: Connection, request: Command) -> Command:
        """Have a consumer consume a stored message."""
        asked = request.header(ConsumeDirectlyRequest)
        parts = self._parts
        try:
            body = bytes(parts.store.message_by_offset_id(asked.msg_id or ""))
            kept_in = decode_message(body).topic
        except (StoreError, MessageError) as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"message {asked.msg_id!r} cannot be read: {error}"
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
        """Pass a request on, and its answer back; `topic` is that of the body."""
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
        # All of them may know of the group: if none is nearest, the last one.
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
        """The progress of each member of a group, from the members themselves."""
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
        """The progress of one member; None without a useful answer."""
        try:
            answer = await _connection(member).request(
                RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, header, timeout=MEMBER_DEADLINE
            )
            if answer.code != ResponseCode.SUCCESS or not answer.body:
                return None
            return decode_body(ConsumerStatus, answer.body).message_queue_table or {}
        except (RemotingError, WireError):
            return None


def _connection(member: Member) -> Connection:
    if not isinstance(member.channel, Connection):
        raise Refused(
            ResponseCode.SYSTEM_ERROR, f"{member.client.id} has no connection for requests"
        )
    return member.channel


def _version(member: Member) -> str:
    release = release_of(member.client.version)
    return str(member.client.version) if release is None else str(release)


# Replies to requests by message: pushed to the requester, and stored (324, 325; pushes 326).


#: The place in the answer to a reply that was not stored; clients require these fields.
_NOT_STORED = "0"


class ReplyHandler:
    """Passes replies to the clients that wait for them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.SEND_REPLY_MESSAGE: self.reply,
            RequestCode.SEND_REPLY_MESSAGE_V2: self.reply,
        }

    async def reply(self, connection: Connection, request: Command) -> Command:
        """Push the reply to the client that it names; the answer says whether that worked.

        It is stored in any case; the result of that shows only in the place.
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
        """Push the reply to the waiting client; the problem, or None."""
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
        channel = self._parts.access.requester(channels, request, requester)
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
            why = answer.remark or named(ResponseCode, answer.code)
            return f"push reply message to {requester} fail: {why}"
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

        self._parts.writes.put(draft, done, transform=False)
        result: PutResult = await stored
        if not result.status.is_stored:
            log.warning("a reply was not stored: %s", result.error, extra={"topic": header.topic})
        return result
