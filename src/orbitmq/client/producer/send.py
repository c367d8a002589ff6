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
import enum
import itertools
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerUnavailable, NoNameServer, TimesUnsupported, refused_by
from orbitmq.client.message import Message
from orbitmq.client.routes import MASTER, NOT_NOW, Queue, TopicRoute
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
from orbitmq.javahash import java_hash
from orbitmq.message.ids import UniqueIds
from orbitmq.message.properties import (
    INSTANCE_ID,
    ITEM_END,
    MAX_RECONSUME_TIMES,
    NAME_END,
    RECONSUME_TIME,
    UNIQ_KEY,
)
from orbitmq.message.record import COMPRESSED, COMPRESSION_TYPE_MASK, MAX_PROPERTIES
from orbitmq.message.stored import compress_body
from orbitmq.names import RETRY_PREFIX, wrap_topic
from orbitmq.remoting.blocking import BlockingPool, Encode
from orbitmq.remoting.connection import Connection, settling
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
    Release,
    RequestCode,
    ResponseCode,
    WireLimits,
    ordinal_of,
    release_of,
)
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers import SendMessageRequest, SendMessageResponse
from orbitmq.wire.javajson import quoted
from orbitmq.wire.templates import RequestTemplate

if TYPE_CHECKING:
    from orbitmq.client.producer.core import SendSettings


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

    @property
    def is_ok(self) -> bool:
        """Whether it is as safe as the broker promises."""
        return self.status is SendStatus.OK


#: Is given the result or the error of a send, once, on the loop.
Done: TypeAlias = Callable[[SendResult | BaseException], None]

_GO_AWAY: Final = int(ResponseCode.GO_AWAY)


class Attempt(NamedTuple):
    """An attempt that was made, and what came of it."""

    queue: Queue
    outcome: Command | OrbitError
    connection: Connection | None


