"""Sends: one message, or a batch of one topic (10, 310, 320), their checks, and send-backs (36).

An ordinary message passes all checks with a few lookups: its header is decoded once, the state of
its topic is known from the previous message (`_Course`), its property string is not decoded, and
its answer comes from a template.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from orbitmq import names
from orbitmq.broker.counters import TopicCounts
from orbitmq.broker.dedup import MARK, RAW_MARK, Original, ids_of, key_of, keys_of
from orbitmq.broker.errors import PutResult, Refused, SystemBusy, refusal_code
from orbitmq.broker.groups import peer_of
from orbitmq.broker.retries import PUT_OFF, Failure, given_up_properties
from orbitmq.broker.topics import may_write
from orbitmq.broker.writes import BatchPlace, Draft, SendAnswers, unique_id_of, waits_for_flush
from orbitmq.clock import milliseconds, milliseconds_up
from orbitmq.errors import OrbitError
from orbitmq.message.batchrecords import BatchColumns, batch_columns
from orbitmq.message.properties import (
    CLUSTER,
    DEDUP_ID,
    DELAY,
    INNER_NUM,
    MSG_REGION,
    POP_CK,
    RETRY_TOPIC,
    TRACE_SWITCH,
    TRANSACTION_PREPARED,
    UNIQ_KEY,
    append_property,
    property_value,
    remove_properties,
    replace_property,
)
from orbitmq.message.record import (
    INNER_BATCH,
    MAX_PROPERTIES,
    Buffer,
    MessageError,
    PropertiesRefused,
)
from orbitmq.message.stored import StoredMessage, batch_fields, decode_message
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result
from orbitmq.store.settings import StoreError
from orbitmq.wire.bodies import SubscriptionGroupConfig, TopicConfig
from orbitmq.wire.codes import Flag, Gate, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import ConsumerSendBackRequest, SendMessageRequest, SendMessageResponse

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts
    from orbitmq.message.scan import Int64s


_ONE_WAY = int(Flag.ONE_WAY)
_POP_CK = POP_CK + "\x01"
_INNER_NUM = INNER_NUM + "\x01"
_ITEM_END = "\x02"
_RETRY = names.RETRY_PREFIX
_LONGEST_PLAIN_TOPIC = 127


@dataclass(frozen=True, slots=True)
class _Course:
    """What the messages to a topic have in common, while no topic and no setting changes."""

    config: TopicConfig
    queues: int  #: that can be written
    counts: TopicCounts
    #: Whether it is a retry topic: its messages may become dead letters.
    is_retry: bool


class _Batch(NamedTuple):
    """A batch that is being stored."""

    connection: Connection
    header: SendMessageRequest
    topic: str
    queue_id: int
    counts: TopicCounts
    elements: BatchColumns | list[tuple[Buffer, int, bytes]]


class SendHandler:
    """Stores messages of producers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._turns = parts.writes
        self._topics = parts.topics
        self._checks = SendChecks(parts)
        self._append = parts.store.append
        self._concern = parts.writes.transformations.concern
        self._dedup = parts.dedup
        for mark in (_POP_CK, _INNER_NUM, MARK):
            parts.writes.transformations.notice(mark)
        self._count = parts.counters.topic
        #: The prefix of every offset id.
        self._id_prefix = parts.store_host.hex().upper()
        #: By topic, and the revision of the topics that it is valid for.
        self._courses: dict[str, _Course] = {}
        self._revision = parts.topics.revision
        self._apply_settings()
        parts.on_settings_changed(self._apply_settings)

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.SEND_MESSAGE: self.send,
            RequestCode.SEND_MESSAGE_V2: self.send,
            RequestCode.SEND_BATCH_MESSAGE: self.send,
        }

    def _apply_settings(self) -> None:
        settings = self._parts.settings
        self._settings = settings.send
        self._turns.settings = settings.send
        self._max_body = settings.send.max_message_size
        self._answers = self._turns.answers = SendAnswers(
            settings.send.region, self._parts.store_host, trace_on=settings.send.trace_on
        )
        #: Properties that the broker adds to every message.
        self._marks = "".join(
            append_property("", name, value)
            for name, value in (
                (MSG_REGION, settings.send.region),
                (TRACE_SWITCH, "true" if settings.send.trace_on else "false"),
                (CLUSTER, settings.cluster),
            )
        )
        self._courses.clear()

    def send(self, connection: Connection, request: Command) -> Result:
        """Store a message or a batch; it is answered after its write."""
        header = request.header(SendMessageRequest)
        try:
            if header.batch:
                self._take_batch(connection, request, header)
            else:
                self._take(connection, request, header)
        except UnicodeEncodeError as error:
            problem = f"properties that UTF-8 cannot express: {error.reason}"
            return self._refuse(request, PropertiesRefused(problem))
        except (Refused, StoreError, MessageError) as error:
            return self._refuse(request, error)
        return None

    def _refuse(self, request: Command, error: OrbitError) -> Command:
        code = refusal_code(error)
        self._parts.counters.failed_puts += 1
        self._parts.latencies.call((request.code, code, False), 0.0)
        return self._answers.refused(request, code, str(error))

    # One message.

    def _take(self, connection: Connection, request: Command, header: SendMessageRequest) -> None:
        body = request.body
        topic = header.topic
        course = self._courses.get(topic)
        if course is None or not body or self._revision != self._topics.revision:
            course = self._course(request, header)
        queue_id = header.queue_id
        if not 0 <= queue_id < course.queues:
            queue_id = self._checks.queue(header, course.config)
        asked_queue = queue_id
        properties = header.properties or ""
        counts = course.counts
        if course.is_retry:
            topic, queue_id, properties = self._checks.retried(
                request, header, queue_id, properties
            )
            counts = self._count(topic)
        is_marked = self._concern(properties)
        if is_marked and _POP_CK in properties:
            properties = remove_properties(properties, (POP_CK,))
        unique_id = unique_id_of(properties)
        if unique_id is None:
            unique_id = self._parts.unique_ids()
            properties = append_property(properties, UNIQ_KEY, unique_id)
        sys_flag = header.sys_flag
        if is_marked or sys_flag & INNER_BATCH:
            self._checks.kind(header, properties)
        writes = self._turns
        if writes.is_busy:
            raise self._checks.busy()
        if properties[-1:] != _ITEM_END:
            properties += _ITEM_END
        raw = (properties + self._marks).encode()
        size = len(body)
        if size > self._max_body or len(raw) > MAX_PROPERTIES:
            raise self._checks.too_large(size, len(raw))
        waits = not writes.is_slow or waits_for_flush(properties)
        dedup_id = None
        if is_marked and MARK in properties and self._dedup.takes(header.topic):
            dedup_id = _dedup_id_of(properties)
            if dedup_id and (first := self._dedup.find(topic, dedup_id)):
                self._answer_first(connection, request, topic, first, waits=waits)
                return
            is_marked = writes.transformations.change(properties)
        born_host: bytes = connection.context.born_host
        if is_marked:
            draft = Draft(
                topic,
                queue_id,
                body,
                raw,
                header.born_timestamp,
                born_host,
                sys_flag,
                header.flag,
                header.reconsume_times or 0,
                waits=waits,
            )
            at = self._take_draft(connection, request, draft, asked_queue, unique_id)
            if dedup_id:
                self._dedup.note(topic, (key_of(dedup_id),), (at,))
            if course.is_retry and topic != header.topic:
                self._checks.count_dead(header, properties)
            return
        at, number = self._append(
            topic,
            queue_id,
            body,
            raw,
            header.born_timestamp,
            born_host,
            sys_flag,
            header.flag,
            header.reconsume_times or 0,
        )
        if dedup_id:
            self._dedup.note(topic, (key_of(dedup_id),), (at,))
        if course.is_retry and topic != header.topic:
            self._checks.count_dead(header, properties)
        taken = counts.taken
        if not taken:
            writes.counting.append(counts)
        taken.append(size)
        writes.is_dirty = True
        if not request.flag & _ONE_WAY:
            turn = writes.waiting_for_flush if waits else writes.answered_after_write
            turn.senders.append((connection, request, (at, asked_queue, number, unique_id)))

    def _take_draft(
        self,
        connection: Connection,
        request: Command,
        draft: Draft,
        asked_queue: int,
        unique_id: str,
    ) -> int:
        """Store a message that may be parked first; its offset in the log."""
        counts = self._count(draft.topic)
        size = len(draft.body)
        self._turns.transformations.apply(draft)
        at, number = self._turns.append(draft)
        self._turns.count(counts, [size])
        self._turns.answer_later(
            connection,
            request,
            SendMessageResponse(
                msg_id=f"{self._id_prefix}{at:016X}",
                queue_id=asked_queue,
                queue_offset=number,
                transaction_id=unique_id,
                recall_handle=draft.recall_handle,
            ),
            waits=draft.waits,
        )
        return at

    def _answer_first(
        self,
        connection: Connection,
        request: Command,
        topic: str,
        first: Original,
        *,
        waits: bool,
    ) -> None:
        """Answer with the first copy of a message, when that is as safe as the policy demands."""
        self._dedup.dropped[topic] += 1
        self._turns.answer_later(
            connection,
            request,
            SendMessageResponse(
                msg_id=f"{self._id_prefix}{first.at:016X}",
                queue_id=first.queue_id,
                queue_offset=first.number,
                transaction_id=first.unique_id,
                recall_handle=first.recall_handle,
                duplicates=first.told(0),
            ),
            waits=waits,
        )

    # A batch.

    def _take_batch(
        self, connection: Connection, request: Command, header: SendMessageRequest
    ) -> None:
        topic = header.topic
        course = self._courses.get(topic)
        if course is None or not request.body or self._revision != self._topics.revision:
            course = self._course(request, header)
            topic = course.config.topic_name
        queue_id = header.queue_id
        if not 0 <= queue_id < course.queues:
            queue_id = self._checks.queue(header, course.config)
        if len(topic) > _LONGEST_PLAIN_TOPIC:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"message topic length too long {len(topic)}; a batch takes topics of up to "
                f"{_LONGEST_PLAIN_TOPIC} characters",
            )
        if topic.startswith(_RETRY):
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                "batch request does not support retry group " + topic[len(_RETRY) :],
            )
        writes = self._turns
        if writes.is_busy:
            raise self._checks.busy()
        body = request.body
        if len(body) > self._settings.max_message_size:
            raise self._checks.too_large(len(body), 0)
        elements = batch_columns(body) or batch_fields(body)
        batch = _Batch(connection, header, topic, queue_id, course.counts, elements)
        if isinstance(elements, BatchColumns):
            has_ids = RAW_MARK in elements.joined_tails
        else:
            has_ids = any(RAW_MARK in element[2] for element in elements)
        has_ids = has_ids and self._dedup.takes(topic)
        writes.answer_later(
            connection,
            request,
            self._put_new(batch) if has_ids else self._put_batch(batch),
            waits=not writes.is_slow or waits_for_flush(header.properties or ""),
        )

    def _put_batch(self, batch: _Batch) -> BatchPlace:
        header, elements = batch.header, batch.elements
        offsets, number = self._parts.store.append_batch(
            batch.topic,
            batch.queue_id,
            elements,
            header.born_timestamp,
            peer_of(batch.connection).born_host,
            header.sys_flag,
            header.reconsume_times or 0,
        )
        if isinstance(elements, BatchColumns):
            self._turns.count(batch.counts, elements.body_sizes.tolist())
        else:
            self._turns.count(batch.counts, [len(element[0]) for element in elements])
        return BatchPlace(offsets, batch.queue_id, number, unique_id_of(header.properties or ""))

    def _put_new(self, batch: _Batch) -> BatchPlace:
        """Store those messages of a batch whose ids are new."""
        dedup, elements = self._dedup, batch.elements
        if isinstance(elements, BatchColumns):
            ids = ids_of(elements.tails, skip=2)
        else:
            ids = ids_of(element[2] for element in elements)
        keys = keys_of(ids)
        if all(ids) and dedup.are_new(batch.topic, keys):
            place = self._put_batch(batch)
            dedup.note(batch.topic, keys, _numbers(place.offsets))
            return place
        # The place of the first one with each id in this batch, and first copies in the log.
        here: dict[bytes, int] = {}
        firsts: dict[int, Original | int] = {}
        for at, dedup_id in enumerate(ids):
            if not dedup_id:
                continue
            if dedup_id in here:
                firsts[at] = here[dedup_id]
            elif (first := dedup.find(batch.topic, dedup_id)) is not None:
                firsts[at] = first
            else:
                here[dedup_id] = at
        if isinstance(elements, BatchColumns):
            elements = batch_fields(elements.batch)
        stored = [at for at in range(len(ids)) if at not in firsts]
        offsets, number = self._put_chosen(batch, elements, stored)
        noted = [at for at in stored if ids[at]]
        if noted:
            dedup.note(batch.topic, [keys[at] for at in noted], [offsets[at] for at in noted])
        ranks = {at: rank for rank, at in enumerate(stored)}
        told: list[str] = []
        for at, found in firsts.items():
            if isinstance(found, int):
                its_id = property_value(elements[found][2], UNIQ_KEY) or ""
                original = Original(offsets[found], batch.queue_id, number + ranks[found], its_id)
            else:
                original = found
            offsets[at] = original.at
            told.append(original.told(at))
        dedup.dropped[batch.topic] += len(firsts)
        return BatchPlace(
            [offsets[at] for at in range(len(ids))],
            batch.queue_id,
            number,
            unique_id_of(batch.header.properties or ""),
            ",".join(told) or None,
        )

    def _put_chosen(
        self, batch: _Batch, elements: list[tuple[Buffer, int, bytes]], chosen: list[int]
    ) -> tuple[dict[int, int], int]:
        """Store some messages of a batch: their offsets in the log, and the first one's number."""
        if not chosen:
            return {}, self._parts.store.max_offset(batch.topic, batch.queue_id)
        put = self._put_batch(batch._replace(elements=[elements[at] for at in chosen]))
        return dict(zip(chosen, _numbers(put.offsets), strict=True)), put.number

    def _course(self, request: Command, header: SendMessageRequest) -> _Course:
        """The state of a topic that may be sent to: checks 0 to 7."""
        config = self._checks.config(request, header)
        if self._revision != self._topics.revision:
            self._revision = self._topics.revision
            self._courses.clear()
        topic = config.topic_name
        is_retry = topic.startswith(_RETRY)
        course = _Course(config, config.write_queue_nums, self._count(topic), is_retry)
        # A slave, or a broker that accepts no messages yet, is refused before.
        if may_write(self._parts.settings.permission):
            self._courses[topic] = course
        return course


