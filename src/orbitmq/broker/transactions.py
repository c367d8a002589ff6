"""Half messages: stored and not yet visible, until their producer says what becomes of them.

A half message lies in the half topic. Its end, commit or rollback, is noted by an *op message* with
its offset there. What has no op message some time after its birth is asked about, and to be asked
about again later it is appended to the half topic once more: so the half queue is read from front
to back, and its progress (group `CID_RMQ_SYS_TRANS`, kept like everybody's) moves on always.

**Commit and mark are one write.** The op message of all that ended in a turn is appended to the
same turn as the messages that were committed, and a turn is stored as a whole or not at all. After
a crash a transaction is therefore either ended, and its message is there, or open, and is asked
about. (Apache writes the op messages up to three seconds later, and a crash in between commits
twice.)

**Copies.** What was appended again has two offsets, and its producer may quote the first (it was
slow) or the last (it answers the question). The root of a transaction is its first offset, which
copies carry as `TRAN_PREPARED_QUEUE_OFFSET`. An end marks the quoted offset, the root and the
latest copy; and who ends a transaction a second time, by another of its offsets, changes nothing
any more.

Producers have no say in that: what they claim about the root and the number of questions is
taken out of a message when it is parked, and again when it is committed, so that whoever copies its
properties into a new message does not pass them on.

Op messages are read at a start only: from then on all of them are ours. The progress in the op
queue is the first op message that names an offset which the half queue's progress has not passed.
Some before that are read as well, to recognise whoever ends a transaction again after a restart.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq import names
from orbitmq.broker.attributes import READ_WRITE
from orbitmq.broker.errors import BrokerError, PutResult, Refused, failed, refusal_code
from orbitmq.broker.groups import Channel
from orbitmq.broker.progress import CommitSource
from orbitmq.broker.scheduled import Reading, Release, TransactionCounts, copied, park, real_place
from orbitmq.broker.scheduler import no_wake
from orbitmq.broker.writes import Draft, Stage
from orbitmq.clock import milliseconds
from orbitmq.errors import OrbitError
from orbitmq.logonce import LogAtIntervals, LogEveryNth
from orbitmq.message.ids import encode_offset_id
from orbitmq.message.properties import (
    CHECK_IMMUNITY_TIME_IN_SECONDS,
    DELAY,
    KEYS,
    PRODUCER_GROUP,
    REAL_QUEUE_ID,
    REAL_TOPIC,
    TAGS,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TRANSACTION_CHECK_TIMES,
    TRANSACTION_ID,
    TRANSACTION_PREPARED,
    TRANSACTION_PREPARED_QUEUE_OFFSET,
    UNIQ_KEY,
    encode_properties,
    property_value,
    remove_properties,
    replace_property,
)
from orbitmq.message.record import (
    TRANSACTION_COMMIT,
    TRANSACTION_NONE,
    BodyCorrupt,
    MessageError,
    with_transaction_type,
)
from orbitmq.message.stored import StoredMessage, decode_message
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result
from orbitmq.store.settings import StoreError
from orbitmq.wire.bodies import TopicConfig
from orbitmq.wire.codes import Flag, RequestCode, ResponseCode, TransactionState
from orbitmq.wire.command import Command
from orbitmq.wire.headers import (
    CheckTransactionStateRequest,
    EndTransactionRequest,
    ResumeCheckHalfMessageRequest,
)

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts


log = logging.getLogger(__name__)

GROUP = "CID_RMQ_SYS_TRANS"
#: The only queue of the half topic and of the op topic that is used.
QUEUE = 0
#: The tag of op messages.
ENDED_TAG = "d"
#: Bytes of offsets in an op message (`transactionOpMsgMaxSize`).
OP_BYTES = 4096
#: Ends that are remembered to recognise a second one.
REMEMBERED_ENDS = 65_536
#: Op messages before the progress that are read at a start for the same purpose.
REMEMBERED_OPS = 1024
#: What the broker notes on half messages, and nobody else.
OWN_NOTES = (TRANSACTION_PREPARED_QUEUE_OFFSET, TRANSACTION_CHECK_TIMES)

_SEPARATOR = ","
_BATCH = 1024
#: Delays are of no use to a half message, and would make it disappear from its transaction.
_DELAYS = (DELAY, TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS)


@dataclass(frozen=True, slots=True)
class _Mark:
    offset: int
    told: Callable[[PutResult], None] | None


class HalfMessages:
    """The open transactions of a broker."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._store = parts.store
        #: The first half message that has not been dealt with.
        self.position = self._saved(names.HALF_TOPIC)
        self._op_position = self._saved(names.OP_HALF_TOPIC)
        #: Ended half messages at or behind the position.
        self._ended: set[int] = set()
        #: Op messages at or behind the op position, and the highest offset in each.
        self._ops: deque[tuple[int, int]] = deque()
        #: The latest copy of a transaction by its root, and the other way round.
        self._copies: dict[int, int] = {}
        self._roots: dict[int, int] = {}
        #: How transactions ended lately, by their root.
        self._ends: dict[int, TransactionState] = {}
        #: What op messages of earlier runs say has ended.
        self._ended_earlier: set[int] = set()
        self._marks: list[_Mark] = []
        self.counts = TransactionCounts()
        self._read_back()
        parts.writes.before_write.append(self._write_marks)
        parts.writes.transformations.add(
            TRANSACTION_PREPARED + "\x01", Stage.HALF_MESSAGE, self.park
        )

    # Parking.

    def park(self, draft: Draft) -> None:
        """Store a message of a transaction in the half topic; a transformation."""
        properties = draft.properties
        if (property_value(properties, TRANSACTION_PREPARED) or "").lower() != "true":
            return
        if draft.topic.startswith((names.RETRY_PREFIX, names.DEAD_LETTER_PREFIX)):
            # It was committed, failed and comes back with what it once was in its properties.
            return
        if self._parts.settings.send.reject_transactions:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._parts.address}] sending transaction message is forbidden",
            )
        unique_id = property_value(properties, UNIQ_KEY)
        properties = remove_properties(properties, _DELAYS + OWN_NOTES)
        if unique_id:
            properties = replace_property(properties, TRANSACTION_ID, unique_id)
        draft.properties = properties
        draft.sys_flag = with_transaction_type(draft.sys_flag, TRANSACTION_NONE)
        park(draft, names.HALF_TOPIC, QUEUE)

    # Ending.

    def end_of(self, root: int) -> TransactionState | None:
        """How a transaction ended, as far as that is remembered."""
        return self._ends.get(root)

    def has_ended(self, half: StoredMessage) -> bool:
        """Whether a transaction has ended, by any of its copies; perhaps nobody knows how."""
        root = root_of(half)
        if root in self._ends:
            return True
        copies = {root, half.queue_offset, self._copies.get(root, root)}
        return not (self._ended.isdisjoint(copies) and self._ended_earlier.isdisjoint(copies))

    def end(
        self,
        half: StoredMessage,
        state: TransactionState,
        told: Callable[[PutResult], None] | None = None,
    ) -> None:
        """Mark a half message as ended, in the turn that is under way."""
        root = root_of(half)
        latest = self._copies.get(root, half.queue_offset)
        is_first = root not in self._ends

        def written(result: PutResult) -> None:
            if not result.status.is_stored:
                if self._ends.get(root) is state:
                    del self._ends[root]
            elif is_first:
                self._count(half, state)
            if told is not None:
                told(result)

        self._ends[root] = state
        if len(self._ends) > REMEMBERED_ENDS:
            del self._ends[next(iter(self._ends))]
        self._marks.append(_Mark(half.queue_offset, written))
        for copy in {root, latest} - {half.queue_offset}:
            self._marks.append(_Mark(copy, None))
        self._parts.writes.is_dirty = True
        self._parts.writes.finish_soon()

    def _count(self, half: StoredMessage, state: TransactionState) -> None:
        place = real_place(half)
        if place is not None:
            self.counts.ended(
                place[0],
                is_commit=state is TransactionState.COMMIT,
                seconds=self._parts.clock.now() - half.born_ms / 1000,
            )

    def _write_marks(self) -> None:
        """Append op messages for what ended in this turn. What is raised refuses the turn."""
        marks, self._marks = self._marks, []
        begin = 0
        try:
            while begin < len(marks):
                end, size = begin, 0
                while end < len(marks) and size < OP_BYTES:
                    size += len(str(marks[end].offset)) + 1
                    end += 1
                self._write_op(marks[begin:end])
                begin = end
        except Exception as error:
            # Those before are in the turn, and hear of its end with everybody else.
            cause = error if isinstance(error, OrbitError) else BrokerError(f"no mark: {error}")
            _notify(marks[begin:], failed(cause))
            raise

    def _write_op(self, marks: list[_Mark]) -> None:
        parts = self._parts
        body = "".join([f"{mark.offset}{_SEPARATOR}" for mark in marks]).encode()
        properties = encode_properties({TAGS: ENDED_TAG, UNIQ_KEY: parts.unique_ids()})
        now_ms = milliseconds(parts.clock.now())
        draft = Draft(
            names.OP_HALF_TOPIC, QUEUE, body, properties, now_ms, parts.store_host, waits=False
        )

        def stored(result: PutResult) -> None:
            if result.status.is_stored:
                self._note_op(result.queue_offset, [mark.offset for mark in marks])
            _notify(marks, result)

        parts.writes.add(draft, stored)

    def _note_op(self, op_offset: int, offsets: list[int]) -> None:
        self._ops.append((op_offset, max(offsets, default=-1)))
        self._ended.update(offset for offset in offsets if offset >= self.position)

    # Going through them.

    @property
    def open_count(self) -> int:
        """How many half messages have not ended."""
        known = self._store.max_offset(names.HALF_TOPIC, QUEUE) - self.position
        # One that waits for the disk may have ended already.
        return max(known - len(self._ended), 0)

    def is_open(self, half: StoredMessage) -> bool:
        """Whether a half message has to be dealt with: not ended, and no copy of it further on.

        After a crash the progress may be before a message that had been appended again.
        """
        if half.queue_offset in self._ended:
            return False
        return self._copies.get(root_of(half), -1) <= half.queue_offset

    def skip_ended(self) -> None:
        """Move on over what has ended, up to what can be read: more may wait for the disk."""
        position = self.position
        end = self._store.max_offset(names.HALF_TOPIC, QUEUE)
        while position < end and position in self._ended:
            self._ended.discard(position)
            self._forget_copy(position)
            position += 1
        self.position = position

    def pass_to(self, position: int) -> None:
        """Everything before `position` has ended, was given up or has a copy behind it."""
        for offset in range(self.position, position) if position - self.position < _BATCH else ():
            self._ended.discard(offset)
            self._forget_copy(offset)
        if position - self.position >= _BATCH:
            self._ended = {offset for offset in self._ended if offset >= position}
            for offset in [offset for offset in self._roots if offset < position]:
                self._forget_copy(offset)
        self.position = position

    def note_copy(self, message: StoredMessage, offset: int) -> None:
        """A half message has been appended again."""
        root = root_of(message)
        self._roots.pop(self._copies.get(root, -1), None)
        self._copies[root] = offset
        self._roots[offset] = root
        state = self._ends.get(root)
        if state is not None:
            # It ended while its copy was on the way.
            self._marks.append(_Mark(offset, None))
            self._parts.writes.is_dirty = True
            self._parts.writes.finish_soon()

    def _forget_copy(self, offset: int) -> None:
        root = self._roots.pop(offset, None)
        if root is not None and self._copies.get(root) == offset:
            del self._copies[root]

    def save(self) -> None:
        """Report how far both queues are dealt with, once the log up to here is on the disk.

        Otherwise a loss of power could leave the progress behind a copy that is gone.
        """
        position = self.position
        while self._ops and self._ops[0][1] < position:
            self._op_position = self._ops.popleft()[0] + 1
        op_position = self._op_position

        def flushed(failure: StoreError | None) -> None:
            if failure is None:
                self._commit(names.HALF_TOPIC, position)
                self._commit(names.OP_HALF_TOPIC, op_position)

        self._store.when_flushed(self._store.statistics().log_end, flushed)

    def _commit(self, topic: str, offset: int) -> None:
        progress = self._parts.progress
        if progress.stored(topic, GROUP, QUEUE) != offset:
            now = self._parts.clock.monotonic()
            progress.commit(
                topic, GROUP, QUEUE, offset, by=GROUP, way=CommitSource.REQUEST, now=now
            )

    # A start.

    def _saved(self, topic: str) -> int:
        low = self._store.min_offset(topic, QUEUE)
        high = self._store.max_offset(topic, QUEUE)
        saved = self._parts.progress.stored(topic, GROUP, QUEUE)
        return low if saved is None else min(max(saved, low), high)

    def _read_back(self) -> None:
        """Learn from both queues what earlier runs did."""
        named = self._ended_earlier
        low = self._store.min_offset(names.OP_HALF_TOPIC, QUEUE)
        begin = max(low, self._op_position - REMEMBERED_OPS)
        ops = Reading(self._store, names.OP_HALF_TOPIC, QUEUE, begin)
        while messages := [each for batch in ops.batches(_BATCH) for each in batch]:
            for message in messages:
                offsets = offsets_in(message)
                named.update(offsets)
                if message.queue_offset >= self._op_position:
                    self._note_op(message.queue_offset, offsets)
        halves = Reading(self._store, names.HALF_TOPIC, QUEUE, self.position)
        while messages := [each for batch in halves.batches(_BATCH) for each in batch]:
            for message in messages:
                root = root_of(message)
                if root == message.queue_offset:
                    continue
                self._copies[root] = message.queue_offset
                self._roots[message.queue_offset] = root
                if root in named:
                    # Written by a broker that marks what was quoted and nothing else.
                    self._ended.add(message.queue_offset)


