"""Order locks: the broker's word that nobody else of the group consumes a queue.

The guarantee is a gap between two lifetimes. A broker keeps a lock for 60 s after it was last asked
for; we believe in it for 30 s, **counted from when the request was sent**, which is before the
broker's count began. A client that was paused, cut off or slow therefore stops consuming before
anybody else may begin, whatever its clock shows: both sides measure durations only. (Apache's
client counts from the answer and bounds the difference by a call timeout.)

A lock is renewed every 20 s. A renewal that comes too late, after we have stopped to believe in the
lock, does not bring it back: meanwhile somebody may have had the queue and given it back, so the
queue has to be gained anew, with its progress read after the lock was taken.

A request for a lock that was sent is never abandoned, whoever stops to wait for it: the broker may
grant it, and nobody else would have the queue for a minute. Locks whose request had no answer are
remembered for the same reason, and are given back like those that were granted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq.client.routes import Queue
from orbitmq.errors import OrbitError, SettingError
from orbitmq.logonce import LogOncePerOutage
from orbitmq.parsing import Fields
from orbitmq.wire.bodies import LockBatch, LockedQueues, MessageQueue
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.javajson import decode_body, encode_body

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine, Periodic


log = logging.getLogger(__name__)

#: How long the broker keeps a lock that is not renewed.
BROKER_LOCK_LIFE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LockSettings:
    """How order locks are kept."""

    life: float = 30.0  #: how long a lock is believed in; well below the broker's 60 s
    renewal: float = 20.0  #: how often locks are renewed
    retry: float = 1.0  #: when a renewal that failed is tried again
    timeout: float = 1.0  #: for one request

    def __post_init__(self) -> None:
        Fields(self, "locks").durations("life", "renewal", "retry", "timeout")
        if not self.renewal < self.life < BROKER_LOCK_LIFE:
            raise SettingError(
                f"locks.renewal must be below locks.life, and that below {BROKER_LOCK_LIFE:g} s, "
                f"got {self.renewal:g} and {self.life:g}"
            )


class QueueLock:
    """One lock, as this client believes in it."""

    __slots__ = ("_life", "_until", "granted_at", "queue")

    def __init__(self, queue: Queue, *, sent_at: float, life: float) -> None:
        self.queue = queue
        #: When the request was sent that was last granted.
        self.granted_at = sent_at
        self._life = life
        self._until = sent_at + life

    def is_held(self, now: float) -> bool:
        """Whether it may be relied on at `now`, by the clock's `monotonic`."""
        return now < self._until

    def renew(self, *, sent_at: float, now: float) -> bool:
        """A renewal sent at `sent_at` was granted, as we hear `now`; whether that is in time.

        The broker counts at least from when the last granted request was sent, and twice as long
        as we do: as long as we have believed in the lock until now, nobody else had it meanwhile.
        """
        if not self.is_held(now):
            return False
        if sent_at > self.granted_at:
            self.granted_at = sent_at
            self._until = sent_at + self._life
        return True

    def give_up(self) -> None:
        """Believe in it no more."""
        self._until = float("-inf")

    def __repr__(self) -> str:
        return f"<QueueLock {self.queue} granted_at={self.granted_at:.3f}>"


class QueueLocks:
    """The locks of one consumer. A broker is asked one thing at a time: nothing is overtaken."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        settings: LockSettings | None = None,
        *,
        on_lost: Callable[[Queue], None] | None = None,
    ) -> None:
        """`on_lost` is called, on the loop, for a queue whose lock lapsed or was given away."""
        self._engine = engine
        self._group = group
        self._settings = settings or LockSettings()
        self.on_lost = on_lost
        self._locks: dict[Queue, QueueLock] = {}
        #: Asked for, without an answer: the broker may have granted them or not.
        self._unsure: set[Queue] = set()
        #: Requests on their way.
        self._asking: set[asyncio.Task[None]] = set()
        self._turns: dict[str, asyncio.Lock] = {}
        #: What is given back with the next request to a broker.
        self._unlocking: dict[str, set[Queue]] = {}
        self._outages = LogOncePerOutage(log)
        self._renewal: Periodic | None = None
        #: Locks that lapsed or were given away while we meant to keep them.
        self.lost = 0

    def start(self) -> None:
        """Begin to renew."""
        settings = self._settings
        self._renewal = self._engine.every(
            settings.renewal, self.renew, name=f"lock renewal of {self._group}"
        )

    def stop(self) -> None:
        """Renew no more; what is held lapses unless it is released."""
        if self._renewal is not None:
            self._renewal.stop()
            self._renewal = None

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why brokers could not be asked for locks, a sentence each."""
        return self._outages.current()

    @property
    def queues(self) -> tuple[Queue, ...]:
        """The queues whose locks are kept."""
        return tuple(self._locks)

    def get(self, queue: Queue) -> QueueLock | None:
        """The lock of a queue, held or not; none when it was never taken, or was released."""
        return self._locks.get(queue)

    def is_held(self, queue: Queue) -> bool:
        lock = self._locks.get(queue)
        return lock is not None and lock.is_held(self._now())

    async def acquire(self, queues: Iterable[Queue]) -> dict[Queue, QueueLock]:
        """Take locks; those that were granted. Refusals are no errors, and trouble is logged."""
        granted: dict[Queue, QueueLock] = {}
        asking = [
            self._engine.spawn(self._acquire(broker, some, granted), f"lock queues of {broker}")
            for broker, some in _by_broker(queues).items()
        ]
        self._asking.update(asking)
        for task in asking:
            task.add_done_callback(self._asking.discard)
        if asking:
            # Not a gather, which would cancel what is on its way together with whoever waits.
            await asyncio.wait(asking)
        return granted

    def may_be_held(self, queue: Queue) -> bool:
        """Whether the broker may keep the queue for us: granted, or asked for without an answer."""
        return queue in self._locks or queue in self._unsure

    async def release(self, queues: Iterable[Queue]) -> None:
        """Give locks back; whoever waits for them can have them when this returns."""
        kept = _by_broker(queue for queue in queues if self._forget(queue))
        for broker, some in kept.items():
            self._unlocking.setdefault(broker, set()).update(some)
        await asyncio.gather(*(self._unlock(broker) for broker in kept))

    async def release_all(self, *, but: Collection[Queue] = ()) -> None:
        """Give everything back, also what is still on its way, `but` some locks: those lapse."""
        if self._asking:
            await asyncio.wait(self._asking)
        await self.release({*self._locks, *self._unsure} - set(but))

    async def renew(self) -> float | None:
        """Renew all locks, and tell of those that are lost; when to do it again."""
        by_broker = _by_broker(self._locks)
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
                    self._lose(lock, "given to somebody else" if held is not None else "lapsed")
            return held is not None

    def _lose(self, lock: QueueLock, why: str) -> None:
        lock.give_up()
        del self._locks[lock.queue]
        self.lost += 1
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
        """Which of `queues` the broker says are ours; None when it could not be asked."""
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
        """Give back what waits for that: for all who wait, in one request."""
        async with self._turn(broker):
            # Somebody here may have taken them anew, while this waited for its turn.
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
        """Whether there was anything to forget."""
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


def _by_broker(queues: Iterable[Queue]) -> Mapping[str, list[Queue]]:
    found: dict[str, list[Queue]] = {}
    for queue in queues:
        found.setdefault(queue.broker, []).append(queue)
    return found