def _numbers(offsets: Sequence[int] | Int64s) -> Sequence[int]:
    """Offsets as Python's numbers."""
    if isinstance(offsets, Sequence):
        return offsets
    numbers: list[int] = offsets.tolist()
    return numbers


def _dedup_id_of(properties: str) -> bytes | None:
    """The id by which a message is de-duplicated. Raises `Refused` in a transaction."""
    found = property_value(properties, DEDUP_ID)
    if found and property_value(properties, TRANSACTION_PREPARED) == "true":
        # The answer would name another transaction, which may have been rolled back.
        raise Refused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"a message of a transaction cannot have the property {DEDUP_ID}; the transaction's "
            "own check keeps it from being delivered twice",
        )
    return found.encode() if found else None


# The checks of a send, with the numbers of Apache's broker. Their order counts, because a client
# reacts to the first refusal. They raise `broker.errors.Refused`.


OVERLOADED = "[OVERLOAD]system busy, start flow control for a while"
#: Bytes of properties that a message gets beside the names of region and cluster, dead letters
#: included: a level, and a unique id if it has none.
_NOTED_LATER = 128


class SendChecks:
    """Accepts or refuses sends."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def config(self, request: Command, header: SendMessageRequest) -> TopicConfig:
        """The topic, which may be created now: checks 0 to 7."""
        topic = header.topic
        settings = self._parts.settings
        if settings.is_slave:
            raise SystemBusy
        if not request.body:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"a message to topic {topic!r} without a body is not stored; send at least a byte",
            )
        accept_from = settings.send.accept_from
        if accept_from > self._parts.clock.now():
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"broker unable to service, until {accept_from:.3f} (seconds since the epoch)",
            )
        if not may_write(settings.permission) and self._parts.topics.is_order(topic):
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._parts.address}] sending message is forbidden: it may not be "
                "written now; send to another broker of the topic",
            )
        self._parts.topics.check_for_send(topic)
        return self._parts.topics.for_send(
            topic,
            template=header.default_topic,
            queues=header.default_topic_queue_nums,
            unit_mode=bool(header.unit_mode),
            now=self._parts.clock.now(),
        )

    def queue(self, header: SendMessageRequest, config: TopicConfig) -> int:
        """The requested queue, or any: checks 8 and 9."""
        queue_id = header.queue_id
        if queue_id >= config.write_queue_nums and queue_id >= config.read_queue_nums:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"request queueId[{queue_id}] is illegal, topic {config.topic_name!r} has "
                f"{max(config.write_queue_nums, config.read_queue_nums)} queues",
            )
        if queue_id >= 0:
            return queue_id
        if not config.write_queue_nums:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"topic {config.topic_name!r} has no queue that can be written; update the topic",
            )
        return int(self._parts.chance.random() * config.write_queue_nums)

    def retried(
        self, request: Command, header: SendMessageRequest, queue_id: int, properties: str
    ) -> tuple[str, int, str]:
        """The topic of a message to a retry topic: this one, or the dead letters; 10 and 11."""
        parts = self._parts
        now = parts.clock.now()
        name = header.topic[len(_RETRY) :]
        group = parts.groups.require(name, now=now)
        most = group.retry_max_times
        if request.version >= Gate.MAX_RECONSUME_TIMES and header.max_reconsume_times is not None:
            most = header.max_reconsume_times
        is_dead = (header.reconsume_times or 0) > most
        is_put_off = property_value(properties, PUT_OFF) is not None
        if is_put_off:
            properties = remove_properties(properties, (PUT_OFF,))
        # A group with order locks is orderly, and its clients send here only to give up.
        is_given_up = not is_put_off and parts.locks.group_has_lock(name, parts.clock.monotonic())
        if is_dead or is_given_up:
            config = parts.topics.ensure_dead_letter(name, now=now)
            reason = "its attempts are used up" if is_dead else "its consumer, in order, gave it up"
            settings = parts.settings
            named = (settings.send.region + settings.cluster).encode()
            room = MAX_PROPERTIES - _NOTED_LATER - len(named)
            properties = given_up_properties(properties, reason, limit=room)
            return config.topic_name, 0, replace_property(properties, DELAY, "-1")
        return header.topic, queue_id, properties

    def count_dead(self, header: SendMessageRequest, properties: str) -> None:
        """A message to a retry topic has become a dead letter."""
        origin = property_value(properties, RETRY_TOPIC) or header.topic
        # An origin can be invented, and every new one would get a count.
        counted = origin if origin in self._parts.topics else header.topic
        self._parts.counters.group(counted, header.topic[len(_RETRY) :]).dead_letters += 1

    def kind(self, header: SendMessageRequest, properties: str) -> None:
        """Refuse inconsistent flags: 19."""
        if header.sys_flag & INNER_BATCH or property_value(properties, INNER_NUM) is not None:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                "a batch inside one message is not supported; send it with the batch flag",
            )

    def busy(self) -> Refused:
        """The refusal while too much waits for the disk."""
        self._parts.counters.busy_puts += 1
        return Refused(ResponseCode.SYSTEM_BUSY, OVERLOADED)

    def too_large(self, body: int, properties: int) -> Refused:
        """The refusal of a body or properties that are too long."""
        most = self._parts.settings.send.max_message_size
        return Refused(
            ResponseCode.MESSAGE_ILLEGAL,
            "the message is illegal, maybe msg body or properties length not matched. msg body "
            f"length limit {most}B, msg properties length limit 32KB; "
            f"this one has a body of {body} and properties of {properties} bytes",
        )


# Send-back of messages that a consumer could not process.


log = logging.getLogger(__name__)

#: Fields of our own: the reason, and a delay in milliseconds that replaces the level.
REASON_FIELD = "reason"
DELAY_FIELD = "delayMs"

#: Seconds that a consumer waits for the disk or a slave. Clients wait for five, old pull consumers
#: for three, and then send a copy of their own.
_PATIENCE = 2.0


class SendBackHandler:
    """Stores failed messages for another attempt, or as dead letters."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self.send_back}

    def send_back(self, connection: Connection, request: Command) -> Result:
        """Store the copy for the next attempt, or the dead letter; answered when it is stored.

        The consumer goes on past the message when it has the answer, so the answer waits for the
        flush. (Apache's brokers do not wait.) A copy that is stored but not confirmed in time is
        answered as success: otherwise the consumer would send another one.
        """
        parts = self._parts
        header = request.header(ConsumerSendBackRequest)
        group = self._group(header)
        if group.retry_queue_nums <= 0:
            return request.answer(ResponseCode.SUCCESS)
        now = parts.clock.now()
        topic = parts.topics.ensure_retry(
            group.group_name, group.retry_queue_nums, unit_mode=header.unit_mode, now=now
        )
        if not may_write(topic.perm):
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the topic[{topic.topic_name}] sending message is forbidden",
            )
        fields = request.ext_fields
        failure = Failure(
            self._message(header.offset),
            header.delay_level,
            self._allowed(request, header, group),
            fields.get(REASON_FIELD),
        )
        failure = failure.for_retry_in(topic.topic_name)
        try:
            if failure.is_final:
                dead = parts.topics.ensure_dead_letter(group.group_name, now=now)
                draft = failure.dead_letter(dead.topic_name)
            else:
                # The topic may have fewer queues than the group's setting says.
                queues = max(1, min(group.retry_queue_nums, topic.read_queue_nums))
                queue_id = int(parts.chance.random() * queues)
                draft = failure.retry(topic.topic_name, queue_id)
                self._delay(draft, fields.get(DELAY_FIELD), now)
        except MessageError as error:
            raise Refused(ResponseCode.SYSTEM_ERROR, str(error)) from error
        draft.waits = True
        is_confirmed = False

        def confirm() -> None:
            nonlocal is_confirmed
            if not is_confirmed:
                is_confirmed = True
                connection.reply(request, request.answer(ResponseCode.SUCCESS))

        # A copy that cannot be written is refused earlier; after this time it is written.
        patience = asyncio.get_running_loop().call_later(_PATIENCE, confirm)

        def stored(result: PutResult) -> None:
            patience.cancel()
            if result.status.is_stored:
                # An origin can be invented, and every new one would get a count.
                origin = failure.origin_topic
                counted = origin if origin in parts.topics else topic.topic_name
                counts = parts.counters.group(counted, group.group_name)
                counts.sent_back += 1
                if failure.is_final:
                    counts.dead_letters += 1
                    self._log_dead(draft, group.group_name, failure)
                confirm()
            elif not is_confirmed:
                remark = result.status.name
                if result.error is not None:
                    remark += f": {result.error}"
                answer = request.answer(ResponseCode.SYSTEM_ERROR, remark=remark)
                connection.reply(request, answer)

        parts.writes.put(draft, stored, transform=False)
        return LATER

    # Its steps.

    def _group(self, header: ConsumerSendBackRequest) -> SubscriptionGroupConfig:
        parts = self._parts
        if parts.settings.is_slave:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"no master available along with {parts.address.host}"
            )
        group = parts.groups.require(header.group, now=parts.clock.now())
        if not may_write(parts.settings.permission):
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the broker[{parts.address}] sending message is forbidden",
            )
        return group

    def _message(self, offset: int) -> StoredMessage:
        try:
            return decode_message(self._parts.store.message_at(offset))
        except (StoreError, MessageError) as error:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {offset}: {error}"
            ) from error

    @staticmethod
    def _allowed(
        request: Command, header: ConsumerSendBackRequest, group: SubscriptionGroupConfig
    ) -> int:
        if request.version >= Gate.MAX_RECONSUME_TIMES and header.max_reconsume_times is not None:
            return header.max_reconsume_times
        return group.retry_max_times

    def _delay(self, draft: Draft, delay_ms: str | None, now: float) -> None:
        """Park the copy for its level, or for the delay that the consumer requests.

        A delay beyond the limit of timers becomes the longest one; without timers the level counts.
        The next attempt may request the rest.
        """
        timers = self._parts.timers
        if delay_ms is None:
            self._parts.delays.park(draft)
            return
        if not delay_ms.isascii() or not delay_ms.isdecimal() or len(delay_ms) > 15:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"field {DELAY_FIELD} must be milliseconds, got {delay_ms[:32]!r}",
            )
        if not int(delay_ms):
            return
        if not self._parts.settings.timer:
            self._parts.delays.park(draft)
        else:
            longest = milliseconds(timers.longest)
            timers.park_until(draft, milliseconds_up(now) + min(int(delay_ms), longest))

    def _log_dead(self, draft: Draft, group: str, failure: Failure) -> None:
        log.info(
            "message became a dead letter",
            extra={"group": group, "topic": failure.origin_topic}
            | {"dead_letters": names.dead_letter_topic(group)}
            | {"message_id": property_value(draft.properties, UNIQ_KEY) or failure.origin_id},
        )
