"""Order locks: which client of a group may consume a queue in order.

The guarantee is a gap between two lifetimes. The broker keeps a lock for `BROKER_LOCK_LIFE` after
it was last asked for; a client believes in it for `CLIENT_LOCK_LIFE` only, counted **from when it
sent the request** that was granted, which is before the broker's count began. So a client that
was paused, cut off or slow stops consuming before anybody else may begin, whatever its clock
shows: both sides measure durations only. (A client that counts from the answer keeps the
guarantee only as long as answers take less than the difference; Apache's does, and bounds them by
a call timeout of 1 s.)

There are no messages about locks: a client renews, every 20 s, and gives back what it holds when it
stops. A queue whose owner died is free after at most `BROKER_LOCK_LIFE`.

That a client is gone from its group and its connection is closed does not free its locks earlier,
as with Apache, because it says nothing about the client: the process may be cut off, or stopped
for a while, and still be in the middle of a message. What ends its right to go on is its own
count, and that began when it last asked. So `CLIENT_LOCK_LIFE` after the last renewal a lock could
be given away - if every client kept that count, and checked it while a message is being consumed
and not only before. Apache's clients check before, and a handler may take longer than the
difference; the whole of `BROKER_LOCK_LIFE` is what they are made for. Whoever wants a faster
takeover after a crash has to shorten both lives, on both sides.

Locks are in memory only. After a restart of the broker a queue can be taken by somebody else while
its owner of before still believes in its lock for up to `CLIENT_LOCK_LIFE`, and is in the middle of
a message for as long as that takes, as with Apache. That is what `granting_from` is for: a broker
that grants no lock during its first `BROKER_LOCK_LIFE` keeps the guarantee as if it had never been
away; one that waits for `CLIENT_LOCK_LIFE` only, for messages that are done with by then.

What may be locked is decided by whoever asks this table (`handlers.locks`): the queues that there
are, for groups that there are. That is still many if somebody makes many groups, so there is a
bound for all of them together; what is held can be renewed nevertheless.

Times are seconds of a clock that never goes back.
"""

from __future__ import annotations

import logging
from asyncio import Future
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from orbitmq import names
from orbitmq.broker.errors import Refused
from orbitmq.broker.groups import LONGEST_ID
from orbitmq.broker.progress import ProgressPlaces
from orbitmq.broker.scheduler import STEP, Slices, chunked_answer
from orbitmq.logonce import LogAtIntervals
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.wire.bodies import LockBatch, LockedQueues, MessageQueue, SubscriptionGroupConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import decode_body, encode_body

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts


BROKER_LOCK_LIFE = 60.0
CLIENT_LOCK_LIFE = 30.0
#: Locks of all groups together, each of about 300 bytes.
MOST_LOCKS = 500_000


@dataclass(slots=True)
class _Lock:
    client_id: str
    renewed_at: float


