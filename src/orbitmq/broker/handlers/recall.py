"""Taking a timer message back before it is delivered (370)."""

from __future__ import annotations

from collections.abc import Mapping

from orbitmq.broker.drafts import Draft
from orbitmq.broker.errors import Refused
from orbitmq.broker.outcomes import PutResult
from orbitmq.broker.parts import Parts
from orbitmq.broker.peers import peer_of
from orbitmq.broker.permissions import may_write
from orbitmq.broker.recalls import RecallHandle, decode_handle, recall_key
from orbitmq.clock import milliseconds
from orbitmq.message.properties import encode_properties
from orbitmq.message.wellknown import (
    BORN_TIMESTAMP,
    PRODUCER_GROUP,
    TAGS,
    TIMER_DEL_UNIQKEY,
    TIMER_DELIVER_MS,
    UNIQ_KEY,
)
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.send import RecallMessageRequest, RecallMessageResponse

_RECALL_TAG = "_RECALL_TAG_"
_BODY = b"0"


class Recalling:
    """Takes timer messages back."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {RequestCode.RECALL_MESSAGE: self.recall}

    def recall(self, connection: Connection, request: Command) -> Result:
        """Store a message that cancels another; answered when it is stored.

        Whether the other one exists is not looked at, as with Apache's broker: a handle is given
        out for messages that do.
        """
        header = request.header(RecallMessageRequest)
        self._check_broker()
        if header.topic not in self._parts.topics:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"recall failed, the topic[{header.topic}] not exist",
            )
        handle = decode_handle(header.recall_handle)
        now_ms = milliseconds(self._parts.clock.now())
        self._check_handle(handle, header.topic, now_ms)
        draft = self._marker(connection, header, handle, now_ms)
        self._parts.timers.park_until(draft, handle.due_ms)

        def stored(result: PutResult) -> None:
            extra = {"MSG_REGION": self._parts.settings.send.region}
            if result.status.is_stored:
                answer = request.answer(
                    ResponseCode.SUCCESS,
                    RecallMessageResponse(msg_id=handle.unique_id),
                    extra=extra,
                )
            else:
                answer = request.answer(
                    ResponseCode.SYSTEM_ERROR,
                    remark=f"recall failed, execute error: {result.error}",
                    extra=extra,
                )
            connection.reply(request, answer)

        self._parts.turns.put(draft, stored, transform=False)
        return LATER

    def _check_broker(self) -> None:
        settings = self._parts.settings
        if not settings.delays.recall:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                "recall failed, operation is forbidden: delays.recall is off",
            )
        if settings.is_slave:
            raise Refused(
                ResponseCode.SLAVE_NOT_AVAILABLE,
                "recall failed, broker service not available: it is a slave",
            )
        if settings.send.accept_from > self._parts.clock.now() or not may_write(
            settings.permission
        ):
            raise Refused(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                "recall failed, broker service not available: it may not be written now",
            )

    def _check_handle(self, handle: RecallHandle, topic: str, now_ms: int) -> None:
        problem = ""
        if handle.topic != topic:
            problem = "topic not match"
        elif handle.broker != self._parts.settings.name:
            problem = f"broker service not available: the handle is of broker {handle.broker!r}"
        elif handle.due_ms <= now_ms:
            problem = "timestamp invalid: the message is due"
        elif handle.due_ms - now_ms > self._parts.timers.longest * 1000:
            problem = "timestamp invalid: no message can be so far ahead"
        if problem:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, f"recall failed, {problem}")

    def _marker(
        self,
        connection: Connection,
        header: RecallMessageRequest,
        handle: RecallHandle,
        now_ms: int,
    ) -> Draft:
        properties = encode_properties(
            {
                TAGS: _RECALL_TAG,
                TIMER_DEL_UNIQKEY: recall_key(handle.topic, handle.unique_id),
                UNIQ_KEY: handle.unique_id,
                TIMER_DELIVER_MS: str(handle.due_ms),
                BORN_TIMESTAMP: str(now_ms),
                PRODUCER_GROUP: header.producer_group,
            }
        )
        born_host = peer_of(connection).born_host
        return Draft(handle.topic, 0, _BODY, properties, now_ms, born_host)
