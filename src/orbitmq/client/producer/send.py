"""How a message is sent: which queue and broker, in which attempts, and with which outcome.

The entry is `Publisher`. A `Sending` is the state of one call; its first attempt is made by the
caller's thread, coroutine or callback, further ones by a coroutine on the loop. Only an attempt
that reached a broker counts, as only that may have stored the message: a broker that restarts is
not noticed by callers whose timeout is longer (Java counts failed connections, too).

Everything belongs to the loop of the engine, except what says that threads may call it. Those only
read tables whose entries are replaced as a whole, and never wait for the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
import hashlib
import itertools
import logging
import random
import zlib
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, cast

import msgspec

from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerUnavailable, NoNameServer, TimesUnsupported, refused_by
from orbitmq.client.heartbeats import BrokerVersions
from orbitmq.client.message import Message
from orbitmq.client.routes import (
    MASTER,
    NOT_NOW,
    PROVISIONAL_LIFE,
    Queue,
    TopicRoute,
    queues_by_broker,
)
from orbitmq.clock import milliseconds
from orbitmq.errors import (
    BrokerRefused,
    ClientError,
    MessageRefused,
    NoRoute,
    NotRunning,
    OrbitError,
    SendFailed,
)
from orbitmq.javahash import key_hash
from orbitmq.remoting.blocking import BlockingPool, Encode
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import (
    Address,
    ConnectFailed,
    RemotingError,
    RequestTimedOut,
    TooManyRequests,
)
from orbitmq.wire.codes import (
    DEFAULT_LIMITS,
    HeaderError,
    RequestCode,
    ResponseCode,
    WireLimits,
)
from orbitmq.wire.command import Command, RequestTemplate
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers import SendMessageRequest, SendMessageResponse
from orbitmq.wire.javajson import quoted

if TYPE_CHECKING:
    from orbitmq.client.producer.core import Draft, SendSettings
    from orbitmq.message.ids import UniqueIds


log = logging.getLogger(__name__)


class SendStatus(enum.Enum):
    """How safe a stored message is. All of these are stored at the broker that took it.

    Whatever is not `OK` can be lost if that broker's machine fails now, before it has caught up;
    the broker promised more than it could keep in time. The application decides whether to send
    again (and then maybe has the message twice), or `SendSettings.retry_not_stored_ok` does.
    """

    OK = "ok"
    #: The broker flushes before it answers, and the disk did not follow in time.
    FLUSH_DISK_TIMEOUT = "flush-disk-timeout"
    #: The broker waits for its slaves, and none of them confirmed in time.
    FLUSH_SLAVE_TIMEOUT = "flush-slave-timeout"
    #: The broker waits for its slaves, and none was there.
    SLAVE_NOT_AVAILABLE = "slave-not-available"


#: The answers that say where a message was stored.
STORED: Final = {
    int(ResponseCode.SUCCESS): SendStatus.OK,
    int(ResponseCode.FLUSH_DISK_TIMEOUT): SendStatus.FLUSH_DISK_TIMEOUT,
    int(ResponseCode.FLUSH_SLAVE_TIMEOUT): SendStatus.FLUSH_SLAVE_TIMEOUT,
    int(ResponseCode.SLAVE_NOT_AVAILABLE): SendStatus.SLAVE_NOT_AVAILABLE,
}


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """Where a message was stored, and how safely."""

    status: SendStatus
    #: The unique id that the producer gave it; consumers see the same.
    msg_id: str
    #: The id that the broker gave it: its place.
    offset_id: str
    queue: Queue
    queue_offset: int
    #: Of a half message: the id under which its transaction is known.
    transaction_id: str | None = None
    #: Takes a message back that is delivered later: see `recall`.
    recall_handle: str | None = None
    #: It was stored before, by its `dedup_id`: all of this is about the first copy.
    is_duplicate: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether it is as safe as the broker promises."""
        return self.status is SendStatus.OK


class BatchResult(SendResult, frozen=True, gc=False):
    """Where a batch was stored of which some messages were stored before."""

    #: See `SendMessageResponse.duplicates`.
    duplicates: str = ""


class Sender(Protocol):
    """What a message came from. Called on the loop."""

    def finish(self, sending: Sending, outcome: SendResult | BaseException) -> None:
        """The message has its outcome; comes once."""

    def retry(self, sending: Sending) -> None:
        """An attempt has failed and another one is due."""

    def not_ready(self, sending: Sending) -> None:
        """The broker is not connected, or the queues of the topic are not known any more."""


#: What tells the outcome to a thread or to a coroutine.
Sent: TypeAlias = "concurrent.futures.Future[SendResult] | asyncio.Future[SendResult | None]"

_GO_AWAY: Final = int(ResponseCode.GO_AWAY)


class Attempt(NamedTuple):
    """An attempt that was made, and what came of it."""

    queue: Queue
    outcome: Command | OrbitError
    connection: Connection | None


class SendCounts:
    """What a producer has sent. Threads and the event loop count without a lock.

    A thread is not switched between the steps of `+=` on an attribute: only after a call.
    """

    __slots__ = ("failed", "retried", "sent")

    def __init__(self) -> None:
        self.sent = self.failed = self.retried = 0


