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

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from orbitmq.broker import names
from orbitmq.broker.commitrule import Way
from orbitmq.broker.deliverycounts import TransactionCounts
from orbitmq.broker.drafts import Draft, Stage
from orbitmq.broker.errors import BrokerError, Refused
from orbitmq.broker.outcomes import PutResult, failed
from orbitmq.broker.parking import Reading, park, real_place
from orbitmq.broker.parts import Parts
from orbitmq.clock import milliseconds
from orbitmq.errors import OrbitError
from orbitmq.message.properties import (
    encode_properties,
    property_value,
    remove_properties,
    replace_property,
)
from orbitmq.message.stored import StoredMessage
from orbitmq.message.sysflag import TRANSACTION_NONE, with_transaction_type
from orbitmq.message.wellknown import (
    DELAY,
    TAGS,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TRANSACTION_CHECK_TIMES,
    TRANSACTION_ID,
    TRANSACTION_PREPARED,
    TRANSACTION_PREPARED_QUEUE_OFFSET,
    UNIQ_KEY,
)
from orbitmq.store.errors import StoreError
from orbitmq.wire.codes import ResponseCode, TransactionState

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
        parts.turns.before_write.append(self._write_marks)
        parts.turns.transformations.add(
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
        self._parts.turns.is_dirty = True
        self._parts.turns.finish_soon()

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
            _tell(marks[begin:], failed(cause))
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
            _tell(marks, result)

        parts.turns.add(draft, stored)

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
            self._parts.turns.is_dirty = True
            self._parts.turns.finish_soon()

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
            progress.commit(topic, GROUP, QUEUE, offset, by=GROUP, way=Way.REQUEST, now=now)

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


def _tell(marks: list[_Mark], result: PutResult) -> None:
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