class Publisher:
    """Sends for one producer group."""

    def __init__(
        self, engine: Engine, group: str, settings: SendSettings, *, for_threads: bool = False
    ) -> None:
        """`for_threads` lets threads send on connections of their own."""
        self._engine = engine
        self._settings = settings
        self._monotonic = engine.clock.monotonic
        self._faults = Faults(
            self._monotonic, avoid_failed=settings.avoid_failed, avoid_slow=settings.avoid_slow
        )
        self.frames = SendFrames(
            group, settings, engine.clock.now, engine.settings.channel.connection.limits
        )
        self._links = BrokerLinks(engine, self._faults, for_threads=for_threads)
        # Looked at for every send.
        self._connections, self._pools = self._links.connections, self._links.pools
        self._targets = Targets(
            engine,
            self._faults,
            default_queues=settings.auto_create_queues,
            changed=self._links.forget,
        )
        self._known = self._targets.publications.get

    def close(self) -> None:
        """Let go of what was kept; what is still under way ends with an error."""
        self._links.close()
        self._targets.publications.close()

    # ---- sending

    async def send(self, sending: Sending) -> SendResult:
        """Make attempts until one has an outcome that counts. Raises what `settle` raises.

        What was stored, though not as safely as wanted, has not failed, whatever comes after.
        A message whose answer was lost may be stored: the error is then `SendFailed`, or
        `NotRunning` after a stop, also if a later attempt is refused.
        """
        try:
            return await self._send(sending)
        except OrbitError as error:
            if sending.result is not None:
                return sending.result
            if sending.is_open and not isinstance(error, SendFailed):
                sending.error = error
                raise sending.failed() from error
            raise

    async def _send(self, sending: Sending) -> SendResult:
        while True:
            queue, others = await self._targets.choose(sending)
            pause = pause_before(sending, queue.broker, self._settings)
            if pause and not await self._pause(sending, pause):
                return given_up(sending)
            sending.first = None
            attempt = await self._attempt(sending, queue, others)
            if isinstance(attempt.outcome, TimesUnsupported):
                self._pass_over(sending, queue, attempt.outcome)
                continue
            result = self._settle(sending, *attempt)
            if result is not None:
                return result

    @staticmethod
    def _pass_over(sending: Sending, queue: Queue, error: TimesUnsupported) -> None:
        """Have another broker asked; raises the error when the message may not go elsewhere."""
        if sending.is_bound:
            raise error
        sending.unable[queue.broker] = error

    async def _pause(self, sending: Sending, seconds: float) -> bool:
        """Wait before a broker is tried again; False when the time was up before that."""
        left = sending.deadline - self._monotonic()
        await asyncio.sleep(min(seconds, max(0.0, left)))
        return seconds < left

    async def go_on(self, sending: Sending, attempt: Attempt | None) -> SendResult:
        """Continue what a thread has begun."""
        if attempt is not None:
            result = self._settle(sending, *attempt)
            if result is not None:
                return result
        return await self.send(sending)

    async def find(self, sending: Sending) -> tuple[Queue, bool] | Exception:
        """Its queue and whether there are other brokers; or what is in the way."""
        try:
            found = await self._targets.choose(sending)
        except Exception as error:  # noqa: BLE001  # also a selector's
            return error
        sending.first = found[0]
        return found

    async def connect(self, sending: Sending, queue: Queue, others: bool) -> None:
        """Connect to the broker, where there are other brokers within half of the time.

        Errors are not raised: sending meets them again, or goes to another broker.
        """
        now = self._monotonic()
        limit = attempt_time(sending, now, self._settings, others=others)
        if limit <= 0:
            return
        if others:
            limit = min(limit, (sending.deadline - now) / 2)
        end = now + limit
        try:
            await self._links.connected(queue, limit)
        except (RemotingError, BrokerUnavailable) as error:
            log.debug("a send cannot begin yet: %r", error)
            self._faults.failed(queue.broker)
            sending.error, sending.first = error, None
            return
        try:
            await self._links.check_times(sending.draft, queue, end - self._monotonic())
        except Exception as error:  # noqa: BLE001  # sending meets it again
            log.debug("a send cannot begin yet: %r", error)

    def pass_by(self, sending: Sending, broker: str) -> None:
        """Choose another queue for a message that has waited for this broker in vain."""
        if not self._links.is_open(broker):
            self._faults.failed(broker)
        sending.first = None
        sending.tried[broker] = sending.tried.pop(broker, 0) + 1
        with suppress(Exception):  # sending meets it again
            chosen = self._targets.choose_known(sending)
            if chosen is not None:
                sending.first = chosen[0]

    def has_others(self, topic: str) -> bool:
        """Whether more than one broker is known to take messages of a topic."""
        publication = self._known(topic)
        return publication is not None and publication.has_others

    def avoids(self, broker: str) -> bool:
        """Whether other brokers are preferred for now."""
        return not self._faults.is_available(broker)

    def knows(self, topic: str) -> bool:
        """Whether the queues of a topic are known."""
        return self._known(topic) is not None

    def next_broker(self, sending: Sending) -> str | None:
        """The broker of its queue, as far as that is known. Raises what a selector raises."""
        chosen = self._targets.choose_known(sending)
        if chosen is None:
            return None
        sending.first = chosen[0]
        return sending.first.broker

    def begin(self, sending: Sending, done: Done) -> None:
        """Send without a task of its own, unless something goes wrong; `done` gets the outcome."""
        if not self.begin_at_once(sending, done):
            self._finish_later(sending, done, "send")

    def begin_at_once(self, sending: Sending, done: Done) -> bool:
        """The same if nothing has to be found out before; False, and nothing is done, otherwise."""
        try:
            first = self._first(sending)
        except Exception as error:  # noqa: BLE001  # a selector's
            done(error)
            return True
        if first is None:
            return False
        queue, limit = first
        if limit <= 0:
            done(self._expired(sending, queue))
            return True
        connection = self._connections.get(queue.broker)
        if connection is None or not connection.is_open:
            sending.first = queue
            return False
        sending.first = None

        def settled(outcome: Command | RemotingError) -> None:
            try:
                result = self._settle(sending, queue, outcome, connection)
                if result is None:
                    self._finish_later(sending, done, "send again")
                    return
            except OrbitError as error:
                # As in `send`: what was stored has not failed, also if there is no second attempt.
                done(error if sending.result is None else sending.result)
            else:
                done(result)

        try:
            connection.submit_encoded(
                sending.draft.code,
                self.frames.encoder(sending.draft, queue, connection),
                settled,
                timeout=limit,
            )
        except RemotingError as error:
            settled(error)
        except Exception as error:  # noqa: BLE001  # no frame can be made of it: the caller's to see
            done(error)
        return True

    def expired(self, sending: Sending) -> SendFailed:
        """The error of a message whose time was up while it waited for others before it."""
        queue = sending.queue or sending.first
        if queue is not None and self.knows(sending.draft.topic):
            return self._expired(sending, queue)
        if sending.error is None:
            sending.error = self._targets.unanswered(sending.timeout)
        return sending.failed()

    def _expired(self, sending: Sending, queue: Queue) -> SendFailed:
        """The time was up before anything was sent, which is no fault of the broker."""
        if sending.error is None:
            try:
                where = self._links.address(queue)
            except BrokerUnavailable as error:
                sending.error = error
            else:
                sending.error = RequestTimedOut(where, sending.draft.code, sending.timeout)
        return sending.failed()

    def _finish_later(self, sending: Sending, done: Done, name: str) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            # Here and not in the coroutine, which may be cancelled before its first step.
            if task.cancelled():
                done(outcome_at_stop(sending))

        self._engine.spawn(self.finish(sending, done), name).add_done_callback(ended)

    async def finish(self, sending: Sending, done: Done) -> None:
        """Make attempts until there is an outcome, which `done` gets."""
        try:
            result = await self.send(sending)
        except Exception as error:  # noqa: BLE001  # also a selector's: it is the caller's to see
            done(error)
        else:
            done(result)

    def from_thread(self, sending: Sending) -> SendResult | Attempt | None:
        """Make the first attempt on the calling thread; `go_on` with all but a result.

        Raises `SendFailed` if there is no time for one.
        """
        first = self._first(sending)
        if first is None:
            return None
        queue, limit = first
        pool, connection = self._pools.get(queue.broker), self._connections.get(queue.broker)
        if pool is None or connection is None or not connection.is_open:
            return None
        if limit <= 0:
            raise self._expired(sending, queue)
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
        return result_of(draft, queue, SendStatus.OK, answer)

    def _first(self, sending: Sending) -> tuple[Queue, float] | None:
        """Where a first attempt goes and how long it may take; None when that is not known yet."""
        draft = sending.draft
        publication = self._known(draft.topic)
        if publication is None:
            return None
        is_free = sending.queue is None and sending.select is None and sending.first is None
        if is_free and draft.timed_by is None and not self._faults.avoided:
            # Most sends are so, and there is nothing to consider.
            queue = publication.rotation.next_queue(publication.queues)
        else:
            queue = self._targets.choice(sending, publication)
            if draft.timed_by is not None and self._links.is_unsure_of(queue, draft):
                sending.first = queue
                return None
        sending.began = now = self._monotonic()
        others = publication.has_others
        return queue, attempt_time(sending, now, self._settings, others=others)

    async def notify(self, sending: Sending) -> None:
        """Send one-way: one attempt, without an answer. Raises `SendFailed`."""
        while True:
            queue, _ = await self._targets.choose(sending)
            sending.first = None
            try:
                await self._notify(sending, queue)
            except TimesUnsupported as error:
                self._pass_over(sending, queue, error)
            else:
                return

    async def _notify(self, sending: Sending, queue: Queue) -> None:
        try:
            connection = await self._links.connected(queue, sending.timeout)
            await self._links.check_times(sending.draft, queue, sending.timeout)
            header = self.frames.header(sending.draft, queue)
            connection.notify(sending.draft.code, header, body=sending.draft.body)
        except (RemotingError, BrokerUnavailable) as error:
            self._faults.failed(queue.broker)
            sending.error = error
            sending.attempts += 1
            raise sending.failed() from error

    def notify_from_thread(self, sending: Sending) -> bool:
        """Send one-way on the calling thread; False when the loop has to do it."""
        first = self._first(sending)
        if first is None:
            return False
        queue, limit = first
        pool, connection = self._pools.get(queue.broker), self._connections.get(queue.broker)
        if pool is None or connection is None or not connection.is_open:
            return False
        draft = sending.draft
        header = self.frames.header(draft, queue)
        try:
            return pool.notify(
                lambda opaque: connection.encoded(
                    Command.request(
                        draft.code, header, opaque=opaque, body=draft.body, one_way=True
                    )
                ),
                limit,
            )
        except RemotingError:
            return False

    # ---- queues

    async def queues(self, topic: str, within: float | None = None) -> tuple[Queue, ...]:
        """The queues of a topic that can be sent to, as brokers know them; see `Targets.queues`."""
        return await self._targets.queues(topic, within)

    async def is_before_5(self, topic: str, timeout: float) -> bool:  # noqa: ASYNC109
        """Whether a broker of the topic is of the old line, as far as they have said so.

        Errors are not raised: sending meets them again.
        """
        try:
            # Half of the time, at most, is for the question: the rest is for sending.
            async with asyncio.timeout(max(0.0, timeout / 2)):
                brokers = {queue.broker for queue in await self.queues(topic)}
                return await self._links.versions.any_before_5(brokers)
        except (OrbitError, TimeoutError):
            return False

    # ---- attempts

    async def _attempt(self, sending: Sending, queue: Queue, others: bool) -> Attempt:
        now = sending.began = self._monotonic()
        limit = attempt_time(sending, now, self._settings, others=others)
        if limit <= 0:
            raise self._expired(sending, queue)
        end = now + limit
        draft = sending.draft
        connection: Connection | None = None
        try:
            connection = self._connections.get(queue.broker)
            if connection is None or not connection.is_open:
                connection = await self._links.connected(queue, limit)
                limit = end - self._monotonic()
            if self._links.is_unsure_of(queue, draft):
                await self._links.check_times(draft, queue, limit)
                limit = end - self._monotonic()
            answer = await self._ask(connection, draft, queue, limit)
        except (RemotingError, BrokerUnavailable, TimesUnsupported) as error:
            return Attempt(queue, error, connection)
        return Attempt(queue, answer, connection)

    async def _ask(
        self,
        connection: Connection,
        draft: Draft,
        queue: Queue,
        timeout: float,  # noqa: ASYNC109
    ) -> Command:
        answered: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
        opaque = connection.submit_encoded(
            draft.code,
            self.frames.encoder(draft, queue, connection),
            settling(answered),
            timeout=timeout,
        )
        try:
            return await answered
        except asyncio.CancelledError:
            connection.give_up(opaque)
            raise

    def _settle(
        self,
        sending: Sending,
        queue: Queue,
        outcome: Command | OrbitError,
        connection: Connection | None,
    ) -> SendResult | None:
        if isinstance(outcome, OrbitError):
            self._targets.publications.refresh_soon(sending.draft.topic)
        elif outcome.code == _GO_AWAY and connection is not None:
            self._links.went_away(queue, connection)
        return settle(
            sending,
            queue,
            outcome,
            now=self._monotonic(),
            settings=self._settings,
            faults=self._faults,
        )


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
#: Nothing was taken, and the message is welcome elsewhere: as good as no connection.
_NOT_COUNTED: Final = int(ResponseCode.GO_AWAY)

