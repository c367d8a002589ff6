"""Going on elsewhere, because an administrator wants it: a broker pushes a table of offsets.

The invariant of all progress: it never passes an unfinished message, never goes back unless it is
told to, and never overwrites what a newer owner has made. A reset is what tells it to, and must not
get lost either. So:

* every queue of a push is on its own: none waits for the handlers of another, or for its broker;
* whose a queue is counts in the moment in which the push comes, and in that moment its offset is
  frozen, before anything is waited for: nothing of ours reports another one from then on, neither
  handlers that end later nor a release that is under way;
* the offset is told at once, and once: later it could meet what another owner has done since;
* of several resets the newest counts. It is frozen last, and what is put by of a queue is what is
  frozen at that time (`progress`); an older one is not tried again, nor told any more when the
  newer one is somebody else's to follow;
* a stop waits until they are told, for a few seconds: what is not told by then is an error.

| the queue is                      | its offset is                                              |
|-----------------------------------|------------------------------------------------------------|
| owned, or being given up          | told before it is let go, and begun anew              |
| claimed                           | told, and noted: the queue begins there      |
| neither, but ours by the last round | told                                                     |
| given up, its lock on its way back | the same if it is ours by the last round; else an error   |
| somebody else's                   | left to that member, which was pushed the same             |

A claimed queue may have a former owner that follows the same push, and then what it has done since
is done again. That cannot be told from an owner that the push has missed: better twice than never.
For the same reason it begins there even if the report fails, which is an error nevertheless.

A queue that we do not have may become somebody else's while its offset is told. We say until then
that we hold it (`ownership`), so that whoever has it next waits, and finds the offset. In order
nobody waits for that, but for a lock that we need not have. There the offset is told, and it is an
error if the queue is not ours any more by then, as far as our rounds have noticed.

A queue between two owners, which one has let go of and the other has not seen yet to be its own, is
nobody's. No member follows a push then, and none can know that: whoever pushes has to read back
(as `admin.resetting` does).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

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
    from orbitmq.client.consumer.handover import (
        Ownership,
        PendingReset,
        QueueAcquisition,
        QueueRelease,
    )
    from orbitmq.client.consumer.progress import OffsetCommitter, ProgressStore, Unreported
    from orbitmq.client.consumer.workers import DirectCall
    from orbitmq.client.engine import Engine
    from orbitmq.remoting.connection import Connection
    from orbitmq.wire.bodies import ConsumerRunningInfo
    from orbitmq.wire.command import Command
    from orbitmq.wire.frame import Bytes


log = logging.getLogger(__name__)

#: What puts an offset by, if that is done elsewhere; the note of a claim; or neither.
_PuttingBy: TypeAlias = "asyncio.Task[OrbitError | None] | PendingReset | None"

#: How often a reset is tried while its queue comes and goes.
_TIMES: Final = 5


class ResetUnsettled(OrbitError):
    """A queue came and went while its progress was reset: it may not be."""

    retriable = True

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        super().__init__(
            f"{queue} came and went while its progress was reset; reset it again when the group is "
            "at rest"
        )


class OffsetResets:
    """Follows the resets of one consumer. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        ownership: Ownership,
        *,
        progress: ProgressStore,
        unreported: Unreported,
        acquisition: QueueAcquisition,
        releases: QueueRelease,
        reporting: OffsetCommitter,
        is_own: Callable[[Queue], bool],
        is_locked: bool,
    ) -> None:
        """`is_own`: whether a queue is ours by the last round, owned or not.

        `is_locked`: whether others wait for the locks of queues, and not for what we hold.
        """
        self._engine = engine
        self._group = group
        self._ownership = ownership
        self._progress = progress
        self._unreported = unreported
        self._acquisition = acquisition
        self._releases = releases
        self._reporting = reporting
        self._is_own = is_own
        self._is_locked = is_locked
        #: What stands for the newest reset of each queue.
        self._newest: dict[Queue, object] = {}
        self._following: set[asyncio.Task[OrbitError | None]] = set()

    async def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Go on from other offsets; returns when they are put by.

        Raises when one could not be; the others are, all the same. A claimed queue begins where it
        was reset to even then.
        """
        self._unreported.drop(offsets)
        # What counts happens here, in one step; the rest goes on even if nobody waits for it.
        following = [
            self._begin(queue, at) for queue, at in offsets.items() if self._concerns_us(queue)
        ]
        for queue in offsets:
            if not self._concerns_us(queue):
                self._supersede(queue)
        for error in await asyncio.gather(*following):
            if error is not None:
                raise error

    async def settled(self) -> None:
        """Wait until no reset is on its way: not for long once the consumer stops."""
        while self._following:
            await asyncio.wait(self._following)

    def _concerns_us(self, queue: Queue) -> bool:
        return queue in self._ownership.owned or self._is_to_be_told(queue)

    def _is_to_be_told(self, queue: Queue) -> bool:
        """Whether we tell where a queue was reset to that we do not have."""
        ownership = self._ownership
        is_waited_for = queue in ownership.resets and not self._is_locked
        return is_waited_for or queue in ownership.claims or self._is_own(queue)

    def _supersede(self, queue: Queue) -> None:
        """A newer reset is somebody else's to follow: one of ours that still waits is not told."""
        if self._newest.pop(queue, None) is not None:
            self._progress.forget(queue)

    def _begin(self, queue: Queue, at: int) -> asyncio.Future[OrbitError | None]:
        mark = self._newest[queue] = object()
        try:
            putting_by = self._freeze(queue, at)
        except OrbitError as error:
            del self._newest[queue]
            self._not_followed(queue, at, error)
            failed: asyncio.Future[OrbitError | None] = asyncio.get_running_loop().create_future()
            failed.set_result(error)
            return failed
        following = self._engine.spawn(
            self._follow(queue, at, mark, putting_by), f"follow the reset of {queue}"
        )
        self._following.add(following)
        following.add_done_callback(self._following.discard)
        return asyncio.shield(following)

    def _freeze(self, queue: Queue, at: int) -> _PuttingBy:
        """Have a queue follow: see the table."""
        owned = self._ownership.owned.get(queue)
        if owned is not None and self._releases.is_held(owned):
            return self._releases.reset(owned, at)
        if not self._is_to_be_told(queue):
            raise ResetUnsettled(queue)
        # In one step with the freezing: a frozen queue that begins would never be reported.
        noted = self._acquisition.reset(queue, at)
        self._progress.freeze(queue, at)
        self._ownership.reset_begins(queue)
        return noted

    async def _follow(
        self, queue: Queue, at: int, mark: object, putting_by: _PuttingBy
    ) -> OrbitError | None:
        """Go on until the offset is put by, or a newer one is to be; what prevented it, if any."""
        try:
            for times in range(_TIMES):
                if times:
                    putting_by = self._freeze(queue, at)
                if isinstance(putting_by, asyncio.Task):
                    error = await putting_by
                    self._reporting.let_be_seen([queue])
                    break
                is_put_by = await self._put_by(queue, at, mark, putting_by)
                if is_put_by or self._newest.get(queue) is not mark:
                    return None
            else:
                error = ResetUnsettled(queue)
        except OrbitError as failed:
            error = failed
        except asyncio.CancelledError:
            # A stop that was cut short.
            self._not_followed(queue, at, ResetUnsettled(queue))
            raise
        finally:
            if self._newest.get(queue) is mark:
                del self._newest[queue]
        if error is not None:
            self._not_followed(queue, at, error)
        return error

    def _not_followed(self, queue: Queue, at: int, error: OrbitError) -> None:
        # Said here for each queue: brokers of Apache do not wait for an answer.
        log.warning(
            "progress of group %s in %s could not be reset to %d: %s",
            self._group,
            queue,
            at,
            error,
            extra={"group": self._group, "queue": str(queue), "offset": at},
        )

    async def _put_by(
        self, queue: Queue, at: int, mark: object, noted: PendingReset | None
    ) -> bool:
        """Put the offset of a queue by that we do not have; whether it was not forgotten before.

        That happens when the queue is claimed, or begun, or let go meanwhile. Raises when somebody
        else may have begun it before.
        """
        try:
            async with self._releases.limit.kept(queue.broker):
                await self._progress.persist([queue])
            if noted is not None and noted.is_followed:
                return True
            is_newest = self._newest.get(queue) is mark
            if is_newest and self._is_locked and not self._concerns_us(queue):
                raise ResetUnsettled(queue)
            return self._progress.read(queue) == at
        finally:
            ownership = self._ownership
            ownership.reset_ended(queue)
            is_ours = queue in ownership.owned or queue in ownership.claims
            if self._newest.get(queue) is mark and not is_ours:
                self._progress.forget(queue)


