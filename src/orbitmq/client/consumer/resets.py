"""Offset resets by an administrator, and the other requests that brokers send to a consumer.

A broker pushes a table of offsets to every member. A queue that is owned is released and begun
again at its new offset; a claim is dropped and made again. In both cases the offset is set in
memory first, so that nothing overwrites it, then committed, and only then may a member begin the
queue. Of several resets of a queue the newest counts. A queue of another member is left to that
member, which receives the same push.

Trap: between two owners a queue belongs to neither, and no member follows the push. The
administrator's tool therefore reads the offsets back (`client.admin.resets`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from orbitmq.client.consumer.progress import look
from orbitmq.client.consumer.pull import PullStatus, read_pulled
from orbitmq.client.consumer.verdict import Outcome, Verdict
from orbitmq.client.engine import NOT_MINE, NotMine
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import OrbitError
from orbitmq.message.stored import decode_message
from orbitmq.wire.bodies import (
    ConsumeDirectlyResult,
    ConsumeResult,
    ConsumerStatus,
    MessageQueue,
    ResetOffsetList,
    ResetOffsets,
)
from orbitmq.wire.codes import BodyError, RequestCode, ResponseCode
from orbitmq.wire.headers import (
    ConsumeDirectlyRequest,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
    ResetOffsetRequest,
)
from orbitmq.wire.javajson import decode_body, encode_body

if TYPE_CHECKING:
    from orbitmq.client.consumer.handover import HandoverParts, QueueAcquisition, QueueRelease
    from orbitmq.client.consumer.progress import OffsetCommitter, ProgressStore
    from orbitmq.client.consumer.workers import DirectCall
    from orbitmq.client.engine import Engine
    from orbitmq.remoting.connection import Connection
    from orbitmq.wire.bodies import ConsumerRunningInfo
    from orbitmq.wire.command import Command
    from orbitmq.wire.frame import Bytes


log = logging.getLogger(__name__)

#: How long a stop waits for the commits of resets, in seconds.
_LAST_COMMIT: Final = 5.0


class OffsetResets:
    """Follows the resets of one consumer. Belongs to the event loop."""

    def __init__(
        self,
        parts: HandoverParts,
        *,
        acquisition: QueueAcquisition,
        releases: QueueRelease,
        committer: OffsetCommitter,
        is_own: Callable[[Queue], bool],
        on_committed: Callable[[], None],
    ) -> None:
        """`is_own`: whether the last round gave a queue to this member, owned or not."""
        self._parts = parts
        self._group = parts.group
        self._ownership = parts.ownership
        self._acquisition = acquisition
        self._releases = releases
        self._committer = committer
        self._is_own = is_own
        self._on_committed = on_committed

    async def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Go on from other offsets; returns when they are committed.

        Raises when one could not be; the others are, all the same.
        """
        # All queues stop here, in one step; the commits go on even if the caller is cancelled.
        commits: list[asyncio.Task[OrbitError | None]] = []
        errors: list[OrbitError | None] = []
        for queue, offset in offsets.items():
            if self._is_ours(queue):
                try:
                    commits.append(self._begin(queue, offset))
                except OrbitError as error:
                    self._not_committed(queue, offset, error)
                    errors.append(error)
        errors += await asyncio.gather(*map(asyncio.shield, commits))
        for each in errors:
            if each is not None:
                raise each

    async def settled(self) -> None:
        """Wait until no reset is under way, for a limited time."""
        if commits := self._ownership.resets.values():
            await asyncio.wait(tuple(commits), timeout=_LAST_COMMIT)

    def _is_ours(self, queue: Queue) -> bool:
        ownership = self._ownership
        return (
            queue in ownership.owned
            or queue in ownership.claims
            or queue in ownership.resets
            or self._is_own(queue)
        )

    def _begin(self, queue: Queue, offset: int) -> asyncio.Task[OrbitError | None]:
        """Stop a queue and set its offset; returns the commit."""
        ownership, parts = self._ownership, self._parts
        owned = ownership.owned.get(queue)
        if owned is None:
            self._acquisition.drop_claim(queue)
        parts.starting.forget(queue)
        parts.progress.freeze(queue, offset)
        commit = ownership.resets[queue] = parts.engine.spawn(
            self._commit(queue, offset), f"commit the reset of {queue}"
        )
        if owned is not None:
            owned.is_reset = True
            self._releases.release(owned, "its offset was reset", commits=False)
        return commit

    async def _commit(self, queue: Queue, offset: int) -> OrbitError | None:
        """Commit the offset of a queue, or a newer one; the error that prevented it."""
        error: OrbitError | None = None
        try:
            await self._parts.progress.persist([queue])
        except OrbitError as failed:
            error = failed
            self._not_committed(queue, offset, error)
        except asyncio.CancelledError:
            self._not_committed(queue, offset, "the consumer stops")
            raise
        finally:
            resets = self._ownership.resets
            if resets.get(queue) is asyncio.current_task():
                del resets[queue]
                self._committer.was_reset()
                if queue not in self._ownership.owned:
                    self._parts.progress.forget(queue)
                self._on_committed()
        return error

    def _not_committed(self, queue: Queue, offset: int, why: object) -> None:
        # Logged for each queue: Apache's brokers do not wait for an answer.
        log.warning(
            "the offset of group %s in %s could not be reset to %d: %s",
            self._group,
            queue,
            offset,
            why,
            extra={"group": self._group, "queue": str(queue), "offset": offset},
        )


#: Answers of brokers that say something about resets; all others are errors.
_ANSWERS: Final = frozenset(int(status.value) for status in PullStatus)


