"""Turns: what is put within one step of the loop is written once, then answered.

`finish` makes one `store.write` of everything that was appended since the last one. The write makes
the messages visible, which wakes held pulls (`store.on_arrival`); then the senders are answered,
all of a connection with one socket write.

When is a turn finished? A lone producer is answered fastest at the end of its connection's turn
(all requests of one read). With many producers the cost is in the system calls, and it pays to let
the other sockets that are ready in the same step of the loop join in: 64 connections with one
message each took 1.6 times as much when each was written by itself, one connection with one message
1.2 times as much when it waited for others. So a turn is finished at its end if the same connection
sent before it, and else at the end of the step. What somebody puts outside of any turn (a delivery
that is due, a transaction that is decided) is written at the end of the step as well.

Either the whole turn is stored or nothing of it: when the write fails, or something that belongs
to the turn cannot be added to it (`before_write`), every sender of the turn is told so, with the
code that its client understands, and may send again.

With synchronous flushing the answer waits for the flush that covers the message, at most
`flush_timeout`: after that it says FLUSH_DISK_TIMEOUT, which means "stored, but perhaps not yet
on the disk". Whatever was written during one flush shares the next. A message whose `WAIT` is
false is answered after the write. Too much of what waits makes the broker busy (`is_busy`), so a
disk that has become slow is felt by producers as flow control and not as memory. A master that has
to have its messages on other brokers too (`wait_for_copies`) waits for these in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeAlias

from orbitmq.broker.answers import BatchPlace, Place, SendAnswers
from orbitmq.broker.counters import Counters, TopicCounts
from orbitmq.broker.drafts import Draft, Transformations
from orbitmq.broker.errors import BrokerError
from orbitmq.broker.latencies import Latencies
from orbitmq.broker.outcomes import PutResult, PutStatus, failed, refusal_code
from orbitmq.broker.settings import SendSettings
from orbitmq.errors import OrbitError
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.occurrences import Occurrences
from orbitmq.store.errors import StoreError, WriteRefused
from orbitmq.store.settings import FlushPolicy
from orbitmq.store.store import Store
from orbitmq.wire.codes import Flag, Serialization
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers.send import SendMessageResponse

log = logging.getLogger(__name__)

_ONE_WAY = int(Flag.ONE_WAY)
_JSON = Serialization.JSON


Done: TypeAlias = Callable[[PutResult], None]

#: Calls when the log below an offset is on enough brokers, or why it is not.
WhenCopied: TypeAlias = Callable[[int, Callable[[PutStatus], None]], None]

#: A sender to be answered: its request, and where its message is.
Sender: TypeAlias = tuple[Connection, Command, Place | BatchPlace | SendMessageResponse]
#: Somebody of ours to be told, and where the message is.
_Putter: TypeAlias = tuple[Done, tuple[int, int]]


class _Turn:
    """Those who are to be told about one write."""

    __slots__ = ("began", "putters", "senders", "size", "timer")

    def __init__(self) -> None:
        self.senders: list[Sender] = []
        self.putters: list[_Putter] = []
        #: When the write began.
        self.began = 0.0
        #: For those who wait for the flush: bytes of their messages, and when their time is up.
        self.size = 0
        self.timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.senders) + len(self.putters)


class Turns:
    """The one way into the store. Belongs to the loop."""

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
        #: Whether something was appended and not written yet; set by whoever appends directly.
        self.is_dirty = False
        #: Who is to be told about the current turn when it is stored as the policy says, and who
        #: when it is written. A send adds itself to their `senders`.
        self.patient = _Turn()
        self.hasty = _Turn()
        #: The counts of topics to which producers have sent something in the current turn: they
        #: have it as `taken`, and it counts when it is written.
        self.counting: list[TopicCounts] = []
        #: Whether stored means "on the disk".
        self.is_sync = store.settings.flush.policy is FlushPolicy.SYNC
        #: Too much waits for the disk: sends are to be refused for a while.
        self.is_busy = False
        #: Whether a sender may have to wait longer than for the write.
        self.is_slow = self.is_sync
        self._when_copied: WhenCopied | None = None
        #: Called before a turn is written; may append to it. What is raised refuses the turn.
        self.before_write: list[Callable[[], None]] = []
        self._store = store
        self._loop = loop
        self._latencies = latencies
        self._counters = counters
        self._monotonic = latencies.monotonic
        self._is_scheduled = False
        self._last_sender: Connection | None = None
        self._refusals = Occurrences()
        self._waiting_messages = 0
        self._waiting_bytes = 0
        self._flushing: set[_Turn] = set()

    @property
    def waiting(self) -> int:
        """Puts that are written and wait for the disk."""
        return self._waiting_messages

    def wait_for_copies(self, when_copied: WhenCopied) -> None:
        """From now on a message counts as stored when it is on enough brokers."""
        self._when_copied = when_copied
        self.is_slow = True

    # Putting.

    def put(self, draft: Draft, done: Done | None = None, *, transform: bool = True) -> None:
        """Put a message of ours; `done` is told what became of it, never before this returns.

        A message that was taken from the store and goes where it belongs (`transform=False`) still
        carries the properties that parked it, and is not to be parked again.
        """
        try:
            if transform:
                self.transformations.apply(draft)
            self.add(draft, done)
        except OrbitError as error:
            self._tell_later(done, failed(error))

    def add(self, draft: Draft, done: Done | None = None) -> None:
        """Put a message that the rest of the turn depends on: raises what the store raises."""
        place = self.append(draft)
        if done is not None:
            (self.patient if draft.waits else self.hasty).putters.append((done, place))

    def append(self, draft: Draft) -> tuple[int, int]:
        """Append a message to the current turn: its offset in the log, its number in the queue.

        Raises what the store raises; then the message has no part in the turn.
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
        # What connections bring into this turn after it may have been sent only now.
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
        """Answer a send when its message is stored. Nothing is said to a one-way request."""
        self.is_dirty = True
        if not request.flag & _ONE_WAY:
            (self.patient if waits else self.hasty).senders.append((connection, request, place))

    def count(self, counts: TopicCounts, sizes: list[int]) -> None:
        """Count messages of these sizes for a topic when they are written."""
        if sizes:
            if not counts.taken:
                self.counting.append(counts)
            counts.taken += sizes

    def finish_soon(self) -> None:
        """Have what was put finished at the end of this step of the loop."""
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
            # As after `append`: they may have sent it only now.
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
        patient, hasty = self.patient, self.hasty
        patient.began = hasty.began = began
        # By hand: those who wait for these messages wait for all that comes before the write.
        has_patient = bool(patient.senders or patient.putters)
        has_hasty = bool(hasty.senders or hasty.putters)
        if has_patient:
            self.patient = _Turn()
        if has_hasty:
            self.hasty = _Turn()
        if refusal is not None:
            self._store.discard()
        else:
            end, refusal = self._write()
        for counts in counting:
            counts.settle(are_stored=refusal is None)
        if refusal is not None:
            self._fail(patient, refusal)
            self._fail(hasty, refusal)
            return
        if has_hasty:
            self._answer(hasty, PutStatus.PUT_OK)
        if not has_patient:
            return
        if self.is_sync:
            self._answer_when_flushed(patient, end)
        elif self._when_copied is not None:
            self._wait(patient)
            self._when_copied(end, lambda status: self._settle(patient, status))
        else:
            self._answer(patient, PutStatus.PUT_OK)

    def _complete(self) -> OrbitError | None:
        """Have added what belongs to the turn; why that failed."""
        try:
            for call in self.before_write:
                call()
        except OrbitError as error:
            if count := self._refusals.note(type(error).__name__):
                log.warning("a turn could not be completed: %s (%d so far)", error, count)
            return error
        except Exception as error:
            log.exception("a turn could not be completed")
            return BrokerError(f"the broker failed: {type(error).__name__}: {error}")
        return None

    def _write(self) -> tuple[int, OrbitError | None]:
        """Where the log ends now, and why nothing was written."""
        try:
            return self._store.write(), None
        except WriteRefused as error:
            if count := self._refusals.note(type(error).__name__):
                log.warning("nothing of a turn was stored: %s (%d so far)", error, count)
            return 0, error
        except Exception as error:
            log.exception("a turn could not be written")
            return 0, BrokerError(f"the store failed: {type(error).__name__}: {error}")

    def _finish_scheduled(self) -> None:
        self._is_scheduled = False
        self.finish()

    def _answer_when_flushed(self, turn: _Turn, end: int) -> None:
        self._wait(turn)
        turn.timer = self._loop.call_later(
            self.settings.flush_timeout, self._settle, turn, PutStatus.FLUSH_DISK_TIMEOUT
        )
        self._store.when_flushed(end, lambda failure: self._flushed(turn, end, failure))

    def _wait(self, turn: _Turn) -> None:
        """Keep those of a turn waiting."""
        for connection, request, _ in turn.senders:
            connection.leave_open(request)
            turn.size += len(request.body)
        self._flushing.add(turn)
        self._count(len(turn), turn.size)

    def _flushed(self, turn: _Turn, end: int, failure: StoreError | None) -> None:
        if turn not in self._flushing:
            return  # it was answered that the disk takes long
        if failure is None and self._when_copied is not None:
            # Slaves are sent what is on the disk here. Their time begins now.
            if turn.timer is not None:
                turn.timer.cancel()
            self._when_copied(end, lambda status: self._settle(turn, status))
        elif failure is None:
            self._settle(turn, PutStatus.PUT_OK)
        elif self._take(turn):
            self._fail(turn, failure)
            _release(turn)

    def _settle(self, turn: _Turn, status: PutStatus) -> None:
        if self._take(turn):
            self._answer(turn, status)
            _release(turn)

    def _take(self, turn: _Turn) -> bool:
        """Whether it still waits; from now on it does not."""
        if turn not in self._flushing:
            return False
        self._flushing.discard(turn)
        if turn.timer is not None:
            turn.timer.cancel()
        self._count(-len(turn), -turn.size)
        return True

    def _count(self, messages: int, size: int) -> None:
        self._waiting_messages += messages
        self._waiting_bytes += size
        self.is_busy = (
            self._waiting_messages >= self.settings.waiting_messages
            or self._waiting_bytes >= self.settings.waiting_bytes
        )

    # Telling.

    def _answer(self, turn: _Turn, status: PutStatus) -> None:
        code = int(status.value)
        stored, success = self.answers.stored, self.answers.success
        sending: Connection | None = None
        heads: list[Bytes] = []
        for connection, request, place in turn.senders:
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
        codes = [request.code for _, request, _ in turn.senders]
        self._latencies.stored(turn.began, codes, len(turn.putters), code)
        for done, (at, number) in turn.putters:
            self._tell(done, PutResult(status, at, number))

    def _fail(self, turn: _Turn, error: OrbitError) -> None:
        code = refusal_code(error)
        milliseconds = (self._monotonic() - turn.began) * 1000
        self._counters.failed_puts += len(turn.senders)
        for connection, request, _ in turn.senders:
            connection.send(self.answers.refused(request, code, str(error)))
            self._latencies.call((request.code, code, False), milliseconds)
        for done, _ in turn.putters:
            self._tell(done, failed(error))

    def _tell_later(self, done: Done | None, result: PutResult) -> None:
        if done is not None:
            self._loop.call_soon(self._tell, done, result)

    @staticmethod
    def _tell(done: Done, result: PutResult) -> None:
        try:
            done(result)
        except Exception:
            # The others of the turn have a right to their answers.
            log.exception("what followed a put failed")


def _release(turn: _Turn) -> None:
    for connection, request, _ in turn.senders:
        connection.release(request)