# Whether an administrator wants a group to go on elsewhere in a queue that nobody pulls.
#
# Brokers say so to a pull of the group, once (OrbitMQ's, and Apache's from version 5; older ones
# push it to the members). A position that a broker has for the group says nothing like it: reports
# come from anybody.
#
# OrbitMQ's can be asked to say it again (`keep`): an answer may be lost, and who has heard of a
# reset is to be there before it is forgotten. As long as it is not, they take no reports of the
# group.


#: What says something about resets; everything else is an error.
_ANSWERS: Final = frozenset(int(status.value) for status in PullStatus)


async def reset_told(
    engine: Engine, group: str, queue: Queue, at: int, *, keep: bool = False
) -> int | None:
    """Where a group that is at `at` is to go on, if its broker says so. Raises when it cannot."""
    answer = await engine.ask(
        engine.routes.master(queue.broker),
        RequestCode.PULL_MESSAGE,
        look(group, queue, at, keep_reset=keep or None),
        accept=_ANSWERS,
    )
    pulled = read_pulled(answer, at)
    return pulled.next_offset if pulled is not None and pulled.is_reset else None


# What brokers ask a consumer: its state, its progress, a reset, to consume one message.
#
# That members of the group have changed (40) concerns the rebalancer, which hears of it itself.


class Asked(Protocol):
    """The consumer, as far as brokers ask it."""

    #: As brokers know it.
    group: str
    is_ordered: bool
    progress: ProgressStore

    def running_info(self, *, with_stacks: bool = False) -> ConsumerRunningInfo:
        """What it is and does."""

    async def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Go on from other offsets."""

    async def consume_directly(self, message: ReceivedMessage) -> DirectCall:
        """Call a handler once."""


class BrokerRequests:
    """Answers for one consumer."""

    def __init__(self, engine: Engine, consumer: Asked) -> None:
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
        result = ConsumeDirectlyResult(
            consume_result=_result(call.outcome),
            order=self._consumer.is_ordered,
            auto_commit=call.outcome is None or call.outcome.auto_commit is not False,
            remark=call.outcome.failure.reason if call.outcome and call.outcome.failure else None,
            spent_time_mills=round((call.ended - call.began) * 1000),
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(result))


_RESULTS: Mapping[Verdict, ConsumeResult] = {
    Verdict.SUCCESS: ConsumeResult.CR_SUCCESS,
    Verdict.RETRY: ConsumeResult.CR_LATER,
    Verdict.COMMIT: ConsumeResult.CR_COMMIT,
    Verdict.ROLLBACK: ConsumeResult.CR_ROLLBACK,
}


def _result(outcome: Outcome | None) -> ConsumeResult:
    if outcome is None:
        # Cancelled before it came to anything: the consumer is stopping.
        return ConsumeResult.CR_LATER
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