class Publisher:
    """Sends for one producer group."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        settings: SendSettings,
        counts: SendCounts,
        ids: UniqueIds,
        *,
        for_threads: bool = False,
    ) -> None:
        """`for_threads` lets threads send on connections of their own."""
        self._engine = engine
        self._settings = settings
        self.monotonic = self._monotonic = engine.clock.monotonic
        self._faults = Faults(
            self._monotonic, avoid_failed=settings.avoid_failed, avoid_slow=settings.avoid_slow
        )
        self.frames = SendFrames(
            group, settings, engine.clock.now, ids, engine.settings.channel.connection.limits
        )
        self._versions = BrokerVersions(engine)
        self._links = BrokerLinks(engine, self._faults, for_threads=for_threads)
        # Looked at for every send.
        self._connections, self._pools = self._links.connections, self._links.pools
        self._targets = Targets(
            engine,
            self._faults,
            default_queues=settings.auto_create_queues,
            changed=self._links.forget,
        )
        #: What is known of a topic that can be sent to. May be called by any thread.
        self.known = self._targets.known
        self.counts = counts
        #: The queues of a topic that can be sent to, as brokers know them.
        self.queues = self._targets.queues

    def close(self) -> None:
        """Let go of what was kept; what is still under way ends with an error."""
        self._links.close()
        self._targets.close()

    # ---- sending

    async def send(self, sending: Sending, begun: Attempt | None = None) -> SendResult:
        """Make attempts until one has an outcome that counts; `begun` was made by a thread.

        What was stored, though not as safely as wanted, has not failed, whatever comes after.
        A message whose answer was lost may be stored: the error is then `SendFailed`, or
        `NotRunning` after a stop, also if a later attempt is refused.
        """
        try:
            result = await self._outcome(sending, begun)
        except Exception:
            self.counts.failed += sending.draft.count
            raise
        self.counts.sent += sending.draft.count
        return result

    async def _outcome(self, sending: Sending, begun: Attempt | None = None) -> SendResult:
        try:
            result = None if begun is None else self._settle(sending, *begun)
            while result is None:
                result = await self._next_outcome(sending)
        except OrbitError as error:
            if sending.result is not None:
                return sending.result
            if sending.is_open and not isinstance(error, SendFailed):
                sending.error = error
                raise sending.failed() from error
            raise
        return result

    async def _next_outcome(self, sending: Sending) -> SendResult | None:
        queue, others = await self._targets.choose(sending)
        if pause := self.pause(sending, queue.broker):
            left = sending.deadline - self._monotonic()
            await asyncio.sleep(min(pause, max(0.0, left)))
            if pause >= left:
                return given_up(sending)
        sending.first = None
        attempt = await self._attempt(sending, queue, others)
        if isinstance(attempt.outcome, TimesUnsupported):
            self._pass_over(sending, queue, attempt.outcome)
            return None
        return self._settle(sending, *attempt)

    @staticmethod
    def _pass_over(sending: Sending, queue: Queue, error: TimesUnsupported) -> None:
        """Have another broker asked; raises the error when the message may not go elsewhere."""
        if sending.is_bound:
            raise error
        sending.unable = {**sending.unable, queue.broker: error}

    async def _attempt(self, sending: Sending, queue: Queue, others: bool) -> Attempt:
        now = sending.began = self._monotonic()
        limit = self._attempt_time(sending, now, others=others)
        if limit <= 0:
            raise self.expired(sending, queue)
        end = now + limit
        draft = sending.draft
        connection: Connection | None = None
        try:
            connection = self._connections.get(queue.broker)
            if connection is None or not connection.is_open:
                connection = await self._links.connected(queue, limit)
                limit = end - self._monotonic()
            if draft.timed_by is not None:
                await self._versions.check_times(queue.broker, draft.timed_by, limit)
                limit = end - self._monotonic()
            encode = self.frames.encoder(draft, queue, connection)
            answer = await connection.request_encoded(draft.code, encode, timeout=limit)
        except (RemotingError, BrokerUnavailable, TimesUnsupported) as error:
            return Attempt(queue, error, connection)
        return Attempt(queue, answer, connection)

    def _attempt_time(self, sending: Sending, now: float, *, others: bool) -> float:
        """Seconds that the next attempt may take; `others`: whether there are other brokers."""
        left = sending.made + sending.timeout - now
        limit = self._settings.attempt_timeout
        if not others and limit is None:
            return left
        if sending.is_bound or sending.counted >= self._settings.retries:
            return left
        return left / 2 if limit is None else min(left, limit)

    def _settle(
        self,
        sending: Sending,
        queue: Queue,
        outcome: Command | OrbitError,
        connection: Connection | None,
    ) -> SendResult | None:
        """What an attempt led to: a result, or None for another attempt.

        Raises `BrokerRefused` for a refusal that any broker would repeat, and `SendFailed` when
        there is no attempt or no time left.
        """
        sending.attempts += 1
        broker, now = queue.broker, self._monotonic()
        if isinstance(outcome, OrbitError):
            self._targets.refresh_soon(sending.draft.topic)
            self._note_failure(sending, queue, outcome)
        elif (status := STORED.get(outcome.code)) is not None:
            sending.counted += 1
            self._faults.answered(broker, now - sending.began)
            draft = sending.draft
            result = result_of(draft.unique_id, queue, status, outcome, is_batch=draft.is_batch)
            return self._settle_stored(sending, result)
        else:
            if outcome.code == _GO_AWAY and connection is not None:
                self._links.went_away(queue, connection)
            self._note_refusal(sending, queue, outcome)
        return self._next(sending, broker)

    def _settle_stored(self, sending: Sending, result: SendResult) -> SendResult | None:
        """The result of a message that was stored, or None to have it stored more safely."""
        if result.is_ok or sending.is_bound or not self._settings.retry_not_stored_ok:
            return result
        sending.result = result
        return self._next(sending, result.queue.broker)

    def _next(self, sending: Sending, broker: str) -> SendResult | None:
        """None if another attempt is due; else the unsafe result. Raises the last error."""
        settings, now = self._settings, self._monotonic()
        sending.note_tried(broker)
        may_retry = not sending.is_bound or sending.draft.may_repeat
        retries = settings.retries if may_retry else 0
        if sending.counted > retries or now >= sending.deadline:
            return given_up(sending)
        self.counts.retried += 1
        return None

    def _note_refusal(self, sending: Sending, queue: Queue, answer: Command) -> None:
        refused = refused_by(answer, queue.broker, sending.draft.code)
        avoid = RETRIED.get(answer.code)
        if avoid is None:
            raise refused
        if avoid:
            self._faults.failed(queue.broker)
        if answer.code != _GO_AWAY:
            # Otherwise nothing was taken, and the message is welcome elsewhere.
            sending.counted += 1
        sending.error = refused

    def _note_failure(self, sending: Sending, queue: Queue, error: OrbitError) -> None:
        if not isinstance(error, RemotingError | ClientError) or not error.retriable:
            raise error
        self._faults.failed(queue.broker)
        if not isinstance(error, ConnectFailed | BrokerUnavailable):
            sending.counted += 1
            # What waits in too great a number is not sent.
            sending.is_open |= not isinstance(error, TooManyRequests)
        sending.error = error

    def expired(self, sending: Sending, queue: Queue | None) -> SendFailed:
        """The time was up before anything was sent, which is no fault of the broker."""
        if sending.error is None:
            if queue is None:
                sending.error = self._targets.unanswered(sending.timeout)
                return sending.failed()
            try:
                where = self._engine.routes.master(queue.broker)
            except BrokerUnavailable as error:
                sending.error = error
            else:
                sending.error = RequestTimedOut(where, sending.draft.code, sending.timeout)
        return sending.failed()

    async def notify(self, sending: Sending) -> None:
        """Send one-way: one attempt, without an answer. Raises `SendFailed`."""
        draft, left = sending.draft, sending.timeout
        while True:
            queue, _ = await self._targets.choose(sending)
            sending.first = None
            try:
                connection = await self._links.connected(queue, left)
                if draft.timed_by is not None:
                    await self._versions.check_times(queue.broker, draft.timed_by, left)
                connection.notify(draft.code, self.frames.header(draft, queue), body=draft.body)
            except TimesUnsupported as error:
                self._pass_over(sending, queue, error)
            except (RemotingError, BrokerUnavailable) as error:
                self._faults.failed(queue.broker)
                sending.error = error
                sending.attempts += 1
                raise sending.failed() from error
            else:
                return

    # ---- on the caller's thread

    def from_thread(self, sending: Sending) -> SendResult | Attempt | None:
        """Make the first attempt on the calling thread; `send` goes on with all but a result."""
        first = self._first(sending)
        if first is None:
            return None
        queue, limit = first
        pool, connection = self._pools.get(queue.broker), self._connections.get(queue.broker)
        if pool is None or connection is None or not connection.is_open or limit <= 0:
            return None
        draft = sending.draft
        encode = self.frames.encoder(draft, queue, connection)
        try:
            answer = pool.request(draft.code, encode, limit)
        except RemotingError as error:
            if isinstance(error, RequestTimedOut):
                connection.was_late_from_thread(limit)
            sending.first = None
            return Attempt(queue, error, connection)
        if answer is None:
            return None
        sending.first = None
        if answer.code:
            return Attempt(queue, answer, connection)
        faults = self._faults
        if faults.avoid_slow or faults.avoided:
            faults.answered(queue.broker, self._monotonic() - sending.began)
        result = result_of(draft.unique_id, queue, SendStatus.OK, answer, is_batch=draft.is_batch)
        self.counts.sent += 1
        return result

    def notify_from_thread(self, sending: Sending) -> bool:
        """Send one-way on the calling thread; False when the loop has to do it."""
        first = self._first(sending)
        if first is None:
            return False
        queue, limit = first
        pool, connection = self._pools.get(queue.broker), self._connections.get(queue.broker)
        if pool is None or connection is None or not connection.is_open:
            return False
        draft, header = sending.draft, self.frames.header(sending.draft, queue)

        def encode(opaque: int) -> Sequence[Bytes]:
            return connection.encoded(
                Command.request(draft.code, header, opaque=opaque, body=draft.body, one_way=True)
            )

        try:
            return pool.notify(encode, limit)
        except RemotingError:
            return False

    def _first(self, sending: Sending) -> tuple[Queue, float] | None:
        """Where a first attempt goes and how long it may take; None when that is not known yet."""
        draft = sending.draft
        publication = self.known(draft.topic)
        if publication is None:
            return None
        if sending.is_free and draft.timed_by is None and not self._faults.avoided:
            # Most sends are so, and there is nothing to consider.
            queue = publication.rotation.next_queue(publication.queues)
        else:
            queue = self._targets.choice(sending, publication)
            if draft.timed_by is not None and not self._versions.keeps_times(queue.broker):
                sending.first = queue
                return None
        sending.began = now = self._monotonic()
        return queue, self._attempt_time(sending, now, others=publication.has_others)

    # ---- for what waits for its turn

    def choice(self, sending: Sending, publication: Publication) -> Queue:
        """The queue of the next attempt. Raises what a selector raises."""
        if sending.is_free and not self._faults.avoided:
            # Most sends are so, and there is nothing to consider.
            return publication.rotation.next_queue(publication.queues)
        return self._targets.choice(sending, publication)

    def open_connection(self, broker: str) -> Connection | None:
        connection = self._connections.get(broker)
        return connection if connection is not None and connection.is_open else None

    def is_ready(self, draft: Draft, queue: Queue) -> bool:
        """Whether an attempt needs nothing but to be made."""
        if draft.timed_by is not None and not self._versions.keeps_times(queue.broker):
            return False
        return self.open_connection(queue.broker) is not None

    def is_old(self, broker: str) -> bool | None:
        """Whether a broker is of RocketMQ 4; None if it has not said so yet."""
        return self._versions.is_before_5(broker)

    def ends(self, sendings: Sequence[Sending], now: float) -> list[float] | None:
        """When attempts for messages of one topic that begin now are given up.

        None: at the messages' own deadlines.
        """
        publication = self.known(sendings[0].draft.topic)
        others = publication is not None and publication.has_others
        if not others and self._settings.attempt_timeout is None:
            return None
        return [now + self._attempt_time(each, now, others=others) for each in sendings]

    def answered(self, broker: str, latency: float) -> None:
        """A broker has stored what it was sent."""
        self._faults.answered(broker, latency)

    def settle(
        self,
        sending: Sending,
        queue: Queue,
        outcome: Command | OrbitError,
        connection: Connection | None,
    ) -> bool:
        """Tell the sender what an attempt led to; False if another attempt is due."""
        return self._conclude(sending, lambda: self._settle(sending, queue, outcome, connection))

    def settle_stored(self, sending: Sending, result: SendResult) -> bool:
        """The same for one of the messages of a batch that was stored."""
        sending.attempts += 1
        sending.counted += 1
        return self._conclude(sending, lambda: self._settle_stored(sending, result))

    @staticmethod
    def _conclude(sending: Sending, settle: Callable[[], SendResult | None]) -> bool:
        try:
            result = settle()
        except OrbitError as error:
            # As in `send`: what was stored has not failed, also if there is no second attempt.
            sending.sender.finish(sending, error if sending.result is None else sending.result)
        else:
            if result is None:
                return False
            sending.sender.finish(sending, result)
        return True

    def pause(self, sending: Sending, broker: str) -> float:
        """Seconds to wait before the next attempt at a broker."""
        times = sending.tried.get(broker, 0)
        return self._settings.retry_pause * 2 ** min(times - 1, 6) if times else 0.0

    def spawn(self, coroutine: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine until the client stops. Raises `NotRunning`."""
        return self._engine.spawn(coroutine, name)

    async def finish(self, sending: Sending) -> None:
        """Make attempts until there is an outcome, which the sender gets."""
        try:
            outcome: SendResult | Exception = await self._outcome(sending)
        except Exception as error:  # noqa: BLE001  # also a selector's: it is the caller's to see
            outcome = error
        sending.sender.finish(sending, outcome)

    async def find(self, sending: Sending) -> tuple[Queue, bool]:
        """Its queue, and whether there are other brokers. Raises also what a selector raises."""
        found = await self._targets.choose(sending)
        sending.first = found[0]
        return found

    async def connect(self, sending: Sending, queue: Queue, others: bool) -> None:
        """Connect to the broker, where there are other brokers within half of the time.

        Errors are not raised: sending meets them again, or goes to another broker.
        """
        now = self._monotonic()
        limit = self._attempt_time(sending, now, others=others)
        if limit <= 0:
            return
        if others:
            limit = min(limit, (sending.deadline - now) / 2)
        try:
            await self._links.connected(queue, limit)
        except (RemotingError, BrokerUnavailable) as error:
            log.debug("a send cannot begin yet: %r", error)
            self._faults.failed(queue.broker)
            sending.error, sending.first = error, None

    def pass_by(self, sending: Sending, broker: str) -> None:
        """Choose another queue for a message that has waited for this broker in vain."""
        if not self._links.is_open(broker):
            self._faults.failed(broker)
        sending.first = None
        sending.note_tried(broker)
        with suppress(Exception):  # sending meets it again
            self.next_broker(sending)

    def next_broker(self, sending: Sending) -> str | None:
        """The broker of its queue, as far as that is known. Raises what a selector raises."""
        publication = self.known(sending.draft.topic)
        if publication is None:
            return None
        sending.first = self._targets.choice(sending, publication)
        return sending.first.broker

    def has_others(self, topic: str) -> bool:
        """Whether more than one broker is known to take messages of a topic."""
        publication = self.known(topic)
        return publication is not None and publication.has_others

    def avoids(self, broker: str) -> bool:
        """Whether other brokers are preferred for now."""
        return not self._faults.is_available(broker)

    # ---- brokers of RocketMQ 4

    async def is_before_5(self, topic: str, timeout: float) -> bool:  # noqa: ASYNC109
        """Whether a broker of the topic is of the old line, as far as they have said so.

        Errors are not raised: sending meets them again.
        """
        try:
            # Half of the time, at most, is for the question: the rest is for sending.
            async with asyncio.timeout(max(0.0, timeout / 2)):
                brokers = {queue.broker for queue in await self.queues(topic)}
                return await self._versions.any_before_5(brokers)
        except (OrbitError, TimeoutError):
            return False


