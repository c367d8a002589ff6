"""The ends of transactions, and half messages that are given another chance (37, 323)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from orbitmq.broker import names
from orbitmq.broker.drafts import Draft
from orbitmq.broker.errors import Refused
from orbitmq.broker.outcomes import PutResult, refusal_code
from orbitmq.broker.parking import Reading, copied, real_place
from orbitmq.broker.parts import Parts
from orbitmq.broker.transactionchecks import immunity_of
from orbitmq.broker.transactions import OWN_NOTES, QUEUE, root_of
from orbitmq.clock import milliseconds
from orbitmq.errors import OrbitError
from orbitmq.message.errors import MessageError
from orbitmq.message.properties import remove_properties, replace_property
from orbitmq.message.stored import StoredMessage, decode_message
from orbitmq.message.sysflag import TRANSACTION_COMMIT, with_transaction_type
from orbitmq.message.wellknown import (
    PRODUCER_GROUP,
    REAL_QUEUE_ID,
    REAL_TOPIC,
    TRANSACTION_CHECK_TIMES,
    TRANSACTION_PREPARED_QUEUE_OFFSET,
)
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result
from orbitmq.remoting.occurrences import Occurrences
from orbitmq.store.errors import StoreError
from orbitmq.wire.codes import Flag, RequestCode, ResponseCode, TransactionState
from orbitmq.wire.command import Command
from orbitmq.wire.headers.transactions import (
    EndTransactionRequest,
    ResumeCheckHalfMessageRequest,
)

log = logging.getLogger(__name__)

_ONE_WAY = int(Flag.ONE_WAY)
#: Of a reason that may quote what a client has sent, this much is shown.
_SHOWN = 256
_NOT_FOUND = "Find prepared transaction message failed"


class Transactions:
    """Ends transactions as their producers say."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._halves = parts.transactions.halves
        self._refused = Occurrences()

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
                names.shown(str(refused), _SHOWN),
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
            self._parts.turns.append(self._committed(half))
        except OrbitError as error:
            raise Refused(refusal_code(error), str(error)) from error
        counts = self._parts.counters.topic(real_topic(half))
        self._parts.turns.count(counts, [len(half.stored_body)])

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

        self._parts.turns.put(draft, told, transform=False)
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
