"""Half messages, the end of transactions, and checks of those that were left open.

A half message lies in the half topic. Its end is recorded by an *op message* with its offset there.
A half message without one is checked, and appended again for a later check, so the half queue is
processed from front to back; its progress is that of group `CID_RMQ_SYS_TRANS`.

The op message of an end is part of the same write as the committed message. So after a crash a
transaction is either ended with its message there, or open. (Apache commits twice.) All copies of a
half message carry the first offset, the *root*; an end by any of its offsets ends all of them.
Trap: a producer may not set these properties itself; they are removed when a message is parked and
when it is committed.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq import names
from orbitmq.broker.errors import BrokerError, PutResult, Refused, failed, refusal_code
from orbitmq.broker.groups import Channel
from orbitmq.broker.parked import (
    Reading,
    Release,
    TransactionCounts,
    copied,
    decimal,
    park,
    real_place,
)
from orbitmq.broker.progress import CommitSource
from orbitmq.broker.scheduler import no_wake
from orbitmq.broker.topics import READ_WRITE
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
#: Properties of half messages that only the broker sets.
OWN_NOTES = (TRANSACTION_PREPARED_QUEUE_OFFSET, TRANSACTION_CHECK_TIMES)

_SEPARATOR = ","
_BATCH = 1024
#: A delay would take a half message out of its transaction.
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
        #: The first half message that is not processed yet.
        self.position = self._saved(names.HALF_TOPIC)
        self._op_position = self._saved(names.OP_HALF_TOPIC)
        #: Ended half messages at or behind the position.
        self._ended: set[int] = set()
        #: Op messages at or behind the op position, and the highest offset in each.
        self._ops: deque[tuple[int, int]] = deque()
        #: The latest copy of a transaction by its root, and the other way round.
        self._copies: dict[int, int] = {}
        self._roots: dict[int, int] = {}
        #: The results of recent transactions, by their root.
        self._ends: dict[int, TransactionState] = {}
        #: What op messages of earlier runs have ended.
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
            # It was committed, failed, and is sent again with its former properties.
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
        """The result of a transaction, while it is remembered."""
        return self._ends.get(root)

    def has_ended(self, half: StoredMessage) -> bool:
        """Whether a transaction has ended, by any of its copies."""
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
        """Mark a half message as ended, in the present write."""
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
        """Append op messages for the ends in this write. An exception refuses the write."""
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
            # The earlier ones are part of the write, and fail with it.
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

    # Processing the half queue.

    @property
    def open_count(self) -> int:
        """The number of half messages that have not ended."""
        known = self._store.max_offset(names.HALF_TOPIC, QUEUE) - self.position
        # One that waits for the disk may have ended already.
        return max(known - len(self._ended), 0)

    def is_open(self, half: StoredMessage) -> bool:
        """Whether a half message has to be processed: not ended, and no later copy.

        After a crash the progress may be before a message that was appended again.
        """
        if half.queue_offset in self._ended:
            return False
        return self._copies.get(root_of(half), -1) <= half.queue_offset

    def skip_ended(self) -> None:
        """Advance over ended messages, up to what is readable: more may wait for the disk."""
        position = self.position
        end = self._store.max_offset(names.HALF_TOPIC, QUEUE)
        while position < end and position in self._ended:
            self._ended.discard(position)
            self._forget_copy(position)
            position += 1
        self.position = position

    def pass_to(self, position: int) -> None:
        """Everything before `position` has ended, was given up or has a later copy."""
        if position - self.position < _BATCH:
            for offset in range(self.position, position):
                self._ended.discard(offset)
                self._forget_copy(offset)
        else:
            # The queue's beginning was deleted, for instance: there may be millions of numbers.
            self._ended = {offset for offset in self._ended if offset >= position}
            for offset in [offset for offset in self._roots if offset < position]:
                self._forget_copy(offset)
        self.position = position

    def note_copy(self, message: StoredMessage, offset: int) -> None:
        """A half message was appended again."""
        root = root_of(message)
        self._roots.pop(self._copies.get(root, -1), None)
        self._copies[root] = offset
        self._roots[offset] = root
        if root in self._ends:
            # It ended while its copy was on the way.
            self._marks.append(_Mark(offset, None))
            self._parts.writes.is_dirty = True
            self._parts.writes.finish_soon()

    def _forget_copy(self, offset: int) -> None:
        root = self._roots.pop(offset, None)
        if root is not None and self._copies.get(root) == offset:
            del self._copies[root]

    def save(self) -> None:
        """Commit the progress of both queues when the log up to here is on the disk.

        Otherwise the progress could survive a power failure that a copy does not.
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
        """Read from both queues what earlier runs did."""
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
                    # Written by a broker that marks only the quoted offset.
                    self._ended.add(message.queue_offset)


