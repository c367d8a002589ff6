"""Pulls: checks, reading, answers, and what happens before and after long polling (11, 361).

A pull is processed once, or twice when it was held in between: the second time it is checked and
read again, including its sender's permissions, but it is neither held nor committed again. The
messages are sent from the mapped log.

A pull whose filter reads properties is processed in parts, in turns with others (`Pacing`), and
is answered without messages if its topic or filter has changed since the last part.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.broker.filters import CompileLater
from orbitmq.broker.groups import peer_of
from orbitmq.broker.longpoll import HeldPull, Kept
from orbitmq.broker.progress import OFFSET_RESET, CommitSource, is_there
from orbitmq.broker.scheduler import JUDGEMENTS, judgements
from orbitmq.broker.settings import Transfer
from orbitmq.broker.topics import may_read
from orbitmq.filter.tags import TAG, MessageFilter, TagFilter
from orbitmq.names import DEAD_LETTER_PREFIX, RETRY_PREFIX
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result, refusal
from orbitmq.store.read import ReadResult, ReadStatus
from orbitmq.wire.bodies import (
    ConsumeType,
    MessageModel,
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)
from orbitmq.wire.codes import (
    DEFAULT_LIMITS,
    Flag,
    ForbiddenType,
    RequestCode,
    ResponseCode,
    Serialization,
)
from orbitmq.wire.command import AnswerTemplate, Command, command_pieces
from orbitmq.wire.frame import Bytes, frame_head, pack_prefix
from orbitmq.wire.headers import PullFlag, PullMessageRequest, PullMessageResponse

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts


log = logging.getLogger(__name__)

_FOUND, _FOUND_WORD = ReadStatus.FOUND, ReadStatus.FOUND.value
_COMMIT = int(PullFlag.COMMIT_OFFSET)
_SUSPEND = int(PullFlag.SUSPEND)
_ONE_WAY = int(Flag.ONE_WAY)
#: An answer has to fit into a frame, whatever the store's settings are.
_MOST_BYTES = DEFAULT_LIMITS.frame - 64 * 1024
#: Usual sizes of pulls. A pull of more reads a long stretch, and gets more in one answer.
_USUAL_BYTES = 256 * 1024
#: Bytes that a queue entry counts for that was rejected by the filter.
_LOOKED_AT = 16


@dataclass(frozen=True, slots=True)
class _Begun:
    """A pull of which a part was processed."""

    at: float
    header: PullMessageRequest
    result: ReadResult
    topic: TopicConfig  #: as it was then
    wanted: MessageFilter
    judge: int  #: messages of one part
    was_held: bool = False


class PullHandler:
    """Answers pulls."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pacing = parts.pacing
        self._held = parts.held
        self._held.again = self._again
        self._access = parts.access
        self._access.on_change(self._check_held)
        self._read = parts.store.read
        self._max_offset = parts.store.max_offset
        self._progress = parts.progress
        self._topics = parts.topics
        self._counts_of = parts.counters.group
        self._monotonic = parts.clock.monotonic
        self._pulled = parts.latencies.pulled
        self._answers = PullAnswers()
        self._checks = PullChecks(parts)
        parts.filters.compiled = self._pacing.compiled
        parts.filters.must_wait = lambda: self._pacing.is_judging
        self._apply_settings()
        parts.on_settings_changed(self._apply_settings)

    def handlers(self) -> Mapping[int, Handler]:
        return {RequestCode.PULL_MESSAGE: self.pull, RequestCode.LITE_PULL_MESSAGE: self.pull}

    def _apply_settings(self) -> None:
        settings = self._parts.settings
        self._settings = settings.pull
        self._answers.by_heap = settings.pull.transfer is Transfer.HEAP
        self._held.apply(settings.pull)
        self._pacing.limit = settings.pull.step_bytes
        self._parts.filters.is_enabled = settings.pull.enable_property_filter
        self._is_slave = settings.is_slave

    def pull(self, connection: Connection, request: Command) -> Result:
        """Answer a pull now, or when a message has arrived for it."""
        if self._pacing.must_wait(connection):
            return self._later(connection, request)
        return self._first(connection, request)

    def _later(
        self, connection: Connection, request: Command, begun: _Begun | None = None
    ) -> Result:
        rules = self._access.version
        self._pacing.later(connection, lambda: self._in_its_turn(connection, request, rules, begun))
        return LATER

    def _in_its_turn(
        self,
        connection: Connection,
        request: Command,
        rules: int,
        begun: _Begun | None,
    ) -> None:
        """Process a pull that waited for its turn."""
        if not connection.is_open:
            return
        try:
            self._access.check_again(connection, request, since=rules)
            if begun is None:
                answer = self._first(connection, request, is_its_turn=True)
            else:
                answer = self._go_on(connection, request, begun)
        except Exception as error:  # noqa: BLE001  # as the dispatcher does
            answer = refusal(request, error)
        if answer is not LATER and answer is not None:
            connection.reply(request, answer)

    def _first(
        self, connection: Connection, request: Command, *, is_its_turn: bool = False
    ) -> Result:
        """Process a pull."""
        began = self._monotonic()
        header = request.header(PullMessageRequest)
        try:
            group, topic, wanted, _ = self._checks.passed(connection, request, header, began)
        except CompileLater:
            return self._later(connection, request)
        except Refused as refused:
            return self._refused(request, refused)
        if self._pacing.is_judging and not is_its_turn and wanted.needs_properties:
            return self._later(connection, request)
        if (
            header.sys_flag & _COMMIT
            # A client's offset may be beyond the end after messages were lost.
            and header.commit_offset <= self._max_offset(header.topic, header.queue_id)
        ):
            self._progress.commit(
                header.topic,
                header.consumer_group,
                header.queue_id,
                header.commit_offset,
                by=peer_of(connection).name,
                way=CommitSource.PULL,
                now=began,
                asked=header.queue_offset,
            )
        judge = judgements(wanted)
        code, remark, result = self._look(header, header.queue_offset, wanted, judge)
        if result.rest is not None:
            begun = _Begun(began, header, result, topic, wanted, judge)
            return self._later(connection, request, begun)
        if (
            code == NOT_FOUND
            and header.sys_flag & _SUSPEND
            and result.next_offset == header.queue_offset
            and (seconds := self._seconds(request, header)) > 0
        ):
            pull = HeldPull(connection, request, header, wanted, rules=self._access.version)
            if self._held.hold(pull, seconds) is not Kept.NOT:
                return LATER
            # Not an empty answer, to which clients react with the next pull immediately.
            return self._refused(request, SystemBusy())
        answer = self._answer(request, header, group, topic, code, remark, result)
        self._count(header, result)
        self._pulled(request.code, code, self._monotonic() - began, was_held=False)
        return answer

    def _go_on(self, connection: Connection, request: Command, begun: _Begun) -> Result:
        """Process the next part of a pull."""
        header, result = begun.header, begun.result
        try:
            group, topic, wanted, _ = self._checks.passed(
                connection, request, header, self._monotonic()
            )
        except CompileLater:
            return self._later(connection, request, begun)
        except Refused as refused:
            return self._refused(request, refused)
        if topic is not begun.topic or wanted != begun.wanted:
            # The result may have been deleted, or not be wanted any more: the client pulls again.
            status, low, high = ReadStatus.NO_MATCHED_MESSAGE, result.min_offset, result.max_offset
            result = ReadResult(status, header.queue_offset, low, high)
        if result.rest is not None:
            result.rest.go_on(begun.judge)
            self._pacing.judged(result.judged, begun.judge)
            if result.rest is not None:
                return self._later(connection, request, begun)
        code, remark = CODES[result.status], result.status.value
        answer = self._answer(request, header, group, topic, code, remark, result)
        self._count(header, result)
        self._pulled(request.code, code, self._monotonic() - begun.at, was_held=begun.was_held)
        return answer

    def _refused(self, request: Command, refused: Refused) -> Command:
        self._pulled(request.code, refused.code, 0.0, was_held=False)
        return _refusal(request, refused)

    def _seconds(self, request: Command, header: PullMessageRequest) -> float:
        """The seconds that a pull may be held."""
        if request.flag & _ONE_WAY or self._held.is_stopped:
            return 0.0
        settings = self._settings
        if not settings.long_polling:
            return settings.short_hold
        return min(header.suspend_timeout_millis / 1000, settings.longest_hold)

    # Held pulls.

    def _again(self, pull: HeldPull) -> None:
        request = pull.request
        header = pull.header
        connection = pull.connection
        code: int
        result: ReadResult | None
        try:
            if pull.refusal is not None or pull.rules != self._access.version:
                self._check_sender(pull)
            group, topic, wanted, _ = self._checks.passed(
                connection, request, header, self._monotonic()
            )
        except CompileLater:
            self._held.run_later(pull)
            return
        except Refused as refused:
            code = refused.code
            pull.is_answered = True
            connection.reply(request, _refusal(request, refused), at_once=pull.is_alone)
            result = None
        else:
            # The only message that has arrived, and its filter has accepted it.
            is_judged = pull.judged == pull.offset and wanted is pull.wanted
            offset = pull.offset
            if wanted is not pull.wanted and wanted != pull.wanted:
                # The new filter may accept what the previous one rejected.
                offset = header.queue_offset
            judge = judgements(wanted)
            code, remark, result = self._look(
                header, offset, None if is_judged else wanted, judge, only_one=is_judged
            )
            if result.rest is not None:
                pull.is_answered = True  # in a later turn, like any other pull
                since = self._monotonic() - self._held.age_of(pull)
                begun = _Begun(since, header, result, topic, wanted, judge, was_held=True)
                self._later(connection, request, begun)
                return
            answer = self._answer(request, header, group, topic, code, remark, result)
            pull.is_answered = True
            # The answer first, the statistics after it.
            try:
                connection.send_pieces(answer, at_once=pull.is_alone)
            finally:
                connection.release(request)
        try:
            if result is not None:
                self._count(header, result)
            self._pulled(request.code, code, self._held.age_of(pull), was_held=True)
        except Exception:
            log.exception("a held pull was answered, but could not be counted")

    def _check_held(self) -> None:
        """The accounts have changed: answer pulls that are no longer allowed."""
        self._held.wake(unless=self._may_wait)

    def _may_wait(self, pull: HeldPull) -> bool:
        try:
            self._check_sender(pull)
        except Refused:
            return False
        return True

    def _check_sender(self, pull: HeldPull) -> None:
        """Raise `Refused` if the sender of a pull may not have it any more."""
        if pull.refusal is not None:
            raise pull.refusal
        try:
            self._access.check_again(pull.connection, pull.request, since=pull.rules)
        except Refused as refused:
            pull.refusal = refused
            raise
        pull.rules = self._access.version

    def _has_slaves(self) -> bool:
        """Whether there is a slave to suggest. (Apache's broker suggests in any case.)"""
        serving = self._parts.replication.serving
        return serving is not None and bool(serving.replicas)

    def _look(
        self,
        header: PullMessageRequest,
        offset: int,
        wanted: MessageFilter | None,
        judge: int = 0,
        *,
        only_one: bool = False,
    ) -> tuple[int, str, ReadResult]:
        """Read at an offset: the code, its name, and the result.

        `judge`: the messages that a filter may judge in this part.
        """
        name, topic, queue_id = header.consumer_group, header.topic, header.queue_id
        progress = self._progress
        reset = progress.pending_reset(topic, name, queue_id)
        if reset is not None:
            is_moved = not is_there(header, reset)
            if not (is_moved and header.keep_reset):
                progress.take_reset(topic, name, queue_id)
            if is_moved:
                store = self._parts.store
                low, high = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
                moved = ReadResult(ReadStatus.OFFSET_TOO_SMALL, reset, low, high)
                return MOVED, OFFSET_RESET, moved
        asked = header.max_msg_bytes or 0
        result = self._read(
            topic,
            queue_id,
            offset,
            1 if only_one else header.max_msg_nums,
            wanted,
            min(asked, _MOST_BYTES) if asked > 0 else _MOST_BYTES,
            in_bulk=asked > _USUAL_BYTES,
            judge=judge,
        )
        if result.judged:
            self._pacing.judged(result.judged, judge or JUDGEMENTS)
        status = result.status
        if status is _FOUND:
            return FOUND, _FOUND_WORD, result
        code = CODES[status]
        if code == RETRY:
            self._pacing.spent += (result.next_offset - offset) * _LOOKED_AT
        if offset and status in EMPTY_QUEUE:
            code = MOVED
        if code == MOVED:
            if self._is_slave:
                # This slave may only lag behind; the master knows the right offset.
                result.next_offset = offset
                return RETRY, status.value, result
            self._progress.permit(topic, name, queue_id, result.next_offset, now=self._monotonic())
        return code, status.value, result

    def _answer(
        self,
        request: Command,
        header: PullMessageRequest,
        group: SubscriptionGroupConfig,
        topic: TopicConfig,
        code: int,
        remark: str,
        result: ReadResult,
    ) -> list[Bytes]:
        suggested = 0
        if self._settings.slave_read_enable:
            is_far = result.suggest_replica and (self._is_slave or self._has_slaves())
            suggested = group.which_broker_when_consume_slowly if is_far else group.broker_id
            if suggested:
                self._progress.reads_elsewhere(header.topic, header.consumer_group, header.queue_id)
        place = (
            suggested,
            result.next_offset,
            result.min_offset,
            result.max_offset,
            topic.topic_sys_flag,
            group.group_sys_flag,
        )
        return self._answers.make(request, code, remark, place, result)

    def _count(self, header: PullMessageRequest, result: ReadResult) -> None:
        name, topic = header.consumer_group, header.topic
        self._progress.note_pull(topic, name, header.queue_id, result.next_offset)
        counts = self._counts_of(topic, name)
        counts.pulls += 1
        size = result.size
        if size:
            counts.hits += 1
            counts.gets += result.count
            counts.get_bytes += size
            self._pacing.spent += size