#: Refusals after which another broker is tried, and whether the one that refused is avoided: a
#: broker without the topic, or without the right to it, is a good one for other topics.
RETRIED: Final[Mapping[int, bool]] = {
    int(ResponseCode.SYSTEM_ERROR): True,
    int(ResponseCode.SYSTEM_BUSY): True,
    int(ResponseCode.SERVICE_NOT_AVAILABLE): True,
    int(ResponseCode.GO_AWAY): True,
    int(ResponseCode.TOPIC_NOT_EXIST): False,
    int(ResponseCode.NO_PERMISSION): False,
    int(ResponseCode.NO_BUYER_ID): False,
    int(ResponseCode.NOT_IN_CURRENT_UNIT): False,
}
#: Most sends fail nowhere. A dictionary each would have the garbage collector run more often.
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Sending(msgspec.Struct, eq=False):
    """The state of one call. Changed by one attempt at a time."""

    draft: Draft
    #: When the call was made, and how long it may take altogether.
    made: float
    timeout: float
    #: The one queue that the message may go to, or what picks it.
    queue: Queue | None = None
    select: Selector | None = None
    #: Chosen for the next attempt already.
    first: Queue | None = None
    #: When the attempt under way began.
    began: float = 0.0
    #: Attempts made, and those of them that may have stored the message.
    attempts: int = 0
    counted: int = 0
    #: Whether the answer to one of them was lost: it is unknown whether the message is stored.
    is_open: bool = False
    #: How often each broker was tried, in the order of the last times.
    tried: Mapping[str, int] = _NOTHING
    #: Brokers that cannot deliver the message at its time, and their errors: passed over.
    unable: Mapping[str, OrbitError] = _NOTHING
    error: OrbitError | None = None
    #: Stored, but not as safely as wanted.
    result: SendResult | None = None
    #: What gets the outcome of a message that waits for its turn, and its future for it.
    sender: Sender = cast("Sender", None)
    sent: Sent | None = None

    @property
    def deadline(self) -> float:
        """When the time of the call is up."""
        return self.made + self.timeout

    @property
    def is_bound(self) -> bool:
        """Whether the message may go to one queue only."""
        return self.queue is not None or self.select is not None

    @property
    def is_free(self) -> bool:
        """Whether nothing says yet which queue it goes to."""
        return self.queue is None and self.select is None and self.first is None

    def note_tried(self, broker: str) -> None:
        """Another attempt was made there."""
        tried = dict(self.tried)
        times = tried.pop(broker, 0)
        self.tried = {**tried, broker: times + 1}

    @property
    def topic(self) -> str:
        """As the application knows it."""
        message = self.draft.message
        return self.draft.topic if message is None else message.topic

    def failed(self) -> SendFailed:
        """The error that ends the call."""
        failure = SendFailed(self.topic, self.attempts, self.error)
        failure.__cause__ = self.error
        return failure


