"""Writes: messages of one step of the loop are written together, then their senders are answered.

`finish` makes one `store.write` of everything that was appended. That makes the messages visible,
which wakes held pulls; then the senders are answered, those of a connection with one socket write.
A write is stored as a whole or not at all; if it fails, all its senders get the error.

It is finished at the end of a connection's turn (all requests of one read) if the same connection
sent the last time as well, else at the end of the step: a lone producer is answered fastest, and
many producers share a write. With synchronous flushing, or replicas to wait for, the answer waits
for them, at most `flush_timeout`. Too much that waits makes the broker busy. See
docs/internals/durability.md.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from orbitmq.broker.counters import Counters, Latencies, TopicCounts
from orbitmq.broker.errors import BrokerError, PutResult, PutStatus, failed, refusal_code
from orbitmq.errors import OrbitError
from orbitmq.logonce import LogEveryNth
from orbitmq.message.properties import UNIQ_KEY, WAIT, property_value
from orbitmq.remoting.connection import Connection
from orbitmq.store.settings import FlushPolicy, StoreError, WriteRefused
from orbitmq.store.store import Store
from orbitmq.wire.codes import Flag, ResponseCode, Serialization
from orbitmq.wire.command import AnswerTemplate, Command, command_pieces
from orbitmq.wire.frame import Bytes, frame_head, pack_prefix
from orbitmq.wire.headers import SendMessageResponse

if TYPE_CHECKING:
    from orbitmq.broker.settings import SendSettings
    from orbitmq.message.scan import Int64s


# Answers to sends: from templates for the usual ones, else by the encoder.


#: Offset in the log, queue, offset in the queue, unique id.
Place: TypeAlias = tuple[int, int, int, str]

_JSON = Serialization.JSON
#: The longest unique id that is answered from the template; those of clients have 32 characters.
_USUAL_ID = 64

#: Results after which the message is stored, so that the answer names its offset.
_STORED = (
    ResponseCode.SUCCESS,
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE,
    ResponseCode.FLUSH_SLAVE_TIMEOUT,
)


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """The answer to a batch."""

    offsets: Sequence[int] | Int64s  #: in the log, of all its messages
    queue_id: int
    number: int  #: in the queue, of the first message
    unique_id: str | None
    #: Of messages that were stored before: see `SendMessageResponse.duplicates`.
    duplicates: str | None = None


class SendAnswers:
    """Makes the answers to sends."""

    def __init__(self, region: str, store_host: bytes, *, trace_on: bool) -> None:
        #: The format of an offset id.
        self._host_id = store_host.hex().upper()
        self._offset_id = self._host_id + "%016X"
        self._region = region
        self._trace_on = trace_on
        self._extra = {"MSG_REGION": region, "TRACE_ON": "true" if trace_on else "false"}
        constant = {"region": region, "trace_on": trace_on}
        varying = ("msg_id", "queue_id", "queue_offset", "transaction_id")
        self._templates = {
            int(code): AnswerTemplate(
                SendMessageResponse,
                varying,
                constant=constant,
                forms={"msg_id": self._offset_id},
                code=code,
                remark=None if code is ResponseCode.SUCCESS else code.name,
            )
            for code in _STORED
        }
        self._success = self._templates[0].text
        self._batch_success = AnswerTemplate(SendMessageResponse, varying, constant=constant).text
        #: By the size of the header. Numbers have up to 20 digits each.
        longest = len(self._success) + _USUAL_ID + 4 * 20
        self._prefixes = [pack_prefix(4 + size, size) for size in range(longest)]

    def success(self, opaque: int, place: Place) -> bytes:
        """The most frequent answer, in half the time of the template's `head`."""
        at, queue_id, number, unique_id = place
        letters = unique_id.encode()
        if len(letters) > _USUAL_ID or not letters.isalnum():
            return self._templates[0].head(opaque, *place)
        header = self._success % (at, queue_id, number, letters, opaque)
        return self._prefixes[len(header)] + header

    def stored(
        self, code: int, request: Command, place: Place | BatchPlace | SendMessageResponse
    ) -> Sequence[Bytes]:
        """The answer to a send whose messages are in the log."""
        if isinstance(place, BatchPlace):
            return self._stored_batch(code, request, place)
        if request.serialization is _JSON and isinstance(place, tuple):
            return (self._templates[code].head(request.opaque, *place),)
        header = place if isinstance(place, SendMessageResponse) else self.header(place)
        return self._encoded(code, request, header)

    def _stored_batch(self, code: int, request: Command, place: BatchPlace) -> Sequence[Bytes]:
        offsets, unique_id = place.offsets, place.unique_id or ""
        ids = self._offset_ids(offsets)
        # The encoder would search a thousand characters of ids for what has to be escaped.
        is_usual = code == ResponseCode.SUCCESS and request.serialization is _JSON
        is_usual = is_usual and place.duplicates is None
        if is_usual and unique_id.isascii() and unique_id.isalnum():
            header = self._batch_success % (
                ids,
                place.queue_id,
                place.number,
                unique_id.encode(),
                request.opaque,
            )
            return (frame_head(int(_JSON), header),)
        fields = SendMessageResponse(
            msg_id=ids.decode(),
            queue_id=place.queue_id,
            queue_offset=place.number,
            transaction_id=place.unique_id,
            duplicates=place.duplicates,
        )
        return self._encoded(code, request, fields)

    def _offset_ids(self, offsets: Sequence[int] | Int64s) -> bytes:
        if not isinstance(offsets, np.ndarray):
            return b",".join([self._offset_id.encode()] * len(offsets)) % tuple(offsets)
        digits = offsets.astype(">i8").tobytes().hex(",", 8).upper()
        return (self._host_id + digits.replace(",", "," + self._host_id)).encode()

    def _encoded(self, code: int, request: Command, header: SendMessageResponse) -> list[Bytes]:
        remark = None if code == ResponseCode.SUCCESS else ResponseCode(code).name
        return command_pieces(request.answer(code, self._marked(header), remark=remark))

    def refused(self, request: Command, code: int, remark: str) -> Command:
        """The answer to a send that was not stored."""
        return request.answer(code, remark=remark, extra=self._extra)

    def header(self, place: Place) -> SendMessageResponse:
        """A place as a header, to add unusual fields."""
        at, queue_id, queue_offset, unique_id = place
        return SendMessageResponse(
            msg_id=self._offset_id % at,
            queue_id=queue_id,
            queue_offset=queue_offset,
            transaction_id=unique_id,
        )

    def _marked(self, header: SendMessageResponse) -> SendMessageResponse:
        return msgspec.structs.replace(header, region=self._region, trace_on=self._trace_on)