def _refusal(request: Command, refused: Refused) -> Command:
    extra = {"forbiddenType": str(int(refused.kind))} if isinstance(refused, Forbidden) else {}
    return request.answer(refused.code, remark=str(refused), extra=extra)


# The checks of a pull, in the order of Apache's broker and with its codes. Nearly every pull is
# like an earlier one of its group, so its result is remembered for a group and a topic until the
# settings, the topics, the groups or the members change, which all count their revisions.


_SUBSCRIPTION = int(PullFlag.SUBSCRIPTION)
_PULL = int(RequestCode.PULL_MESSAGE)
#: Seconds between two notes of the subscription that comes with every pull of a group.
_NOTE_SUBSCRIPTION = 60.0
_MOST_NOTED = 10_000
#: Characters of a subscription that is noted; a longer one is looked up each time.
_LONGEST_NOTED = 512
#: Tags of a filter that is remembered with the result.
_MOST_CODES = 64


class Forbidden(Refused):
    """A pull that administration has forbidden; the answer says at which level."""

    def __init__(self, kind: ForbiddenType, remark: str) -> None:
        self.kind = kind
        super().__init__(ResponseCode.NO_PERMISSION, remark)


class _Noted(NamedTuple):
    """The subscription of a group's pulls, and until when it is not noted again."""

    text: str | None
    kind: str | None
    until: float
    #: None when it is more than tags: that takes more memory, and may be disabled.
    wanted: TagFilter | None


