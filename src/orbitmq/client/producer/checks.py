"""Answers brokers that ask what became of half messages."""

from __future__ import annotations

import asyncio
import logging

from orbitmq.client.engine import NOT_MINE, Engine
from orbitmq.client.producer.transactions import Check, outcome_of
from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage
from orbitmq.client.serving import NotMine
from orbitmq.message.errors import MessageError
from orbitmq.message.stored import decode_message
from orbitmq.message.wellknown import PRODUCER_GROUP, TRANSACTION_CHECK_TIMES
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.errors import ConnectionLost
from orbitmq.wire.codes import RequestCode, TransactionState
from orbitmq.wire.command import Command
from orbitmq.wire.headers.transactions import CheckTransactionStateRequest, EndTransactionRequest

log = logging.getLogger(__name__)


class Checks:
    """Answers brokers that ask what became of half messages of one group."""

    def __init__(
        self, engine: Engine, group: str, check: Check, *, workers: int, namespace: str | None
    ) -> None:
        self._engine = engine
        self._group = group
        self._check = check
        self._namespace = namespace
        self._workers = asyncio.Semaphore(workers)
        self._asked: set[tuple[str, int]] = set()
        self.close = engine.serve(RequestCode.CHECK_TRANSACTION_STATE, self._handle)

    def _handle(self, connection: Connection, request: Command) -> NotMine | None:
        header = request.header(CheckTransactionStateRequest)
        try:
            stored = decode_message(request.body)
        except MessageError:
            log.exception("a broker asked about a transaction with a message that is none")
            return None
        if stored.get_property(PRODUCER_GROUP) != self._group:
            return NOT_MINE
        queue = Queue(stored.topic, header.broker_name or "", stored.queue_id)
        message = ReceivedMessage(stored, queue, self._group, namespace=self._namespace)
        # A broker that asks again before the answer came need not be answered twice.
        key = (str(connection.remote), header.commit_log_offset)
        if key not in self._asked:
            self._asked.add(key)
            task = self._engine.spawn(self._answer(connection, header, message), "check back")
            task.add_done_callback(lambda _: self._asked.discard(key))
        return None

    async def _answer(
        self,
        connection: Connection,
        asked: CheckTransactionStateRequest,
        message: ReceivedMessage,
    ) -> None:
        async with self._workers:
            try:
                state = await outcome_of(self._check, message)
            except Exception:
                log.exception(
                    "check= failed for the transaction of message %s to %s (keys %s, group %s), "
                    "question %s; the broker asks again, 15 times in all by default, and then "
                    "drops the message",
                    message.msg_id,
                    message.topic,
                    " ".join(message.keys) or "none",
                    self._group,
                    message.get(TRANSACTION_CHECK_TIMES) or "1",
                    extra={
                        "group": self._group,
                        "topic": message.topic,
                        "message_id": message.msg_id,
                    },
                )
                state = TransactionState.UNKNOWN
        header = EndTransactionRequest(
            producer_group=self._group,
            topic=message.stored.topic,
            tran_state_table_offset=asked.tran_state_table_offset,
            commit_log_offset=asked.commit_log_offset,
            commit_or_rollback=int(state),
            msg_id=message.msg_id,
            transaction_id=asked.transaction_id,
            from_transaction_check=True,
            broker_name=asked.broker_name,
        )
        try:
            connection.notify(RequestCode.END_TRANSACTION, header)
        except ConnectionLost as error:
            log.info(
                "nobody to tell of the transaction of message %s (group %s): %s",
                message.msg_id,
                self._group,
                error,
                extra={"group": self._group},
            )