def given_up(sending: Sending) -> SendResult:
    """What is left when there is no further attempt: an unsafe result, or else the last error."""
    if sending.result is not None:
        return sending.result
    raise sending.failed()


def outcome_at_stop(sending: Sending) -> SendResult | NotRunning:
    """What becomes of a call when the producer is stopped: it may be stored all the same."""
    return sending.result or NotRunning("this producer", was_stopped=True)


def result_of(
    unique_id: str, queue: Queue, status: SendStatus, answer: Command, *, is_batch: bool = False
) -> SendResult:
    """Where the broker says that the message is. Raises `SendFailed` if that cannot be read."""
    try:
        header = answer.header(SendMessageResponse)
    except HeaderError as error:
        raise SendFailed(queue.topic, 1, error) from error
    if header.queue_id != queue.id:
        queue = Queue(queue.topic, queue.broker, header.queue_id)
    stored = (status, unique_id, header.msg_id, queue, header.queue_offset)
    if header.duplicates is not None:
        batch = BatchResult(
            *stored, recall_handle=header.recall_handle, duplicates=header.duplicates
        )
        return batch if is_batch else results_in([unique_id], batch)[0]
    return SendResult(*stored, header.transaction_id, header.recall_handle)


def results_in(unique_ids: Sequence[str], batch: SendResult) -> list[SendResult]:
    """The result of each message of a batch."""
    offset_ids = batch.offset_id.split(",")
    if len(offset_ids) != len(unique_ids):
        # A topic that stores a batch as one record has one place for all of it.
        offset_ids = (offset_ids + offset_ids[:1] * len(unique_ids))[: len(unique_ids)]
    status, queue, number = batch.status, batch.queue, batch.queue_offset
    if not isinstance(batch, BatchResult):
        return [
            SendResult(status, unique_id, offset_id, queue, number + place)
            for place, (unique_id, offset_id) in enumerate(zip(unique_ids, offset_ids, strict=True))
        ]
    firsts = {}
    for told in batch.duplicates.split(","):
        at, queue_id, queue_offset, first_id = told.split(":", 3)
        first = Queue(queue.topic, queue.broker, int(queue_id)), int(queue_offset)
        firsts[int(at)] = (first_id, *first)
    results = []
    for place, (unique_id, offset_id) in enumerate(zip(unique_ids, offset_ids, strict=True)):
        if place not in firsts:
            results.append(SendResult(status, unique_id, offset_id, queue, number))
            number += 1
            continue
        first_id, where, first_offset = firsts[place]
        result = SendResult(
            status,
            first_id or unique_id,
            offset_id,
            where,
            first_offset,
            recall_handle=batch.recall_handle,
            is_duplicate=True,
        )
        results.append(result)
    return results


