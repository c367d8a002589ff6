"""What the asyncio and the blocking producer have in common: life, settings and options."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, cast

import msgspec

from orbitmq.arguments import check_known, explained, warn_deprecated
from orbitmq.client.engine import Engine, ProcessCheck, own_ip
from orbitmq.client.message import Message
from orbitmq.client.producer.request import Requests
from orbitmq.client.producer.send import (
    Publisher,
    Selector,
    SendCounts,
    Sending,
    by_dedup_id,
    by_key,
    by_ordering_key,
)
from orbitmq.client.producer.transactions import Checks, OpenTransactions, Transactions
from orbitmq.client.routes import Queue
from orbitmq.client.serialization import Serializing, format_of
from orbitmq.errors import (
    MessageRefused,
    NotRunning,
    OrbitError,
    SettingError,
    WrongUse,
)
from orbitmq.logonce import LogEveryNth
from orbitmq.message.ids import UniqueIds
from orbitmq.message.properties import (
    INSTANCE_ID,
    ITEM_END,
    MAX_RECONSUME_TIMES,
    NAME_END,
    RECONSUME_TIME,
    UNIQ_KEY,
    WAIT,
)
from orbitmq.message.record import (
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_TYPE_MASK,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    MAX_PROPERTIES,
)
from orbitmq.message.stored import DEFAULT_LEVEL, MIN_ELEMENT_SIZE, compress_body
from orbitmq.names import (
    AUTO_CREATE_TOPIC,
    RETRY_PREFIX,
    check_group,
    is_retry_topic,
    wrap_group,
    wrap_topic,
)
from orbitmq.parsing import Duration, Fields, Instant, instance, seconds
from orbitmq.wire.bodies import ConsumerData
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.frame import Bytes

if TYPE_CHECKING:
    from orbitmq.client.producer.transactions import Check
    from orbitmq.message.scan import Int64s


log = logging.getLogger(__name__)

DEFAULT_GROUP: Final = "orbitmq-producer"

#: Bodies of this size and more are not compressed on the loop: others would have to wait.
_LARGE: Final = 128 * 1024
#: Seconds for all that a stop does beside waiting for others.
_SPARE: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerStatistics:
    """What a producer has done since its start."""

    sent: int = 0  #: messages that were stored, whichever way they were sent
    failed: int = 0  #: messages whose call, or future, ended with an error
    retried: int = 0  #: attempts after which another one was due
    in_flight: int = 0  #: submitted messages without an outcome


class ProducerCore:
    """One producer group at work on an engine. A member of the client for brokers."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        *,
        sending: SendSettings | None = None,
        check: Check | None = None,
        serializer: Serializing = None,
        owns_engine: bool = True,
        for_threads: bool = False,
    ) -> None:
        client = engine.settings
        self.engine = engine
        self.group = check_group(group)
        self.settings = (
            SendSettings() if sending is None else instance(sending, "sending", SendSettings)
        )
        #: The group as brokers know it.
        self.producer_group = wrap_group(client.namespace, group)
        format_of(serializer)  # raises
        self.serializer = serializer
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
        self.drafting = Drafting(self.settings, ids, client.namespace)
        self.monotonic = engine.clock.monotonic
        self._publisher: Publisher | None = None
        self._was_stopped = False
        #: The one task that leaves: all callers of `stop` wait for it.
        self._leaving: asyncio.Task[None] | None = None
        self._unsent = LogEveryNth()
        self.open_transactions = OpenTransactions()
        # There from the start on.
        self.counts = SendCounts()
        self.requests: Requests
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
        self._publisher = Publisher(
            engine, group, settings, self.counts, self.drafting.ids, for_threads=self._for_threads
        )
        self.requests = Requests(engine)
        self.transactions = Transactions(
            engine, self._publisher, self.drafting, group, is_checked=self._check is not None
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
        """Leave, after transactions under way. What else still is ends with an error.

        A caller that is cancelled waits no longer; the producer leaves all the same.
        """
        self._was_stopped = True
        self._check_process()
        if self._leaving is None and self._publisher is not None:
            self._leaving = asyncio.ensure_future(self._leave())
        if self._leaving is not None:
            await asyncio.shield(self._leaving)

    async def _leave(self) -> None:
        await self.open_transactions.until_ended()
        publisher, self._publisher = self.publisher, None
        publisher.close()
        self.requests.close()
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

    def running(self) -> Publisher:
        """What carries sends out. Raises `NotRunning` or `UsedAfterFork`. For any thread."""
        if self._check_process.pid != os.getpid():
            self._check_process()
        publisher = self._publisher
        if publisher is None or self._was_stopped:
            raise NotRunning("this producer", was_stopped=self._was_stopped)
        return publisher

    @property
    def publisher(self) -> Publisher:
        """The same for what goes on while a stop waits: raises when it is over for good."""
        self._check_process()
        publisher = self._publisher
        if publisher is None:
            raise NotRunning("this producer", was_stopped=self._was_stopped)
        return publisher

    def statistics(self, in_flight: int) -> ProducerStatistics:
        counts = self.counts
        return ProducerStatistics(
            sent=counts.sent, failed=counts.failed, retried=counts.retried, in_flight=in_flight
        )

    # ---- making calls ready

    def sending(self, message: Message | str, body: Body | None, options: SendOptions) -> Sending:
        """The state of a new call. May be called by any thread."""
        if not options:
            # Most calls are so, and there is nothing to check but the message itself.
            if type(message) is str and type(body) is bytes and self.serializer is None:
                plain = self.drafting.plain(message, body)
                if plain is not None:
                    return Sending(plain, self.monotonic(), self.settings.timeout)
                message, body = Message(message, body), None
            if (
                isinstance(message, Message)
                and body is message.ordering_key is message.dedup_id is None
            ):
                draft = self.drafting.draft(message)
                return Sending(draft, self.monotonic(), self.settings.timeout)
        call = parse_send_args(message, body, options, self.settings.timeout, self.serializer)
        return self._drafted(call)

    async def sending_aside(
        self, message: Message | str, body: Body | None, options: SendOptions
    ) -> Sending:
        """The same on the loop, or on a thread if the body is large."""
        if not isinstance(message, Message) and type(body) is not bytes:
            call = parse_send_args(message, body, options, self.settings.timeout, self.serializer)
            if self._is_large(call.message.body):
                return await asyncio.to_thread(self._drafted, call)
            return self._drafted(call)
        check_known(options, SEND_NAMES)  # here, where the caller is known
        return await asyncio.to_thread(self.sending, message, body, options)

    def may_take_long(self, message: Message | str, body: Body | None) -> bool:
        """Whether a call is prepared aside. The size of a value is known when it is encoded."""
        if isinstance(message, Message):
            return self._is_large(message.body)
        return type(body) is not bytes or self._is_large(body)

    def _is_large(self, body: bytes) -> bool:
        return self.settings.compress_from > 0 and len(body) >= _LARGE

    def _drafted(self, call: Call) -> Sending:
        return self.bound(self.drafting.draft(call.message), call)

    def limit(self, timeout: Duration | None) -> float:
        """The timeout of a call, in seconds."""
        return _timeout(timeout, self.settings.timeout)

    def bound(self, draft: Draft, call: Call) -> Sending:
        """The state of a call, with the queue that it names."""
        queue = call.queue
        if queue is not None and queue.topic != draft.topic:
            if self.drafting.wire_topic(queue.topic) != draft.topic:
                raise MessageRefused("topic", f"is {call.message.topic!r}, the queue is {queue}")
            queue = Queue(draft.topic, queue.broker, queue.id)
        return Sending(draft, self.monotonic(), call.timeout, queue, call.select)

    def note_failure(self, topic: str, outcome: BaseException) -> None:
        """Count and log a submitted message that was not sent.

        Its future may never be looked at.
        """
        self.counts.failed += 1
        if count := self._unsent.note(topic):
            log.warning(
                "a message submitted to %s by group %s was not sent (%d so far): %s",
                topic,
                self.group,
                count,
                outcome,
                extra={"topic": topic, "group": self.group},
            )


KIB = 1024
MIB = 1024 * KIB


class Compression(enum.IntEnum):
    """How large bodies are compressed; clients in C++, Go and Node can read zlib only."""

    ZLIB = COMPRESSION_ZLIB
    LZ4 = COMPRESSION_LZ4  #: needs orbitmq[lz4]
    ZSTD = COMPRESSION_ZSTD  #: needs orbitmq[zstd]


@explained()
@dataclass(frozen=True, slots=True, kw_only=True)
class SendSettings:
    """Deadlines, retries and limits of one producer."""

    timeout: float = 3.0  #: for a whole call, retries included
    retries: int = 2  #: further attempts after the first, on another broker where there is one
    #: The timeout of an attempt while another could follow; None: half of what is left, if
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
    #: Seconds for which messages wait for others before a batch goes, though its queue is free.
    linger: float = 0.0
    batch_messages: int = 512  #: messages of a batch that `submit` and `send` gather; 1: off
    batch_bytes: int = 512 * KIB  #: the same for its bytes, also with `send_many`, `send_arrow`
    max_in_flight: int = 1024  #: submitted messages without an answer; above, `submit` waits
    max_in_flight_bytes: int = 32 * MIB  #: the same for their bodies
    auto_create_topic: str = AUTO_CREATE_TOPIC  #: template of topics made by sending to them
    auto_create_queues: int = 8  #: queues per broker of such a topic
    check_workers: int = 4  #: checks of transactions that run at a time

    def __post_init__(self) -> None:
        fields = Fields(self, "sending")
        fields.whole("max_message_size", "max_in_flight", "max_in_flight_bytes")
        fields.whole("auto_create_queues", "check_workers", "batch_messages", "batch_bytes")
        fields.whole("retries", "compress_from", least=0)
        fields.durations("timeout")
        fields.durations("retry_pause", "linger", least=0)
        fields.durations("attempt_timeout", optional=True)
        fields.switches("retry_not_stored_ok", "avoid_failed", "avoid_slow")
        if self.linger >= self.timeout:
            raise SettingError(
                f"sending.linger must be below sending.timeout ({self.timeout:g} s), or no message "
                f"that waits for others goes in its time; got {self.linger:g} s"
            )
        if self.compression not in tuple(Compression):
            allowed = ", ".join(f"Compression.{each.name}" for each in Compression)
            raise SettingError(
                f"sending.compression must be one of {allowed}, got {self.compression!r}"
            )
        fields.whole("compression_level", least=0, most=9)

    @property
    def largest_batch(self) -> int:
        """Bytes of a batch that is gathered."""
        return min(self.batch_bytes, self.max_message_size)


#: Bytes and texts are sent as they are; any other value is encoded by a serializer.
Body: TypeAlias = object


class MessageFields(TypedDict, total=False):
    """The fields of a message that is not given as a `Message`."""

    json: object  #: instead of a body: any value that JSON can express
    serializer: Serializing  #: for this body, instead of the producer's
    tags: str | None
    tag: str | None  #: another name of `tags`
    keys: str | Iterable[str]  #: what the message is looked up by
    #: Messages with the same key go to the same queue, and keep their order.
    ordering_key: str | int | None
    properties: Mapping[str, str]
    flag: int
    delay_level: int
    delay: Duration | None
    deliver_at: Instant | None
    wait_stored: bool
    #: An OrbitMQ broker stores one message of a topic with this id.
    dedup_id: str | None
    sharding_key: str | None  #: deprecated: `ordering_key`


class SendOptions(MessageFields, total=False):
    """Where a message goes and how long that may take, and the fields of the message."""

    queue: Queue | None  #: to this queue only
    key: str | int | None  #: deprecated: `ordering_key`
    selector: Selector | None  #: to the queue that this function picks
    timeout: Duration | None  #: for the whole call; None: as the producer's settings say


#: The names that a hint of a sending method may mention.
SEND_NAMES: Final = (
    "body",
    *(name for name in SendOptions.__annotations__ if name not in ("key", "sharding_key")),
)


class ProducerOptions(TypedDict, total=False):
    """What both faces of a producer take beside their group and cluster."""

    sending: SendSettings | None  #: deadlines, retries and limits
    check: Check | None  #: says what became of a transaction, when a broker asks
    serializer: Serializing  #: for bodies that are neither bytes nor texts; None: JSON


class Call(msgspec.Struct, frozen=True, eq=False):
    """The arguments of one call to a method that sends, checked."""

    message: Message
    queue: Queue | None
    select: Selector | None
    timeout: float


def parse_send_args(
    message: Message | str,
    body: Body | None,
    options: SendOptions,
    default_timeout: float,
    serializer: Serializing = None,
) -> Call:
    """Check the arguments of a call, which begin with a `Message` or with a topic and a body.

    Raises `MessageRefused` or `SettingError`.
    """
    rest = cast("dict[str, Any]", {**options})
    queue = rest.pop("queue", None)
    select = rest.pop("selector", None)
    timeout = rest.pop("timeout", None)
    key = rest.pop("key", None)
    if isinstance(message, Message):
        ordering_key = rest.pop("ordering_key", None)
        if body is not None or rest:
            check_known(rest, SEND_NAMES)
            names = ", ".join(["body"] * (body is not None) + sorted(rest))
            raise MessageRefused(names, "cannot be given beside a whole Message; change that one")
        if ordering_key is not None:
            message = dataclasses.replace(message, ordering_key=ordering_key)
    else:
        if serializer is not None:
            rest.setdefault("serializer", serializer)
        try:
            message = Message(message, body, **rest)
        except TypeError:
            check_known(rest, SEND_NAMES)
            raise
    if queue is not None and not isinstance(queue, Queue):
        raise MessageRefused("queue", f"must be one of producer.queues(topic), got {queue!r}")
    if sum(given is not None for given in (queue, key, select)) > 1:
        raise SettingError("queue, key and selector exclude each other: give one of them")
    if key is not None:
        warn_deprecated("key=", "ordering_key= (keys= is what messages are looked up by)")
        select = by_key(key)
    elif queue is None and select is None and message.ordering_key is not None:
        select = by_ordering_key
    elif queue is None and select is None and message.dedup_id is not None:
        select = by_dedup_id
    return Call(message, queue, select, _timeout(timeout, default_timeout))


def _timeout(given: Duration | None, default: float) -> float:
    if given is None:
        return default
    timeout = seconds(given, "timeout")
    if timeout <= 0:
        raise SettingError(f"timeout must be positive, got {given!r}")
    return timeout


_SEND: Final = int(RequestCode.SEND_MESSAGE_V2)
_ID_ITEM: Final = f"{UNIQ_KEY}{NAME_END}"
#: Topics that are remembered as those of plain messages.
_MOST_TOPICS: Final = 1024
_SEND_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)
#: Bytes of properties that a message may have when it is sent. A record has room for a few more:
#: brokers note their region and cluster in it, and where a message belongs that waits for its time.
LONGEST_PROPERTIES: Final = MAX_PROPERTIES - 512


