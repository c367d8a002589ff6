"""Pulling messages, with or without waiting for them (11, 361).

A pull is processed once, or twice when it was held in between: the second time everything is
checked and read anew, but it is neither held again nor does it commit again. That includes its
sender's permissions, if they may have changed since it came: whoever loses them while he waits is
told so then, and never gets a message that arrives later. What a pull gets lies in the mapped log
and goes to the socket from there.

A pull whose filter looks into the messages is processed in parts, in turns with others who want
something like it (`pacing`). It is begun anew if a topic has changed since the part before. One
whose expression has to be compiled first waits for its turn as well, and until its connection may
have that done (`compileallowance`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from orbitmq.broker.commitrule import Way
from orbitmq.broker.compileallowance import Postponed
from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.broker.heldpull import HeldPull
from orbitmq.broker.holding import Kept
from orbitmq.broker.pacing import JUDGEMENTS, judgements
from orbitmq.broker.parts import Parts
from orbitmq.broker.peers import peer_of
from orbitmq.broker.pullanswers import (
    CODES,
    EMPTY_QUEUE,
    FOUND,
    MOVED,
    NOT_FOUND,
    RETRY,
    PullAnswers,
)
from orbitmq.broker.pullchecks import Forbidden, PullChecks
from orbitmq.broker.resets import OFFSET_RESET, is_there
from orbitmq.broker.settings import Transfer
from orbitmq.filter.subscription import MessageFilter
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result, refusal
from orbitmq.remoting.errors import Refused as AccessRefused
from orbitmq.store.reading import ReadResult, ReadStatus
from orbitmq.wire.bodies.topics import SubscriptionGroupConfig, TopicConfig
from orbitmq.wire.codes import Flag, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers.pull import PullFlag, PullMessageRequest
from orbitmq.wire.limits import DEFAULT_LIMITS

log = logging.getLogger(__name__)

_FOUND, _FOUND_WORD = ReadStatus.FOUND, ReadStatus.FOUND.value
_COMMIT = int(PullFlag.COMMIT_OFFSET)
_SUSPEND = int(PullFlag.SUSPEND)
_ONE_WAY = int(Flag.ONE_WAY)
#: An answer has to fit into a frame, whatever the settings of the store allow.
_MOST_BYTES = DEFAULT_LIMITS.frame - 64 * 1024
#: What consumers ask for. Whoever asks for more reads a long stretch, and gets more at a time.
_USUAL_BYTES = 256 * 1024
#: What a queue entry that was looked at in vain counts for, in bytes that were not sent meanwhile.
_LOOKED_AT = 16


@dataclass(frozen=True, slots=True)
class _Begun:
    """A pull that was processed in part."""

    at: float
    header: PullMessageRequest
    result: ReadResult
    topic: TopicConfig  #: as it was then
    wanted: MessageFilter
    judge: int  #: messages of one part
    was_held: bool = False


class Pulling:
    """Gives messages to consumers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pacing = parts.pacing
        self._held = parts.held
        self._held.again = self._again
        self._access = parts.access
        self._access.on_change(self._check_held)
        self._read = parts.store.read
        self._progress = parts.progress
        self._topics = parts.topics
        self._counts_of = parts.counters.group
        self._monotonic = parts.clock.monotonic
        self._pulled = parts.latencies.pulled
        self._answers = PullAnswers()
        self._checks = PullChecks(parts)
        parts.filters.compiled = self._pacing.compiled
        parts.filters.must_wait = lambda: self._pacing.is_judging
        parts.on_connection_closed(parts.filters.allowances.forget)
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
        """Answer a pull now, or when something has arrived for it."""
        if self._pacing.must_wait(connection):
            return self._later(connection, request)
        return self._first(connection, request)

    def _later(
        self, connection: Connection, request: Command, begun: _Begun | None = None
    ) -> Result:
        rules = self._access.version
        self._pacing.later(connection, lambda: self._in_its_turn(connection, request, rules, begun))
        return LATER

    def _compile_later(
        self,
        connection: Connection,
        request: Command,
        seconds: float,
        begun: _Begun | None = None,
    ) -> Result:
        rules = self._access.version
        self._pacing.later(
            connection,
            lambda: self._in_its_turn(connection, request, rules, begun, has_waited=True),
            after=seconds,
        )
        return LATER

    def _in_its_turn(
        self,
        connection: Connection,
        request: Command,
        rules: int,
        begun: _Begun | None,
        *,
        has_waited: bool = False,
    ) -> None:
        """A pull that had to wait because too much was done for others, or for itself."""
        if not connection.is_open:
            return
        try:
            self._access.check_again(connection, request, since=rules)
            if begun is None:
                answer = self._first(connection, request, is_its_turn=True, has_waited=has_waited)
            else:
                answer = self._go_on(connection, request, begun, has_waited=has_waited)
        except Exception as error:  # noqa: BLE001  # as the dispatcher does
            answer = refusal(request, error)
        if answer is not LATER and answer is not None:
            connection.reply(request, answer)

    def _first(
        self,
        connection: Connection,
        request: Command,
        *,
        is_its_turn: bool = False,
        has_waited: bool = False,
        before: _Begun | None = None,
    ) -> Result:
        """Process a pull, possibly once more: then it has committed `before`, and been held."""
        began = self._monotonic()
        header = request.header(PullMessageRequest)
        try:
            group, topic, wanted, _ = self._checks.passed(
                connection, request, header, began, has_waited=has_waited
            )
        except Postponed as postponed:
            return self._compile_later(connection, request, postponed.seconds, before)
        except Refused as refused:
            self._pulled(request.code, refused.code, 0.0, was_held=False)
            return _refusal(request, refused)
        was_held = before is not None and before.was_held
        if self._pacing.is_judging and not is_its_turn and wanted.needs_properties:
            return self._later(connection, request)
        if header.sys_flag & _COMMIT and before is None:
            self._progress.commit(
                header.topic,
                header.consumer_group,
                header.queue_id,
                header.commit_offset,
                by=peer_of(connection).name,
                way=Way.PULL,
                now=began,
                asked=header.queue_offset,
            )
        judge = judgements(wanted)
        code, remark, result = self._look(header, header.queue_offset, wanted, judge)
        if result.rest is not None:
            begun = _Begun(began, header, result, topic, wanted, judge, was_held)
            return self._later(connection, request, begun)
        if (
            code == NOT_FOUND
            and header.sys_flag & _SUSPEND
            and not was_held
            and result.next_offset == header.queue_offset
            and (seconds := self._seconds(request, header)) > 0
        ):
            if self._hold(connection, request, header, wanted, seconds) is not Kept.NOT:
                return LATER
            # Not an empty answer: who gets one asks again at once.
            self._pulled(request.code, ResponseCode.SYSTEM_BUSY, 0.0, was_held=False)
            return _refusal(request, SystemBusy())
        answer = self._answer(request, header, group, topic, code, remark, result)
        self._count(header, result)
        self._pulled(request.code, code, self._monotonic() - began, was_held=was_held)
        return answer

    def _go_on(
        self, connection: Connection, request: Command, begun: _Begun, *, has_waited: bool
    ) -> Result:
        """The next part of a pull."""
        header, result = begun.header, begun.result
        try:
            group, topic, wanted, _ = self._checks.passed(
                connection, request, header, self._monotonic(), has_waited=has_waited
            )
        except Postponed as postponed:
            return self._compile_later(connection, request, postponed.seconds, begun)
        except Refused as refused:
            self._pulled(request.code, refused.code, 0.0, was_held=False)
            return _refusal(request, refused)
        if topic is not begun.topic or wanted != begun.wanted:
            # What was read may not be there any more, or not be wanted, and other messages be.
            return self._first(connection, request, is_its_turn=True, before=begun)
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

    def _seconds(self, request: Command, header: PullMessageRequest) -> float:
        """How long a pull may be held."""
        if request.flag & _ONE_WAY or self._held.is_stopped:
            return 0.0
        settings = self._settings
        if not settings.long_polling:
            return settings.short_hold
        return min(header.suspend_timeout_millis / 1000, settings.longest_hold)

    def _hold(
        self,
        connection: Connection,
        request: Command,
        header: PullMessageRequest,
        wanted: MessageFilter,
        seconds: float,
    ) -> Kept:
        pull = HeldPull(
            connection,
            request,
            header.topic,
            header.queue_id,
            header.consumer_group,
            header.queue_offset,
            wanted,
            rules=self._access.version,
            header=header,
        )
        return self._held.hold(pull, seconds)

    # A second time.

    def _again(self, pull: HeldPull) -> None:
        request = pull.request
        header = pull.header or request.header(PullMessageRequest)
        connection = pull.connection
        code: int
        result: ReadResult | None
        try:
            if pull.refusal is not None or pull.rules != self._access.version:
                self._check_sender(pull)
            group, topic, wanted, _ = self._checks.passed(
                connection, request, header, self._monotonic(), has_waited=pull.has_waited
            )
        except Postponed as postponed:
            pull.has_waited = True
            self._held.run_later(pull, postponed.seconds)
            return
        except Refused as refused:
            code = refused.code
            pull.is_answered = True
            connection.reply(request, _refusal(request, refused), at_once=pull.is_alone)
            result = None
        else:
            # The message that has come for it is the only one, and its filter has judged it.
            is_judged = pull.judged == pull.offset and wanted is pull.wanted
            offset = pull.offset
            if wanted is not pull.wanted and wanted != pull.wanted:
                # What the filter of before has refused, the new one may want.
                offset = header.queue_offset
            judge = judgements(wanted)
            code, remark, result = self._look(
                header, offset, None if is_judged else wanted, judge, only_one=is_judged
            )
            if result.rest is not None:
                pull.is_answered = True  # in a later turn, as any other pull
                since = self._monotonic() - self._held.age_of(pull)
                begun = _Begun(since, header, result, topic, wanted, judge, was_held=True)
                self._later(connection, request, begun)
                return
            answer = self._answer(request, header, group, topic, code, remark, result)
            pull.is_answered = True
            # Who waits gets it first; what is counted can wait.
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
        """The accounts have changed: whoever may not wait any more is told now."""
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
        except AccessRefused as error:
            pull.refusal = Refused(ResponseCode(error.code), error.remark)
            raise pull.refusal from error
        pull.rules = self._access.version

    def _has_slaves(self) -> bool:
        """Whether somebody else can be suggested. (Apache's broker suggests in any case.)"""
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
        """What is there at an offset: a code, a word for it, and the result.

        Only its first part, if `judge` says how many messages a filter may look into at a time.
        """
        name, topic, queue_id = header.consumer_group, header.topic, header.queue_id
        progress = self._progress
        hear = progress.pending_reset if header.keep_reset else progress.take_reset
        reset = hear(topic, name, queue_id)
        if reset is not None and not is_there(header, reset):
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
                # Perhaps it only lags behind: the master knows better what is there.
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