_OK: Final = SendStatus.OK


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
    tried: dict[str, int] = {}
    #: Brokers that cannot deliver the message at its time, and their errors: passed over.
    unable: dict[str, OrbitError] = {}
    error: OrbitError | None = None
    #: Stored, but not as safely as wanted.
    result: SendResult | None = None

    @property
    def deadline(self) -> float:
        """When the time of the call is up."""
        return self.made + self.timeout

    @property
    def is_bound(self) -> bool:
        """Whether the message may go to one queue only."""
        return self.queue is not None or self.select is not None

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


def settle(
    sending: Sending,
    queue: Queue,
    outcome: Command | OrbitError,
    *,
    now: float,
    settings: SendSettings,
    faults: Faults,
) -> SendResult | None:
    """What an attempt led to: a result, or None for another attempt. Called by any thread.

    Raises `BrokerRefused` for a refusal that would be repeated by any broker, and `SendFailed` when
    there is no attempt or no time left.
    """
    sending.attempts += 1
    broker = queue.broker
    if isinstance(outcome, Command):
        status = STORED.get(outcome.code)
        if status is not None:
            sending.counted += 1
            faults.answered(broker, now - sending.began)
            result = result_of(sending.draft, queue, status, outcome)
            if status is _OK or sending.is_bound or not settings.retry_not_stored_ok:
                return result
            sending.result = result
        else:
            _note_refusal(sending, queue, outcome, faults)
    else:
        _note_failure(sending, queue, outcome, faults)
    sending.tried[broker] = sending.tried.pop(broker, 0) + 1
    if _may_go_on(sending, now, settings):
        return None
    return given_up(sending)