log = logging.getLogger(__name__)

_ONE_WAY = int(Flag.ONE_WAY)


Done: TypeAlias = Callable[[PutResult], None]

#: Calls with the status when the log below an offset is on enough brokers, or will not be.
WhenCopied: TypeAlias = Callable[[int, Callable[[PutStatus], None]], None]

#: A sender: its connection and request, and the place of its message.
Sender: TypeAlias = tuple[Connection, Command, Place | BatchPlace | SendMessageResponse]
#: A callback of the broker, and the place of its message.
_Putter: TypeAlias = tuple[Done, tuple[int, int]]


class _Write:
    """The senders and callbacks of one write."""

    __slots__ = ("began", "putters", "senders", "size", "timer")

    def __init__(self) -> None:
        self.senders: list[Sender] = []
        self.putters: list[_Putter] = []
        #: When the write began.
        self.began = 0.0
        #: While it waits for the flush: the bytes of its messages, and its timeout.
        self.size = 0
        self.timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.senders) + len(self.putters)


class Writes:
    """The only way into the store. Belongs to the loop."""

    def __init__(
        self,
        store: Store,
        answers: SendAnswers,
        settings: SendSettings,
        loop: asyncio.AbstractEventLoop,
        latencies: Latencies,
        counters: Counters,
    ) -> None:
        self.transformations = Transformations()
        self.answers = answers
        self.settings = settings
        #: Whether something was appended and not written yet; set by direct callers of the store.
        self.is_dirty = False
        #: The present write: senders that are answered when it is stored as the policy demands, and
        #: senders that are answered when it is written.
        self.waiting_for_flush = _Write()
        self.answered_after_write = _Write()
        #: The topics that got messages of producers in this write (as `taken`), which are counted
        #: when it is written.
        self.counting: list[TopicCounts] = []
        #: Whether stored means "on the disk".
        self.is_sync = store.settings.flush.policy is FlushPolicy.SYNC
        #: Too much waits for the disk: sends are refused for a while.
        self.is_busy = False
        #: Whether a sender may have to wait longer than for the write.
        self.is_slow = self.is_sync
        self._when_copied: WhenCopied | None = None
        #: Called before a write; may append to it. An exception refuses the write.
        self.before_write: list[Callable[[], None]] = []
        #: Called once, after the present write, with whether it was stored; before any answer.
        self.after_write: list[Callable[[bool], None]] = []
        self._store = store
        self._loop = loop
        self._latencies = latencies
        self._counters = counters
        self._monotonic = latencies.monotonic
        self._is_scheduled = False
        self._last_sender: Connection | None = None
        self._refusals = LogEveryNth()
        self._waiting_messages = 0
        self._waiting_bytes = 0
        self._flushing: set[_Write] = set()

    @property
    def waiting(self) -> int:
        """Messages that are written and wait for the disk."""
        return self._waiting_messages

    def wait_for_copies(self, when_copied: WhenCopied) -> None:
        """From now on a message counts as stored when it is on enough brokers."""
        self._when_copied = when_copied
        self.is_slow = True

    # Putting.

    def put(self, draft: Draft, done: Done | None = None, *, transform: bool = True) -> None:
        """Put a message of the broker; `done` gets the result, never before this returns.

        A message that was parked in the store (`transform=False`) still has the properties for
        which it was parked, and is not parked again.
        """
        try:
            if transform:
                self.transformations.apply(draft)
            self.add(draft, done)
        except OrbitError as error:
            self._notify_later(done, failed(error))

    def add(self, draft: Draft, done: Done | None = None) -> None:
        """Put a message that the rest of the write depends on: raises what the store raises."""
        place = self.append(draft)
        if done is not None:
            (self.waiting_for_flush if draft.waits else self.answered_after_write).putters.append(
                (done, place)
            )

    def append(self, draft: Draft) -> tuple[int, int]:
        """Append a message to the present write: its offset in the log, its offset in the queue.

        Raises what the store raises; then the message is not part of the write.
        """
        place = self._store.append(
            draft.topic,
            draft.queue_id,
            draft.body,
            draft.properties,
            draft.born_ms,
            draft.born_host,
            draft.sys_flag,
            draft.flag,
            draft.reconsume_times,
            draft.prepared_offset,
        )
        # Later messages of this step may have been sent only now.
        self._store.take_time_anew()
        self.is_dirty = True
        self.finish_soon()
        return place

    def answer_later(
        self,
        connection: Connection,
        request: Command,
        place: Place | BatchPlace | SendMessageResponse,
        *,
        waits: bool = True,
    ) -> None:
        """Answer a send when its message is stored; a one-way request gets no answer."""
        self.is_dirty = True
        if not request.flag & _ONE_WAY:
            (self.waiting_for_flush if waits else self.answered_after_write).senders.append(
                (connection, request, place)
            )

    def count(self, counts: TopicCounts, sizes: list[int]) -> None:
        """Count messages of these sizes for a topic when they are written."""
        if sizes:
            if not counts.taken:
                self.counting.append(counts)
            counts.taken += sizes

    def finish_soon(self) -> None:
        """Finish the write at the end of this step of the loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._finish_scheduled)

    # Finishing.

    def end(self, connection: Connection) -> None:
        """A connection's turn has ended."""
        if not self.is_dirty:
            return
        if connection is self._last_sender:
            self.finish()
        else:
            self._last_sender = connection
            # As after `append`: later messages may have been sent only now.
            self._store.take_time_anew()
            self.finish_soon()

    def finish(self) -> None:
        """Write what was appended, and answer."""
        if not self.is_dirty:
            return
        began, end = self._monotonic(), 0
        refusal = self._complete()
        self.is_dirty = False
        counting, self.counting = self.counting, []
        waiting_for_flush, answered_after_write = self.waiting_for_flush, self.answered_after_write
        waiting_for_flush.began = answered_after_write.began = began
        # Inline: all senders wait for what comes before the write.
        must_wait = bool(waiting_for_flush.senders or waiting_for_flush.putters)
        must_answer = bool(answered_after_write.senders or answered_after_write.putters)
        if must_wait:
            self.waiting_for_flush = _Write()
        if must_answer:
            self.answered_after_write = _Write()
        if refusal is not None:
            self._store.discard()
        else:
            end, refusal = self._write()
        for counts in counting:
            counts.settle(are_stored=refusal is None)
        if self.after_write:
            after_write, self.after_write = self.after_write, []
            for call in after_write:
                call(refusal is None)
        if refusal is not None:
            self._fail(waiting_for_flush, refusal)
            self._fail(answered_after_write, refusal)
            return
        if must_answer:
            self._answer(answered_after_write, PutStatus.PUT_OK)
        if not must_wait:
            return
        if self.is_sync:
            self._answer_when_flushed(waiting_for_flush, end)
        elif self._when_copied is not None:
            self._wait(waiting_for_flush)
            self._when_copied(end, lambda status: self._settle(waiting_for_flush, status))
        else:
            self._answer(waiting_for_flush, PutStatus.PUT_OK)

    def _complete(self) -> OrbitError | None:
        """Call `before_write`; the error if that failed."""
        try:
            for call in self.before_write:
                call()
        except OrbitError as error:
            if count := self._refusals.note(type(error).__name__):
                log.warning("a write could not be completed: %s (%d so far)", error, count)
            return error
        except Exception as error:
            log.exception("a write could not be completed")
            return BrokerError(f"the broker failed: {type(error).__name__}: {error}")
        return None

    def _write(self) -> tuple[int, OrbitError | None]:
        """The end of the log, and the error if nothing was written."""
        try:
            return self._store.write(), None
        except WriteRefused as error:
            if count := self._refusals.note(type(error).__name__):
                log.warning("nothing of a write was stored: %s (%d so far)", error, count)
            return 0, error
        except Exception as error:
            log.exception("a write failed")
            return 0, BrokerError(f"the store failed: {type(error).__name__}: {error}")

    def _finish_scheduled(self) -> None:
        self._is_scheduled = False
        self.finish()

    def _answer_when_flushed(self, write: _Write, end: int) -> None:
        self._wait(write)
        write.timer = self._loop.call_later(
            self.settings.flush_timeout, self._settle, write, PutStatus.FLUSH_DISK_TIMEOUT
        )
        self._store.when_flushed(end, lambda failure: self._flushed(write, end, failure))

    def _wait(self, write: _Write) -> None:
        """Keep the senders of a write waiting."""
        for connection, request, _ in write.senders:
            connection.leave_open(request)
            write.size += len(request.body)
        self._flushing.add(write)
        self._count(len(write), write.size)

    def _flushed(self, write: _Write, end: int, failure: StoreError | None) -> None:
        if write not in self._flushing:
            return  # answered with FLUSH_DISK_TIMEOUT already
        if failure is None and self._when_copied is not None:
            # Slaves get what is on the disk here; their timeout begins now.
            if write.timer is not None:
                write.timer.cancel()
            self._when_copied(end, lambda status: self._settle(write, status))
        elif failure is None:
            self._settle(write, PutStatus.PUT_OK)
        elif self._take(write):
            self._fail(write, failure)
            _release(write)

    def _settle(self, write: _Write, status: PutStatus) -> None:
        if self._take(write):
            self._answer(write, status)
            _release(write)

    def _take(self, write: _Write) -> bool:
        """End the waiting of a write; whether it was waiting."""
        if write not in self._flushing:
            return False
        self._flushing.discard(write)
        if write.timer is not None:
            write.timer.cancel()
        self._count(-len(write), -write.size)
        return True

    def _count(self, messages: int, size: int) -> None:
        self._waiting_messages += messages
        self._waiting_bytes += size
        self.is_busy = (
            self._waiting_messages >= self.settings.waiting_messages
            or self._waiting_bytes >= self.settings.waiting_bytes
        )

    # Answers and callbacks.

    def _answer(self, write: _Write, status: PutStatus) -> None:
        code = int(status.value)
        stored, success = self.answers.stored, self.answers.success
        sending: Connection | None = None
        heads: list[Bytes] = []
        for connection, request, place in write.senders:
            if connection is not sending:
                if sending is not None:
                    sending.send_pieces(heads)
                    sending.flush()
                sending, heads = connection, []
            if code == 0 and type(place) is tuple and request.serialization is _JSON:
                heads.append(success(request.opaque, place))
            else:
                heads += stored(code, request, place)
        if sending is not None:
            sending.send_pieces(heads)
            sending.flush()
        codes = [request.code for _, request, _ in write.senders]
        self._latencies.stored(write.began, codes, len(write.putters), code)
        for done, (at, number) in write.putters:
            self._notify(done, PutResult(status, at, number))

    def _fail(self, write: _Write, error: OrbitError) -> None:
        code = refusal_code(error)
        milliseconds = (self._monotonic() - write.began) * 1000
        self._counters.failed_puts += len(write.senders)
        for connection, request, _ in write.senders:
            connection.send(self.answers.refused(request, code, str(error)))
            self._latencies.call((request.code, code, False), milliseconds)
        for done, _ in write.putters:
            self._notify(done, failed(error))

    def _notify_later(self, done: Done | None, result: PutResult) -> None:
        if done is not None:
            self._loop.call_soon(self._notify, done, result)

    @staticmethod
    def _notify(done: Done, result: PutResult) -> None:
        try:
            done(result)
        except Exception:
            # The other senders of the write still have to be answered.
            log.exception("a callback after a put failed")