#: What differs between sends to the same topic and broker.
_VARYING: Final = ("queue_id", "sys_flag", "born_timestamp", "flag", "properties")
#: Templates kept; with more topics than that all are dropped and made again.
_MOST_TEMPLATES: Final = 4096


class SendFrames:
    """Encodes sends of one producer group, with one-letter headers (310, 320, 325).

    May be used by several threads at a time.
    """

    __slots__ = ("_group", "_ids", "_limits", "_now", "_settings", "_templates")

    def __init__(
        self,
        group: str,
        settings: SendSettings,
        now: Callable[[], float],
        ids: UniqueIds,
        limits: WireLimits = DEFAULT_LIMITS,
    ) -> None:
        """`limits` are those of the connections."""
        self._group = group
        self._settings = settings
        self._now = now
        self._ids = ids
        self._limits = limits
        self._templates: dict[tuple[int, str, str, bool], RequestTemplate[SendMessageRequest]] = {}

    def encoder(self, draft: Draft, queue: Queue, connection: Connection | None = None) -> Encode:
        """What encodes the send, for a connection that prepares requests or for any other."""
        born_ms = milliseconds(self._now())
        if not draft.unique_id:
            draft.identify(self._ids())
        if connection is not None and connection.prepares:
            header = self.header(draft, queue, born_ms)

            def prepared(opaque: int) -> Sequence[Bytes]:
                request = Command.request(draft.code, header, opaque=opaque, body=draft.body)
                return connection.encoded(request)

            return prepared
        template = self._template(draft, queue)

        def encode(opaque: int) -> Sequence[Bytes]:
            properties = quoted(draft.properties)
            return template.filled(
                (queue.id, draft.sys_flag, born_ms, draft.flag, properties, opaque), draft.body
            )

        return encode

    def header(self, draft: Draft, queue: Queue, born_ms: int | None = None) -> SendMessageRequest:
        """The same as a header, for requests that are signed or one-way."""
        if not draft.unique_id:
            draft.identify(self._ids())
        return SendMessageRequest(
            **self._constant(draft, queue),  # type: ignore[arg-type]  # named as declared
            queue_id=queue.id,
            sys_flag=draft.sys_flag,
            born_timestamp=milliseconds(self._now()) if born_ms is None else born_ms,
            flag=draft.flag,
            properties=draft.properties,
        )

    def _template(self, draft: Draft, queue: Queue) -> RequestTemplate[SendMessageRequest]:
        key = (draft.code, draft.topic, queue.broker, draft.is_batch)
        # What goes to a retry topic has further fields, and no template is kept.
        is_kept = draft.max_reconsume_times is None and not draft.reconsume_times
        template = self._templates.get(key) if is_kept else None
        if template is None:
            template = RequestTemplate(
                draft.code,
                SendMessageRequest,
                _VARYING,
                constant=self._constant(draft, queue),
                limits=self._limits,
            )
            if is_kept:
                if len(self._templates) >= _MOST_TEMPLATES:
                    self._templates.clear()
                self._templates[key] = template
        return template

    def _constant(self, draft: Draft, queue: Queue) -> dict[str, object]:
        return {
            "producer_group": self._group,
            "topic": draft.topic,
            "default_topic": self._settings.auto_create_topic,
            "default_topic_queue_nums": self._settings.auto_create_queues,
            "reconsume_times": draft.reconsume_times,
            "unit_mode": False,
            "max_reconsume_times": draft.max_reconsume_times,
            "batch": draft.is_batch,
            "broker_name": queue.broker,
        }