async def pending_reset(
    engine: Engine, group: str, queue: Queue, at: int, *, keep: bool = False
) -> int | None:
    """The offset to which an administrator has reset a group that is at `at`. Raises `OrbitError`.

    A broker reports a reset in the answer to a pull, once. With `keep` OrbitMQ's brokers report it
    again: an answer may be lost. As long as it is kept they take no commits of the group.
    """
    answer = await engine.ask(
        engine.routes.master(queue.broker),
        RequestCode.PULL_MESSAGE,
        look(group, queue, at, keep_reset=keep or None),
        accept=_ANSWERS,
    )
    pulled = read_pulled(answer, at)
    return pulled.next_offset if pulled is not None and pulled.is_reset else None


class RequestedConsumer(Protocol):
    """A consumer as far as brokers ask it."""

    #: As brokers know it.
    group: str
    is_ordered: bool
    progress: ProgressStore

    def running_info(self, *, with_stacks: bool = False) -> ConsumerRunningInfo:
        """Its state."""

    async def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Go on from other offsets."""

    async def consume_directly(self, message: ReceivedMessage) -> DirectCall:
        """Call a handler once."""


class BrokerRequests:
    """Answers the requests of brokers for one consumer: state, offsets, resets, direct calls."""

    def __init__(self, engine: Engine, consumer: RequestedConsumer) -> None:
        self._engine = engine
        self._consumer = consumer
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        serve = self._engine.serve
        self._undo = [
            serve(RequestCode.GET_CONSUMER_RUNNING_INFO, self._running_info),
            serve(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, self._status),
            serve(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, self._reset),
            serve(RequestCode.CONSUME_MESSAGE_DIRECTLY, self._consume_directly),
        ]

    def stop(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _running_info(self, _: Connection, request: Command) -> Command | NotMine:
        header = request.header(GetConsumerRunningInfoRequest)
        if header.consumer_group != self._consumer.group:
            return NOT_MINE
        info = self._consumer.running_info(with_stacks=header.jstack_enable)
        return request.answer(ResponseCode.SUCCESS, body=encode_body(info))

    def _status(self, _: Connection, request: Command) -> Command | NotMine:
        """Positions in memory, which are ahead of those that were reported."""
        header = request.header(GetConsumerStatusRequest)
        if header.group != self._consumer.group:
            return NOT_MINE
        positions = self._consumer.progress.positions(header.topic)
        table = {
            MessageQueue(topic=queue.topic, broker_name=queue.broker, queue_id=queue.id): offset
            for queue, offset in positions.items()
        }
        body = encode_body(ConsumerStatus(message_queue_table=table))
        return request.answer(ResponseCode.SUCCESS, body=body)

    def _reset(
        self, _: Connection, request: Command
    ) -> NotMine | Coroutine[object, object, Command | None]:
        header = request.header(ResetOffsetRequest)
        if header.group != self._consumer.group:
            return NOT_MINE
        return self._do_reset(request, _offsets(request.body))

    async def _do_reset(self, request: Command, offsets: Mapping[Queue, int]) -> Command | None:
        log.info(
            "a broker resets progress of group %s: %s",
            self._consumer.group,
            ", ".join(f"{queue} to {offset}" for queue, offset in sorted(offsets.items())),
            extra={"group": self._consumer.group},
        )
        await self._consumer.reset(offsets)
        return None if request.is_one_way else request.answer(ResponseCode.SUCCESS)

    def _consume_directly(
        self, _: Connection, request: Command
    ) -> NotMine | Coroutine[object, object, Command | None]:
        header = request.header(ConsumeDirectlyRequest)
        if header.consumer_group != self._consumer.group:
            return NOT_MINE
        stored = decode_message(bytes(request.body))
        queue = Queue(stored.topic, header.message_broker or "", stored.queue_id)
        namespace = self._engine.settings.namespace
        message = ReceivedMessage(stored, queue, self._consumer.group, None, namespace)
        return self._do_consume(request, message)

    async def _do_consume(self, request: Command, message: ReceivedMessage) -> Command | None:
        call = await self._consumer.consume_directly(message)
        outcome = call.outcome
        assert outcome is not None  # noqa: S101  # it has ended
        result = ConsumeDirectlyResult(
            consume_result=_result(outcome),
            order=self._consumer.is_ordered,
            auto_commit=outcome.auto_commit is not False,
            remark=outcome.failure.reason if outcome.failure else None,
            spent_time_mills=round((call.ended - call.began) * 1000),
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(result))


_RESULTS: Mapping[Verdict, ConsumeResult] = {
    Verdict.SUCCESS: ConsumeResult.CR_SUCCESS,
    Verdict.RETRY: ConsumeResult.CR_LATER,
    Verdict.COMMIT: ConsumeResult.CR_COMMIT,
    Verdict.ROLLBACK: ConsumeResult.CR_ROLLBACK,
}


def _result(outcome: Outcome) -> ConsumeResult:
    if outcome.failure is not None:
        if outcome.failure.error is not None:
            return ConsumeResult.CR_THROW_EXCEPTION
        return (
            ConsumeResult.CR_RETURN_NULL if outcome.failure.is_silence else ConsumeResult.CR_LATER
        )
    return _RESULTS[outcome.verdict]


def _offsets(body: Bytes) -> dict[Queue, int]:
    """A table of offsets, in the form for Java clients or in the one for C++ ones."""
    try:
        table = decode_body(ResetOffsets, body).offset_table
        return {
            Queue(each.topic, each.broker_name, each.queue_id): offset
            for each, offset in table.items()
        }
    except BodyError:
        rows = decode_body(ResetOffsetList, body).offset_table
        return {Queue(each.topic, each.broker_name, each.queue_id): each.offset for each in rows}
