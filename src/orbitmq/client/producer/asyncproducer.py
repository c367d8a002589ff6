"""The producer for programs with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self, Unpack

from orbitmq.client.durations import Duration
from orbitmq.client.engine import Engine
from orbitmq.client.message import Message
from orbitmq.client.producer.arguments import Body, SendOptions
from orbitmq.client.producer.core import DEFAULT_GROUP, ProducerCore
from orbitmq.client.producer.inflight import InFlight
from orbitmq.client.producer.publishing import Publisher
from orbitmq.client.producer.results import SendResult
from orbitmq.client.producer.settings import SendSettings
from orbitmq.client.producer.transactions import (
    Check,
    Local,
    TransactionResult,
    outcome_of,
)
from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage
from orbitmq.client.settings import ClientSettings, resolve
from orbitmq.wire.codes import TransactionState


class AsyncProducer:
    """Sends messages; many `send` at a time share one connection to each broker.

    async with AsyncProducer("orders-svc", name_server="localhost:9876") as producer:
        await producer.send("orders", b"...", tags="paid", keys="o-1")

    `group` names the service that sends. It matters for transactions: a broker that wants to know
    what became of one asks any producer of its group, by `check`.
    """

    def __init__(
        self,
        group: str = DEFAULT_GROUP,
        *,
        name_server: str | Iterable[str] | None = None,
        client: ClientSettings | None = None,
        sending: SendSettings | None = None,
        check: Check | None = None,
    ) -> None:
        engine = Engine(resolve(name_server, client))
        self._take(ProducerCore(engine, group, sending, check, owns_engine=True))

    @classmethod
    def on(
        cls,
        engine: Engine,
        group: str = DEFAULT_GROUP,
        *,
        sending: SendSettings | None = None,
        check: Check | None = None,
    ) -> Self:
        """A producer that shares the connections of a running client, which outlives it."""
        producer = cls.__new__(cls)
        producer._take(ProducerCore(engine, group, sending, check, owns_engine=False))
        return producer

    def _take(self, core: ProducerCore) -> None:
        self._core = core
        self._in_flight = InFlight(core.settings.max_in_flight, core.settings.max_in_flight_bytes)

    # ---- life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Belong to the running loop from now on. Connects to nobody before the first send."""
        await self._core.start()

    async def stop(self) -> None:
        """Wait for what was submitted, each within its own time; then leave. May be repeated.

        Transactions under way are waited for as well, each for its `timeout` from now on.
        """
        if self._core.refuse():
            await self._in_flight.until_empty()
        await self._core.stop()

    @property
    def group(self) -> str:
        return self._core.group

    @property
    def settings(self) -> SendSettings:
        return self._core.settings

    @property
    def client_id(self) -> str:
        """The id under which brokers know this client."""
        return self._core.engine.client_id

    # ---- sending

    async def send(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> SendResult:
        """Send a message, or a topic and a body with the fields of one; wait until it is stored.

        Raises `MessageRefused` before anything is sent, `NoRoute`, `BrokerRefused` for a refusal
        that no other broker would take back, and `SendFailed` when attempts or time ran out.
        """
        core = self._core
        core.check_running()
        return await core.publisher.send(await core.sending_aside(message, body, options))

    async def submit(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> asyncio.Future[SendResult]:
        """Send in the background: returns as soon as there is room for it, with its future.

        Messages that one task submits to one queue are stored in their order, unless an attempt
        fails. A failure that nobody looks at is logged. That no frame can be made of a message,
        which is too long for one, is told by the future as well.
        """
        core, in_flight = self._core, self._in_flight
        publisher = core.running()
        sending = await core.sending_aside(message, body, options)
        size = len(sending.draft.body)
        if not in_flight.enter_at_once(size):
            await in_flight.enter(size, sending.timeout)
        sent: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()

        def done(outcome: SendResult | BaseException) -> None:
            in_flight.leave(size)
            if not isinstance(outcome, SendResult):
                core.note_unsent(sending.topic, outcome)
            if sent.done():  # cancelled by whoever has it
                return
            if isinstance(outcome, SendResult):
                sent.set_result(outcome)
            else:
                sent.set_exception(outcome)
                sent.exception()  # it was logged: nobody has to look at it

        try:
            # What cannot be sent at once might be overtaken by what is submitted next.
            if not publisher.begin_at_once(sending, done):
                await publisher.prepare(sending)
                publisher.begin(sending, done)
        except BaseException:
            in_flight.leave(size)
            raise
        return sent

    async def flush(self) -> None:
        """Returns when everything that was submitted has an outcome."""
        await self._in_flight.until_empty()

    async def send_one_way(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> None:
        """Send without waiting for an answer: fast, and without knowing what becomes of it."""
        core = self._core
        core.check_running()
        await core.publisher.tell(await core.sending_aside(message, body, options))

    async def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: Queue | None = None,
        key: str | int | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109  # for the whole call
    ) -> list[SendResult]:
        """Send many messages in few frames; the results are in the order of the messages.

        Messages of one topic go to one queue, in their order, except for those that have a
        sharding key, which go to the queue of that, unless `queue` or `key` says where all go.
        Several queues are sent to one after the other. Raises `BatchFailed`, which says what was
        stored before it failed; before anything is sent `MessageRefused`, also for a message of
        another topic than `queue`, and `SettingError` for a queue and a key.
        """
        self._core.check_running()
        return await self._core.send_batch(messages, queue, key, timeout)

    async def forward(
        self,
        topic: str,
        body: bytes,
        properties: Mapping[str, str],
        *,
        flag: int = 0,
        sys_flag: int = 0,
        queue: Queue | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109  # for the whole call
    ) -> SendResult:
        """Pass on a message as it was stored, to a topic named as brokers know it.

        For tools that move messages: any properties go along, those of the system as well.
        """
        self._core.check_running()
        return await self._core.forward(
            topic, body, properties, flag=flag, sys_flag=sys_flag, queue=queue, timeout=timeout
        )

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        """The queues that messages of a topic may go to, in the order that selectors see."""
        self._core.check_running()
        return await self._core.queues(topic)

    @property
    def publisher(self) -> Publisher:
        """What carries sends out, for parts of this package that make frames themselves."""
        self._core.check_running()
        return self._core.publisher

    # ---- messages for later

    async def recall(self, topic: str, handle: str) -> str:
        """Take a message back before it is delivered; returns its id.

        `handle` is the `recall_handle` of its `SendResult`. Raises `BrokerRefused`, also when the
        message was delivered already or the broker does not allow it.
        """
        self._core.check_running()
        return await self._core.recall(topic, handle)

    # ---- transactions

    async def send_in_transaction(
        self,
        message: Message,
        local: Local,
        *,
        timeout: Duration | None = None,  # noqa: ASYNC109  # for storing the half message
    ) -> TransactionResult:
        """Store a half message, run `local`, and commit or drop the message by what it returns.

        `local` is given the message and the id of the transaction, and returns True or
        `TransactionState.COMMIT`, False or `.ROLLBACK`, or None when it does not know; a plain
        function runs on a thread. When it raises, the error is raised here, and the message stays
        open: the broker asks `check` later, several times, and drops it if nobody knows. So it
        does when the producer was stopped and the end could not be told, which is logged.
        """
        core = self._core
        with core.open_transactions.one(core.limit(timeout)):
            sent = await self.send_half(message, timeout=timeout)
            transactions = core.transactions
            if not sent.is_ok:
                return await transactions.end(sent, TransactionState.ROLLBACK)
            try:
                state = await outcome_of(local, message, sent.transaction_id or sent.msg_id)
            except BaseException as error:
                transactions.note_raised(message, sent, error)
                await transactions.end(sent, TransactionState.UNKNOWN)
                raise
            return await transactions.end(sent, state)

    async def send_half(
        self,
        message: Message,
        *,
        timeout: Duration | None = None,  # noqa: ASYNC109  # for the whole call
    ) -> SendResult:
        """Store a half message; nobody sees it before `end_transaction` commits it.

        It is delivered when it is committed: raises `MessageRefused` for a message with a delay.
        """
        self._core.check_running()
        return await self._core.transactions.begin(message, self._core.limit(timeout))

    async def end_transaction(self, sent: SendResult, state: TransactionState) -> TransactionResult:
        """Say what becomes of a half message. Not answered: if it gets lost, `check` is asked."""
        self._core.check_not_left()
        return await self._core.transactions.end(sent, state)

    # ---- request and reply

    async def request(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> ReceivedMessage:
        """Send a message and wait for the reply to it, both within `timeout`.

        Raises `NoReply`, and what `send` raises.
        """
        self._core.check_running()
        return await self._core.request(message, body, options)

    async def reply(
        self,
        request: ReceivedMessage,
        body: bytes | str,
        *,
        properties: Mapping[str, str] | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109  # for the whole call
    ) -> SendResult:
        """Answer a message that was sent with `request`. Raises `NotARequest`, `SendFailed`."""
        self._core.check_running()
        return await self._core.reply(request, body, properties, timeout)
