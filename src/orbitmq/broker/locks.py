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

from collections.abc import Iterable
from dataclasses import dataclass

from orbitmq.wire.bodies.route import MessageQueue

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
