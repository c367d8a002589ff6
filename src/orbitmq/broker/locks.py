"""Order locks: which client of a group may consume a queue in order.

The broker keeps a lock for `BROKER_LOCK_LIFE` after the last request for it; the client relies on
it for `CLIENT_LOCK_LIFE`, counted from when it sent that request. So a client that was paused or
cut off stops before another may begin. A lock does not end earlier when its connection does: the
process may still be in the middle of a message.

Locks are in memory only. `granting_from` delays the first grants after a restart, so that owners of
before stop in time. The number of locks is limited; held ones can always be renewed. Times are
seconds of a monotonic clock. See docs/internals/order-locks.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq import names
from orbitmq.broker.errors import Refused
from orbitmq.broker.groups import LONGEST_ID
from orbitmq.broker.progress import ProgressPlaces
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
        """The locks in memory, including expired ones that were not removed yet."""
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether no further queue can be locked."""
        return self._count >= self._most

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now: float
    ) -> tuple[MessageQueue, ...]:
        """Take or renew locks; those of `queues` that the client now holds."""
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
        """Release the client's locks of `queues`; those of other clients stay."""
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
        """Whether the group has a lock: then a message to its retry topic is a dead letter."""
        held = self._locks.get(group)
        return held is not None and any(not self._is_expired(lock, now) for lock in held.values())

    def owner(self, group: str, queue: MessageQueue, now: float) -> str | None:
        """The client id that holds a queue."""
        lock = self._locks.get(group, {}).get(queue)
        return None if lock is None or self._is_expired(lock, now) else lock.client_id

    def forget_expired(self, now: float) -> int:
        """Remove expired locks; how many there were."""
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


# The requests for locks (41, 42). Apache's broker locks any name for any group. Here a queue is
# locked if the broker has it, or had it when its topic had more queues, and if the group exists or
# may be created; other queues are left out of the answer, as if another client held them.


log = logging.getLogger(__name__)

#: Queues of one request for locks, as many as a topic may have; more would hold up other requests.
_MOST_QUEUES = 16_384


class LockHandler:
    """Handles requests for order locks."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._places = ProgressPlaces(parts.topics, parts.progress, parts.store)
        self._full = LogAtIntervals()

    def handlers(self) -> Mapping[int, Handler]:
        return {RequestCode.LOCK_BATCH_MQ: self.lock, RequestCode.UNLOCK_BATCH_MQ: self.unlock}

    def lock(self, _: Connection, request: Command) -> Command:
        """Take or renew locks; the answer names those that the client holds."""
        asked = _asked(request)
        if len(asked.mq_set) > _MOST_QUEUES:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"{len(asked.mq_set)} queues in one request: {_MOST_QUEUES} are allowed; "
                "send several",
            )
        parts, locks = self._parts, self._parts.locks
        group = parts.groups.require(asked.consumer_group, now=parts.clock.now())
        there = [queue for queue in asked.mq_set if self._is_there(queue, group)]
        now = parts.clock.monotonic()
        granted = locks.lock(group.group_name, asked.client_id, there, now)
        if len(granted) < len(there) and locks.is_full:
            self._log_full(asked, now)
        held = LockedQueues(lock_ok_mq_set=granted)
        return request.answer(ResponseCode.SUCCESS, body=encode_body(held))

    def unlock(self, _: Connection, request: Command) -> Command:
        asked = _asked(request)
        self._parts.locks.unlock(asked.consumer_group, asked.client_id, asked.mq_set)
        return request.answer(ResponseCode.SUCCESS)

    def _is_there(self, queue: MessageQueue, group: SubscriptionGroupConfig) -> bool:
        parts = self._parts
        if queue.broker_name != parts.settings.name:
            return False
        topic = parts.topics.get(queue.topic)
        if topic is not None:
            return self._places.problem(topic, group.group_name, queue.queue_id) is None
        # A retry topic that was lost in a crash is created again by the next heartbeat.
        is_own = queue.topic == names.retry_topic(group.group_name)
        return is_own and 0 <= queue.queue_id < group.retry_queue_nums

    def _log_full(self, asked: LockBatch, now: float) -> None:
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
        # The id would be kept for as long as the lock.
        raise Refused(
            ResponseCode.INVALID_PARAMETER,
            f"a client id of {len(asked.client_id)} characters: {LONGEST_ID} are allowed",
        )
    return asked