class OrderLocks:
    """The locks of all groups."""

    def __init__(
        self,
        *,
        life: float = BROKER_LOCK_LIFE,
        granting_from: float | None = None,
        most: int = MOST_LOCKS,
    ) -> None:
        self._life = life
        self._granting_from = granting_from
        self._most = most
        self._locks: dict[str, dict[MessageQueue, _Lock]] = {}
        self._count = 0

    def __len__(self) -> int:
        """The locks that are remembered, also those that have expired since the last tidying."""
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether no queue is locked that is not locked already."""
        return self._count >= self._most

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now: float
    ) -> tuple[MessageQueue, ...]:
        """Take or renew; those of `queues` that the client now holds."""
        if self._granting_from is not None and now < self._granting_from:
            return ()
        held = self._locks.setdefault(group, {})
        granted = []
        for queue in queues:
            lock = held.get(queue)
            if lock is None:
                if self._count >= self._most:
                    continue
                held[queue] = _Lock(client_id, now)
                self._count += 1
            elif lock.client_id == client_id or self._is_expired(lock, now):
                lock.client_id = client_id
                lock.renewed_at = now
            else:
                continue
            granted.append(queue)
        if not held:
            del self._locks[group]
        return tuple(granted)

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Give back what the client holds of `queues`; what others hold stays theirs."""
        held = self._locks.get(group)
        if held is None:
            return
        for queue in queues:
            lock = held.get(queue)
            if lock is not None and lock.client_id == client_id:
                del held[queue]
                self._count -= 1
        if not held:
            del self._locks[group]

    def group_has_lock(self, group: str, now: float) -> bool:
        """Whether any queue is locked: then a message sent to the retry topic is a dead letter."""
        held = self._locks.get(group)
        return held is not None and any(not self._is_expired(lock, now) for lock in held.values())

    def owner(self, group: str, queue: MessageQueue, now: float) -> str | None:
        """The client id that holds a queue."""
        lock = self._locks.get(group, {}).get(queue)
        return None if lock is None or self._is_expired(lock, now) else lock.client_id

    def held_by_group(self, group: str, now: float) -> dict[MessageQueue, str]:
        """Every locked queue of a group and who holds it."""
        held = self._locks.get(group, {})
        return {
            queue: lock.client_id for queue, lock in held.items() if not self._is_expired(lock, now)
        }

    def forget_expired(self, now: float) -> int:
        """Let go of the memory of locks that nobody holds; how many there were."""
        forgotten = 0
        for group, held in list(self._locks.items()):
            expired = [queue for queue, lock in held.items() if self._is_expired(lock, now)]
            for queue in expired:
                del held[queue]
            forgotten += len(expired)
            if not held:
                del self._locks[group]
        self._count -= forgotten
        return forgotten

    def _is_expired(self, lock: _Lock, now: float) -> bool:
        return now - lock.renewed_at > self._life


# Locking queues for consumption in order (41, 42).
#
# Apache's broker locks whatever it is asked for, in the name of any group, and keeps it for a
# minute. Here a queue is locked if this broker has it, or had it when its topic had more, and if
# the group is there or may be made, as by a pull: after a crash a member may renew its locks before
# its first heartbeat. Everything else is left out of the answer, as if somebody else held it;
# members ask for such a queue only by mistake, or for as long as they have an old route.
#
# A request with few queues is done at once; one with many, in portions, between which others are
# served. What the same client of the group asks for meanwhile waits until that is done: whoever
# stops gives back what it has just asked for, and a queue that is given back first and locked then
# stays locked for a minute.


log = logging.getLogger(__name__)

#: Queues that are locked or given back before there may be a look at the clock.
_PORTION = 32

#: A consumer group and a client of it.
_Sender = tuple[str, str]
#: Does a portion; the queues of it that the client then holds.
_Step = Callable[[Sequence[MessageQueue]], Sequence[MessageQueue]]