def _release(write: _Write) -> None:
    for connection, request, _ in write.senders:
        connection.release(request)


# Drafts: messages that are changed before they are stored. A half message goes to the half topic,
# one with a delay to the schedule topic, a timer message to the timer topic. These transformations
# are all requested by properties, so nearly all messages are recognised as ordinary by a few
# searches in their property string, and never become a draft.


@dataclass(slots=True)
class Draft:
    """A message that is not in the log yet. Transformations change it in place."""

    topic: str
    queue_id: int
    body: Bytes
    properties: bytes
    born_ms: int
    born_host: bytes  #: packed
    sys_flag: int = 0
    flag: int = 0
    reconsume_times: int = 0
    prepared_offset: int = 0
    #: Whether its sender waits for the flush policy (`WAIT`).
    waits: bool = True
    #: For the producer, to recall a timer message.
    recall_handle: str | None = None


#: Changes a draft, or raises `broker.errors.Refused` with the code for the producer.
Transformation: TypeAlias = Callable[[Draft], None]


class Stage(enum.IntEnum):
    """The order of transformations, as in Apache's broker."""

    HALF_MESSAGE = 1
    TIMER = 2
    DELAY_LEVEL = 3


@dataclass(frozen=True, slots=True)
class _Rule:
    mark: str
    raw: bytes
    stage: Stage
    transform: Transformation