def given_up(sending: Sending) -> SendResult:
    """What is left when there is no further attempt: an unsafe result, or else the last error."""
    if sending.result is not None:
        return sending.result
    raise sending.failed()


def outcome_at_stop(sending: Sending) -> SendResult | NotRunning:
    """What becomes of a call when the producer is stopped: it may be stored all the same."""
    return sending.result or NotRunning("this producer", was_stopped=True)


def result_of(draft: Draft, queue: Queue, status: SendStatus, answer: Command) -> SendResult:
    """Where the broker says that the message is. Raises `SendFailed` if that cannot be read."""
    try:
        header = answer.header(SendMessageResponse)
    except HeaderError as error:
        raise SendFailed(draft.topic, 1, error) from error
    if header.queue_id != queue.id:
        queue = Queue(queue.topic, queue.broker, header.queue_id)
    return SendResult(
        status,
        draft.unique_id,
        header.msg_id,
        queue,
        header.queue_offset,
        header.transaction_id,
        header.recall_handle,
    )


def attempt_time(sending: Sending, now: float, settings: SendSettings, *, others: bool) -> float:
    """Seconds that the next attempt may take; `others`: whether there are other brokers."""
    left = sending.made + sending.timeout - now
    if not others and settings.attempt_timeout is None:
        return left
    if sending.is_bound or sending.counted >= settings.retries:
        return left
    if settings.attempt_timeout is not None:
        return min(left, settings.attempt_timeout)
    return left / 2


