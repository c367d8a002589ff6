"""What the asyncio and the blocking producer have in common, and their settings."""

from __future__ import annotations

import asyncio
import enum
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, cast

import msgspec
from msgspec.structs import replace

from orbitmq.client.engine import Engine, ProcessCheck, own_ip
from orbitmq.client.errors import NoReply, RecallUnsupported
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.producer.batch import send_in_batches
from orbitmq.client.producer.request import Requests, decode_recall_handle, reply_properties
from orbitmq.client.producer.send import (
    Drafting,
    Publisher,
    Selector,
    Sending,
    by_key,
    by_sharding_key,
)
from orbitmq.client.producer.transactions import Checks, OpenTransactions, Transactions
from orbitmq.client.routes import Queue
from orbitmq.errors import (
    BrokerRefused,
    MessageRefused,
    NotRunning,
    OrbitError,
    SettingError,
    WrongUse,
)
from orbitmq.logonce import LogEveryNth
from orbitmq.message.ids import UniqueIds
from orbitmq.message.record import COMPRESSION_LZ4, COMPRESSION_ZLIB, COMPRESSION_ZSTD
from orbitmq.message.stored import DEFAULT_LEVEL
from orbitmq.names import AUTO_CREATE_TOPIC, check_group, wrap_group
from orbitmq.parsing import Duration, Fields, Instant, instance, seconds
from orbitmq.wire.bodies import ConsumerData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import RecallMessageRequest, RecallMessageResponse

if TYPE_CHECKING:
    from orbitmq.client.producer.send import Draft, SendResult
    from orbitmq.client.producer.transactions import Check


log = logging.getLogger(__name__)

DEFAULT_GROUP: Final = "orbitmq-producer"

_REPLY: Final = int(RequestCode.SEND_REPLY_MESSAGE_V2)
#: Bodies of this size and more are not compressed on the loop: others would have to wait.
_LARGE: Final = 128 * 1024
#: Seconds for all that a stop does beside waiting for others.
_SPARE: Final = 10.0


