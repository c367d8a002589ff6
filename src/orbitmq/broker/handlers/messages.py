"""Looking single messages up: by their place in the log, by key, by unique id (12, 33)."""

from __future__ import annotations

from collections.abc import Mapping

from orbitmq.broker.errors import Refused
from orbitmq.broker.parts import Parts
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.store.errors import DamagedRecord, NoSuchRecord
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.pull import (
    QueryMessageRequest,
    QueryMessageResponse,
    ViewMessageRequest,
)

#: How many messages a question for a key may bring (`maxMsgsNumBatch`).
MOST_RESULTS = 64
#: How many one for a unique id does, whatever it asks for (`defaultQueryMaxNum`).
MOST_WITH_ONE_ID = 32


class Messages:
    """Finds messages."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.QUERY_MESSAGE: self.query,
            RequestCode.VIEW_MESSAGE_BY_ID: self.view,
        }

    def query(self, _: Connection, request: Command) -> Command:
        """Messages of a topic with a key or a unique id, within a span of time."""
        asked = request.header(QueryMessageRequest)
        most = MOST_WITH_ONE_ID if asked.is_unique_key else min(asked.max_num, MOST_RESULTS)
        store = self._parts.store
        found: list[memoryview] = []
        if most > 0:
            found = store.lookup(
                asked.topic, asked.key, most, asked.begin_timestamp, asked.end_timestamp
            )
        state = store.statistics()
        header = QueryMessageResponse(
            index_last_update_timestamp=state.indexed_ms, index_last_update_phyoffset=state.indexed
        )
        if not found:
            return request.answer(
                ResponseCode.QUERY_NOT_FOUND,
                header,
                remark="can not find message, maybe time range not correct",
            )
        return request.answer(ResponseCode.SUCCESS, header, body=b"".join(found))

    def view(self, _: Connection, request: Command) -> Command:
        """The message that begins at an offset of the log; clients take it from an offset id."""
        asked = request.header(ViewMessageRequest)
        try:
            record = self._parts.store.message_at(asked.offset)
        except (NoSuchRecord, DamagedRecord) as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"can not find message by the offset, {asked.offset}: {error}",
            ) from error
        return request.answer(ResponseCode.SUCCESS, body=bytes(record))
