"""Order locks: only one member of a group consumes a queue in order.

A broker keeps a lock for 60 s after the last request; the client relies on it for 30 s, counted
from when the request was *sent*. A client that was paused or cut off therefore stops before another
member may begin. Both sides measure durations only.

A renewal that comes too late does not revive a lock: the queue must be acquired again. A request
that was sent is never cancelled, as the broker may grant it. See `docs/internals/order-locks.md`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq.client.routes import Queue, queues_by_broker
from orbitmq.errors import OrbitError, SettingError
from orbitmq.logonce import LogOncePerOutage
from orbitmq.parsing import Fields
from orbitmq.wire.bodies import LockBatch, LockedQueues, MessageQueue
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.javajson import decode_body, encode_body

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine, Periodic


log = logging.getLogger(__name__)

#: Seconds for which the broker keeps a lock after the last request.
BROKER_LOCK_LIFE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LockSettings:
    """How order locks are kept, in seconds."""

    life: float = 30.0  #: how long a lock is relied on; well below the broker's 60 s
    renewal: float = 20.0  #: the interval of renewals
    retry: float = 1.0  #: before a failed renewal is repeated
    timeout: float = 1.0  #: of one request

    def __post_init__(self) -> None:
        Fields(self, "locks").durations("life", "renewal", "retry", "timeout")
        if not self.renewal < self.life < BROKER_LOCK_LIFE:
            raise SettingError(
                f"locks.renewal must be below locks.life, and that below {BROKER_LOCK_LIFE:g} s, "
                f"got {self.renewal:g} and {self.life:g}"
            )


class QueueLock:
    """One lock, as this client relies on it."""

    __slots__ = ("_life", "_until", "granted_at", "queue")

    def __init__(self, queue: Queue, *, sent_at: float, life: float) -> None:
        self.queue = queue
        #: When the last granted request was sent.
        self.granted_at = sent_at
        self._life = life
        self._until = sent_at + life

    def is_held(self, now: float) -> bool:
        """Whether the lock holds at `now`, by the clock's `monotonic`."""
        return now < self._until

    def renew(self, *, sent_at: float, now: float) -> bool:
        """A renewal was granted; whether it came in time.

        The broker's count is twice as long and began no earlier. As long as this side has relied on
        the lock without a gap, no other member had it meanwhile.
        """
        if not self.is_held(now):
            return False
        if sent_at > self.granted_at:
            self.granted_at = sent_at
            self._until = sent_at + self._life
        return True

    def give_up(self) -> None:
        """Stop relying on the lock."""
        self._until = float("-inf")

    def __repr__(self) -> str:
        return f"<QueueLock {self.queue} granted_at={self.granted_at:.3f}>"


