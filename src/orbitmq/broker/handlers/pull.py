"""Pulling messages, with or without waiting for them (11, 361).

A pull is processed once, or twice when it was held in between: the second time everything is
checked and read anew, but it is neither held again nor does it commit again. What it gets lies in
the mapped log and goes to the socket from there.
"""

from __future__ import annotations

from collections.abc import Mapping

from orbitmq.broker.commitrule import Way
from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.broker.holding import HeldPull
from orbitmq.broker.parts import Parts
from orbitmq.broker.peers import peer_of
from orbitmq.broker.permissions import may_read
from orbitmq.broker.pullanswers import (
    CODES,
    EMPTY_QUEUE,
    MOVED,
    NOT_FOUND,
    RETRY,
    PullAnswers,
)
from orbitmq.broker.resets import OFFSET_RESET, is_there
from orbitmq.broker.settings import Transfer
from orbitmq.filter.subscription import TAG, MessageFilter
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result, refusal
from orbitmq.remoting.owner import Answer
from orbitmq.store.reading import ReadResult, ReadStatus
from orbitmq.wire.bodies.membership import ConsumeType, MessageModel, SubscriptionData
from orbitmq.wire.bodies.topics import SubscriptionGroupConfig, TopicConfig
from orbitmq.wire.codes import Flag, ForbiddenType, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers.pull import PullFlag, PullMessageRequest
from orbitmq.wire.limits import DEFAULT_LIMITS

_COMMIT = int(PullFlag.COMMIT_OFFSET)
_SUSPEND = int(PullFlag.SUSPEND)
_SUBSCRIPTION = int(PullFlag.SUBSCRIPTION)
_ONE_WAY = int(Flag.ONE_WAY)
#: An answer has to fit into a frame, whatever the settings of the store allow.
_MOST_BYTES = DEFAULT_LIMITS.frame - 64 * 1024
#: What consumers ask for. Whoever asks for more reads a long stretch, and gets more at a time.
_USUAL_BYTES = 256 * 1024
#: How often the subscription that comes with every pull of a group is noted.
_NOTE_SUBSCRIPTION = 60.0
_MOST_NOTED = 10_000


class Forbidden(Refused):
    """A pull that somebody has switched off; clients are told who."""

    def __init__(self, kind: ForbiddenType, remark: str) -> None:
        self.kind = kind
        super().__init__(ResponseCode.NO_PERMISSION, remark)


