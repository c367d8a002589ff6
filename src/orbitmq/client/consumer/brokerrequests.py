"""What brokers ask a consumer: its state, its progress, a reset, to consume one message.

That members of the group have changed (40) concerns the rebalancer, which hears of it itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Protocol

from orbitmq.client.consumer.verdict import Outcome, Verdict
from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage
from orbitmq.client.serving import NOT_MINE, NotMine
from orbitmq.message.stored import decode_message
from orbitmq.wire.bodies.base import decode_body, encode_body
from orbitmq.wire.bodies.offsets import ConsumerStatus, ResetOffsetList, ResetOffsets
from orbitmq.wire.bodies.route import MessageQueue
from orbitmq.wire.bodies.stats import ConsumeDirectlyResult, ConsumeResult
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.errors import BodyError
from orbitmq.wire.headers.offsets import ResetOffsetRequest
from orbitmq.wire.headers.stats import (
    ConsumeDirectlyRequest,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
)

if TYPE_CHECKING:
    from orbitmq.client.consumer.calls import DirectCall
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.engine import Engine
    from orbitmq.remoting.connection import Connection
    from orbitmq.wire.bodies.stats import ConsumerRunningInfo
    from orbitmq.wire.command import Command
    from orbitmq.wire.frame import Bytes

log = logging.getLogger(__name__)


class Asked(Protocol):
    """The consumer, as far as brokers ask it."""

    #: As brokers know it.
    group: str
    is_ordered: bool
    progress: ProgressStore

    def running_info(self, *, with_stacks: bool = False) -> ConsumerRunningInfo:
        """What it is and does."""

    async def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Go on from other offsets."""

    async def consume_directly(self, message: ReceivedMessage) -> DirectCall:
        """Call a handler once."""


class BrokerRequests:
    """Answers for one consumer."""

    def __init__(self, engine: Engine, consumer: Asked) -> None:
        self._engine = engine
        self._consumer = consumer
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        serve = self._engine.serve
        self._undo = [
            serve(RequestCode.GET_CONSUMER_RUNNING_INFO, self._running_info),
            serve(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, self._status),
            serve(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, self._reset),
            serve(RequestCode.CONSUME_MESSAGE_DIRECTLY, self._consume_directly),
        ]

    def stop(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _running_info(self, _: Connection, request: Command) -> Command | NotMine:
        header = request.header(GetConsumerRunningInfoRequest)
        if header.consumer_group != self._consumer.group:
            return NOT_MINE
        info = self._consumer.running_info(with_stacks=header.jstack_enable)
        return request.answer(ResponseCode.SUCCESS, body=encode_body(info))

    def _status(self, _: Connection, request: Command) -> Command | NotMine:
        """Positions in memory, which are ahead of those that were reported."""
        header = request.header(GetConsumerStatusRequest)
        if header.group != self._consumer.group:
            return NOT_MINE
        positions = self._consumer.progress.positions(header.topic)
        table = {
            MessageQueue(topic=queue.topic, broker_name=queue.broker, queue_id=queue.id): offset
            for queue, offset in positions.items()
        }
        body = encode_body(ConsumerStatus(message_queue_table=table))
        return request.answer(ResponseCode.SUCCESS, body=body)

    def _reset(
        self, _: Connection, request: Command
    ) -> NotMine | Coroutine[object, object, Command | None]:
        header = request.header(ResetOffsetRequest)
        if header.group != self._consumer.group:
            return NOT_MINE
        return self._do_reset(request, _offsets(request.body))

    async def _do_reset(self, request: Command, offsets: Mapping[Queue, int]) -> Command | None:
        log.info(
            "a broker resets progress of group %s: %s",
            self._consumer.group,
            ", ".join(f"{queue} to {offset}" for queue, offset in sorted(offsets.items())),
            extra={"group": self._consumer.group},
        )
        await self._consumer.reset(offsets)
        return None if request.is_one_way else request.answer(ResponseCode.SUCCESS)

    def _consume_directly(
        self, _: Connection, request: Command
    ) -> NotMine | Coroutine[object, object, Command | None]:
        header = request.header(ConsumeDirectlyRequest)
        if header.consumer_group != self._consumer.group:
            return NOT_MINE
        stored = decode_message(bytes(request.body))
        queue = Queue(stored.topic, header.message_broker or "", stored.queue_id)
        namespace = self._engine.settings.namespace
        message = ReceivedMessage(stored, queue, self._consumer.group, None, namespace)
        return self._do_consume(request, message)

    async def _do_consume(self, request: Command, message: ReceivedMessage) -> Command | None:
        call = await self._consumer.consume_directly(message)
        result = ConsumeDirectlyResult(
            consume_result=_result(call.outcome),
            order=self._consumer.is_ordered,
            auto_commit=call.outcome is None or call.outcome.auto_commit is not False,
            remark=call.outcome.failure.reason if call.outcome and call.outcome.failure else None,
            spent_time_mills=round((call.ended - call.began) * 1000),
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(result))


_RESULTS: Mapping[Verdict, ConsumeResult] = {
    Verdict.SUCCESS: ConsumeResult.CR_SUCCESS,
    Verdict.RETRY: ConsumeResult.CR_LATER,
    Verdict.COMMIT: ConsumeResult.CR_COMMIT,
    Verdict.ROLLBACK: ConsumeResult.CR_ROLLBACK,
}


def _result(outcome: Outcome | None) -> ConsumeResult:
    if outcome is None:
        # Cancelled before it came to anything: the consumer is stopping.
        return ConsumeResult.CR_LATER
    if outcome.failure is not None:
        if outcome.failure.error is not None:
            return ConsumeResult.CR_THROW_EXCEPTION
        return (
            ConsumeResult.CR_RETURN_NULL if outcome.failure.is_silence else ConsumeResult.CR_LATER
        )
    return _RESULTS[outcome.verdict]


def _offsets(body: Bytes) -> dict[Queue, int]:
    """A table of offsets, in the form for Java clients or in the one for C++ ones."""
    try:
        table = decode_body(ResetOffsets, body).offset_table
        return {
            Queue(each.topic, each.broker_name, each.queue_id): offset
            for each, offset in table.items()
        }
    except BodyError:
        rows = decode_body(ResetOffsetList, body).offset_table
        return {Queue(each.topic, each.broker_name, each.queue_id): each.offset for each in rows}
