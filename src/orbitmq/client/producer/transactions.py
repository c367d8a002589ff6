"""Transactions: a half message, the application's own work, and the word that ends it.

A half message is stored where no consumer sees it. Commit delivers it, rollback drops it. When
neither is heard - the producer crashed, the word was lost, the outcome was unknown - the broker
asks a producer of the same group, any of them, what became of it, after six seconds and then again
every thirty, fifteen times by default. The answer has to come from what the application has stored,
not from what this process remembers.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec

from orbitmq.client.engine import Engine
from orbitmq.client.errors import ClientError, MessageRefused
from orbitmq.client.message import Message
from orbitmq.client.producer.drafts import Drafting
from orbitmq.client.producer.publishing import Publisher
from orbitmq.client.producer.queuechoice import by_sharding_key
from orbitmq.client.producer.results import SendResult
from orbitmq.client.producer.sending import Sending
from orbitmq.client.received import ReceivedMessage
from orbitmq.errors import OrbitError
from orbitmq.message import sysflag
from orbitmq.message.ids import decode_offset_id
from orbitmq.message.wellknown import PRODUCER_GROUP, TRANSACTION_PREPARED
from orbitmq.wire.codes import RequestCode, TransactionState
from orbitmq.wire.headers.transactions import EndTransactionRequest

log = logging.getLogger(__name__)

#: What the application says of a transaction: a state, True to commit, False to roll back, None
#: when it does not know (yet): the broker asks later.
Verdict: TypeAlias = TransactionState | bool | None
#: The work that decides about a message that is stored as a half message.
Local: TypeAlias = Callable[[Message, str], Verdict | Awaitable[Verdict]]
#: The same for callers that block: on their own thread, so it cannot be a coroutine.
BlockingLocal: TypeAlias = Callable[[Message, str], Verdict]
#: Says what became of a half message.
Check: TypeAlias = Callable[[ReceivedMessage], Verdict | Awaitable[Verdict]]


class VerdictUnknown(ClientError):
    """The application answered something that is no verdict on a transaction."""

    def __init__(self, got: object) -> None:
        super().__init__(
            "a transaction ends with TransactionState.COMMIT, .ROLLBACK or .UNKNOWN, or with True, "
            f"False or None, got {got!r}"
        )


class TransactionResult(msgspec.Struct, frozen=True, gc=False):
    """Where the half message was stored, and what was said about it."""

    sent: SendResult
    state: TransactionState


def state_of(verdict: object) -> TransactionState:
    """The state that a verdict stands for. Raises `VerdictUnknown`."""
    if isinstance(verdict, TransactionState):
        return verdict
    if verdict is None:
        return TransactionState.UNKNOWN
    if isinstance(verdict, bool):
        return TransactionState.COMMIT if verdict else TransactionState.ROLLBACK
    raise VerdictUnknown(verdict)


async def outcome_of(function: Callable[..., object], *arguments: object) -> TransactionState:
    """Run the application's function; a plain one runs on a thread, it may take its time."""
    if inspect.iscoroutinefunction(function):
        verdict: object = await function(*arguments)
    else:
        verdict = await asyncio.to_thread(function, *arguments)
        if inspect.isawaitable(verdict):
            verdict = await verdict
    return state_of(verdict)


class Transactions:
    """The two words of a producer about a half message: here it is, and what becomes of it."""

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        drafting: Drafting,
        group: str,
        *,
        is_checked: bool,
    ) -> None:
        self._engine = engine
        self._is_checked = is_checked
        self._should_warn = not is_checked
        self._publisher = publisher
        self._drafting = drafting
        self._group = group

    async def begin(self, message: Message, timeout: float) -> SendResult:  # noqa: ASYNC109
        """Store a half message, in the queue of its sharding key if it has one.

        Raises `MessageRefused` for one with a delay.
        """
        _check_no_delay(message)
        if self._should_warn:
            self._should_warn = False
            log.warning(
                "producer group %r sends in transactions without check=: if the end of one is "
                "lost, no broker can learn what became of it, and its message is dropped in the "
                "end, unless another producer of the group has a check",
                self._group,
                extra={"group": self._group},
            )
        draft = self._drafting.draft(
            message,
            sys_flag=sysflag.TRANSACTION_PREPARED,
            extra={TRANSACTION_PREPARED: "true", PRODUCER_GROUP: self._group},
        )
        now = self._engine.clock.monotonic()
        select = None if message.sharding_key is None else by_sharding_key
        return await self._publisher.send(Sending(draft, made=now, timeout=timeout, select=select))

    def note_raised(self, message: Message, sent: SendResult, error: BaseException) -> None:
        """The local work raised something: whether it was done is for `check` to say."""
        if self._is_checked:
            next_step = "the broker asks check= of a producer of the group what became of it"
        else:
            next_step = (
                "the broker asks the producers of the group what became of it, which this one "
                "cannot answer without check="
            )
        log.warning(
            "the local work of a transaction raised %s: message %s to %s (transaction %s, keys %s, "
            "group %s) is kept and not delivered; %s, first after about 6 s and 15 times at most "
            "by default, and drops the message if nobody commits it",
            type(error).__name__,
            sent.msg_id,
            sent.queue.topic,
            sent.transaction_id or sent.msg_id,
            " ".join(message.keys) or "none",
            self._group,
            next_step,
            extra={
                "group": self._group,
                "topic": sent.queue.topic,
                "message_id": sent.msg_id,
                "transaction": sent.transaction_id or sent.msg_id,
            },
        )

    async def end(self, sent: SendResult, state: TransactionState) -> TransactionResult:
        """Say what becomes of it. That it could not be told is logged: the broker will ask."""
        header = EndTransactionRequest(
            producer_group=self._group,
            topic=sent.queue.topic,
            tran_state_table_offset=sent.queue_offset,
            commit_log_offset=decode_offset_id(sent.offset_id).offset,
            commit_or_rollback=int(state),
            msg_id=sent.msg_id,
            transaction_id=sent.transaction_id or sent.msg_id,
            broker_name=sent.queue.broker,
        )
        try:
            where = self._engine.routes.master(sent.queue.broker)
            await self._engine.tell(where, RequestCode.END_TRANSACTION, header)
        except OrbitError as error:
            self.note_untold(sent, state, error)
        return TransactionResult(sent, state)

    def note_untold(self, sent: SendResult, state: TransactionState, error: OrbitError) -> None:
        """What becomes of it could not be told."""
        log.warning(
            "the end (%s) of the transaction of message %s to %s (group %s) was not told, the "
            "broker will ask: %s",
            state.name,
            sent.msg_id,
            sent.queue,
            self._group,
            error,
            extra={"group": self._group, "topic": sent.queue.topic},
        )


def _check_no_delay(message: Message) -> None:
    """Brokers deliver a half message when it is committed, and drop its delay without a word."""
    for name, is_given in (
        ("delay_level", message.delay_level != 0),
        ("delay", message.delay is not None),
        ("deliver_at", message.deliver_at is not None),
    ):
        if is_given:
            raise MessageRefused(
                name,
                "cannot be given in a transaction: the message is delivered when it is committed; "
                "send a delayed message after the commit instead",
            )