class Pulling:
    """Gives messages to consumers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pacing = parts.pacing
        self._held = parts.held
        self._held.again = self._again
        self._read = parts.store.read
        self._monotonic = parts.clock.monotonic
        self._pulled = parts.latencies.pulled
        self._answers = PullAnswers()
        self._noted: dict[tuple[str, str], tuple[str | None, str | None, float]] = {}
        self._apply_settings()
        parts.on_settings_changed(self._apply_settings)

    def handlers(self) -> Mapping[int, Handler]:
        return {RequestCode.PULL_MESSAGE: self.pull, RequestCode.LITE_PULL_MESSAGE: self.pull}

    def _apply_settings(self) -> None:
        settings = self._parts.settings
        self._settings = settings.pull
        self._answers.by_heap = settings.pull.transfer is Transfer.HEAP
        self._held.limit = settings.pull.held_requests
        self._held.limit_of_one = settings.pull.held_per_connection
        self._pacing.limit = settings.pull.step_bytes
        self._parts.filters.is_enabled = settings.pull.enable_property_filter
        self._is_slave = settings.is_slave

    def pull(self, connection: Connection, request: Command) -> Result:
        """Answer a pull now, or when something has arrived for it."""
        if self._pacing.must_wait(connection):
            self._pacing.later(connection, lambda: self._in_its_turn(connection, request))
            return LATER
        return self._first(connection, request)

    def _in_its_turn(self, connection: Connection, request: Command) -> None:
        """A pull that had to wait because too much was sent to others."""
        if not connection.is_open:
            return
        try:
            answer = self._first(connection, request)
        except Exception as error:  # noqa: BLE001  # as the dispatcher does
            answer = refusal(request, error)
        if answer is not LATER and answer is not None:
            connection.reply(request, answer)

    def _first(self, connection: Connection, request: Command) -> Result:
        began = self._monotonic()
        header = request.header(PullMessageRequest)
        try:
            group, topic = self._check(request, header)
            wanted = self._wanted(connection, header, group)
        except Refused as refused:
            self._pulled(request.code, refused.code, 0.0, was_held=False)
            return _refusal(request, refused)
        if header.sys_flag & _COMMIT:
            self._parts.progress.commit(
                header.topic,
                header.consumer_group,
                header.queue_id,
                header.commit_offset,
                by=peer_of(connection).name,
                way=Way.PULL,
                now=began,
            )
        code, remark, result = self._look(header, header.queue_offset, wanted)
        if (
            code == NOT_FOUND
            and header.sys_flag & _SUSPEND
            and result.next_offset == header.queue_offset
            and self._hold(connection, request, header, wanted)
        ):
            return LATER
        answer = self._answer(request, header, group, topic, code, remark, result)
        self._pulled(request.code, code, self._monotonic() - began, was_held=False)
        return answer

    def _again(self, pull: HeldPull) -> None:
        request = pull.request
        header = request.header(PullMessageRequest)
        answer: Answer
        try:
            group, topic = self._check(request, header)
            wanted = self._wanted(pull.connection, header, group)
        except Refused as refused:
            answer = _refusal(request, refused)
        else:
            code, remark, result = self._look(header, pull.offset, wanted)
            answer = self._answer(request, header, group, topic, code, remark, result)
            self._pulled(request.code, code, self._held.age_of(pull), was_held=True)
        pull.connection.reply(request, answer)

    def _hold(
        self,
        connection: Connection,
        request: Command,
        header: PullMessageRequest,
        wanted: MessageFilter,
    ) -> bool:
        settings = self._settings
        seconds = settings.short_hold
        if settings.long_polling:
            seconds = min(header.suspend_timeout_millis / 1000, settings.longest_hold)
        if seconds <= 0 or request.flag & _ONE_WAY:
            return False
        pull = HeldPull(
            connection,
            request,
            header.topic,
            header.queue_id,
            header.consumer_group,
            header.queue_offset,
            wanted,
        )
        return self._held.hold(pull, seconds)

    # Checks, in their order.

    def _check(
        self, request: Command, header: PullMessageRequest
    ) -> tuple[SubscriptionGroupConfig, TopicConfig]:
        """Whether this group may read this queue: checks 0 to 7."""
        parts = self._parts
        if self._is_slave and not (
            self._settings.slave_read_enable or parts.replication.is_master_gone
        ):
            raise SystemBusy
        if not may_read(parts.settings.permission):
            raise Forbidden(
                ForbiddenType.BROKER,
                f"the broker[{parts.address}] pulling message is forbidden: its read permission "
                "is off",
            )
        if request.code == RequestCode.LITE_PULL_MESSAGE and not self._settings.lite_pull:
            raise Forbidden(
                ForbiddenType.BROKER,
                f"the broker[{parts.address}] for lite pull consumer is forbidden",
            )
        group = parts.groups.get(header.consumer_group) or parts.groups.find(
            header.consumer_group, now=parts.clock.now()
        )
        if group is None:
            raise Refused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{header.consumer_group}] does not exist; create it, or allow "
                "that it is created",
            )
        if not group.consume_enable:
            raise Forbidden(
                ForbiddenType.GROUP,
                f"subscription group no permission, {header.consumer_group}: its consumption is "
                "switched off",
            )
        topic = parts.topics.get(header.topic)
        if topic is None:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{header.topic}] not exist, apply first please! It can be created with: "
                f"orbitmq topic create {header.topic}",
            )
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

    def _wanted(
        self, connection: Connection, header: PullMessageRequest, group: SubscriptionGroupConfig
    ) -> MessageFilter:
        """The filter that this pull brings or its group has: checks 8 to 10."""
        parts = self._parts
        name = header.consumer_group
        if header.sys_flag & _SUBSCRIPTION:
            wanted = parts.filters.of_pull(header.subscription, header.expression_type)
            self._note_subscription(header)
        else:
            self._check_membership(header, group)
            wanted = parts.filters.of_group(
                name,
                header.topic,
                parts.consumers.subscription(name, header.topic, with_compensation=False),
                header.sub_version,
            )
        if self._settings.reject_pull_consumer and not self._is_known(connection, name):
            raise Refused(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's group info not exist, or the pull consumer is rejected by server: "
                f"group {name!r} has to send heartbeats",
            )
        return wanted

    def _check_membership(self, header: PullMessageRequest, group: SubscriptionGroupConfig) -> None:
        parts = self._parts
        name = header.consumer_group
        if not parts.consumers.is_online(name):
            raise Refused(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's group info not exist: no heartbeat of group {name!r} has come, "
                "and the pull does not bring its subscription",
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

    def _note_subscription(self, header: PullMessageRequest) -> None:
        """Remember, for the tools, what a group wants that need not send heartbeats."""
        key = (header.consumer_group, header.topic)
        now = self._monotonic()
        noted = self._noted.get(key)
        text, kind = header.subscription, header.expression_type
        if noted is not None and noted[:2] == (text, kind) and now - noted[2] < _NOTE_SUBSCRIPTION:
            return
        if len(self._noted) >= _MOST_NOTED:
            self._noted.clear()
        self._noted[key] = (text, kind, now)
        subscription = SubscriptionData(
            topic=header.topic,
            sub_string=text,
            expression_type=kind or TAG,
            sub_version=header.sub_version,
        )
        self._parts.consumers.compensate(header.consumer_group, subscription, now)

    def _has_slaves(self) -> bool:
        """Whether somebody else can be suggested. (Apache's broker suggests in any case.)"""
        serving = self._parts.replication.serving
        return serving is not None and bool(serving.replicas)

    # Reading and answering.

    def _look(
        self, header: PullMessageRequest, offset: int, wanted: MessageFilter
    ) -> tuple[int, str, ReadResult]:
        """What is there at an offset: a code, a word for it, and the result."""
        parts = self._parts
        name, topic, queue_id = header.consumer_group, header.topic, header.queue_id
        reset = parts.progress.take_reset(topic, name, queue_id)
        if reset is not None and not is_there(header, reset):
            low, high = (
                parts.store.min_offset(topic, queue_id),
                parts.store.max_offset(topic, queue_id),
            )
            moved = ReadResult(ReadStatus.OFFSET_TOO_SMALL, reset, low, high)
            return MOVED, OFFSET_RESET, moved
        asked = header.max_msg_bytes or 0
        result = self._read(
            topic,
            queue_id,
            offset,
            header.max_msg_nums,
            wanted,
            min(asked, _MOST_BYTES) if asked > 0 else _MOST_BYTES,
            in_bulk=asked > _USUAL_BYTES,
        )
        status = result.status
        code = CODES[status]
        if offset and status in EMPTY_QUEUE:
            code = MOVED
        if code == MOVED:
            if self._is_slave:
                # Perhaps it only lags behind: the master knows better what is there.
                result.next_offset = offset
                return RETRY, status.value, result
            parts.progress.permit(topic, name, queue_id, result.next_offset, now=self._monotonic())
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
        name = header.consumer_group
        self._parts.progress.note_pull(header.topic, name, header.queue_id, result.next_offset)
        counts = self._parts.counters.group(header.topic, name)
        counts.pulls += 1
        size = result.size
        if size:
            counts.hits += 1
            counts.gets += result.count
            counts.get_bytes += size
            self._pacing.spent += size
        suggested = 0
        if self._settings.slave_read_enable:
            is_far = result.suggest_replica and (self._is_slave or self._has_slaves())
            suggested = group.which_broker_when_consume_slowly if is_far else group.broker_id
        place = (
            suggested,
            result.next_offset,
            result.min_offset,
            result.max_offset,
            topic.topic_sys_flag,
            group.group_sys_flag,
        )
        return self._answers.make(request, code, remark, place, result)


def _refusal(request: Command, refused: Refused) -> Command:
    extra = {"forbiddenType": str(int(refused.kind))} if isinstance(refused, Forbidden) else {}
    return request.answer(refused.code, remark=str(refused), extra=extra)