#: Between questions to name servers that do not answer; doubles.
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 0.5
#: Before a topic that was just made is looked for; doubles.
_NEW_TOPIC_PAUSE: Final = 0.01
#: Seconds between two questions for a route because sends to its brokers failed.
_REFRESH_PAUSE: Final = 1.0


class Publication(NamedTuple):
    """A topic that is sent to: its queues and their rotation."""

    queues: tuple[Queue, ...]
    rotation: RoundRobin
    #: Whether more than one broker takes messages.
    has_others: bool


class Targets:
    """The queues that one producer sends to, kept as fresh as the routes of the client.

    Name servers that do not answer are asked again until the time of the call is up. Threads read
    `known` while the loop changes it; entries are replaced as a whole.
    """

    def __init__(
        self, engine: Engine, faults: Faults, *, default_queues: int, changed: Callable[[], None]
    ) -> None:
        """`changed` is called when any route has; `default_queues` are those of a new topic."""
        self._engine = engine
        self._faults = faults
        self._monotonic = engine.clock.monotonic
        self._default_queues = default_queues
        self._changed = changed
        #: By topic as brokers know it: real routes with queues, not those of the template.
        self._known: dict[str, Publication] = {}
        #: What is known of a topic, without asking. May be called by any thread.
        self.known: Callable[[str], Publication | None] = self._known.get
        self._rotations: dict[str, RoundRobin] = {}
        self._refreshed: dict[str, float] = {}
        #: Topics that were not there when they were sent to for the first time.
        self._made: set[str] = set()
        self._is_closed = False
        self._end_watch = engine.routes.on_change(self._route_changed)

    def close(self) -> None:
        """Track no routes any more."""
        self._is_closed = True
        self._end_watch()
        for topic in self._rotations:
            self._engine.routes.untrack(topic)
        self._rotations.clear()
        self._known.clear()

    async def choose(self, sending: Sending) -> tuple[Queue, bool]:
        """Where the next attempt goes, and whether there are other brokers.

        Raises `SendFailed`, or what the last broker said when none can deliver the message.
        """
        topic, left = sending.draft.topic, sending.deadline - self._monotonic()
        found = self._known.get(topic) or await self._found(topic, left)
        if isinstance(found, OrbitError):
            if sending.error is None or not isinstance(found, RequestTimedOut):
                sending.error = found
            raise sending.failed() from sending.error
        return self.choice(sending, found), found.has_others

    async def queues(self, topic: str, within: float | None = None) -> tuple[Queue, ...]:
        """The queues of a topic, as brokers know them. Raises `NoRoute`.

        Without a name server, `NoNameServer`, or `SendFailed` after asking for `within` seconds.
        """
        if within is None:
            return (await self._find(topic)).queues
        found = await self._found(topic, within)
        if isinstance(found, OrbitError):
            raise SendFailed(topic, 0, found) from found
        return found.queues

    async def _found(self, topic: str, within: float) -> Publication | OrbitError:
        """What is known of a topic, or what was in the way when the time was up."""
        trouble: OrbitError = self.unanswered(within)
        pause = _FIRST_PAUSE
        try:
            async with asyncio.timeout(max(0.0, within)):
                while True:
                    try:
                        return await self._find(topic)
                    except NoNameServer as error:
                        trouble = error
                    except BrokerRefused as error:
                        if error.code not in NOT_NOW:
                            raise
                        trouble = error
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        except TimeoutError:
            return trouble

    def unanswered(self, within: float) -> RequestTimedOut:
        """The error when the queues were not found within the time."""
        where = self._engine.name_servers[0]
        return RequestTimedOut(where, RequestCode.GET_ROUTEINFO_BY_TOPIC, within)

    def choice(self, sending: Sending, publication: Publication) -> Queue:
        """Where the next attempt goes, of the queues of its topic. May be called by any thread."""
        bound = sending.queue or sending.first
        if bound is not None:
            return bound
        if sending.select is None:
            queues: Sequence[Queue] = publication.queues
            if sending.unable:
                # Brokers that cannot deliver the message at its time are passed over.
                queues = [queue for queue in queues if queue.broker not in sending.unable]
                if not queues:
                    raise list(sending.unable.values())[-1]
            return publication.rotation.choose(queues, self._faults, sending.tried)
        message = sending.draft.message
        assert message is not None  # noqa: S101  # only messages of the application have a selector
        chosen = sending.select(publication.queues, message)
        if not isinstance(chosen, Queue):
            raise MessageRefused("queue", f"must be chosen by the selector, got {chosen!r}")
        # One choice holds for the whole call, also if queues come or go meanwhile.
        sending.queue = chosen
        return chosen

    async def _find(self, topic: str) -> Publication:
        """What is known of a topic, or what the name server says. Raises `NoRoute`."""
        known = self._known.get(topic)
        if known is not None:
            return known
        if self._is_closed:
            raise NotRunning("this producer", was_stopped=True)
        routes = self._engine.routes
        if topic not in self._rotations:
            self._rotations[topic] = RoundRobin(self._engine.chance)
            routes.track(topic)
        route = await routes.publish_route(topic, default_queues=self._default_queues)
        if self._is_closed:
            raise NotRunning("this producer", was_stopped=True)
        publication = self._note(topic, route)
        if not publication.queues:
            raise NoRoute(topic, self._engine.name_servers)
        if route.is_provisional and topic not in self._made:
            # Logged because its name may have been mistyped.
            self._made.add(topic)
            text = "topic %s does not exist and is created by sending to it"
            log.info(text, topic, extra={"topic": topic})
            self._engine.spawn(self._await_route(topic), f"find the new topic {topic}")
        return publication

    async def _await_route(self, topic: str) -> None:
        """Ask for the route of a topic that the first send makes, until it has one.

        What is sent before goes one by one: nothing is certain of such a topic's queues.
        """
        pause = _NEW_TOPIC_PAUSE
        while pause < PROVISIONAL_LIFE and topic not in self._known and not self._is_closed:
            await asyncio.sleep(pause)
            pause *= 2
            await self._refresh(topic)

    def refresh_soon(self, topic: str) -> None:
        """A broker did not do: maybe the name server knows better by now."""
        now = self._monotonic()
        if now - self._refreshed.get(topic, -_REFRESH_PAUSE) < _REFRESH_PAUSE:
            return
        self._refreshed[topic] = now
        if self._engine.is_running:
            self._engine.spawn(self._refresh(topic), f"refresh the route of {topic}")

    async def _refresh(self, topic: str) -> None:
        try:
            await self._engine.routes.get(topic, refresh=True)
        except OrbitError as error:  # also an answer that cannot be read
            log.debug("route not refreshed: %s", error, extra={"topic": topic})

    def _route_changed(self, topic: str, route: TopicRoute) -> None:
        self._changed()
        if topic not in self._rotations:
            return
        before = self._known.get(topic)
        known = set() if before is None else {queue.broker for queue in before.queues}
        for queue in self._note(topic, route).queues:
            if queue.broker not in known:
                # It registered just now, whatever was wrong with it before.
                self._faults.forgive(queue.broker)

    def _note(self, topic: str, route: TopicRoute) -> Publication:
        queues = route.publish_queues
        has_others = len({queue.broker for queue in queues}) > 1
        publication = Publication(queues, self._rotations[topic], has_others)
        if route.is_provisional or not publication.queues:
            # The topic is made by the first send; its own route may have other queues.
            self._known.pop(topic, None)
        else:
            self._known[topic] = publication
        return publication