def pause_before(sending: Sending, broker: str, settings: SendSettings) -> float:
    """Seconds to wait before an attempt: none unless this broker was tried before."""
    times = sending.tried.get(broker, 0)
    return settings.retry_pause * 2 ** min(times - 1, 6) if times else 0.0


def _note_refusal(sending: Sending, queue: Queue, answer: Command, faults: Faults) -> None:
    refused = refused_by(answer, queue.broker, sending.draft.code)
    avoid = RETRIED.get(answer.code)
    if avoid is None:
        raise refused
    if avoid:
        faults.failed(queue.broker)
    if answer.code != _NOT_COUNTED:
        sending.counted += 1
    sending.error = refused


def _note_failure(sending: Sending, queue: Queue, error: OrbitError, faults: Faults) -> None:
    if not isinstance(error, RemotingError | ClientError) or not error.retriable:
        raise error
    faults.failed(queue.broker)
    if not isinstance(error, ConnectFailed | BrokerUnavailable):
        sending.counted += 1
        # What waits in too great a number is not sent.
        sending.is_open |= not isinstance(error, TooManyRequests)
    sending.error = error


def _may_go_on(sending: Sending, now: float, settings: SendSettings) -> bool:
    allowed = 0 if sending.is_bound else settings.retries
    return sending.counted <= allowed and now < sending.deadline


_SEND: Final = int(RequestCode.SEND_MESSAGE_V2)
#: Bytes of properties that a message may have when it is sent. A record has room for a few more:
#: brokers note their region and cluster in it, and where a message belongs that waits for its time.
LONGEST_PROPERTIES: Final = MAX_PROPERTIES - 512


