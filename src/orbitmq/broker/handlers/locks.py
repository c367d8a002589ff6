"""Locking queues for consumption in order (41, 42).

Apache's broker locks whatever it is asked for, in the name of any group, and keeps it for a minute.
Here a queue is locked if this broker has it, or had it when its topic had more, and if the group is
there or may be made, as by a pull: after a crash a member may renew its locks before its first
heartbeat. Everything else is left out of the answer, as if somebody else held it; members ask for
such a queue only by mistake, or for as long as they have an old route.

A request with few queues is done at once; one with many, in portions, between which others are
served. What the same client of the group asks for meanwhile waits until that is done: whoever stops
gives back what it has just asked for, and a queue that is given back first and locked then stays
locked for a minute.
"""

from __future__ import annotations

import logging
from asyncio import Future
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial

from orbitmq.broker import names
from orbitmq.broker.clients import LONGEST_ID
from orbitmq.broker.errors import Refused
from orbitmq.broker.handlers.apart import STEP, answered
from orbitmq.broker.parts import Parts
from orbitmq.broker.progressplaces import ProgressPlaces
from orbitmq.broker.slices import Slices
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.remoting.occurrences import Reminders
from orbitmq.wire.bodies.base import decode_body, encode_body
from orbitmq.wire.bodies.membership import LockBatch, LockedQueues
from orbitmq.wire.bodies.route import MessageQueue
from orbitmq.wire.bodies.topics import SubscriptionGroupConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command

log = logging.getLogger(__name__)

#: Queues that are locked or given back before there may be a look at the clock.
_PORTION = 32

#: A consumer group and a client of it.
_Sender = tuple[str, str]
#: Does a portion; the queues of it that the client then holds.
_Step = Callable[[Sequence[MessageQueue]], Sequence[MessageQueue]]


class Locking:
    """Gives queues to one client of a group at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._places = ProgressPlaces(parts.topics, parts.progress, parts.store)
        self._full = Reminders()
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
        return await answered(request, LockedQueues(lock_ok_mq_set=held), entries=len(held))

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
            self._slices.begin(self._serving(sender))
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
