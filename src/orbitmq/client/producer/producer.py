"""The producer: `AsyncProducer`, and `Producer` for programs without an event loop."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self, Unpack

from msgspec.structs import replace

from orbitmq.arguments import explained, warn_deprecated
from orbitmq.client.engine import AsyncLife, Engine
from orbitmq.client.errors import NoReply, RecallUnsupported
from orbitmq.client.loopthread import BlockingFace, Life, LoopThread, waiting
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.producer.batch import send_in_batches
from orbitmq.client.producer.core import (
    DEFAULT_GROUP,
    Body,
    ProducerCore,
    ProducerOptions,
    ProducerStatistics,
    SendOptions,
    SendSettings,
    parse_send_args,
)
from orbitmq.client.producer.request import decode_recall_handle, reply_properties
from orbitmq.client.producer.send import Publisher, Sending, SendResult
from orbitmq.client.producer.submit import Submissions, ThreadSubmissions
from orbitmq.client.producer.transactions import (
    BlockingLocal,
    Local,
    TransactionResult,
    outcome_of,
    state_of,
)
from orbitmq.client.routes import Queue
from orbitmq.client.serialization import Serializing, encoded_body
from orbitmq.client.settings import ClientSettings, resolve
from orbitmq.errors import BrokerRefused, NotRunning, OrbitError
from orbitmq.parsing import Duration, seconds
from orbitmq.wire.codes import RequestCode, ResponseCode, TransactionState
from orbitmq.wire.headers import RecallMessageRequest, RecallMessageResponse

if TYPE_CHECKING:
    from types import ModuleType

    import pyarrow as pa

    from orbitmq.client.producer.columns import SendResults


log = logging.getLogger(__name__)

_REPLY: Final = int(RequestCode.SEND_REPLY_MESSAGE_V2)
#: Seconds that a stop waits for the outcome of a message whose timeout has passed.
_GRACE: Final = 1.0


@explained(besides=("send", "submit", "send_one_way"))
class AsyncProducer(AsyncLife):
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
        **options: Unpack[ProducerOptions],
    ) -> None:
        self._take(ProducerCore(Engine(resolve(name_server, client)), group, **options))

    @classmethod
    def on(
        cls, engine: Engine, group: str = DEFAULT_GROUP, **options: Unpack[ProducerOptions]
    ) -> Self:
        """A producer that shares the connections of a running client, which outlives it."""
        return cls._of(ProducerCore(engine, group, owns_engine=False, **options))

    @classmethod
    def _of(cls, core: ProducerCore) -> Self:
        """The face of a core."""
        producer = cls.__new__(cls)
        producer._take(core)
        return producer

    def _take(self, core: ProducerCore) -> None:
        self._core = core
        self._submissions = Submissions(core)

    # ---- life

    async def start(self) -> None:
        """Belong to the running loop from now on. No connection is made before the first send."""
        await self._core.start()

    async def stop(self) -> None:
        """Wait for what was submitted, each within its own time; then leave. May be repeated.

        Transactions under way are waited for as well, each for its `timeout` from now on.
        """
        if self._core.refuse():
            await self._submissions.in_flight.until_empty()
        await self._core.stop()

    @property
    def group(self) -> str:
        return self._core.group

    @property
    def settings(self) -> SendSettings:
        return self._core.settings

    @property
    def serializer(self) -> Serializing:
        """What encodes bodies that are neither bytes nor texts; None: JSON."""
        return self._core.serializer

    @property
    def client_id(self) -> str:
        """The id under which brokers know this client."""
        return self._core.engine.client_id

    def statistics(self) -> ProducerStatistics:
        """What was sent, failed and retried so far, and what is in flight; also after the end."""
        return self._core.statistics(self._submissions.in_flight.count)

    # ---- sending

    async def send(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> SendResult:
        """Send a message, or a topic and a body with the fields of one; wait until it is stored.

        Raises `MessageRefused` before anything is sent, `NoRoute`, `BrokerRefused` for a refusal
        that no other broker would take back, and `SendFailed` when attempts or time ran out.
        """
        core = self._core
        core.running()
        if core.may_take_long(message, body):
            sending = await core.sending_aside(message, body, options)
        else:
            sending = core.sending(message, body, options)
        return await self._submissions.send(sending)

    async def submit(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> asyncio.Future[SendResult]:
        """Send in the background: returns as soon as there is room for it, with its future.

        Messages that one task submits to one queue are stored in their order, unless an attempt
        fails. Failures are logged. A message that is too long for a frame fails by its future.
        """
        core = self._core
        core.running()
        if core.may_take_long(message, body):
            sending = await core.sending_aside(message, body, options)
        else:
            sending = core.sending(message, body, options)
        sent = self._submissions.submit(sending)
        return await self._submissions.enter(sending) if sent is None else sent

    async def flush(self) -> None:
        """Returns when everything that was submitted has an outcome."""
        await self._submissions.in_flight.until_empty()

    async def send_one_way(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> None:
        """Send without waiting for an answer: fast, and without knowing what becomes of it."""
        publisher = self._core.running()
        if self._core.may_take_long(message, body):
            sending = await self._core.sending_aside(message, body, options)
        else:
            sending = self._core.sending(message, body, options)
        await publisher.notify(sending)

    async def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: Queue | None = None,
        ordering_key: str | int | None = None,
        key: str | int | None = None,  # deprecated
        timeout: Duration | None = None,  # noqa: ASYNC109  # for the whole call
    ) -> list[SendResult]:
        """Send many messages in few frames; the results are in the order of the messages.

        Messages of one topic go to one queue, in their order, except for those that have an
        ordering key, which go to the queue of that, unless `queue` or `ordering_key` of the call
        says where all go.
        Several queues are sent to one after the other. Raises `SendFailed`, which says what was
        stored before it failed; before anything is sent `MessageRefused`, also for a message of
        another topic than `queue`, and `SettingError` for a queue and a key.
        """
        limit, key = self._core.limit(timeout), _batch_key(ordering_key, key)
        given = tuple(messages)
        return await send_in_batches(self._core, given, limit, queue=queue, ordering_key=key)

    async def send_arrow(
        self,
        topic: str,
        table: pa.Table | pa.RecordBatch,
        *,
        queue: Queue | None = None,
        ordering_key: str | int | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109  # for the whole call
    ) -> SendResults:
        """Send the rows of an Arrow table, with no object for each.

        The columns are `body`, and if wanted `tag`, `keys`, `properties` (a map), `ordering_key`,
        `dedup_id` and `flag`; what brokers set in received messages is left out.

        One result for each message, in their order, made when it is looked at: `to_arrow` has all
        of them. Messages go to the queues of the topic in turn, a frame to each; with `queue` or
        `ordering_key` all go there, in their order. Raises `MessageRefused` before anything is
        sent, and `SendFailed`, which says what was stored.
        """
        limit = self._core.limit(timeout)
        results: SendResults = await _columns().send_columns(
            self._core, topic, table, limit, queue=queue, ordering_key=ordering_key
        )
        return results

    async def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes] | pa.Array,
        *,
        keys: Sequence[str | Iterable[str] | None] | pa.Array | None = None,
        tag: str | Sequence[str | None] | pa.Array | None = None,
        properties: Sequence[Mapping[str, str] | None] | pa.Array | None = None,
        queue: Queue | None = None,
        dedup_ids: Sequence[str | None] | pa.Array | None = None,
        ordering_key: str | int | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109  # for the whole call
    ) -> SendResults:
        """Send many bodies of bytes, with a tag and keys for each, without an object for each.

        One result for each message, in their order, made when it is looked at: `to_arrow` has all
        of them. Messages go to the queues of the topic in turn, a frame to each; with `queue` or
        `ordering_key` all go there, in their order. Raises `MessageRefused` before anything is
        sent, and `SendFailed`, which says what was stored.
        """
        table = _columns().many(
            bodies, keys=keys, tag=tag, properties=properties, dedup_ids=dedup_ids
        )
        return await self.send_arrow(
            topic, table, queue=queue, ordering_key=ordering_key, timeout=timeout
        )

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
        core, publisher = self._core, self._core.running()
        draft = core.drafting.passed_on(topic, body, properties, flag=flag, sys_flag=sys_flag)
        return await publisher.send(
            Sending(draft, made=core.monotonic(), timeout=core.limit(timeout), queue=queue)
        )

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        """The queues that messages of a topic may go to, in the order that selectors see."""
        return await self._core.running().queues(self._core.drafting.wire_topic(topic))

    @property
    def publisher(self) -> Publisher:
        """What carries sends out, for parts of this package that make frames themselves."""
        return self._core.running()

    # ---- messages for later

    async def recall(self, topic: str, handle: str) -> str:
        """Take a message back before it is delivered; returns its id.

        `handle` is the `recall_handle` of its `SendResult`. Raises `BrokerRefused`, also when the
        message was delivered already or the broker does not allow it.
        """
        core, publisher = self._core, self._core.running()
        broker = decode_recall_handle(handle).broker
        wire_topic = core.drafting.wire_topic(topic)
        deadline = core.monotonic() + core.settings.timeout
        # So that the address of the broker is known.
        await publisher.queues(wire_topic, core.settings.timeout)
        header = RecallMessageRequest(
            topic=wire_topic,
            recall_handle=handle,
            producer_group=core.producer_group,
            broker_name=broker,
        )
        left = max(0.0, deadline - core.monotonic())
        where, code = core.engine.routes.master(broker), RequestCode.RECALL_MESSAGE
        try:
            answer = await core.engine.ask(where, code, header, timeout=left)
        except BrokerRefused as error:
            if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise RecallUnsupported(error, broker) from error
            raise
        return answer.header(RecallMessageResponse).msg_id

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
        open: the broker asks `check` later, several times, and drops it if no producer knows. So it
        does when the producer was stopped and could not report the end, which is logged.
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
        """Store a half message, which is not delivered before `end_transaction` commits it.

        It is delivered when it is committed: raises `MessageRefused` for a message with a delay.
        """
        self._core.running()
        return await self._core.transactions.begin(message, self._core.limit(timeout))

    async def end_transaction(self, sent: SendResult, state: TransactionState) -> TransactionResult:
        """Say what becomes of a half message. Not answered: if it gets lost, `check` is asked."""
        self._core.publisher  # noqa: B018  # raises when the producer has left
        return await self._core.transactions.end(sent, state)

    # ---- request and reply

    async def request(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> ReceivedMessage:
        """Send a message and wait for the reply to it, both within `timeout`.

        Raises `NoReply`, and what `send` raises.
        """
        core, publisher = self._core, self._core.running()
        call = parse_send_args(message, body, options, core.settings.timeout, core.serializer)
        topic = core.drafting.wire_topic(call.message.topic)
        deadline = core.monotonic() + call.timeout
        await publisher.queues(topic, call.timeout)
        try:
            async with asyncio.timeout(deadline - core.monotonic()):
                await core.requests.introduce(topic, within=call.timeout / 4)
                with core.requests.waiting(call.timeout) as (properties, reply):
                    draft = core.drafting.draft(call.message, extra=properties)
                    left = deadline - core.monotonic()
                    await publisher.send(core.bound(draft, replace(call, timeout=left)))
                    return await reply
        except TimeoutError:
            raise NoReply(call.message.topic, call.timeout) from None

    async def reply(
        self,
        request: ReceivedMessage,
        body: Body | None = None,
        *,
        json: object = None,
        properties: Mapping[str, str] | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109  # for the whole call
    ) -> SendResult:
        """Answer a message that was sent with `request`. Raises `WrongUse`, `SendFailed`."""
        core, publisher = self._core, self._core.running()
        topic, system = reply_properties(request)
        content = encoded_body(body, json, core.serializer)
        given = {**(properties or {}), **system}
        draft = core.drafting.passed_on(topic, content, given, code=_REPLY)
        limit = core.limit(timeout)
        queues = await publisher.queues(topic, limit)
        # The asker is known for certain at the broker that took its request.
        nearest = next((q for q in queues if q.broker == request.queue.broker), queues[0])
        return await publisher.send(Sending(draft, core.monotonic(), limit, nearest))


@explained(besides=("send", "submit", "send_one_way"))
class Producer(BlockingFace, Life):
    """Sends messages; may be used by any number of threads at a time.

    with Producer("orders-svc", name_server="localhost:9876") as producer:
        producer.send("orders", b"...", tags="paid", keys="o-1")

    A thread that sends does so on a blocking connection of its own, lent by a pool. Everything else
    happens on an event loop in a background thread: routes, heartbeats, retries, `submit`.
    """

    def __init__(
        self,
        group: str = DEFAULT_GROUP,
        *,
        name_server: str | Iterable[str] | None = None,
        client: ClientSettings | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        engine = Engine(resolve(name_server, client))
        self._core = core = ProducerCore(engine, group, for_threads=True, **options)
        super().__init__(AsyncProducer._of(core), LoopThread(f"orbitmq producer {group}"))
        self.group = core.group
        self.settings = core.settings
        self.serializer = core.serializer
        self._submissions = ThreadSubmissions(self._core, self._thread)

    # ---- life

    def start(self) -> None:
        """Start the event loop's thread. No connection is made before the first send."""
        self._thread.start()
        try:
            self._thread.run(self._core.start())
        except BaseException:
            if not self._core.is_running:
                self._thread.stop()
            raise
        # A program that forgets to stop it ends all the same, and brokers are notified.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Wait for what was submitted, each within its own time; then leave. May be repeated.

        Transactions under way are waited for as well, each for its `timeout` from now on. Other
        sends of other threads end with an error. Interrupted, it waits no longer, and leaves.

        Several threads may stop it: all wait for the same end. So may a signal handler, whatever it
        interrupts; but what it interrupts does not go on meanwhile, and is waited for in vain for
        its time. Better let the handler raise, or set a flag.
        """
        self._thread.check_other()
        was_running = self._core.refuse()
        if not self._thread.is_running:
            self._thread.stop()  # nothing, unless another one is at it: its end is waited for
            return
        atexit.unregister(self.stop)
        try:
            self._until_over(was_running)
        finally:
            try:
                self._thread.stop()
            finally:
                self._submissions.give_up()

    def _until_over(self, was_running: bool) -> None:
        """Wait for what was submitted, then until the producer has left."""
        limit = self._core.stop_limit
        with suppress(NotRunning):  # another thread has stopped it meanwhile
            if was_running:
                # A thread that a signal handler interrupts may have been about to.
                self._submissions.wake()
                left = self._submissions.latest_deadline + _GRACE - self._core.monotonic()
                with suppress(TimeoutError):
                    self._thread.run(self._submissions.in_flight.until_empty(), max(left, 0.0))
            try:
                self._thread.run(self._core.stop(), limit)
            except TimeoutError:
                log.error(  # noqa: TRY400  # nothing went wrong in here
                    "producer group %s did not leave within %.0f s: something blocks its event "
                    "loop, maybe what a signal handler interrupted",
                    self.group,
                    limit,
                    extra={"group": self.group},
                )

    @property
    def client_id(self) -> str:
        return self._core.engine.client_id

    def statistics(self) -> ProducerStatistics:
        """As `AsyncProducer.statistics`."""
        return self._core.statistics(self._submissions.in_flight.count)

    # ---- sending

    def send(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> SendResult:
        """Send a message, or a topic and a body with the fields of one; wait until it is stored.

        Raises `MessageRefused` before anything is sent, `NoRoute`, `BrokerRefused` for a refusal
        that no other broker would take back, and `SendFailed` when attempts or time ran out.
        """
        core = self._core
        publisher = core.running()
        self._thread.check_other()
        sending = core.sending(message, body, options)
        outcome = publisher.from_thread(sending)
        if isinstance(outcome, SendResult):
            return outcome
        return self._thread.run(publisher.send(sending, outcome))

    def submit(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> concurrent.futures.Future[SendResult]:
        """Send in the background: returns as soon as there is room for it, with its future.

        Messages of one thread to one queue are stored in the order of their submission, unless an
        attempt fails, or one that may go to any queue has waited too long for its broker.
        """
        self._core.running()
        return self._submissions.post(self._core.sending(message, body, options))

    def flush(self, timeout: Duration | None = None) -> None:
        """Returns when everything that was submitted has an outcome. Raises `TimeoutError`."""
        self._check()
        limit = None if timeout is None else seconds(timeout, "timeout")
        in_flight = self._submissions.in_flight
        self._submissions.wake()  # a thread that was interrupted may have been about to
        try:
            self._thread.run(in_flight.until_empty(), limit)
        except TimeoutError:
            raise TimeoutError(f"{in_flight.count} messages have no outcome yet") from None

    def send_one_way(
        self, message: Message | str, body: Body | None = None, **options: Unpack[SendOptions]
    ) -> None:
        """Send without waiting for an answer: fast, and without knowing what becomes of it."""
        self._check()
        sending, publisher = self._core.sending(message, body, options), self._core.publisher
        if not publisher.notify_from_thread(sending):
            self._thread.run(publisher.notify(sending))

    def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: Queue | None = None,
        ordering_key: str | int | None = None,
        key: str | int | None = None,  # deprecated
        timeout: Duration | None = None,
    ) -> list[SendResult]:
        """As `AsyncProducer.send_batch`."""
        self._check()
        given = tuple(messages)  # here, as a generator may block
        limit, key = self._core.limit(timeout), _batch_key(ordering_key, key)
        return self._thread.run(
            send_in_batches(self._core, given, limit, queue=queue, ordering_key=key)
        )

    send_arrow = waiting(AsyncProducer.send_arrow)
    send_many = waiting(AsyncProducer.send_many)
    queues = waiting(AsyncProducer.queues)

    # ---- messages for later

    recall = waiting(AsyncProducer.recall)

    # ---- transactions

    def send_in_transaction(
        self, message: Message, local: BlockingLocal, *, timeout: Duration | None = None
    ) -> TransactionResult:
        """Store a half message, run `local`, and commit or drop the message by what it returns.

        `local` is called on this thread with the message and the id of the transaction, and
        returns True or `TransactionState.COMMIT`, False or `.ROLLBACK`, or None when it does not
        know. When it raises, the error is raised here, and the message stays open: the broker asks
        `check` later, several times, and drops it if no producer knows. So it does when the
        producer was stopped and could not report the end, which is logged.
        """
        with self._core.open_transactions.one(self._core.limit(timeout)):
            sent = self.send_half(message, timeout=timeout)
            if not sent.is_ok:
                return self._end(sent, TransactionState.ROLLBACK)
            try:
                state = state_of(local(message, sent.transaction_id or sent.msg_id))
            except BaseException as error:
                self._core.transactions.note_raised(message, sent, error)
                self._end(sent, TransactionState.UNKNOWN)
                raise
            return self._end(sent, state)

    def _end(self, sent: SendResult, state: TransactionState) -> TransactionResult:
        """Tell the end of what `local` has decided, or log why not; the broker asks then."""
        transactions = self._core.transactions
        try:
            return self._thread.run(transactions.end(sent, state))
        except OrbitError as error:
            transactions.note_unreported(sent, state, error)
            return TransactionResult(sent, state)

    send_half = waiting(AsyncProducer.send_half)

    def end_transaction(self, sent: SendResult, state: TransactionState) -> TransactionResult:
        """Say what becomes of a half message. Not answered: if it gets lost, `check` is asked."""
        self._core.publisher  # noqa: B018  # raises when the producer has left
        return self._thread.run(self._core.transactions.end(sent, state))

    # ---- request and reply

    request = waiting(AsyncProducer.request)
    reply = waiting(AsyncProducer.reply)

    # ---- inside

    def _check(self) -> None:
        """Before anything else: raises `NotRunning`, `UsedAfterFork`, or `WrongUse` on the loop."""
        self._core.running()
        self._thread.check_other()


def _batch_key(ordering_key: str | int | None, key: str | int | None) -> str | int | None:
    if key is None:
        return None if ordering_key is None else str(ordering_key)
    warn_deprecated("key=", "ordering_key=")
    return key if ordering_key is None else ordering_key


def _columns() -> ModuleType:
    """What needs Arrow, which is an extra."""
    from orbitmq.client.producer import columns  # noqa: PLC0415  # an extra, and slow to import

    return columns