def _notify(marks: list[_Mark], result: PutResult) -> None:
    for mark in marks:
        if mark.told is not None:
            mark.told(result)


def root_of(half: StoredMessage) -> int:
    """The first offset of a transaction in the half queue; no copy lies before it."""
    text = half.get_property(TRANSACTION_PREPARED_QUEUE_OFFSET)
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 18:
        return half.queue_offset
    return min(int(text), half.queue_offset)


def offsets_in(op: StoredMessage) -> list[int]:
    """The half messages that an op message says have ended."""
    if op.tags != ENDED_TAG:
        log.error("an op message with an unknown tag", extra={"offset": op.queue_offset})
        return []
    texts = op.body.decode("utf-8", "replace").split(_SEPARATOR)
    return [int(text) for text in texts if text.isascii() and text.isdecimal()]


# Asking producers about transactions that they left open.
#
# Every half minute the half queue is gone through from its progress on. What is still open there is
# judged by one table (`judge`), and whatever the verdict, the message is dealt with or the round
# ends before it: nothing is skipped. One that cannot be dealt with is given up, so that it does not
# keep those behind it from being asked about. A round is done in bounded steps.


#: Of texts that somebody else has chosen, this much is shown.
_SHOWN = 128
#: A producer that left this much unread is asked only if nobody else is there.
_SLOW_BYTES = 64 * 1024