#: Picks one of the queues, which are sorted by broker and number.
Selector: TypeAlias = Callable[[Sequence[Queue], Message], Queue]


def by_key(key: str | int) -> Selector:
    """Messages with the same key go to the same queue as long as the number of queues stays.

    The queue is `abs(hash % n)` with Java's `String.hashCode`, in the order of queues that every
    client sees, so that producers in any language agree.
    """
    place = key_hash(key)

    def select(queues: Sequence[Queue], _: Message) -> Queue:
        # Java's remainder has the sign of what is divided.
        return queues[abs(place) % len(queues)]

    return select


def by_ordering_key(queues: Sequence[Queue], message: Message) -> Queue:
    """The queue of the message's own `ordering_key`."""
    if message.ordering_key is None:
        raise MessageRefused("ordering_key", "is needed by this selector, got None")
    return by_key(message.ordering_key)(queues, message)


def by_dedup_id(queues: Sequence[Queue], message: Message) -> Queue:
    """The queue of the message's own `dedup_id`, which a copy meets at the same broker."""
    dedup_id = (message.dedup_id or "").encode()
    by_broker = queues_by_broker(queues)
    own = by_broker[broker_of_id(dedup_id, by_broker)]
    return own[zlib.crc32(dedup_id) % len(own)]


def broker_of_id(dedup_id: bytes, brokers: Collection[str]) -> str:
    """The broker that de-duplicates messages of this id, by rendezvous hashing.

    When a broker comes or goes, only its own share of the ids changes its place.
    """
    if len(brokers) == 1:
        return next(iter(brokers))
    weigh = hashlib.blake2b
    return max(
        brokers, key=lambda name: weigh(dedup_id, digest_size=8, key=name.encode()[:64]).digest()
    )


class RoundRobin:
    """Goes through the queues of one topic, from a random one on, so that producers do not begin
    with the same queue. May be used by several threads at a time."""

    __slots__ = ("_places",)

    def __init__(self, chance: random.Random) -> None:
        self._places = itertools.count(chance.randrange(1 << 30))

    def next_queue(self, queues: Sequence[Queue]) -> Queue:
        """The next queue, whatever is known of its broker."""
        return queues[next(self._places) % len(queues)]

    def choose(self, queues: Sequence[Queue], faults: Faults, tried: Collection[str] = ()) -> Queue:
        """The next queue: of a broker not tried before and not avoided, if there is one.

        Otherwise of one that was not tried last, otherwise any.
        """
        if not tried and not faults.avoided:
            return self.next_queue(queues)
        last = next(reversed(list(tried)), None)
        for is_wanted in (
            lambda broker: broker not in tried and faults.is_available(broker),
            lambda broker: broker != last and faults.is_available(broker),
            lambda broker: broker not in tried,
            lambda broker: broker != last,
        ):
            found = self._next_of(queues, is_wanted)
            if found is not None:
                return found
        return self.next_queue(queues)

    def _next_of(self, queues: Sequence[Queue], is_wanted: Callable[[str], bool]) -> Queue | None:
        # Every look moves on, or the first wanted queue after unwanted ones would get their share.
        for _ in range(len(queues)):
            queue = queues[next(self._places) % len(queues)]
            if is_wanted(queue.broker):
                return queue
        return None


