"""Transactions: a half message, the application's own work, and the word that ends it.

A half message is stored where no consumer sees it. Commit delivers it, rollback drops it. When
neither is heard - the producer crashed, the word was lost, the outcome was unknown - the broker
asks a producer of the same group, any of them, what became of it, after six seconds and then again
every thirty, fifteen times by default. The answer has to come from what the application has stored,
not from what this process remembers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from orbitmq.client.engine import NOT_MINE, Engine, NotMine
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.producer.send import Sending, SendResult, by_ordering_key
from orbitmq.client.routes import Queue
from orbitmq.errors import MessageRefused, OrbitError, WrongUse
from orbitmq.message import record
from orbitmq.message.ids import decode_offset_id
from orbitmq.message.properties import PRODUCER_GROUP, TRANSACTION_CHECK_TIMES, TRANSACTION_PREPARED
from orbitmq.message.record import MessageError
from orbitmq.message.stored import decode_message
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import ConnectionLost
from orbitmq.wire.codes import RequestCode, TransactionState
from orbitmq.wire.command import Command
from orbitmq.wire.headers import CheckTransactionStateRequest, EndTransactionRequest

if TYPE_CHECKING:
    from orbitmq.client.producer.core import Drafting
    from orbitmq.client.producer.send import Publisher


log = logging.getLogger(__name__)

#: What the application says of a transaction: a state, True to commit, False to roll back, None
#: when it does not know (yet): the broker asks later.
Verdict: TypeAlias = TransactionState | bool | None
#: The work that decides about a message that is stored as a half message.
Local: TypeAlias = Callable[[Message, str], Verdict | Awaitable[Verdict]]
#: The same for callers that block: on their own thread, so it cannot be a coroutine.
BlockingLocal: TypeAlias = Callable[[Message, str], Verdict]
#: Returns the outcome of the transaction of a half message.
Check: TypeAlias = Callable[[ReceivedMessage], Verdict | Awaitable[Verdict]]


class VerdictUnknown(WrongUse):
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
        self._should_warn = not is_checked
        self._publisher = publisher
        self._drafting = drafting
        self._group = group

    async def begin(self, message: Message, timeout: float) -> SendResult:  # noqa: ASYNC109
        """Store a half message, in the queue of its ordering key if it has one.

        Raises `MessageRefused` for one with a delay.
        """
        _check_no_delay(message)
        if message.dedup_id is not None:
            raise MessageRefused(
                "dedup_id",
                "cannot be given in a transaction: a copy would be told of another transaction, "
                "which may be rolled back; check= keeps a message from being committed twice",
            )
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
            sys_flag=record.TRANSACTION_PREPARED,
            extra={TRANSACTION_PREPARED: "true", PRODUCER_GROUP: self._group},
        )
        now = self._engine.clock.monotonic()
        select = None if message.ordering_key is None else by_ordering_key
        return await self._publisher.send(Sending(draft, made=now, timeout=timeout, select=select))

    def note_raised(self, message: Message, sent: SendResult, error: BaseException) -> None:
        """The local work raised something: whether it was done is for `check` to say."""
        log.warning(
            "the local work of a transaction raised %s: message %s to %s (transaction %s, keys %s, "
            "group %s) is kept and not delivered; the broker asks check= of a producer of the "
            "group what became of it, first after about 6 s and 15 times at most by default, and "
            "drops the message if it is not committed",
            type(error).__name__,
            sent.msg_id,
            sent.queue.topic,
            sent.transaction_id or sent.msg_id,
            " ".join(message.keys) or "none",
            self._group,
            extra={
                "group": self._group,
                "topic": sent.queue.topic,
                "message_id": sent.msg_id,
                "transaction": sent.transaction_id or sent.msg_id,
            },
        )

    async def end(self, sent: SendResult, state: TransactionState) -> TransactionResult:
        """Commit or roll back. A failure is logged: the broker will ask."""
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
            self.note_unreported(sent, state, error)
        return TransactionResult(sent, state)

    def note_unreported(self, sent: SendResult, state: TransactionState, error: OrbitError) -> None:
        """The end could not be reported."""
        log.warning(
            "the end (%s) of the transaction of message %s to %s (group %s) was not reported, the "
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
    for name in ("delay_level", "delay", "deliver_at"):
        if getattr(message, name) not in (None, 0):
            raise MessageRefused(
                name,
                "cannot be given in a transaction: the message is delivered when it is committed; "
                "send a delayed message after the commit instead",
            )


class Checks:
    """Answers brokers that ask for the outcome of transactions of one group."""

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
                "the end of the transaction of message %s (group %s) was not reported: %s",
                message.msg_id,
                self._group,
                error,
                extra={"group": self._group},
            )


class OpenTransactions:
    """Transactions whose local work is under way, which a stop waits for.

    It waits for each no longer than the transaction's own timeout, counted from the stop: local
    work has no deadline, may hang, and may be what stops the producer. A later end is not reported,
    and the broker asks. Threads and coroutines begin transactions; there is no lock.
    """

    __slots__ = ("_ended", "_loop", "_open")

    def __init__(self) -> None:
        #: What a stop waits for each of them at most. Changed by one operation at a time, and read
        #: into a list, which is there before the iterator is. A tuple is made after that, which may
        #: begin a collection of garbage, and let another thread change this meanwhile.
        self._open: dict[object, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None

    @contextlib.contextmanager
    def one(self, patience: float) -> Iterator[None]:
        """Count a transaction until its end was reported. For any thread."""
        transaction = object()
        self._open[transaction] = patience
        try:
            yield
        finally:
            del self._open[transaction]
            if not self._open:
                self._tell()

    @property
    def patience(self) -> float:
        """How long a stop waits for those that are open now. For any thread."""
        return max(list(self._open.values()), default=0.0)

    async def until_ended(self) -> bool:
        """Returns when none is open; False when the time is up. No others may begin meanwhile."""
        if self._ended is None:
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        # A thread that ends the last one looks here after that: one of the two sees the other.
        patience = max(list(self._open.values()), default=None)
        if patience is None:
            return True
        try:
            async with asyncio.timeout(patience):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _tell(self) -> None:
        if self._ended is not None and self._loop is not None:
            # Nothing waits on a loop that is closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ended.set)