#: Why nobody can be asked about a message, and what can be done about it.
_HOMELESS = (
    "the message does not say to which topic and queue it belongs",
    "Look at what sent it: no producer can commit it",
)
_NOT_CONNECTED = (
    "no producer of the group is connected",
    "Start a producer of the group with check=",
)
_NOT_ALLOWED = (
    "producers of the group are connected, but none of them may publish to the topic",
    "Allow the account of one of them to publish there",
)


class Verdict(enum.Enum):
    """What is to be done about an open half message."""

    GIVE_UP = enum.auto()
    #: It is too young, and so is everything behind it: the round ends.
    STOP = enum.auto()
    #: Its producer asked for more time: append it again, and go on.
    PUT_BACK = enum.auto()
    ASK = enum.auto()


def judge(
    half: StoredMessage,
    *,
    now_ms: int,
    round_ms: int,
    timeout_ms: int,
    check_max: int,
    keep_ms: int,
) -> Verdict:
    """What is to be done about an open half message; the first rule that applies.

    `round_ms` is when the round began, `keep_ms` how long messages are kept. Apache asks for the
    number of questions first, and gives a message up in the round that asked the last of them,
    before it can be answered.
    """
    # A producer whose clock is ahead does not make its messages younger than they are.
    age_ms = now_ms - min(half.born_ms, half.store_ms)
    immunity_ms = immunity_of(half)
    if half.store_ms >= round_ms:
        return Verdict.STOP
    if times_asked(half) >= check_max or age_ms > keep_ms:
        return Verdict.GIVE_UP
    if immunity_ms is not None and age_ms <= immunity_ms:
        return Verdict.PUT_BACK
    if immunity_ms is None and age_ms <= timeout_ms:
        return Verdict.STOP
    return Verdict.ASK