def _notify(marks: list[_Mark], result: PutResult) -> None:
    for mark in marks:
        if mark.told is not None:
            mark.told(result)


def root_of(half: StoredMessage) -> int:
    """The first offset of a transaction in the half queue; no copy is before it."""
    root = decimal(half.get_property(TRANSACTION_PREPARED_QUEUE_OFFSET), 18)
    return half.queue_offset if root is None else min(root, half.queue_offset)


def offsets_in(op: StoredMessage) -> list[int]:
    """The half messages that an op message says have ended."""
    if op.tags != ENDED_TAG:
        log.error("an op message with an unknown tag", extra={"offset": op.queue_offset})
        return []
    texts = op.body.decode("utf-8", "replace").split(_SEPARATOR)
    return [int(text) for text in texts if text.isascii() and text.isdecimal()]


# Transaction checks. Every half minute the half queue is processed from its progress on. A table
# (`judge`) decides about every open message; either the message is processed, or the round ends
# before it. One that cannot be processed is given up, so that it does not block those behind it.


#: Characters of peers' texts that logs show.
_SHOWN = 128
#: A producer with this much unread is asked only when there is no other.
_SLOW_BYTES = 64 * 1024


#: Why no producer can be asked about a message, and the remedy.
_NO_PLACE = (
    "the message does not say to which topic and queue it belongs",
    "Check the program that sent it: no producer can commit it",
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
    """What to do about an open half message."""

    GIVE_UP = enum.auto()
    #: It is too young, like all behind it: the round ends.
    STOP = enum.auto()
    #: It has more time: append it again, and go on.
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
    """What to do about an open half message; the first rule that applies.

    `round_ms` is the begin of the round, `keep_ms` how long messages are kept. Apache applies the
    rule about the number of checks first, and gives a message up in the round of its last check,
    before the answer.
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
    """The message's own time since its birth without checks, in milliseconds."""
    seconds = decimal(half.get_property(CHECK_IMMUNITY_TIME_IN_SECONDS), 12)
    return None if seconds is None else seconds * 1000


def times_asked(half: StoredMessage) -> int:
    """The number of checks of a half message."""
    return decimal(half.get_property(TRANSACTION_CHECK_TIMES), 9) or 0


class TransactionChecks:
    """The rounds through the half queue."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.halves = HalfMessages(parts)
        #: Wakes the alarm: there may be work before the time that the step returned.
        self.wake: Callable[[], None] = no_wake
        self._next_round = parts.clock.monotonic() + parts.settings.transactions.check_interval
        #: The begin of the current round; None between rounds.
        self._round_ms: int | None = None
        self._release: Release | None = None
        #: Groups without a producer to ask about a topic.
        self._unanswered = LogAtIntervals()

    def step(self, now: float) -> float | None:
        """Do a part of a round when it is time for one; when there will be more to do."""
        if self._release is not None:
            return None
        monotonic = self._parts.clock.monotonic()
        if self._round_ms is None:
            again = now + (self._next_round - monotonic)
            # The rest may be too short for the resolution of the time of day: then it is time.
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
        """Process some half messages; whether the round is over, and whether puts are open."""
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
        """Process an open half message; whether the round continues."""
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
                "a half message that cannot be processed is dropped",
                extra={"offset": half.queue_offset},
            )
            self._give_up_somehow(half, release)
        return True

    def _give_up_somehow(self, half: StoredMessage, release: Release) -> None:
        try:
            self._follow(Verdict.GIVE_UP, half, release)
        except Exception:
            log.exception(
                "a half message that cannot be dropped is skipped",
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
        why = (
            f"after {times_asked(half)} checks that no producer of group "
            f"{names.shown(group, _SHOWN)} has answered"
        )
        if real_place(half) is None:
            why = f"because {_NO_PLACE[0]}"
        log.error(
            "a half message is dropped %s: %s is not delivered, a copy is in topic %s",
            why,
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
        """Ask a producer of the group; a check without producers counts as well."""
        parts = self._parts
        group = half.get_property(PRODUCER_GROUP) or ""
        place = real_place(half)
        if place is None:
            self._log_unanswered(half, group, *_NO_PLACE)
            return
        channel = self._choose(group, place[0])
        if channel is None:
            is_connected = any(map(_is_open, parts.producers.channels(group)))
            self._log_unanswered(half, group, *(_NOT_ALLOWED if is_connected else _NOT_CONNECTED))
            return
        self._unanswered.end((group[:_SHOWN], place[0]))
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

    def _log_unanswered(self, half: StoredMessage, group: str, why: str, remedy: str) -> None:
        """Report what no producer can be asked about: one line a minute for a group and topic."""
        subject = (group[:_SHOWN], _topic_of(half))
        if not (count := self._unanswered.note(subject, self._parts.clock.monotonic())):
            return
        asked, most = times_asked(half) + 1, self._parts.settings.transactions.check_max
        log.warning(
            "no producer to ask about a transaction of group %s: %s; %s has had check %d of %d, "
            "and after the last one it is given up and never delivered. %s (time %d)",
            names.shown(group, _SHOWN),
            why,
            _named(half),
            asked,
            most,
            remedy,
            count,
            extra=_fields(half, group),
        )

    def _choose(self, group: str, topic: str) -> Channel | None:
        """A producer of the group that may see what is sent to a topic.

        Any client can claim to belong to a group, but may not be allowed to see a half message.
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


# The requests: ends of transactions, and given-up messages that are checked again (37, 323).


_ONE_WAY = int(Flag.ONE_WAY)
#: Characters of a reason that may quote a client.
_SHOWN_GROUPS = 256
_NOT_FOUND = "Find prepared transaction message failed"


class TransactionHandler:
    """Ends transactions as their producers request."""

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
        """Commit or roll back a half message; answered when that is stored."""
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
            # Its producer does not know the result either, and does not wait for an answer.
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
            # It ended before a restart, and the result is no longer known.
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
        """Log a failed end: its request has no answer."""
        if count := self._refused.note(connection.remote.host):
            log.warning(
                "the end of a transaction was refused, but one-way requests get no answer: %s "
                "(time %d)",
                names.shown(str(refused), _SHOWN_GROUPS),
                count,
                extra={"client": str(connection.remote)},
            )

    def _half(self, header: EndTransactionRequest) -> StoredMessage:
        try:
            # Its producer may know it before the disk has it, if it did not wait for the flush or
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
                    "than its CHECK_IMMUNITY_TIME_IN_SECONDS; wait for the broker's check",
                )
        problem = ""
        if half.get_property(PRODUCER_GROUP) != header.producer_group:
            problem = "The producer group wrong"
        elif half.queue_offset != header.tran_state_table_offset:
            problem = "The transaction state table offset wrong"
        if problem:
            raise Refused(ResponseCode.SYSTEM_ERROR, problem)

    def _commit(self, half: StoredMessage) -> None:
        """Append the message to its real topic, in the present write.

        If that topic was deleted meanwhile, the message is dropped, and the transaction ends.
        """
        if not self._has_destination(half):
            self._parts.destinations.dropped += 1
            return
        draft = self._committed(half)
        try:
            self._parts.writes.append(draft)
        except OrbitError as error:
            raise Refused(refusal_code(error), str(error)) from error
        self._parts.writes.count(self._parts.counters.topic(draft.topic), [len(half.stored_body)])

    def _has_destination(self, half: StoredMessage) -> bool:
        place, destinations = real_place(half), self._parts.destinations
        if place is None:
            return True
        sent_at = half.physical_offset
        if destinations.was_deleted(place[0]) and root_of(half) < half.queue_offset:
            # A copy of a check: the first one has the time of the send.
            root = root_of(half)
            reading = Reading(self._parts.store, names.HALF_TOPIC, QUEUE, root)
            first = next((found[0] for found in reading.batches(1)), half)
            sent_at = first.physical_offset if first.queue_offset == root else 0
        return destinations.takes(*place, sent_at)

    def _committed(self, half: StoredMessage) -> Draft:
        place = real_place(half)
        if place is None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, "the half message has no target topic or queue"
            )
        draft = copied(half, *place)
        # Apache's 5.5 removes them as well, but only here.
        draft.properties = remove_properties(draft.properties, (REAL_TOPIC, REAL_QUEUE_ID))
        # A consumer that sends the message on in a transaction must not quote this one.
        draft.properties = remove_properties(draft.properties, OWN_NOTES)
        draft.sys_flag = with_transaction_type(draft.sys_flag, TRANSACTION_COMMIT)
        draft.prepared_offset = half.physical_offset
        return draft

    # Given-up messages.

    def resume(self, connection: Connection, request: Command) -> Result:
        """Check a half message again that was given up."""
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
                f"a message of topic {message.topic!r} is no half message; dropped half messages "
                f"are in {names.CHECK_MAX_TIME_TOPIC}",
            )
        draft = copied(message, names.HALF_TOPIC, QUEUE)
        properties = remove_properties(draft.properties, (TRANSACTION_PREPARED_QUEUE_OFFSET,))
        draft.properties = replace_property(properties, TRANSACTION_CHECK_TIMES, "0")
        return draft