class Draft(msgspec.Struct, eq=False, gc=False):
    """What one call sends: the message with its id, properties and body as stored.

    It is made once and used for every attempt, so that a message that is sent again has the same id
    and consumers can recognise it. The id is given with the first attempt: see `identify`.
    """

    #: As brokers know it.
    topic: str
    #: As it will be stored: maybe compressed. Of a batch, a piece of what was encoded together.
    body: Bytes
    properties: str
    unique_id: str
    flag: int = 0
    sys_flag: int = 0
    code: int = _SEND
    is_batch: bool = False
    #: How many messages it has.
    count: int = 1
    #: What the application gave; None for what is only passed on.
    message: Message | None = None
    reconsume_times: int = 0
    max_reconsume_times: int | None = None
    #: What names the time of delivery (`delay`, `deliver_at`), if it is any time of the future:
    #: not every broker can do that.
    timed_by: str | None = None
    #: Whether a batch can carry it among others.
    is_plain: bool = False
    #: Its bytes in a batch, if its properties are ASCII.
    size: int = 0
    #: Whether all its messages have a `dedup_id`: then it may be sent again to the same queue.
    may_repeat: bool = False

    def identify(self, unique_id: str) -> None:
        """Give it its id, once."""
        self.unique_id = unique_id
        self.properties = f"{self.properties}{_ID_ITEM}{unique_id}{ITEM_END}"