class LockHandler:
    """Gives queues to one client of a group at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._places = ProgressPlaces(parts.topics, parts.progress, parts.store)
        self._full = LogAtIntervals()
        self._slices = Slices(parts.loop, at_once=1)
        #: What is under way, and after it what waits for that, in order.
        self._lines: dict[_Sender, deque[Iterator[None]]] = {}

    def handlers(self) -> Mapping[int, Handler]:
        return {RequestCode.LOCK_BATCH_MQ: self.lock, RequestCode.UNLOCK_BATCH_MQ: self.unlock}

    def lock(self, _: Connection, request: Command) -> Command | Coroutine[object, object, Command]:
        """Take or renew; the answer names what the client holds."""
        asked = _asked(request)
        group = self._parts.groups.require(asked.consumer_group, now=self._parts.clock.now())
        if not self._must_wait(asked):
            held = LockedQueues(lock_ok_mq_set=self._lock(asked, group, asked.mq_set))
            return request.answer(ResponseCode.SUCCESS, body=encode_body(held))
        return self._locked(request, self._in_line(asked, partial(self._lock, asked, group)))

    async def _locked(self, request: Command, locking: Future[list[MessageQueue]]) -> Command:
        held = tuple(await locking)
        return await chunked_answer(request, LockedQueues(lock_ok_mq_set=held), entries=len(held))

    def _lock(
        self, asked: LockBatch, group: SubscriptionGroupConfig, queues: Sequence[MessageQueue]
    ) -> tuple[MessageQueue, ...]:
        locks = self._parts.locks
        there = [queue for queue in queues if self._is_there(queue, group)]
        now = self._parts.clock.monotonic()
        granted = locks.lock(group.group_name, asked.client_id, there, now)
        if len(granted) < len(there) and locks.is_full:
            self._tell_full(asked, now)
        return granted

    def unlock(
        self, _: Connection, request: Command
    ) -> Command | Coroutine[object, object, Command]:
        asked = _asked(request)
        if not self._must_wait(asked):
            self._unlock(asked, asked.mq_set)
            return request.answer(ResponseCode.SUCCESS)
        return self._unlocked(request, self._in_line(asked, partial(self._unlock, asked)))

    async def _unlocked(self, request: Command, unlocking: Future[list[MessageQueue]]) -> Command:
        await unlocking
        return request.answer(ResponseCode.SUCCESS)

    def _unlock(self, asked: LockBatch, queues: Sequence[MessageQueue]) -> tuple[()]:
        self._parts.locks.unlock(asked.consumer_group, asked.client_id, queues)
        return ()

    # Requests that are not done at once.

    def _must_wait(self, asked: LockBatch) -> bool:
        return len(asked.mq_set) > STEP or _sender(asked) in self._lines

    def _in_line(self, asked: LockBatch, step: _Step) -> Future[list[MessageQueue]]:
        """Have it done in portions, after what the same client has asked for before."""
        done: Future[list[MessageQueue]] = self._parts.loop.create_future()
        work = _in_portions(asked.mq_set, step, done)
        sender = _sender(asked)
        line = self._lines.get(sender)
        if line is None:
            self._lines[sender] = deque([work])
            self._slices.in_slices(self._serving(sender))
        else:
            line.append(work)
        return done

    def _serving(self, sender: _Sender) -> Iterator[None]:
        line = self._lines[sender]
        while line:
            yield from line.popleft()
            yield
        del self._lines[sender]

    def _is_there(self, queue: MessageQueue, group: SubscriptionGroupConfig) -> bool:
        parts = self._parts
        if queue.broker_name != parts.settings.name:
            return False
        topic = parts.topics.get(queue.topic)
        if topic is not None:
            return self._places.problem(topic, group.group_name, queue.queue_id) is None
        # A retry topic that a crash took away is made again by the next heartbeat.
        is_own = queue.topic == names.retry_topic(group.group_name)
        return is_own and 0 <= queue.queue_id < group.retry_queue_nums

    def _tell_full(self, asked: LockBatch, now: float) -> None:
        if count := self._full.note("full", now):
            log.warning(
                "%d queues are locked, and more are not granted (max_order_locks, time %d)",
                len(self._parts.locks),
                count,
                extra={
                    "group": names.shown(asked.consumer_group),
                    "client": names.shown(asked.client_id),
                },
            )


def _asked(request: Command) -> LockBatch:
    asked = decode_body(LockBatch, request.body)
    if len(asked.client_id) > LONGEST_ID:
        # It would be kept for as long as the lock.
        raise Refused(
            ResponseCode.INVALID_PARAMETER,
            f"a client id of {len(asked.client_id)} characters: {LONGEST_ID} are allowed",
        )
    return asked


def _sender(asked: LockBatch) -> _Sender:
    return asked.consumer_group, asked.client_id


def _in_portions(
    queues: Sequence[MessageQueue], step: _Step, done: Future[list[MessageQueue]]
) -> Iterator[None]:
    held: list[MessageQueue] = []
    try:
        for place in range(0, len(queues), _PORTION):
            held += step(queues[place : place + _PORTION])
            yield
    except Exception as error:  # noqa: BLE001  # it is the sender's, and others are in line
        if not done.done():
            done.set_exception(error)
    else:
        if not done.done():
            done.set_result(held)