def immunity_of(half: StoredMessage) -> int | None:
    """The time since its birth in which a half message is not asked about, if it has its own."""
    text = half.get_property(CHECK_IMMUNITY_TIME_IN_SECONDS)
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 12:
        return None
    return int(text) * 1000


def times_asked(half: StoredMessage) -> int:
    """How often its producer has been asked about a half message."""
    text = half.get_property(TRANSACTION_CHECK_TIMES)
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 9:
        return 0
    return int(text)


class TransactionChecks:
    """The rounds through the half queue."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.halves = HalfMessages(parts)
        #: Called when the step may have something to do earlier than it said.
        self.wake: Callable[[], None] = no_wake
        self._next_round = parts.clock.monotonic() + parts.settings.transactions.check_interval
        #: When the current round began; None between rounds.
        self._round_ms: int | None = None
        self._release: Release | None = None
        #: Groups of which nobody could be asked about a topic.
        self._unanswered = LogAtIntervals()

    def step(self, now: float) -> float | None:
        """Do a part of a round when it is time for one; when there will be more to do."""
        if self._release is not None:
            return None
        monotonic = self._parts.clock.monotonic()
        if self._round_ms is None:
            again = now + (self._next_round - monotonic)
            # What is left may be too little to be seen in the time of day: then it is time.
            if again > now:
                return again
            self._round_ms = milliseconds(now)
        is_over, is_waiting = self._walk(milliseconds(now), self._round_ms)
        if not is_over:
            return None if is_waiting else now
        interval = self._parts.settings.transactions.check_interval
        self._next_round = monotonic + interval
        self._round_ms = None
        return now + interval

    def _walk(self, now_ms: int, round_ms: int) -> tuple[bool, bool]:
        """Deal with some half messages; whether the round is over, and whether puts are open."""
        parts, halves = self._parts, self.halves
        halves.skip_ended()
        reading = Reading(parts.store, names.HALF_TOPIC, QUEUE, halves.position)
        release = Release(lambda failed: self._done(release, failed))
        release.end = halves.position
        is_over = True
        for messages in reading.batches(parts.settings.transactions.step_messages):
            for half in messages:
                if halves.is_open(half) and not self._deal(half, now_ms, round_ms, release):
                    break
                release.end = half.queue_offset + 1
                is_over = False
            else:
                continue
            is_over = True
            break
        else:
            release.end = max(release.end, reading.offset)
        self._release = release
        release.close()
        return is_over, self._release is not None

    def _deal(self, half: StoredMessage, now_ms: int, round_ms: int, release: Release) -> bool:
        """Deal with an open half message; whether the round goes on."""
        settings = self._parts.settings.transactions
        try:
            verdict = judge(
                half,
                now_ms=now_ms,
                round_ms=round_ms,
                timeout_ms=round(settings.timeout * 1000),
                check_max=settings.check_max,
                keep_ms=round(self._parts.settings.store.retention.keep * 1000),
            )
            if verdict is Verdict.STOP:
                return False
            self._follow(verdict, half, release)
        except Exception:
            log.exception(
                "a half message that cannot be dealt with is given up",
                extra={"offset": half.queue_offset},
            )
            self._give_up_somehow(half, release)
        return True

    def _give_up_somehow(self, half: StoredMessage, release: Release) -> None:
        try:
            self._follow(Verdict.GIVE_UP, half, release)
        except Exception:
            log.exception(
                "a half message that cannot be given up is passed over",
                extra={"offset": half.queue_offset},
            )

    def _done(self, release: Release, failed: int | None) -> None:
        self._release = None
        position = release.end if failed is None else failed
        if position != self.halves.position:
            self.halves.pass_to(position)
        self.halves.save()
        if failed is not None:
            # The rest of the round waits for the next one.
            self._round_ms = None
            interval = self._parts.settings.transactions.check_interval
            self._next_round = self._parts.clock.monotonic() + interval
        self.wake()

    # Verdicts.

    def _follow(self, verdict: Verdict, half: StoredMessage, release: Release) -> None:
        parts = self._parts
        try:
            if verdict is Verdict.GIVE_UP:
                release.put(parts.writes, self._given_up(half), half.queue_offset)
                return
            draft = self._again(half, is_asked=verdict is Verdict.ASK)
        except BodyCorrupt as error:
            log.error("a half message is lost: %s", error)  # noqa: TRY400  # the text says all
            return

        def stored(result: PutResult) -> None:
            self.halves.note_copy(half, result.queue_offset)
            if verdict is Verdict.ASK:
                self._ask(half, draft, result)

        release.put(parts.writes, draft, half.queue_offset, stored)

    def _given_up(self, half: StoredMessage) -> Draft:
        group = half.get_property(PRODUCER_GROUP) or ""
        log.error(
            "a half message is given up after %d questions that no producer of group %s has "
            "answered: %s is not delivered, a copy is kept in topic %s",
            times_asked(half),
            names.shown(group, _SHOWN),
            _named(half),
            names.CHECK_MAX_TIME_TOPIC,
            extra=_fields(half, group),
        )
        topic = TopicConfig(
            topic_name=names.CHECK_MAX_TIME_TOPIC,
            read_queue_nums=1,
            write_queue_nums=1,
            perm=READ_WRITE,
        )
        self._parts.topics.ensure(topic, now=self._parts.clock.now())
        return copied(half, names.CHECK_MAX_TIME_TOPIC, 0)

    def _again(self, half: StoredMessage, *, is_asked: bool) -> Draft:
        draft = copied(half, names.HALF_TOPIC, QUEUE)
        properties = replace_property(
            draft.properties, TRANSACTION_PREPARED_QUEUE_OFFSET, str(root_of(half))
        )
        if is_asked:
            times = str(times_asked(half) + 1)
            properties = replace_property(properties, TRANSACTION_CHECK_TIMES, times)
        draft.properties = properties
        return draft

    def _ask(self, half: StoredMessage, copy: Draft, stored: PutResult) -> None:
        """Ask a producer of the group; nobody there counts as asked, too."""
        parts = self._parts
        group = half.get_property(PRODUCER_GROUP) or ""
        place = real_place(half)
        if place is None:
            self._tell_nobody(half, group, *_HOMELESS)
            return
        channel = self._somebody(group, place[0])
        if channel is None:
            is_connected = any(map(_is_open, parts.producers.channels(group)))
            self._tell_nobody(half, group, *(_NOT_ALLOWED if is_connected else _NOT_CONNECTED))
            return
        self._unanswered.end(_subject(half, group))
        message = StoredMessage.build(
            topic=place[0],
            queue_id=place[1],
            stored_body=half.stored_body,
            properties=copy.properties,
            queue_offset=stored.queue_offset,
            physical_offset=stored.physical_offset,
            flag=half.flag,
            sys_flag=half.sys_flag,
            born_ms=half.born_ms,
            born_host=half.born_host,
            store_ms=half.store_ms,
            store_host=(parts.address.host, parts.address.port),
            reconsume_times=half.reconsume_times,
        )
        header = CheckTransactionStateRequest(
            topic=names.HALF_TOPIC,
            tran_state_table_offset=stored.queue_offset,
            commit_log_offset=stored.physical_offset,
            msg_id=half.unique_id,
            transaction_id=half.unique_id,
            offset_msg_id=encode_offset_id(parts.store_host, stored.physical_offset),
            broker_name=parts.settings.name,
        )
        parts.notify(channel, RequestCode.CHECK_TRANSACTION_STATE, header, body=message.encode())

    def _tell_nobody(self, half: StoredMessage, group: str, why: str, remedy: str) -> None:
        """Of what a group has open in a topic and nobody can be asked about, one a minute."""
        subject = _subject(half, group)
        if not (count := self._unanswered.note(subject, self._parts.clock.monotonic())):
            return
        asked, most = times_asked(half) + 1, self._parts.settings.transactions.check_max
        log.warning(
            "nobody to ask about a transaction of group %s: %s; %s has had question %d of %d, and "
            "after the last one it is given up and never delivered. %s (time %d)",
            names.shown(group, _SHOWN),
            why,
            _named(half),
            asked,
            most,
            remedy,
            count,
            extra=_fields(half, group),
        )

    def _somebody(self, group: str, topic: str) -> Channel | None:
        """A producer of the group that may see what is sent to a topic.

        Anybody can say that it belongs to a group; a half message is not for anybody.
        """
        may_publish = self._parts.access.may_publish
        return self._parts.producers.choose(
            group,
            is_active=lambda channel: _is_open(channel) and may_publish(channel, topic),
            is_writable=_is_quick,
        )


def _topic_of(half: StoredMessage) -> str:
    place = real_place(half)
    return "no topic" if place is None else place[0]


def _subject(half: StoredMessage, group: str) -> tuple[str, str]:
    return group[:_SHOWN], _topic_of(half)


def _fields(half: StoredMessage, group: str) -> dict[str, str]:
    return {
        "group": group[:_SHOWN],
        "topic": _topic_of(half),
        "message_id": half.msg_id[:_SHOWN],
    }


def _named(half: StoredMessage) -> str:
    msg_id, keys = half.msg_id, half.get_property(KEYS) or "none"
    return (
        f"message {names.shown(msg_id, _SHOWN)} to {_topic_of(half)} "
        f"(keys {names.shown(keys, _SHOWN)})"
    )


def _is_open(channel: Channel) -> bool:
    return isinstance(channel, Connection) and channel.is_open


def _is_quick(channel: Channel) -> bool:
    return isinstance(channel, Connection) and channel.unwritten < _SLOW_BYTES


# The ends of transactions, and half messages that are given another chance (37, 323).


_ONE_WAY = int(Flag.ONE_WAY)
#: Of a reason that may quote what a client has sent, this much is shown.
_SHOWN_GROUPS = 256
_NOT_FOUND = "Find prepared transaction message failed"


class TransactionHandler:
    """Ends transactions as their producers say."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._halves = parts.transactions.halves
        self._refused = LogEveryNth()

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.END_TRANSACTION: self.end,
            RequestCode.RESUME_CHECK_HALF_MESSAGE: self.resume,
        }

    # Ending.

    def end(self, connection: Connection, request: Command) -> Result:
        """Make a half message visible, or not; answered when that is stored."""
        try:
            return self._end(connection, request)
        except Refused as refused:
            if request.flag & _ONE_WAY:
                self._tell_refused(connection, refused)
            raise

    def _end(self, connection: Connection, request: Command) -> Result:
        if self._parts.settings.is_slave:
            raise Refused(
                ResponseCode.SLAVE_NOT_AVAILABLE,
                "a slave does not end transactions; ask the master",
            )
        header = request.header(EndTransactionRequest)
        if header.commit_or_rollback == TransactionState.COMMIT:
            state = TransactionState.COMMIT
        elif header.commit_or_rollback == TransactionState.ROLLBACK:
            state = TransactionState.ROLLBACK
        else:
            # Its producer does not know yet either, and does not wait for an answer.
            return None
        half = self._half(header)
        self._check(header, half)
        before = self._halves.end_of(root_of(half))
        if before is not None and before is not state:
            raise Refused(
                ResponseCode.ILLEGAL_OPERATION,
                f"the transaction of message {header.msg_id} has ended already: {before.name}",
            )

        if before is None and self._halves.has_ended(half):
            # Before a restart, after which only that is known: nothing is left to be done.
            return request.answer(ResponseCode.SUCCESS)

        def told(result: PutResult) -> None:
            if result.status.is_stored:
                answer = request.answer(ResponseCode.SUCCESS)
            else:
                answer = request.answer(result.status.value, remark=str(result.error))
            connection.reply(request, answer)

        if state is TransactionState.COMMIT and before is None:
            self._commit(half)
        self._halves.end(half, state, told)
        return LATER

    def _tell_refused(self, connection: Connection, refused: Refused) -> None:
        """Nobody is answered, so only the log can tell why a transaction stays open."""
        if count := self._refused.note(connection.remote.host):
            log.warning(
                "the end of a transaction was refused, and its producer does not hear of it: %s "
                "(time %d)",
                names.shown(str(refused), _SHOWN_GROUPS),
                count,
                extra={"client": str(connection.remote)},
            )

    def _half(self, header: EndTransactionRequest) -> StoredMessage:
        try:
            # Its producer may know of it before the disk has it: if it did not wait for that, or
            # is asked about a copy.
            half = decode_message(self._parts.store.written_at(header.commit_log_offset))
        except (StoreError, MessageError) as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"{_NOT_FOUND}: {error}") from error
        if half.topic != names.HALF_TOPIC:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"{_NOT_FOUND}: the one at {header.commit_log_offset} is not prepared",
            )
        return half

    def _check(self, header: EndTransactionRequest, half: StoredMessage) -> None:
        immunity_ms = immunity_of(half)
        if immunity_ms is not None and not header.from_transaction_check:
            age_ms = milliseconds(self._parts.clock.now()) - half.born_ms
            if age_ms > immunity_ms:
                raise Refused(
                    ResponseCode.ILLEGAL_OPERATION,
                    f"the end of message {header.msg_id} comes {age_ms} ms after its birth, later "
                    "than its CHECK_IMMUNITY_TIME_IN_SECONDS; wait to be asked",
                )
        problem = ""
        if half.get_property(PRODUCER_GROUP) != header.producer_group:
            problem = "The producer group wrong"
        elif half.queue_offset != header.tran_state_table_offset:
            problem = "The transaction state table offset wrong"
        if problem:
            raise Refused(ResponseCode.SYSTEM_ERROR, problem)

    def _commit(self, half: StoredMessage) -> None:
        """Append the message to where it belongs, in the turn that is under way.

        A message whose topic was deleted since it was sent goes nowhere, and its transaction ends.
        """
        if not self._has_destination(half):
            self._parts.destinations.dropped += 1
            return
        try:
            self._parts.writes.append(self._committed(half))
        except OrbitError as error:
            raise Refused(refusal_code(error), str(error)) from error
        counts = self._parts.counters.topic(real_topic(half))
        self._parts.writes.count(counts, [len(half.stored_body)])

    def _has_destination(self, half: StoredMessage) -> bool:
        place, destinations = real_place(half), self._parts.destinations
        if place is None:
            return True
        sent_at = half.physical_offset
        if destinations.was_deleted(place[0]) and root_of(half) < half.queue_offset:
            # A copy, made when its producer was asked: the first one says when it was sent.
            root = root_of(half)
            reading = Reading(self._parts.store, names.HALF_TOPIC, QUEUE, root)
            first = next((found[0] for found in reading.batches(1)), half)
            sent_at = first.physical_offset if first.queue_offset == root else 0
        return destinations.takes(*place, sent_at)

    def _committed(self, half: StoredMessage) -> Draft:
        place = real_place(half)
        if place is None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, "the half message does not say where it belongs"
            )
        draft = copied(half, *place)
        # Apache's 5.5 takes them out as well, here and not from what was delayed.
        draft.properties = remove_properties(draft.properties, (REAL_TOPIC, REAL_QUEUE_ID))
        # Whoever forwards the message in a transaction of its own must not quote this one.
        draft.properties = remove_properties(draft.properties, OWN_NOTES)
        draft.sys_flag = with_transaction_type(draft.sys_flag, TRANSACTION_COMMIT)
        draft.prepared_offset = half.physical_offset
        return draft

    # Another chance.

    def resume(self, connection: Connection, request: Command) -> Result:
        """Ask again about a half message that was given up."""
        header = request.header(ResumeCheckHalfMessageRequest)
        try:
            record = self._parts.store.message_by_offset_id(header.msg_id or "")
            draft = self._resumed(decode_message(record))
        except (StoreError, MessageError) as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"Exception was thrown when putting message back to {names.HALF_TOPIC}: {error}",
            ) from error

        def told(result: PutResult) -> None:
            if result.status.is_stored:
                connection.reply(request, request.answer(ResponseCode.SUCCESS))
                return
            remark = f"Put message back to {names.HALF_TOPIC} failed: {result.error}"
            connection.reply(request, request.answer(ResponseCode.SYSTEM_ERROR, remark=remark))

        self._parts.writes.put(draft, told, transform=False)
        return LATER

    @staticmethod
    def _resumed(message: StoredMessage) -> Draft:
        if message.topic not in (names.CHECK_MAX_TIME_TOPIC, names.HALF_TOPIC):
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"a message of topic {message.topic!r} is no half message; one that was given up "
                f"lies in {names.CHECK_MAX_TIME_TOPIC}",
            )
        draft = copied(message, names.HALF_TOPIC, QUEUE)
        properties = remove_properties(draft.properties, (TRANSACTION_PREPARED_QUEUE_OFFSET,))
        draft.properties = replace_property(properties, TRANSACTION_CHECK_TIMES, "0")
        return draft


def real_topic(half: StoredMessage) -> str:
    """The topic that a half message belongs to."""
    place = real_place(half)
    return "" if place is None else place[0]