def _too_many_properties(size: int, field: str = "properties") -> MessageRefused:
    return MessageRefused(
        field,
        f"take {size} bytes together with tags, keys and ids, and may take {LONGEST_PROPERTIES}",
    )


class Drafting:
    """Makes drafts by the rules of one producer. May be used by several threads at a time."""

    __slots__ = (
        "_id_size",
        "_largest_in_batch",
        "_largest_plain",
        "_least",
        "_most",
        "_settings",
        "_topics",
        "ids",
        "namespace",
    )

    def __init__(self, settings: SendSettings, ids: UniqueIds, namespace: str | None) -> None:
        self._settings = settings
        self.ids = ids
        self.namespace = namespace
        self._largest_in_batch = settings.largest_batch // 2
        #: Bodies up to this size are neither refused nor compressed.
        self._largest_plain = settings.max_message_size
        if 0 < settings.compress_from <= self._largest_plain:
            self._largest_plain = settings.compress_from - 1
        self._id_size = len(UNIQ_KEY) + len(NAME_END) + ids.size + len(ITEM_END)
        #: For `plain`: the size of an empty message in a batch, the largest body, and known topics.
        self._least = MIN_ELEMENT_SIZE + self._id_size
        self._most = min(self._largest_plain, self._largest_in_batch)
        self._topics: set[str] = set()

    def plain(self, topic: str, body: bytes) -> Draft | None:
        """A message with a body only; None if it needs the checks of `draft`."""
        size = len(body)
        if topic not in self._topics or not 0 < size <= self._most:
            return None
        return Draft(
            topic,
            body,
            "",
            "",
            0,
            0,
            _SEND,
            False,
            1,
            None,
            0,
            None,
            None,
            True,
            self._least + size,
        )

    def draft(
        self,
        message: Message,
        *,
        code: int = _SEND,
        sys_flag: int = 0,
        extra: Mapping[str, str] | None = None,
    ) -> Draft:
        """A message of the application; `extra` are properties of the system.

        Raises `MessageRefused` for what a broker would refuse or cut.
        """
        properties = message.all_properties()
        if extra:
            properties.update(extra)
        body, compression = message.body, 0
        if len(body) > self._largest_plain:
            body, compression = self._stored(body)
        timed_by = None
        if not message.delay is message.deliver_at is None:
            timed_by = "deliver_at" if message.delay is None else "delay"
        topic = message.topic
        text = ""
        if properties or self.namespace is not None:
            text = self.property_string(properties, self._id_size)
        elif not is_retry_topic(topic) and topic not in self._topics:
            if len(self._topics) >= _MOST_TOPICS:
                self._topics.clear()
            self._topics.add(topic)
        return Draft(
            topic if self.namespace is None else wrap_topic(self.namespace, topic),
            body,
            text,
            "",
            message.flag,
            sys_flag | compression,
            code,
            message=message,
            timed_by=timed_by,
            may_repeat=message.dedup_id is not None,
            is_plain=(
                code == _SEND
                and not sys_flag | compression
                and timed_by is None
                and message.wait_stored
                and not message.delay_level
                and len(body) <= self._largest_in_batch
                and not is_retry_topic(topic)
            ),
            size=self._least + len(body) + len(text),
        )

    def batch(
        self,
        topic: str,
        body: Bytes,
        count: int,
        *,
        is_before_5: bool,
        waits: bool = True,
        message: Message | None = None,
        may_repeat: bool = False,
    ) -> Draft:
        """The frame of `count` messages, encoded as `body`, of which `message` may be one.

        A batch has an id of its own, as Java's have: on some topics it is stored as one record.
        Brokers before 5.0 add the frame's properties to those of each message: an id among them
        would take the place of the messages' own.
        """
        unique_id = self.ids()
        properties = {} if is_before_5 else {UNIQ_KEY: unique_id}
        properties[WAIT] = "true" if waits else "false"
        return Draft(
            topic,
            body,
            self.property_string(properties),
            unique_id,
            code=_SEND_BATCH,
            is_batch=True,
            count=count,
            message=message,
            may_repeat=may_repeat,
        )

    def single(
        self,
        topic: str,
        body: bytes,
        properties: str,
        unique_id: str,
        flag: int = 0,
        *,
        may_repeat: bool = False,
    ) -> Draft:
        """A message that has its id and properties already."""
        compression = 0
        if len(body) > self._largest_plain:
            body, compression = self._stored(body)
        return Draft(topic, body, properties, unique_id, flag, compression, may_repeat=may_repeat)

    def check_properties(self, sizes: Int64s, first: int) -> None:
        """Refuse rows, from `first` on, with more properties than a broker can store.

        The sizes are without what is added here: the id and the namespace.
        """
        added = len(self.property_string({UNIQ_KEY: self.ids()}))
        if len(sizes) and int(sizes.max()) + added > LONGEST_PROPERTIES:
            row = int(sizes.argmax())
            raise _too_many_properties(int(sizes[row]) + added, f"[{first + row}].properties")

    def passed_on(
        self,
        topic: str,
        body: bytes,
        properties: Mapping[str, str],
        *,
        flag: int = 0,
        sys_flag: int = 0,
        code: int = _SEND,
    ) -> Draft:
        """A message that exists already, to another topic: its body and id stay as they are."""
        self._check_size(body)
        kept = dict(properties)
        unique_id = kept.setdefault(UNIQ_KEY, "") or self.ids()
        kept[UNIQ_KEY] = unique_id
        reconsume_times, limit = 0, None
        if topic.startswith(RETRY_PREFIX):
            # Brokers want the two as fields of a send to a retry topic, not as properties.
            reconsume_times = int(kept.pop(RECONSUME_TIME, "0"))
            limit = kept.pop(MAX_RECONSUME_TIMES, None)
        return Draft(
            topic,
            body,
            self.property_string(kept),
            unique_id,
            flag=flag,
            sys_flag=sys_flag & (COMPRESSED | COMPRESSION_TYPE_MASK),
            code=code,
            reconsume_times=reconsume_times,
            max_reconsume_times=None if limit is None else int(limit),
        )

    def element_properties(self, message: Message, unique_id: str) -> bytes:
        """The properties of a message in a batch."""
        properties = message.all_properties()
        if not properties and self.namespace is None:
            return f"{UNIQ_KEY}{NAME_END}{unique_id}{ITEM_END}".encode()
        properties[UNIQ_KEY] = unique_id
        return self.property_string(properties).encode("utf-8", "replace")

    def wire_topic(self, topic: str) -> str:
        """The topic as brokers know it."""
        return topic if self.namespace is None else wrap_topic(self.namespace, topic)

    def property_string(self, properties: dict[str, str], added: int = 0) -> str:
        """Properties as they travel; refuses more than a broker can store with what is added."""
        if self.namespace is not None:
            properties[INSTANCE_ID] = self.namespace
        text = "".join(
            [f"{name}{NAME_END}{value}{ITEM_END}" for name, value in properties.items() if value]
        )
        # A character takes four bytes at most.
        if len(text) * 4 + added > LONGEST_PROPERTIES:
            size = len(text.encode("utf-8", "replace")) + added
            if size > LONGEST_PROPERTIES:
                raise _too_many_properties(size)
        return text

    def _stored(self, body: bytes) -> tuple[bytes, int]:
        """The body as it is stored, and the system flag that says how."""
        settings = self._settings
        self._check_size(body)
        compression = int(settings.compression)
        compressed = compress_body(body, compression, level=settings.compression_level)
        # Java keeps the compressed form even where it is the longer one.
        if len(compressed) >= len(body):
            return body, 0
        return compressed, COMPRESSED | compression

    def _check_size(self, body: bytes) -> None:
        limit = self._settings.max_message_size
        if len(body) > limit:
            raise MessageRefused(
                "body",
                f"has {len(body)} bytes and may have {limit}; brokers have a limit of their own "
                "(maxMessageSize), raise both or send less",
            )