class Transformations:
    """The rules by which drafts are changed."""

    def __init__(self) -> None:
        self._rules: tuple[_Rule, ...] = ()
        self._noticed: tuple[str, ...] = ()
        #: Texts of which one is in the properties of every message that has to be examined.
        self.marks: tuple[str, ...] = ()

    def add(self, mark: str, stage: Stage, transform: Transformation) -> None:
        """Have `transform` called for messages whose property string contains `mark`.

        The mark may be part of a value; the transformation checks that.
        """
        rule = _Rule(mark, mark.encode(), stage, transform)
        self._rules = tuple(sorted((*self._rules, rule), key=lambda each: each.stage))
        self._set_marks()

    def notice(self, mark: str) -> None:
        """Have messages with this mark examined as well, though no rule changes them."""
        self._noticed += (mark,)
        self._set_marks()

    def _set_marks(self) -> None:
        self.marks = tuple(dict.fromkeys((*(each.mark for each in self._rules), *self._noticed)))

    def concern(self, properties: str) -> bool:
        """Whether a message with these properties has to be examined."""
        for mark in self.marks:  # noqa: SIM110  # a generator takes three times as long
            if mark in properties:
                return True
        return False

    def change(self, properties: str) -> bool:
        """Whether a rule may change a message with these properties."""
        return any(rule.mark in properties for rule in self._rules)

    def apply(self, draft: Draft) -> None:
        """Apply the rules to a draft. Raises `broker.errors.Refused`."""
        for rule in self._rules:
            if rule.raw in draft.properties:
                rule.transform(draft)


# Searches in the property strings of all messages, without decoding them.


_UNIQ_KEY = UNIQ_KEY + "\x01"
_ITEM_END = "\x02"


def unique_id_of(properties: str) -> str | None:
    """The unique id in a property string; None when there is none."""
    before, name, rest = properties.partition(_UNIQ_KEY)
    if not name:
        return None
    if (before and before[-1] != _ITEM_END) or _UNIQ_KEY in rest:
        # In a value, or more than once: decode properly.
        return property_value(properties, UNIQ_KEY)
    return rest.partition(_ITEM_END)[0] or None


def waits_for_flush(properties: str) -> bool:
    """Whether the sender of a message waits for the flush policy."""
    wait = property_value(properties, WAIT)
    return wait is None or wait.lower() == "true"