class Draft(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What one call sends: the message with its id, properties and body as stored.

    It is made once and used for every attempt, so that a message that is sent again has the same id
    and consumers can recognise it.
    """

    #: As brokers know it.
    topic: str
    #: As it will be stored: maybe compressed.
    body: bytes
    properties: str
    unique_id: str
    flag: int = 0
    sys_flag: int = 0
    code: int = _SEND
    is_batch: bool = False
    #: What the application gave; None for what is only passed on.
    message: Message | None = None
    reconsume_times: int = 0
    max_reconsume_times: int | None = None
    #: What names the time of delivery (`delay`, `deliver_at`), if it is any time of the future:
    #: not every broker can do that.
    timed_by: str | None = None


class Drafting:
    """Makes drafts by the rules of one producer. May be used by several threads at a time."""

    __slots__ = ("_ids", "_largest_plain", "_namespace", "_settings")

    def __init__(self, settings: SendSettings, ids: UniqueIds, namespace: str | None) -> None:
        self._settings = settings
        self._ids = ids
        self._namespace = namespace
        #: Bodies up to this size are neither refused nor compressed.
        self._largest_plain = settings.max_message_size
        if 0 < settings.compress_from <= self._largest_plain:
            self._largest_plain = settings.compress_from - 1

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
        properties[UNIQ_KEY] = unique_id = self._ids()
        topic = message.topic
        return Draft(
            topic if self._namespace is None else wrap_topic(self._namespace, topic),
            body,
            self.property_string(properties),
            unique_id,
            message.flag,
            sys_flag | compression,
            code,
            message=message,
            timed_by=None if message.delay is message.deliver_at is None else _timed_by(message),
        )

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
        unique_id = kept.setdefault(UNIQ_KEY, "") or self._ids()
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

    def element_properties(self, message: Message) -> tuple[str, bytes]:
        """The id and the properties of a message in a batch."""
        properties = message.all_properties()
        properties[UNIQ_KEY] = unique_id = self._ids()
        return unique_id, self.property_string(properties).encode("utf-8", "replace")

    def new_id(self) -> str:
        return self._ids()

    def wire_topic(self, topic: str) -> str:
        """The topic as brokers know it."""
        return topic if self._namespace is None else wrap_topic(self._namespace, topic)

    def property_string(self, properties: dict[str, str]) -> str:
        """Properties as they travel; refuses more than a broker can store."""
        if self._namespace is not None:
            properties[INSTANCE_ID] = self._namespace
        text = "".join(
            [f"{name}{NAME_END}{value}{ITEM_END}" for name, value in properties.items() if value]
        )
        # A character takes four bytes at most.
        if len(text) * 4 > LONGEST_PROPERTIES:
            size = len(text.encode("utf-8", "replace"))
            if size > LONGEST_PROPERTIES:
                raise MessageRefused(
                    "properties",
                    f"take {size} bytes together with tags, keys and ids, and may take "
                    f"{LONGEST_PROPERTIES}",
                )
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


def _timed_by(message: Message) -> str:
    return "deliver_at" if message.delay is None else "delay"


#: What differs between sends to the same topic and broker.
_VARYING: Final = ("queue_id", "sys_flag", "born_timestamp", "flag", "properties")
#: Templates kept; with more topics than that all are dropped and made again.
_MOST_TEMPLATES: Final = 4096


class SendFrames:
    """Encodes sends of one producer group, with one-letter headers (310, 320, 325).

    May be used by several threads at a time.
    """

    __slots__ = ("_group", "_limits", "_now", "_settings", "_templates")

    def __init__(
        self,
        group: str,
        settings: SendSettings,
        now: Callable[[], float],
        limits: WireLimits = DEFAULT_LIMITS,
    ) -> None:
        """`limits` are those of the connections."""
        self._group = group
        self._settings = settings
        self._now = now
        self._limits = limits
        self._templates: dict[tuple[int, str, str, bool], RequestTemplate[SendMessageRequest]] = {}

    def encoder(self, draft: Draft, queue: Queue, connection: Connection | None = None) -> Encode:
        """What encodes the send, for a connection that prepares requests or for any other."""
        born_ms = milliseconds(self._now())
        if connection is not None and connection.prepares:
            header = self.header(draft, queue, born_ms)

            def prepared(opaque: int) -> Sequence[Bytes]:
                request = Command.request(draft.code, header, opaque=opaque, body=draft.body)
                return connection.encoded(request)

            return prepared
        if draft.reconsume_times or draft.max_reconsume_times is not None:
            template = self._new_template(draft, queue)
        else:
            template = self._template(draft, queue)

        def encode(opaque: int) -> Sequence[Bytes]:
            properties = quoted(draft.properties)
            return template.filled(
                (queue.id, draft.sys_flag, born_ms, draft.flag, properties, opaque), draft.body
            )

        return encode

    def header(self, draft: Draft, queue: Queue, born_ms: int | None = None) -> SendMessageRequest:
        """The same as a header, for requests that are signed or one-way."""
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
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            template = self._templates[key] = self._new_template(draft, queue)
        return template

    def _new_template(self, draft: Draft, queue: Queue) -> RequestTemplate[SendMessageRequest]:
        return RequestTemplate(
            draft.code,
            SendMessageRequest,
            _VARYING,
            constant=self._constant(draft, queue),
            limits=self._limits,
        )

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


class Targets:
    """The queues that one producer sends to.

    Name servers that do not answer are asked again until the time of the call is up.
    """

    def __init__(
        self, engine: Engine, faults: Faults, *, default_queues: int, changed: Callable[[], None]
    ) -> None:
        """`changed` is called when any route has."""
        self._engine = engine
        self._faults = faults
        self._monotonic = engine.clock.monotonic
        self.publications = Publications(
            engine, faults, default_queues=default_queues, changed=changed
        )

    async def choose(self, sending: Sending) -> tuple[Queue, bool]:
        """Where the next attempt goes, and whether there are other brokers.

        Raises `SendFailed`, or what the last broker said when none can deliver the message.
        """
        left = sending.deadline - self._monotonic()
        found = await self._found(sending.draft.topic, left)
        if isinstance(found, OrbitError):
            if sending.error is None or not isinstance(found, RequestTimedOut):
                sending.error = found
            raise sending.failed() from sending.error
        return self.choice(sending, found), found.has_others

    def choose_known(self, sending: Sending) -> tuple[Queue, bool] | None:
        """The same without a request; None for a topic that is not known yet.

        May be called by any thread.
        """
        publication = self.publications.get(sending.draft.topic)
        if publication is None:
            return None
        return self.choice(sending, publication), publication.has_others

    async def queues(self, topic: str, within: float | None = None) -> tuple[Queue, ...]:
        """The queues of a topic, as brokers know them. Raises `NoRoute`.

        Without a name server, `NoNameServer`, or `SendFailed` after asking for `within` seconds.
        """
        if within is None:
            return (await self.publications.find(topic)).queues
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
                        return await self.publications.find(topic)
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
            queues = _able(sending, publication.queues) if sending.unable else publication.queues
            return publication.rotation.choose(queues, self._faults, sending.tried)
        message = sending.draft.message
        assert message is not None  # noqa: S101  # only messages of the application have a selector
        chosen = sending.select(publication.queues, message)
        if not isinstance(chosen, Queue):
            raise MessageRefused("queue", f"must be chosen by the selector, got {chosen!r}")
        # One choice holds for the whole call, also if queues come or go meanwhile.
        sending.queue = chosen
        return chosen


def _able(sending: Sending, queues: Sequence[Queue]) -> Sequence[Queue]:
    """Without the queues of brokers that cannot deliver the message at its time."""
    able = [queue for queue in queues if queue.broker not in sending.unable]
    if not able:
        raise next(reversed(sending.unable.values()))
    return able


#: Seconds between two questions for a route because sends to its brokers failed.
_REFRESH_PAUSE: Final = 1.0


class Publication:
    """A topic that is sent to: its queues and their rotation."""

    __slots__ = ("has_others", "queues", "rotation")

    def __init__(self, queues: tuple[Queue, ...], rotation: RoundRobin) -> None:
        self.queues = queues
        self.rotation = rotation
        #: Whether more than one broker takes messages.
        self.has_others = len({queue.broker for queue in queues}) > 1


class Publications:
    """The topics that a producer sends to, kept as fresh as the routes of the client.

    Threads read `get` while the loop changes it; entries are replaced as a whole.
    """

    def __init__(
        self,
        engine: Engine,
        faults: Faults,
        *,
        default_queues: int,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when any route has; `default_queues` are those of a new topic."""
        self._engine = engine
        self._faults = faults
        self._default_queues = default_queues
        self._changed = changed
        #: By topic as brokers know it: real routes with queues, not those of the template.
        self._known: dict[str, Publication] = {}
        #: What is known of a topic, without asking. May be called by any thread.
        self.get: Callable[[str], Publication | None] = self._known.get
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

    async def find(self, topic: str) -> Publication:
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
        if route.is_provisional:
            self._tell_made(publication)
        return publication

    def _tell_made(self, publication: Publication) -> None:
        """Say once that a topic comes into being: it may be one that was mistyped."""
        first = publication.queues[0]
        if first.topic in self._made:
            return
        self._made.add(first.topic)
        count = sum(queue.broker == first.broker for queue in publication.queues)
        log.info(
            "topic %s does not exist and is made by sending to it, with %d queue%s on each broker "
            "that a message goes to",
            first.topic,
            count,
            "" if count == 1 else "s",
            extra={"topic": first.topic, "queues": count},
        )

    def refresh_soon(self, topic: str) -> None:
        """A broker did not do: maybe the name server knows better by now."""
        now = self._engine.clock.monotonic()
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
        publication = Publication(route.publish_queues, self._rotations[topic])
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
        return queues[_java_index(place, len(queues))]

    return select


def by_sharding_key(queues: Sequence[Queue], message: Message) -> Queue:
    """The queue of the message's own `sharding_key`."""
    if message.sharding_key is None:
        raise MessageRefused("sharding_key", "is needed by this selector, got None")
    return by_key(message.sharding_key)(queues, message)


def key_hash(key: str | int) -> int:
    """Java's `hashCode` of a String, an Integer or a Long."""
    if isinstance(key, str):
        return java_hash(key)
    if isinstance(key, bool) or not -(2**63) <= key < 2**63:
        raise MessageRefused("key", f"must be a text or a 64-bit number, got {key!r}")
    if -(2**31) <= key < 2**31:
        return key
    folded = (key ^ (key & 0xFFFF_FFFF_FFFF_FFFF) >> 32) & 0xFFFF_FFFF
    return folded - ((folded & 0x8000_0000) << 1)


def _java_index(hashed: int, count: int) -> int:
    """`abs(hashed % count)`, with Java's remainder, which has the sign of what is divided."""
    return abs(hashed) % count


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

    @property
    def is_empty(self) -> bool:
        """Whether no broker is avoided, or might be."""
        return not self.avoided

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
        self.versions = BrokerVersions(engine)
        self._end_watch = engine.on_connected(self._reached)

    def close(self) -> None:
        self._end_watch()
        self.forget()

    def forget(self) -> None:
        """Masters may have changed; connections that are still right are found again."""
        self.connections.clear()
        self.pools.clear()

    def address(self, queue: Queue) -> Address:
        """Of the broker to which a queue is written. Raises `BrokerUnavailable`."""
        return self._engine.routes.master(queue.broker)

    async def connected(self, queue: Queue, timeout: float) -> Connection:  # noqa: ASYNC109
        """Raises `RemotingError`, or `BrokerUnavailable`."""
        connection = await self._engine.connection(self.address(queue), timeout)
        self.connections[queue.broker] = connection
        if self._for_threads:
            self.pools[queue.broker] = self._pool_beside(connection, self.address(queue))
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
            where = self.address(queue)
            if self._engine.open_connection(where) is connection:
                self._engine.went_away(where, connection)

    def is_unsure_of(self, queue: Queue, draft: Draft) -> bool:
        """Whether the loop has to find out if a broker can deliver the message at its time."""
        return draft.timed_by is not None and not self.versions.keeps_times(queue.broker)

    async def check_times(self, draft: Draft, queue: Queue, within: float) -> None:
        """Raises `TimesUnsupported` for a broker that would deliver a timed message immediately."""
        if draft.timed_by is not None and not self.versions.keeps_times(queue.broker):
            await self.versions.check_times(queue.broker, draft.timed_by, within)

    def _reached(self, where: Address) -> None:
        """A broker is there, or there again: no reason to avoid it any longer."""
        if self._faults.is_empty:
            return
        for broker, addresses in self._engine.routes.brokers.items():
            if addresses.get(MASTER) == where:
                self._faults.forgive(broker)


#: The first release that delivers at any time, and that reads a whole batch.
_NEW_LINE: Final = ordinal_of(Release(5, 0, 0))


class BrokerVersions:
    """The versions of the brokers that a producer sends to, from their answers to heartbeats.

    A broker before 5.0 takes a message for a certain time, keeps that as a property that it does
    not know, and delivers immediately. So a timed message is sent only to a broker that is known to
    be of 5.0 or later.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known = engine.broker_versions

    async def any_before_5(self, brokers: Iterable[str]) -> bool:
        """Whether one of them is of the old line, as far as they say so. Raises `OrbitError`."""
        masters = {self._engine.routes.master(broker) for broker in brokers}
        if not masters & self._known.keys():
            await self._engine.heartbeat()
        return any(self._known.get(where, _NEW_LINE) < _NEW_LINE for where in masters)

    def keeps_times(self, broker: str) -> bool:
        """Whether a broker is known to deliver at any time. May be called by any thread."""
        # The master's word counts: in a rolling upgrade its slaves are newer than it for a while.
        master = self._engine.routes.brokers.get(broker, {}).get(MASTER)
        return master is not None and self._known.get(master, 0) >= _NEW_LINE

    async def check_times(self, broker: str, timed_by: str, within: float) -> None:
        """Raises `TimesUnsupported` for a broker of the old line.

        One that does not say what it is within the time is not available, for this message.
        """
        master = self._engine.routes.master(broker)
        if master not in self._known:
            try:
                async with asyncio.timeout(max(0.0, within)):
                    failures = await self._engine.heartbeat()
            except TimeoutError:
                failures = {}
            if master not in self._known:
                raise _unheard(broker, failures.get(master))
        version = self._known[master]
        if version < _NEW_LINE:
            raise TimesUnsupported(timed_by, broker, release_of(version))


def _unheard(broker: str, why: OrbitError | None) -> BrokerUnavailable:
    reason = "it has not said its version, without which nothing is sent to it for later"
    return BrokerUnavailable(broker, reason if why is None else f"{reason} ({why})")
