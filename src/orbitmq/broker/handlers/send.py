"""Sending: one message, or a batch of one topic (10, 310, 320).

The usual message passes all checks (`sendchecks`) with a handful of lookups: its header is decoded
once, what its topic says is known from the message before (`_Course`), its property string is never
taken apart, and its answer comes from a template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orbitmq.broker import names
from orbitmq.broker.answers import BatchPlace, SendAnswers
from orbitmq.broker.counters import TopicCounts
from orbitmq.broker.drafts import Draft
from orbitmq.broker.errors import Refused
from orbitmq.broker.handlers.sendchecks import SendChecks
from orbitmq.broker.outcomes import refusal_code
from orbitmq.broker.parts import Parts
from orbitmq.broker.peers import peer_of
from orbitmq.broker.permissions import may_write
from orbitmq.broker.sentproperties import unique_id_of, waits_for_flush
from orbitmq.errors import OrbitError
from orbitmq.message.batch import batch_fields
from orbitmq.message.errors import MessageError, PropertiesRefused
from orbitmq.message.properties import append_property, remove_properties
from orbitmq.message.record import MAX_PROPERTIES
from orbitmq.message.sysflag import INNER_BATCH
from orbitmq.message.wellknown import (
    CLUSTER,
    INNER_NUM,
    MSG_REGION,
    POP_CK,
    TRACE_SWITCH,
    UNIQ_KEY,
)
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler, Result
from orbitmq.store.errors import StoreError
from orbitmq.wire.bodies.topics import TopicConfig
from orbitmq.wire.codes import Flag, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.send import SendMessageRequest, SendMessageResponse

_ONE_WAY = int(Flag.ONE_WAY)
_POP_CK = POP_CK + "\x01"
_INNER_NUM = INNER_NUM + "\x01"
_ITEM_END = "\x02"
_RETRY = names.RETRY_PREFIX
_LONGEST_PLAIN_TOPIC = 127


@dataclass(frozen=True, slots=True)
class _Course:
    """What the messages to a topic have in common, as long as no topic and no setting changes."""

    config: TopicConfig
    queues: int  #: that can be written
    counts: TopicCounts
    #: Whether it is a retry topic: each of its messages may have to go elsewhere.
    is_retry: bool


class Sending:
    """Takes messages from producers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._turns = parts.turns
        self._topics = parts.topics
        self._checks = SendChecks(parts)
        self._append = parts.store.append
        self._concern = parts.turns.transformations.concern
        for mark in (_POP_CK, _INNER_NUM):
            parts.turns.transformations.notice(mark)
        self._count = parts.counters.topic
        #: Told of every single message that was taken, if there are accounts.
        self._note_sent = parts.access.note_sent if parts.access.is_on else None
        #: The beginning of every offset id.
        self._id_prefix = parts.store_host.hex().upper()
        #: By topic, and for which revision of the topics.
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
        #: What every message carries beside its producer's own properties.
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
        """Take a message or a batch; it is answered when its turn is written."""
        header = request.header(SendMessageRequest)
        try:
            if header.batch:
                self._take_batch(connection, request, header)
            else:
                self._take(connection, request, header)
                if self._note_sent is not None:
                    self._note_sent(request, header.properties or "")
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
        turns = self._turns
        if turns.is_busy:
            raise self._checks.busy()
        if properties[-1:] != _ITEM_END:
            properties += _ITEM_END
        raw = (properties + self._marks).encode()
        size = len(body)
        if size > self._max_body or len(raw) > MAX_PROPERTIES:
            raise self._checks.too_large(size, len(raw))
        waits = not turns.is_slow or waits_for_flush(properties)
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
            self._take_draft(connection, request, draft, asked_queue, unique_id)
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
        if course.is_retry and topic != header.topic:
            self._checks.count_dead(header, properties)
        taken = counts.taken
        if not taken:
            turns.counting.append(counts)
        taken.append(size)
        turns.is_dirty = True
        if not request.flag & _ONE_WAY:
            turn = turns.patient if waits else turns.hasty
            turn.senders.append((connection, request, (at, asked_queue, number, unique_id)))

    def _take_draft(
        self,
        connection: Connection,
        request: Command,
        draft: Draft,
        asked_queue: int,
        unique_id: str,
    ) -> None:
        """Store a message that may belong somewhere else for a while."""
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
        turns = self._turns
        if turns.is_busy:
            raise self._checks.busy()
        body = request.body
        if len(body) > self._settings.max_message_size:
            raise self._checks.too_large(len(body), 0)
        elements = batch_fields(body)
        offsets, number = self._parts.store.append_batch(
            topic,
            queue_id,
            elements,
            header.born_timestamp,
            peer_of(connection).born_host,
            header.sys_flag,
            header.reconsume_times or 0,
        )
        turns.count(course.counts, [len(element[0]) for element in elements])
        properties = header.properties or ""
        turns.answer_later(
            connection,
            request,
            BatchPlace(offsets, queue_id, number, unique_id_of(properties)),
            waits=not turns.is_slow or waits_for_flush(properties),
        )

    def _course(self, request: Command, header: SendMessageRequest) -> _Course:
        """What is known about the messages of a topic that may be sent to: checks 0 to 7."""
        config = self._checks.config(request, header)
        if self._revision != self._topics.revision:
            self._revision = self._topics.revision
            self._courses.clear()
        topic = config.topic_name
        is_retry = topic.startswith(_RETRY)
        course = _Course(config, config.write_queue_nums, self._count(topic), is_retry)
        # A slave, or a broker that does not accept messages yet, has not come so far.
        if may_write(self._parts.settings.permission):
            self._courses[topic] = course
        return course
