"""Locking queues for consumption in order (41, 42).

Apache's broker locks whatever it is asked for, in the name of any group, and keeps it for a minute.
Here a queue is locked if this broker has it, or had it when its topic had more, and if the group is
there or may be made, as by a pull: after a crash a member may renew its locks before its first
heartbeat. Everything else is left out of the answer, as if somebody else held it; members ask for
such a queue only by mistake, or for as long as they have an old route.

A request with few queues is done at once; one with many, in portions, between which others are
served. Clients have one request about locks on its way at a time, so nothing overtakes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence

from orbitmq.broker import names
from orbitmq.broker.handlers.apart import STEP, answered
from orbitmq.broker.parts import Parts
from orbitmq.broker.progressplaces import ProgressPlaces
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


class Locking:
    """Gives queues to one client of a group at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._places = ProgressPlaces(parts.topics, parts.progress, parts.store)
        self._full = Reminders()

    def handlers(self) -> Mapping[int, Handler]:
        return {RequestCode.LOCK_BATCH_MQ: self.lock, RequestCode.UNLOCK_BATCH_MQ: self.unlock}

    def lock(self, _: Connection, request: Command) -> Command | Coroutine[object, object, Command]:
        """Take or renew; the answer names what the client holds."""
        asked = decode_body(LockBatch, request.body)
        group = self._parts.groups.require(asked.consumer_group, now=self._parts.clock.now())
        if len(asked.mq_set) > STEP:
            return self._lock_many(request, asked, group)
        held = self._lock(asked, group, asked.mq_set)
        return request.answer(
            ResponseCode.SUCCESS, body=encode_body(LockedQueues(lock_ok_mq_set=held))
        )

    async def _lock_many(
        self, request: Command, asked: LockBatch, group: SubscriptionGroupConfig
    ) -> Command:
        held: list[MessageQueue] = []
        for some in _portions(asked.mq_set):
            held += self._lock(asked, group, some)
            await asyncio.sleep(0)
        body = LockedQueues(lock_ok_mq_set=tuple(held))
        return await answered(request, body, entries=len(held))

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
        asked = decode_body(LockBatch, request.body)
        if len(asked.mq_set) > STEP:
            return self._unlock_many(request, asked)
        self._parts.locks.unlock(asked.consumer_group, asked.client_id, asked.mq_set)
        return request.answer(ResponseCode.SUCCESS)

    async def _unlock_many(self, request: Command, asked: LockBatch) -> Command:
        for some in _portions(asked.mq_set):
            self._parts.locks.unlock(asked.consumer_group, asked.client_id, some)
            await asyncio.sleep(0)
        return request.answer(ResponseCode.SUCCESS)

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


def _portions(queues: Sequence[MessageQueue]) -> Iterator[Sequence[MessageQueue]]:
    return (queues[place : place + STEP] for place in range(0, len(queues), STEP))
