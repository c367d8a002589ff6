"""Looking single messages up: by their place in the log, by key, by unique id (12, 33).

Looking for a key may take long: it may be on millions of messages of another time. So it is done in
slices, and answered at the end. A connection has `_SIDE_BY_SIDE` of its questions looked into at a
time; the next ones wait for these, and nobody for another connection's. The answer has to fit into
a frame; if not all of what was asked for does, it says so, and whoever wants the rest asks for the
time before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence

from orbitmq.broker.errors import Refused
from orbitmq.broker.parts import Parts
from orbitmq.broker.slices import Slices
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result, refusal
from orbitmq.store.errors import DamagedRecord, NoSuchRecord
from orbitmq.store.scanning import store_time
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.pull import (
    QueryMessageRequest,
    QueryMessageResponse,
    ViewMessageRequest,
)
from orbitmq.wire.limits import DEFAULT_LIMITS

#: How many messages a question for a key may bring (`maxMsgsNumBatch`).
MOST_RESULTS = 64
#: How many one for a unique id does, whatever it asks for (`defaultQueryMaxNum`).
MOST_WITH_ONE_ID = 32
#: Bytes of them that fit into a frame.
_MOST_BYTES = DEFAULT_LIMITS.frame - 64 * 1024
#: Rounds of a look-up that are done at once; few questions need more.
_AT_ONCE = 64
#: Questions of one connection that are under way at a time.
_SIDE_BY_SIDE = 16


class _Line:
    """The questions of a connection that are not answered yet."""

    __slots__ = ("under_way", "waiting")

    def __init__(self) -> None:
        self.under_way = 0
        self.waiting: deque[Command] = deque()


class Messages:
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
            self._slices.begin(self._serving(connection, line))
        return LATER

    def _serving(self, connection: Connection, line: _Line) -> Iterator[None]:
        """One question after the other, until none waits."""
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
        # As of now: what the index takes up later is not looked at.
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


def _cut_short(found: Sequence[memoryview]) -> str:
    return (
        f"the newest {len(found)} messages are as much as an answer may hold; for those before "
        f"ask for a time up to {store_time(found[-1])}"
    )