class ProducerCore:
    """One producer group at work on an engine. A member of the client for brokers."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        settings: SendSettings | None,
        check: Check | None,
        *,
        owns_engine: bool,
        for_threads: bool = False,
    ) -> None:
        client = engine.settings
        self.engine = engine
        self.group = check_group(group)
        self.settings = (
            SendSettings() if settings is None else instance(settings, "sending", SendSettings)
        )
        #: The group as brokers know it.
        self.producer_group = wrap_group(client.namespace, group)
        self._check = check
        self._owns_engine = owns_engine
        self._for_threads = for_threads
        self._check_process = ProcessCheck("this producer", from_start=True)
        ids = UniqueIds(
            (client.client_ip or own_ip()).strip("[]"),
            clock=engine.clock,
            # The caller has just checked the process; asking the system again costs a call.
            process_id=self._check_process.owner,
        )
        self._drafting = Drafting(self.settings, ids, client.namespace)
        self.monotonic = engine.clock.monotonic
        self._publisher: Publisher | None = None
        self._was_stopped = False
        #: The one task that leaves, and how many callers of `stop` wait for it.
        self._leaving: asyncio.Task[None] | None = None
        self._stoppers = 0
        self._unsent = LogEveryNth()
        self.open_transactions = OpenTransactions()
        # There from the start on.
        self._requests: Requests
        self.transactions: Transactions
        self._checks: Checks | None = None

    def consumer_data(self) -> ConsumerData | None:
        """A producer consumes nothing."""
        return None

    # ---- life

    async def start(self) -> None:
        self._check_process.begin()
        if self._was_stopped:
            raise NotRunning("this producer", was_stopped=True)
        if self._publisher is not None:
            raise WrongUse("this producer is running already; one start is enough")
        engine, group, settings = self.engine, self.producer_group, self.settings
        if self._owns_engine:
            await engine.start()
        self._publisher = Publisher(engine, group, settings, for_threads=self._for_threads)
        self._requests = Requests(engine)
        self.transactions = Transactions(
            engine, self._publisher, self._drafting, group, is_checked=self._check is not None
        )
        engine.join(self)
        if self._check is not None:
            self._checks = Checks(
                engine,
                group,
                self._check,
                workers=settings.check_workers,
                namespace=engine.settings.namespace,
            )
            engine.routes.track(settings.auto_create_topic)
            engine.spawn(self._introduce(), "introduce the producer")

    async def _introduce(self) -> None:
        """Become known to brokers before the first send: they may have questions already.

        Brokers that make topics by themselves all have the template; of others, a producer hears
        with the first topic that it sends to.
        """
        try:
            await self.engine.routes.get(self.settings.auto_create_topic)
            await self.engine.heartbeat()
        except OrbitError as error:  # also an answer that cannot be read
            log.info(
                "producer group %s is not known to brokers before its first send: %s",
                self.group,
                error,
                extra={"group": self.group},
            )

    def refuse(self) -> bool:
        """Take no more calls; what is under way goes on. Whether it was running."""
        self._was_stopped = True
        return self._publisher is not None

    async def stop(self) -> None:
        """Leave, after transactions under way. What else still is ends with an error."""
        self._was_stopped = True
        if not self._check_process.is_same:
            publisher, self._publisher = self._publisher, None
            if publisher is not None:
                self._check_process()
            return
        while (leaving := self._one_leave()) is not None:
            await self._until_ended(leaving)
            if not leaving.cancelled():
                leaving.result()
                return
            # Cancelled by another caller, which was the last one when it gave up: leave again.

    def _one_leave(self) -> asyncio.Task[None] | None:
        """The leave that is under way, or one that is begun now; None when it is over."""
        if self._leaving is None or self._leaving.done():
            if self._publisher is None:
                return None
            self._leaving = asyncio.ensure_future(self._leave())
        return self._leaving

    async def _until_ended(self, leaving: asyncio.Task[None]) -> None:
        """Wait with all others; the last one to give up cancels it, and waits for its end."""
        self._stoppers += 1
        try:
            await asyncio.wait((leaving,))
        except asyncio.CancelledError:
            if self._stoppers == 1 and leaving.cancel():
                await asyncio.wait((leaving,))
            if leaving.done() and not leaving.cancelled():
                leaving.exception()  # asyncio complains about errors that are not retrieved
            raise
        finally:
            self._stoppers -= 1

    async def _leave(self) -> None:
        await self.open_transactions.until_ended()
        publisher, self._publisher = self._publisher, None
        if publisher is None:
            return
        publisher.close()
        self._requests.close()
        if self._checks is not None:
            self._checks.close()
            self.engine.routes.untrack(self.settings.auto_create_topic)
        if self._owns_engine:
            await self.engine.stop()
        else:
            await self.engine.leave(self)

    @property
    def stop_limit(self) -> float:
        """Seconds after which a stop is certainly over, unless something blocks the loop."""
        return self.open_transactions.patience + 2 * self.engine.settings.stop_timeout + _SPARE

    @property
    def is_running(self) -> bool:
        return self._publisher is not None and not self._was_stopped

    def check_running(self) -> None:
        """Raises `NotRunning` or `UsedAfterFork`. May be called by any thread."""
        self.running()

    def running(self) -> Publisher:
        """What carries sends out, after the same checks. May be called by any thread."""
        if self._check_process.pid != os.getpid():
            self._check_process()
        publisher = self._publisher
        if publisher is None or self._was_stopped:
            raise NotRunning("this producer", was_stopped=self._was_stopped)
        return publisher

    def check_not_left(self) -> None:
        """The same for what goes on while a stop waits: raises when it is over for good."""
        self._check_process()
        if self._publisher is None:
            raise NotRunning("this producer", was_stopped=self._was_stopped)

    @property
    def publisher(self) -> Publisher:
        """What carries sends out; raises `NotRunning` when it is over for good."""
        publisher = self._publisher
        if publisher is None:
            raise NotRunning("this producer", was_stopped=self._was_stopped)
        return publisher

    # ---- making calls ready

    def sending(self, message: Message | str, body: Body | None, options: SendOptions) -> Sending:
        """The state of a new call. May be called by any thread."""
        if not options and isinstance(message, Message) and body is message.sharding_key is None:
            # Most calls are so, and there is nothing to check.
            draft = self._drafting.draft(message)
            return Sending(draft, self.monotonic(), self.settings.timeout)
        call = parse_send_args(message, body, options, self.settings.timeout)
        return self._bound(self._drafting.draft(call.message), call)

    async def sending_aside(
        self, message: Message | str, body: Body | None, options: SendOptions
    ) -> Sending:
        """The same on the loop, or on a thread if the body is large."""
        content = message.body if isinstance(message, Message) else body
        if content is not None and self.settings.compress_from > 0 and len(content) >= _LARGE:
            return await asyncio.to_thread(self.sending, message, body, options)
        return self.sending(message, body, options)

    def limit(self, timeout: Duration | None) -> float:
        """The timeout of a call, in seconds."""
        if timeout is None:
            return self.settings.timeout
        limit = seconds(timeout, "timeout")
        if limit <= 0:
            raise SettingError(f"timeout must be positive, got {timeout!r}")
        return limit

    def _bound(self, draft: Draft, call: Call) -> Sending:
        queue = call.queue
        if queue is not None and queue.topic != draft.topic:
            if self._drafting.wire_topic(queue.topic) != draft.topic:
                raise MessageRefused("topic", f"is {call.message.topic!r}, the queue is {queue}")
            queue = Queue(draft.topic, queue.broker, queue.id)
        now = self.monotonic()
        return Sending(draft, now, call.timeout, queue, call.select)

    def note_unsent(self, topic: str, error: BaseException) -> None:
        """A submitted message was not sent: logged, as its future may never be looked at."""
        if count := self._unsent.note(topic):
            log.warning(
                "a message submitted to %s by group %s was not sent (%d so far): %s",
                topic,
                self.group,
                count,
                error,
                extra={"topic": topic, "group": self.group},
            )

    # ---- the rarer ways to send

    async def send_batch(
        self,
        messages: Iterable[Message],
        queue: Queue | None,
        key: str | int | None,
        timeout: Duration | None,  # noqa: ASYNC109
    ) -> list[SendResult]:
        return await send_in_batches(
            tuple(messages),
            self.publisher,
            self._drafting,
            limit=self.settings.max_message_size,
            timeout=self.limit(timeout),
            monotonic=self.monotonic,
            queue=queue,
            key=key,
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
        timeout: Duration | None = None,  # noqa: ASYNC109
    ) -> SendResult:
        draft = self._drafting.passed_on(topic, body, properties, flag=flag, sys_flag=sys_flag)
        now = self.monotonic()
        sending = Sending(draft, made=now, timeout=self.limit(timeout), queue=queue)
        return await self.publisher.send(sending)

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        return await self.publisher.queues(self._drafting.wire_topic(topic))

    async def recall(self, topic: str, handle: str) -> str:
        broker = decode_recall_handle(handle).broker
        wire_topic = self._drafting.wire_topic(topic)
        deadline = self.monotonic() + self.settings.timeout
        # So that the address of the broker is known.
        await self.publisher.queues(wire_topic, self.settings.timeout)
        try:
            answer = await self.engine.ask(
                self.engine.routes.master(broker),
                RequestCode.RECALL_MESSAGE,
                RecallMessageRequest(
                    topic=wire_topic,
                    recall_handle=handle,
                    producer_group=self.producer_group,
                    broker_name=broker,
                ),
                timeout=max(0.0, deadline - self.monotonic()),
            )
        except BrokerRefused as error:
            if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise RecallUnsupported(error, broker) from error
            raise
        return answer.header(RecallMessageResponse).msg_id

    async def request(
        self, message: Message | str, body: Body | None, options: SendOptions
    ) -> ReceivedMessage:
        publisher = self.publisher
        call = parse_send_args(message, body, options, self.settings.timeout)
        began = self.monotonic()
        topic = self._drafting.wire_topic(call.message.topic)
        await publisher.queues(topic, call.timeout)
        try:
            async with asyncio.timeout(call.timeout - (self.monotonic() - began)):
                await self._requests.introduce(topic, within=call.timeout / 4)
                with self._requests.waiting(call.timeout) as (properties, reply):
                    draft = self._drafting.draft(call.message, extra=properties)
                    left = call.timeout - (self.monotonic() - began)
                    await publisher.send(self._bound(draft, replace(call, timeout=left)))
                    return await reply
        except TimeoutError:
            raise NoReply(call.message.topic, call.timeout) from None

    async def reply(
        self,
        request: ReceivedMessage,
        body: bytes | str,
        properties: Mapping[str, str] | None,
        timeout: Duration | None,  # noqa: ASYNC109
    ) -> SendResult:
        publisher = self.publisher
        topic, system = reply_properties(request)
        content = body.encode() if isinstance(body, str) else bytes(body)
        if not content:
            raise MessageRefused("body", "must not be empty")
        draft = self._drafting.passed_on(
            topic, content, {**(properties or {}), **system}, code=_REPLY
        )
        limit = self.limit(timeout)
        queues = await publisher.queues(topic, limit)
        # The asker is known for certain at the broker that took its request.
        nearest = next((q for q in queues if q.broker == request.queue.broker), queues[0])
        now = self.monotonic()
        return await publisher.send(Sending(draft, made=now, timeout=limit, queue=nearest))


KIB = 1024
MIB = 1024 * KIB


class Compression(enum.IntEnum):
    """How large bodies are compressed; clients in C++, Go and Node can read zlib only."""

    ZLIB = COMPRESSION_ZLIB
    LZ4 = COMPRESSION_LZ4  #: needs orbitmq[lz4]
    ZSTD = COMPRESSION_ZSTD  #: needs orbitmq[zstd]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSettings:
    """Deadlines, retries and limits of one producer."""

    timeout: float = 3.0  #: for a whole call, retries included
    retries: int = 2  #: further attempts after the first, on another broker where there is one
    #: Most that one attempt may take while another could follow; None: half of what is left, if
    #: another broker is there. Java gives the first attempt everything by default.
    attempt_timeout: float | None = None
    retry_pause: float = 0.05  #: before a broker is tried again within one call; doubles
    #: Try again when a message was stored without the safety that the broker promises.
    retry_not_stored_ok: bool = False
    #: Prefer other brokers for a while after one has failed.
    avoid_failed: bool = True
    #: Prefer other brokers for a while after one was slow, by Java's table (`sendLatencyEnable`).
    avoid_slow: bool = False
    max_message_size: int = 4 * MIB  #: of a body or a batch, before compression
    compress_from: int = 4 * KIB  #: bodies of this size and more are compressed; 0: none
    compression: Compression = Compression.ZLIB
    compression_level: int = DEFAULT_LEVEL
    max_in_flight: int = 1024  #: submitted messages without an answer; above, `submit` waits
    max_in_flight_bytes: int = 32 * MIB  #: the same for their bodies
    auto_create_topic: str = AUTO_CREATE_TOPIC  #: template of topics made by sending to them
    auto_create_queues: int = 4  #: queues per broker of such a topic
    check_workers: int = 4  #: checks of transactions that run at a time

    def __post_init__(self) -> None:
        fields = Fields(self, "sending")
        fields.whole("max_message_size", "max_in_flight", "max_in_flight_bytes")
        fields.whole("auto_create_queues", "check_workers")
        fields.whole("retries", "compress_from", least=0)
        fields.durations("timeout")
        fields.durations("retry_pause", least=0)
        fields.durations("attempt_timeout", optional=True)
        fields.switches("retry_not_stored_ok", "avoid_failed", "avoid_slow")
        if self.compression not in tuple(Compression):
            allowed = ", ".join(f"Compression.{each.name}" for each in Compression)
            raise SettingError(
                f"sending.compression must be one of {allowed}, got {self.compression!r}"
            )
        fields.whole("compression_level", least=0, most=9)


Body: TypeAlias = bytes | bytearray | memoryview | str


class MessageFields(TypedDict, total=False):
    """The fields of a message that is not given as a `Message`."""

    tags: str | None
    keys: str | Iterable[str]
    properties: Mapping[str, str]
    flag: int
    delay_level: int
    delay: Duration | None
    deliver_at: Instant | None
    sharding_key: str | None
    wait_stored: bool


class SendOptions(MessageFields, total=False):
    """Where a message goes and how long that may take, and the fields of the message."""

    queue: Queue | None  #: to this queue only
    key: str | int | None  #: to the queue of this key: the same key, the same queue
    selector: Selector | None  #: to the queue that this function picks
    timeout: Duration | None  #: for the whole call; None: as the producer's settings say


class Call(msgspec.Struct, frozen=True, eq=False):
    """The arguments of one call to a method that sends, checked."""

    message: Message
    queue: Queue | None
    select: Selector | None
    timeout: float


def parse_send_args(
    message: Message | str, body: Body | None, options: SendOptions, default_timeout: float
) -> Call:
    """Check the arguments of a call, which begin with a `Message` or with a topic and a body.

    Raises `MessageRefused` or `SettingError`.
    """
    rest = cast("dict[str, Any]", {**options})
    queue = rest.pop("queue", None)
    key = rest.pop("key", None)
    select = rest.pop("selector", None)
    timeout = rest.pop("timeout", None)
    if isinstance(message, Message):
        if body is not None or rest:
            names = ", ".join(["body"] * (body is not None) + sorted(rest))
            raise MessageRefused(names, "cannot be given beside a whole Message; change that one")
    elif body is None:
        raise MessageRefused("body", "is missing; give a Message, or a topic and a body")
    else:
        message = Message(message, body, **rest)
    if sum(given is not None for given in (queue, key, select)) > 1:
        raise SettingError("queue, key and selector exclude each other: give one of them")
    if key is not None:
        select = by_key(key)
    elif queue is None and select is None and message.sharding_key is not None:
        select = by_sharding_key
    return Call(message, queue, select, _timeout(timeout, default_timeout))


def _timeout(given: Duration | None, default: float) -> float:
    if given is None:
        return default
    timeout = seconds(given, "timeout")
    if timeout <= 0:
        raise SettingError(f"timeout must be positive, got {given!r}")
    return timeout