class Passed(NamedTuple):
    """The result of the checks of a pull."""

    group: SubscriptionGroupConfig
    topic: TopicConfig
    wanted: MessageFilter
    #: The highest version of the subscription that a pull may quote.
    version: int


class PullChecks:
    """Accepts or refuses pulls."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._topics, self._groups, self._consumers = parts.topics, parts.groups, parts.consumers
        #: Results by group and topic, with the revisions for which they are valid. For pulls that
        #: bring their subscription: while it is remembered.
        self._passed: dict[tuple[str, str], Passed] = {}
        self._posted: dict[tuple[str, str], tuple[Passed, _Noted]] = {}
        self._revisions = (-1, -1, -1)
        #: Whether the broker allows pulls, and pulls of any client.
        self._is_open = self._is_for_all = False
        self._apply_settings()
        parts.on_settings_changed(self._apply_settings)
        self._noted: dict[tuple[str, str], _Noted] = {}

    def _apply_settings(self) -> None:
        settings = self._parts.settings
        self._is_open = may_read(settings.permission) and not settings.is_slave
        self._is_for_all = not settings.pull.reject_pull_consumer
        self._passed.clear()
        self._posted.clear()

    def passed(
        self,
        connection: Connection,
        request: Command,
        header: PullMessageRequest,
        now: float,
    ) -> Passed:
        """Make all checks, or use the result of an earlier pull.

        Raises `Refused`; `CompileLater` as `wanted` does.
        """
        revisions = self._topics.revision, self._groups.revision, self._consumers.revision
        if revisions != self._revisions:
            self._revisions = revisions
            self._passed.clear()
            self._posted.clear()
        key = header.consumer_group, header.topic
        known = self._known(key, header, now)
        if (
            known is not None
            and request.code == _PULL
            and 0 <= header.queue_id < known.topic.read_queue_nums
        ):
            return known
        group, topic = self.check(request, header)
        version = self._version(connection, header)
        wanted = self.wanted(connection, header, group, version, now)
        passed = Passed(group, topic, wanted, version)
        if (
            self._is_open
            and self._is_for_all
            and request.code == _PULL
            and isinstance(wanted, TagFilter)
            and len(wanted.codes) <= _MOST_CODES
        ):
            if not header.sys_flag & _SUBSCRIPTION:
                if len(self._passed) >= _MOST_NOTED:
                    self._passed.clear()
                self._passed[key] = passed
            elif (noted := self._noted.get(key)) is not None and noted.wanted is wanted:
                if len(self._posted) >= _MOST_NOTED:
                    self._posted.clear()
                self._posted[key] = passed, noted
        return passed

    def _known(self, key: tuple[str, str], header: PullMessageRequest, now: float) -> Passed | None:
        """The result of an earlier pull with the same subscription."""
        if not header.sys_flag & _SUBSCRIPTION:
            known = self._passed.get(key)
            return known if known is not None and header.sub_version <= known.version else None
        posted = self._posted.get(key)
        if posted is None:
            return None
        passed, noted = posted
        is_same = header.subscription == noted.text and header.expression_type == noted.kind
        return passed if is_same and now < noted.until else None

    def check(
        self, request: Command, header: PullMessageRequest
    ) -> tuple[SubscriptionGroupConfig, TopicConfig]:
        """Whether this group may read this queue: checks 0 to 7."""
        if not self._is_open or request.code != _PULL:
            self._check_broker(request)
        parts = self._parts
        group = parts.groups.get(header.consumer_group) or parts.groups.require(
            header.consumer_group, now=parts.clock.now()
        )
        if not group.consume_enable:
            raise Forbidden(
                ForbiddenType.GROUP,
                f"subscription group no permission, {header.consumer_group}: its consumption is "
                "switched off",
            )
        topic = parts.topics.get(header.topic)
        if topic is None:
            remark = f"topic[{header.topic}] not exist, apply first please!"
            # Topics of groups are created by brokers only.
            if not header.topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)):
                remark += f" It can be created with: orbitmq topic create {header.topic}"
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, remark)
        if not may_read(topic.perm):
            raise Forbidden(
                ForbiddenType.TOPIC,
                f"the topic[{header.topic}] pulling message is forbidden: its read permission is "
                "off",
            )
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] has queues 0 to "
                f"{topic.read_queue_nums - 1} to read",
            )
        return group, topic

    def _check_broker(self, request: Command) -> None:
        """Whether pulls are allowed at all: checks 0 to 2."""
        parts = self._parts
        settings = parts.settings
        if settings.is_slave and not (
            settings.pull.slave_read_enable or parts.replication.is_master_gone
        ):
            raise SystemBusy
        if not may_read(settings.permission):
            raise Forbidden(
                ForbiddenType.BROKER,
                f"the broker[{parts.address}] pulling message is forbidden: its read permission "
                "is off",
            )
        if request.code == RequestCode.LITE_PULL_MESSAGE and not settings.pull.lite_pull:
            raise Forbidden(
                ForbiddenType.BROKER,
                f"the broker[{parts.address}] for lite pull consumer is forbidden",
            )

    def wanted(
        self,
        connection: Connection,
        header: PullMessageRequest,
        group: SubscriptionGroupConfig,
        version: int,
        now: float,
    ) -> MessageFilter:
        """The filter that this pull carries, or its group's in that version: checks 8 to 10.

        Raises `CompileLater` if it is to be compiled in a later step.
        """
        parts = self._parts
        name = header.consumer_group
        if header.sys_flag & _SUBSCRIPTION:
            noted = self._noted.get((name, header.topic))
            if (
                noted is not None
                and noted.text == header.subscription
                and noted.kind == header.expression_type
                and now < noted.until
            ):
                wanted = noted.wanted or parts.filters.of_pull(
                    noted.text, noted.kind, connection.remote
                )
            else:
                wanted = parts.filters.of_pull(
                    header.subscription, header.expression_type, connection.remote
                )
                self._note_subscription(header, wanted, now)
        else:
            self._check_membership(header, group)
            subscription = parts.consumers.subscription(name, header.topic, with_compensation=False)
            wanted = parts.filters.of_group(
                name, header.topic, subscription, version, connection.remote
            )
        if not self._is_for_all and not self._is_known(connection, name):
            raise Refused(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's group info not exist, or the pull consumer is rejected by server: "
                f"group {name!r} has to send heartbeats",
            )
        return wanted

    def _version(self, connection: Connection, header: PullMessageRequest) -> int:
        """The version that a pull quotes, or its group's where a newer one means the same."""
        quoted = header.sub_version
        if header.sys_flag & _SUBSCRIPTION:
            return quoted
        group, topic, consumers = header.consumer_group, header.topic, self._consumers
        known = consumers.subscription(group, topic, with_compensation=False)
        if known is None or quoted <= known.sub_version:
            return quoted
        is_same = consumers.may_be_ahead(connection, group, topic)
        return known.sub_version if is_same else quoted

    def _check_membership(self, header: PullMessageRequest, group: SubscriptionGroupConfig) -> None:
        parts = self._parts
        name = header.consumer_group
        if not parts.consumers.is_online(name):
            raise Refused(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's group info not exist: no heartbeat of group {name!r} has come, "
                "or it did not fit (`max_consumer_bytes`), and the pull does not bring its "
                "subscription",
            )
        if (
            not group.consume_broadcast_enable
            and parts.consumers.model(name) is MessageModel.BROADCASTING
        ):
            raise Forbidden(
                ForbiddenType.BROADCASTING,
                f"the consumer group[{name}] can not consume by broadcast way",
            )
        if parts.groups.is_forbidden(name, header.topic):
            raise Forbidden(
                ForbiddenType.SUBSCRIPTION,
                f"the consumer group[{name}] is forbidden for topic[{header.topic}]",
            )

    def _is_known(self, connection: Connection, group: str) -> bool:
        if group.startswith(("CID_RMQ_SYS_", "TOOLS_CONSUMER")):
            return True
        members = self._parts.consumers.members(group)
        if not members:
            return False
        connections = self._parts.consumers.connections(group)
        is_active = connections is not None and (
            connections.consume_type is ConsumeType.CONSUME_ACTIVELY
        )
        return not is_active or any(member.channel is connection for member in members)

    def _note_subscription(
        self, header: PullMessageRequest, wanted: MessageFilter, now: float
    ) -> None:
        """Note, for tools, the subscription of a group that need not send heartbeats."""
        text, kind = header.subscription, header.expression_type
        if text is None or len(text) <= _LONGEST_NOTED:
            if len(self._noted) >= _MOST_NOTED:
                self._noted.clear()
            self._noted[header.consumer_group, header.topic] = _Noted(
                text,
                kind,
                now + _NOTE_SUBSCRIPTION,
                wanted if isinstance(wanted, TagFilter) else None,
            )
        subscription = SubscriptionData(
            topic=header.topic,
            sub_string=text,
            expression_type=kind or TAG,
            sub_version=header.sub_version,
        )
        self._parts.consumers.compensate(header.consumer_group, subscription, now)