#: From this latency on, a broker is avoided for this time, in seconds.
AVOID_SLOW: Final = (
    (15.0, 30.0),
    (5.0, 10.0),
    (3.0, 6.0),
    (1.8, 5.0),
    (0.55, 2.0),
)
#: A failure counts like an answer after ten seconds.
AVOID_FAILED: Final = 10.0


def avoided_for(latency: float) -> float:
    """Seconds for which a broker with this latency is avoided."""
    for least, pause in AVOID_SLOW:
        if latency >= least:
            return pause
    return 0.0


class Faults:
    """Until when which broker is avoided. May be used by several threads at a time.

    Others are preferred to a broker that is avoided; if all are, all are used. A good answer or a
    new connection ends it. Java has all of it behind one switch, off by default
    (`sendLatencyEnable`). Here failures always count, and latency only by `avoid_slow`: a slow
    answer may come from a long queue of our own sends, which would next slow down another broker.
    """

    __slots__ = ("_avoid_failed", "_monotonic", "avoid_slow", "avoided")

    def __init__(
        self, monotonic: Callable[[], float], *, avoid_failed: bool, avoid_slow: bool
    ) -> None:
        self._monotonic = monotonic
        self._avoid_failed = avoid_failed
        #: Whether it matters how long an answer took.
        self.avoid_slow = avoid_slow
        #: Until when a broker is avoided, or was. Empty as a rule: every send looks at it.
        self.avoided: dict[str, float] = {}

    def is_available(self, broker: str) -> bool:
        until = self.avoided.get(broker)
        return until is None or self._monotonic() >= until

    def answered(self, broker: str, latency: float) -> None:
        """A broker did what it was asked."""
        if self.avoid_slow and (pause := avoided_for(latency)):
            self.avoided[broker] = self._monotonic() + pause
        elif self.avoided:
            self.forgive(broker)

    def failed(self, broker: str) -> None:
        """A broker could not be reached, did not answer in time, or could not store."""
        if self._avoid_failed or self.avoid_slow:
            self.avoided[broker] = self._monotonic() + AVOID_FAILED

    def forgive(self, broker: str) -> None:
        """A broker is as good as any other again."""
        self.avoided.pop(broker, None)


#: How often threads that do not see their deadline are looked for, in seconds.
_SWEEP: Final = 0.5


class BrokerLinks:
    """The open connections of a producer to masters, by the name of the broker.

    Most sends find their connection here without routes or engine. Whatever makes an entry
    doubtful empties the tables. `connections` and `pools` stay the same objects: senders keep them.
    """

    def __init__(self, engine: Engine, faults: Faults, *, for_threads: bool) -> None:
        """`for_threads` adds blocking connections for threads beside each of the loop's."""
        self._engine = engine
        self._faults = faults
        self._for_threads = for_threads
        self.connections: dict[str, Connection] = {}
        #: The connections that threads use, by broker.
        self.pools: dict[str, BlockingPool] = {}
        #: All pools. One lives as long as the loop's connection beside it.
        self._pools: dict[Connection, BlockingPool] = {}
        if for_threads:
            idle = engine.settings.channel.blocking_idle
            engine.every(min(idle / 4, _SWEEP), self._sweep, name="sweep threads' connections")
        self._end_watch = engine.on_connected(self._reached)

    def close(self) -> None:
        self._end_watch()
        self.forget()

    def forget(self) -> None:
        """Masters may have changed; connections that are still right are found again."""
        self.connections.clear()
        self.pools.clear()

    async def connected(self, queue: Queue, timeout: float) -> Connection:  # noqa: ASYNC109
        """Raises `RemotingError`, or `BrokerUnavailable`."""
        where = self._engine.routes.master(queue.broker)
        connection = await self._engine.connection(where, timeout)
        self.connections[queue.broker] = connection
        if self._for_threads:
            self.pools[queue.broker] = self._pool_beside(connection, where)
        return connection

    def _pool_beside(self, connection: Connection, where: Address) -> BlockingPool:
        pool = self._pools.get(connection)
        if pool is None:
            settings = self._engine.settings
            pool = self._pools[connection] = BlockingPool(
                where,
                connection.encode_probe,
                most=settings.channel.blocking_connections,
                resolved=connection.remote,
                tls=settings.tls,
                limits=settings.channel.connection.limits,
            )
            connection.on_close(self._close_pool)
        return pool

    def _close_pool(self, connection: Connection) -> None:
        pool = self._pools.pop(connection)
        # A broker that closes gracefully still answers what it has received.
        pool.close(connection.reason, is_abort=connection.was_ended_here)

    async def _sweep(self) -> None:
        for pool in self._pools.values():
            pool.sweep(self._engine.settings.channel.blocking_idle)

    def is_open(self, broker: str) -> bool:
        """Whether a broker is connected."""
        connection = self.connections.get(broker)
        return connection is not None and connection.is_open

    def went_away(self, queue: Queue, connection: Connection) -> None:
        """Use another connection for what follows, unless there is one already."""
        broker = queue.broker
        if self.connections.get(broker) is connection:
            del self.connections[broker]
            self.pools.pop(broker, None)
        with suppress(BrokerUnavailable):
            where = self._engine.routes.master(broker)
            if self._engine.open_connection(where) is connection:
                self._engine.went_away(where, connection)

    def _reached(self, where: Address) -> None:
        """A broker is there, or there again: no reason to avoid it any longer."""
        if not self._faults.avoided:
            return
        for broker, addresses in self._engine.routes.brokers.items():
            if addresses.get(MASTER) == where:
                self._faults.forgive(broker)