class QueueLocks:
    """The locks of one consumer. Requests to a broker go one after the other, in order."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        settings: LockSettings | None = None,
        *,
        on_lost: Callable[[Queue], None] | None = None,
    ) -> None:
        """`on_lost` is called, on the loop, with a queue whose lock lapsed or was given away."""
        self._engine = engine
        self._group = group
        self._settings = settings or LockSettings()
        self.on_lost = on_lost
        self._locks: dict[Queue, QueueLock] = {}
        #: Requested without an answer: the broker may have granted them.
        self._unsure: set[Queue] = set()
        #: Requests under way.
        self._asking: set[asyncio.Task[None]] = set()
        self._turns: dict[str, asyncio.Lock] = {}
        #: Queues to unlock with the next request to a broker.
        self._unlocking: dict[str, set[Queue]] = {}
        self._outages = LogOncePerOutage(log)
        self._renewal: Periodic | None = None

    def start(self) -> None:
        """Begin the renewals."""
        settings = self._settings
        self._renewal = self._engine.every(
            settings.renewal, self.renew, name=f"lock renewal of {self._group}"
        )

    def stop(self) -> None:
        """End the renewals; locks that are not released lapse."""
        if self._renewal is not None:
            self._renewal.stop()
            self._renewal = None

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why locks could not be requested, a sentence each."""
        return self._outages.current()

    def get(self, queue: Queue) -> QueueLock | None:
        """The lock of a queue, held or lapsed; None when it was never granted or was released."""
        return self._locks.get(queue)

    def is_held(self, queue: Queue) -> bool:
        lock = self._locks.get(queue)
        return lock is not None and lock.is_held(self._now())

    async def acquire(self, queues: Iterable[Queue]) -> dict[Queue, QueueLock]:
        """Request locks; returns the granted ones. Errors are logged."""
        granted: dict[Queue, QueueLock] = {}
        asking = [
            self._engine.spawn(self._acquire(broker, some, granted), f"lock queues of {broker}")
            for broker, some in queues_by_broker(queues).items()
        ]
        self._asking.update(asking)
        for task in asking:
            task.add_done_callback(self._asking.discard)
        if asking:
            # Not a gather, which would cancel the requests together with the caller.
            await asyncio.wait(asking)
        return granted

    def may_be_held(self, queue: Queue) -> bool:
        """Whether the broker may keep the lock for us: granted, or requested without an answer."""
        return queue in self._locks or queue in self._unsure

    async def release(self, queues: Iterable[Queue]) -> None:
        """Give locks back; other members can have them when this returns."""
        kept = queues_by_broker(queue for queue in queues if self._forget(queue))
        for broker, some in kept.items():
            self._unlocking.setdefault(broker, set()).update(some)
        await asyncio.gather(*(self._unlock(broker) for broker in kept))

    async def release_all(self, *, but: Collection[Queue] = ()) -> None:
        """Give all locks back, also those being requested, `but` some, which lapse."""
        if self._asking:
            await asyncio.wait(self._asking)
        await self.release({*self._locks, *self._unsure} - set(but))

    async def renew(self) -> float | None:
        """Renew all locks and report the lost ones; the seconds to the next renewal."""
        by_broker = queues_by_broker(self._locks)
        if not by_broker:
            return None
        outcomes = await asyncio.gather(
            *(self._renew(broker, some) for broker, some in by_broker.items())
        )
        return None if all(outcomes) else self._settings.retry

    async def _acquire(
        self, broker: str, queues: list[Queue], granted: dict[Queue, QueueLock]
    ) -> None:
        async with self._turn(broker):
            sent_at = self._now()
            self._unsure.update(queues)
            held = await self._lock(broker, queues)
            if held is not None:
                self._unsure.difference_update(queues)
            for queue in held or ():
                lock = QueueLock(queue, sent_at=sent_at, life=self._settings.life)
                if lock.is_held(self._now()):
                    self._locks[queue] = granted[queue] = lock

    async def _renew(self, broker: str, queues: list[Queue]) -> bool:
        """Whether the broker answered."""
        async with self._turn(broker):
            locks = {queue: self._locks[queue] for queue in queues if queue in self._locks}
            if not locks:
                return True
            sent_at = self._now()
            held = await self._lock(broker, list(locks))
            now = self._now()
            for queue, lock in locks.items():
                if held is not None and queue in held:
                    is_kept = lock.renew(sent_at=sent_at, now=now)
                else:
                    is_kept = held is None and lock.is_held(now)
                if not is_kept and self._locks.get(queue) is lock:
                    self._lose(lock, "given to another member" if held is not None else "lapsed")
            return held is not None

    def _lose(self, lock: QueueLock, why: str) -> None:
        lock.give_up()
        del self._locks[lock.queue]
        log.warning(
            "order lock of %s lost by group %s: %s",
            lock.queue,
            self._group,
            why,
            extra={"group": self._group, "queue": str(lock.queue)},
        )
        if self.on_lost is not None:
            self.on_lost(lock.queue)

    async def _lock(self, broker: str, queues: list[Queue]) -> frozenset[Queue] | None:
        """The locks that the broker grants; None when it did not answer."""
        try:
            answer = await self._engine.ask(
                self._engine.routes.master(broker),
                RequestCode.LOCK_BATCH_MQ,
                body=self._body(queues),
                timeout=self._settings.timeout,
            )
            locked = decode_body(LockedQueues, answer.body).lock_ok_mq_set
        except OrbitError as error:
            self._outages.failed(broker, "queues cannot be locked at %s: %s", broker, error)
            return None
        self._outages.recovered(broker)
        return frozenset(Queue(each.topic, each.broker_name, each.queue_id) for each in locked)

    async def _unlock(self, broker: str) -> None:
        """Unlock the queues that wait for it, in one request."""
        async with self._turn(broker):
            # They may have been locked again before this request had its turn.
            waiting = self._unlocking.pop(broker, set())
            queues = sorted(queue for queue in waiting if queue not in self._locks)
            if not queues:
                return
            try:
                await self._engine.ask(
                    self._engine.routes.master(broker),
                    RequestCode.UNLOCK_BATCH_MQ,
                    body=self._body(queues),
                    timeout=self._settings.timeout,
                )
            except OrbitError as error:
                log.warning(
                    "queues of group %s could not be unlocked at %s, and are free in %g s: %s",
                    self._group,
                    broker,
                    BROKER_LOCK_LIFE,
                    error,
                    extra={"group": self._group, "broker": broker},
                )

    def _forget(self, queue: Queue) -> bool:
        """Forget a lock; whether there was any."""
        lock = self._locks.pop(queue, None)
        if lock is not None:
            lock.give_up()
        is_unsure = queue in self._unsure
        self._unsure.discard(queue)
        return lock is not None or is_unsure

    def _body(self, queues: Iterable[Queue]) -> bytes:
        wanted = tuple(
            MessageQueue(topic=queue.topic, broker_name=queue.broker, queue_id=queue.id)
            for queue in queues
        )
        return encode_body(
            LockBatch(client_id=self._engine.client_id, consumer_group=self._group, mq_set=wanted)
        )

    def _turn(self, broker: str) -> asyncio.Lock:
        return self._turns.setdefault(broker, asyncio.Lock())

    def _now(self) -> float:
        return self._engine.clock.monotonic()