# Answers to pulls.


FOUND = int(ResponseCode.SUCCESS)
NOT_FOUND = int(ResponseCode.PULL_NOT_FOUND)
RETRY = int(ResponseCode.PULL_RETRY_IMMEDIATELY)
MOVED = int(ResponseCode.PULL_OFFSET_MOVED)

#: The code for each status of a read.
CODES: Mapping[ReadStatus, int] = {
    ReadStatus.FOUND: FOUND,
    ReadStatus.NO_MATCHED_MESSAGE: RETRY,
    ReadStatus.MESSAGE_WAS_REMOVING: RETRY,
    ReadStatus.OFFSET_FOUND_NULL: NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_ONE: NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_BADLY: MOVED,
    ReadStatus.OFFSET_TOO_SMALL: MOVED,
    # For a pull from 0. One from another offset is sent to 0: its topic was created again.
    ReadStatus.NO_MESSAGE_IN_QUEUE: NOT_FOUND,
    ReadStatus.NO_MATCHED_LOGIC_QUEUE: NOT_FOUND,
}
EMPTY_QUEUE = frozenset({ReadStatus.NO_MESSAGE_IN_QUEUE, ReadStatus.NO_MATCHED_LOGIC_QUEUE})


#: Suggested broker, next offset, min and max offset, flags of the topic and of the group.
Place: TypeAlias = tuple[int, int, int, int, int, int]

_VARYING = (
    "suggest_which_broker_id",
    "next_begin_offset",
    "min_offset",
    "max_offset",
    "topic_sys_flag",
    "group_sys_flag",
)
_JSON = Serialization.JSON
_JSON_MARK = int(_JSON) << 24
#: A body of this size fits into a frame, whatever its header.
_SURE_BYTES = 1024 * 1024
_FEW_PIECES = 3
_LONG_PIECE = 16 * 1024
_BLOCK = 96 * 1024


class PullAnswers:
    """Makes answers to pulls, each kind from a template of its own."""

    def __init__(self) -> None:
        #: Whether messages are copied before they are sent.
        self.by_heap = False
        self._templates: dict[tuple[int, str], AnswerTemplate[PullMessageResponse]] = {}

    def make(
        self, request: Command, code: int, remark: str, place: Place, result: ReadResult
    ) -> list[Bytes]:
        """The pieces of an answer; its messages are not copied."""
        if request.serialization is not _JSON:
            fields = PullMessageResponse(**dict(zip(_VARYING, place, strict=True)))
            body = b"".join(result.pieces)
            return command_pieces(request.answer(code, fields, remark=remark, body=body))
        template = self._templates.get((code, remark))
        if template is None:
            template = self._templates[code, remark] = AnswerTemplate(
                PullMessageResponse, _VARYING, code=code, remark=remark
            )
        body_size = result.size
        # Inline: with `head`, for texts as well, it would take half as long again.
        header = template.text % (*place, request.opaque)
        size = len(header)
        if body_size <= _SURE_BYTES:
            head = pack_prefix(4 + size + body_size, _JSON_MARK | size) + header
        else:
            head = frame_head(int(_JSON), header, body_size)
        if not body_size:
            return [head]
        if self.by_heap:
            return [head, b"".join(result.pieces)]
        return [head, *result.pieces] if result.count == 1 else few(head, result)


def few(head: bytes, result: ReadResult) -> list[Bytes]:
    """An answer with the messages of a read, in a small number of pieces.

    Messages of a busy queue are short and many, and one join costs less than sending each of them;
    but no piece is larger than what the allocator has without mapping memory.
    """
    pieces, size = result.pieces, result.size
    count = len(pieces)
    if count <= _FEW_PIECES or size >= count * _LONG_PIECE:
        return [head, *pieces]
    if size <= _BLOCK:
        return [b"".join((head, *pieces))]
    step = max(1, count * _BLOCK // size)
    return [head, *(b"".join(pieces[at : at + step]) for at in range(0, count, step))]
