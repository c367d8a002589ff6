"""Messages are consumed once, although they are delivered at least once: an optional middleware.

A message that was consumed before, within a window of time, does not reach the handler again. It is
known by its unique id, which a producer's retries and a broker's redeliveries keep, or by whatever
the application chooses (`by_keys` for its business keys).

The rules, in the life of one key:

    free     -> the handler may be called: claimed -> done      seen, for the length of the window
                                                   -> failed    free again
    claimed  -> somebody is at work on the same message: this delivery waits here for a little, and
                is then seen, free, or waits again. That costs it none of its attempts, or the
                message of a process that died at work would be a dead letter before it is free
    seen     -> the delivery is dropped, and counts as done

It is marked as seen only after success, so that a failure loses nothing. Should the process end
between the handler's success and the mark, the message is consumed twice: what has to be exact has
to put the mark into the transaction of the handler's work, that is, into the application's table.

Two stores are here: memory, for one process, and SQLite, which several processes of a machine share
and which outlives them. A claim holds for a lease, which is renewed as long as the handler is at
work: a handler may take any time, and a claim that its process did not live to take back lapses
soon. A process that is stopped for longer than a lease can lose a claim to another; both then work
on the message.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import sqlite3
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from orbitmq.client.durations import Duration, seconds
from orbitmq.client.errors import SettingError

if TYPE_CHECKING:
    from orbitmq.client.middleware import Delivery
    from orbitmq.client.received import ReceivedMessage

log = logging.getLogger(__name__)

#: How a message is known; None: it is not looked after.
Key = Callable[["ReceivedMessage"], "str | None"]

_DAY: Final = 86400.0


def by_unique_id(message: ReceivedMessage) -> str | None:
    """The id that the producer gave it: the same for all copies of one send."""
    return message.unique_id


def by_keys(message: ReceivedMessage) -> str | None:
    """The business keys: the same for all messages about one thing, whoever sent them."""
    return " ".join(message.keys) or None


class Claim(enum.Enum):
    """What came of the wish to work on a key."""

    TAKEN = enum.auto()
    SEEN = enum.auto()
    BUSY = enum.auto()


class SeenStore(Protocol):
    """Where it is kept what was seen. Called by several threads at a time."""

    def claim(self, key: str, now: float, *, lease: float) -> Claim:
        """Try to be the one who works on a key, for at most `lease` seconds."""

    def renew(self, key: str, now: float, *, lease: float) -> bool:
        """Hold a claim of this store for another `lease` seconds; False if it is held no more."""

    def done(self, key: str, now: float, *, window: float) -> None:
        """It was worked on with success: remember it for `window` seconds."""

    def release(self, key: str) -> None:
        """It was not: somebody may try again."""

    def close(self) -> None:
        """Nothing more is asked."""


class Idempotence:
    """Middleware that drops what it has seen.

    Consumer("billing", middleware=[Idempotence(window=timedelta(hours=1), key=by_keys)])
    """

    def __init__(
        self,
        store: SeenStore | None = None,
        *,
        key: Key = by_unique_id,
        window: Duration = _DAY,
        lease: Duration = 60.0,
        retry: Duration = 5.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`window`: how long a message is remembered; `lease`: how long one stays claimed whose
        process has died (the claims of living ones are renewed); `retry`: how long a delivery waits
        whose message is being worked on, before it is looked at again."""
        self.store = store if store is not None else SeenInMemory()
        self._key = key
        self._window = _positive("window", window)
        self._lease = _positive("lease", lease)
        self._retry = _positive("retry", retry)
        self._now = now
        self._renewal = _Renewal(self.store, self._lease, now)
        #: Deliveries that did not reach the handler because they were seen before.
        self.dropped = 0

    def before(self, delivery: Delivery) -> Coroutine[Any, Any, None] | None:
        if not self._may_wait(delivery):
            self._claim(delivery)
            self._renewal.add(delivery.notes[self])
            return None
        return self._before_async(delivery)

    async def _before_async(self, delivery: Delivery) -> None:
        await asyncio.to_thread(self._claim, delivery)
        # Not if this was cancelled: nobody is at work then, and the claims are left to lapse.
        self._renewal.add(delivery.notes[self])

    def after(self, delivery: Delivery) -> Coroutine[Any, Any, None] | None:
        return self._end(delivery)

    def on_failure(
        self, delivery: Delivery, error: BaseException | None
    ) -> Coroutine[Any, Any, None] | None:
        return self._end(delivery)

    def _end(self, delivery: Delivery) -> Coroutine[Any, Any, None] | None:
        self._renewal.remove(delivery.notes.get(self, ()))
        if self._may_wait(delivery):
            return asyncio.to_thread(self._settle, delivery)
        self._settle(delivery)
        return None

    def _may_wait(self, delivery: Delivery) -> bool:
        """Whether a store is asked on a loop, and may wait for the disk, or another process."""
        return delivery.is_async and not isinstance(self.store, SeenInMemory)

    def _claim(self, delivery: Delivery) -> None:
        """Keep from the handler what was seen, and what somebody is at work on."""
        claimed: dict[str, ReceivedMessage] = {}
        delivery.notes[self] = claimed
        now = self._now()
        try:
            for message in tuple(delivery.messages):
                key = self._name(delivery.group, message)
                if key is None:
                    continue
                claim = self._claim_one(key, now, claimed)
                if claim is Claim.TAKEN:
                    claimed[key] = message
                elif claim is Claim.SEEN:
                    self.dropped += 1
                    delivery.drop(message)
                else:
                    delivery.hold(message, self._retry)
        except BaseException:
            # The handler is not called, and nobody else lets go of these.
            self._settle(delivery)
            raise

    def _claim_one(self, key: str, now: float, claimed: dict[str, ReceivedMessage]) -> Claim:
        if key in claimed:
            # Twice in one batch: the second goes with the first.
            return Claim.SEEN
        return self.store.claim(key, now, lease=self._lease)

    def _settle(self, delivery: Delivery) -> None:
        """Remember what is done, and let go of what is not. Never raises: the work is done."""
        claimed: dict[str, ReceivedMessage] = delivery.notes.get(self, {})
        done = {id(message) for message in delivery.done}
        now = self._now()
        for key, message in claimed.items():
            try:
                if id(message) in done:
                    self.store.done(key, now, window=self._window)
                else:
                    self.store.release(key)
            except Exception:  # a failing store must not repeat what was consumed
                log.exception("that %r was consumed could not be noted", key, extra={"key": key})

    def _name(self, group: str, message: ReceivedMessage) -> str | None:
        key = self._key(message)
        # A store may serve several consumers; what one group has seen is new to another.
        return None if key is None else f"{group}\x00{message.topic}\x00{key}"


class SeenInMemory:
    """What was seen, in this process, up to `limit` keys: the oldest are forgotten first."""

    def __init__(self, *, limit: int = 1_000_000) -> None:
        if limit < 1:
            raise SettingError(f"SeenInMemory.limit must be 1 or more, got {limit!r}")
        self._limit = limit
        self._lock = threading.Lock()
        # Until when each is remembered, or worked on; the two apart, as they are forgotten apart.
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._claimed: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def claim(self, key: str, now: float, *, lease: float) -> Claim:
        with self._lock:
            if self._seen.get(key, now) > now:
                return Claim.SEEN
            if self._claimed.get(key, now) > now:
                return Claim.BUSY
            self._claimed[key] = now + lease
            return Claim.TAKEN

    def renew(self, key: str, now: float, *, lease: float) -> bool:
        with self._lock:
            if key not in self._claimed:
                return False
            self._claimed[key] = now + lease
            return True

    def done(self, key: str, now: float, *, window: float) -> None:
        with self._lock:
            self._claimed.pop(key, None)
            self._seen[key] = now + window
            self._seen.move_to_end(key)
            while self._seen and (
                len(self._seen) > self._limit or next(iter(self._seen.values())) <= now
            ):
                self._seen.popitem(last=False)

    def release(self, key: str) -> None:
        with self._lock:
            self._claimed.pop(key, None)

    def close(self) -> None:
        """Nothing to close."""


class SeenInSqlite:
    """What was seen, in a SQLite file that several processes of a machine may share."""

    def __init__(self, path: Path | str, *, timeout: Duration = 10.0, sweep: int = 1000) -> None:
        """`timeout`: how long to wait for another process; every `sweep` marks old ones go."""
        self._lock = threading.Lock()
        self._timeout = seconds(timeout, "SeenInSqlite.timeout")
        self._sweep = sweep
        self._marks = 0
        # A claim that lapsed may be somebody else's by now, and is not ours to release.
        self._owner = uuid.uuid4().hex
        self._connection = sqlite3.connect(
            Path(path), timeout=self._timeout, isolation_level=None, check_same_thread=False
        )
        with self._lock:
            # Write-ahead: readers and the writer do not wait for each other. What a power cut may
            # take with it are the last marks, and their messages are consumed again.
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS seen ("
                "key TEXT PRIMARY KEY, until REAL NOT NULL, is_done INTEGER NOT NULL, owner TEXT"
                ") WITHOUT ROWID"
            )
            self._connection.execute("CREATE INDEX IF NOT EXISTS seen_until ON seen (until)")

    def claim(self, key: str, now: float, *, lease: float) -> Claim:
        with self._lock:
            # One statement, so that of two processes one gets a row back.
            rows = self._connection.execute(
                "INSERT INTO seen (key, until, is_done, owner) VALUES (?, ?, 0, ?) "
                "ON CONFLICT (key) DO UPDATE "
                "SET until = excluded.until, is_done = 0, owner = excluded.owner "
                "WHERE seen.until <= ? RETURNING key",
                (key, now + lease, self._owner, now),
            ).fetchall()
            if rows:
                return Claim.TAKEN
            found = self._connection.execute(
                "SELECT is_done FROM seen WHERE key = ?", (key,)
            ).fetchone()
        return Claim.SEEN if found is not None and found[0] else Claim.BUSY

    def renew(self, key: str, now: float, *, lease: float) -> bool:
        with self._lock:
            renewed = self._connection.execute(
                "UPDATE seen SET until = ? WHERE key = ? AND is_done = 0 AND owner = ?",
                (now + lease, key, self._owner),
            )
            return renewed.rowcount > 0

    def done(self, key: str, now: float, *, window: float) -> None:
        with self._lock:
            self._connection.execute(
                "INSERT INTO seen (key, until, is_done) VALUES (?, ?, 1) "
                "ON CONFLICT (key) DO UPDATE SET until = excluded.until, is_done = 1",
                (key, now + window),
            )
            self._marks += 1
            if self._marks >= self._sweep:
                self._marks = 0
                self._connection.execute("DELETE FROM seen WHERE until <= ?", (now,))

    def release(self, key: str) -> None:
        with self._lock:
            self._connection.execute(
                "DELETE FROM seen WHERE key = ? AND is_done = 0 AND owner = ?", (key, self._owner)
            )

    def close(self) -> None:
        with self._lock:
            self._connection.close()


class _Renewal:
    """Renews the claims of handlers at work, on a thread that is there as long as there are any."""

    def __init__(self, store: SeenStore, lease: float, now: Callable[[], float]) -> None:
        self._store = store
        self._lease = lease
        self._now = now
        self._lock = threading.Lock()
        self._keys: set[str] = set()
        self._thread: threading.Thread | None = None

    def add(self, keys: Iterable[str]) -> None:
        """These are being worked on."""
        with self._lock:
            self._keys.update(keys)
            # Not alive, in spite of being there, after a fork.
            if self._keys and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(
                    target=self._renew_all, name="orbitmq idempotence", daemon=True
                )
                self._thread.start()

    def remove(self, keys: Iterable[str]) -> None:
        """These are not, any more."""
        with self._lock:
            self._keys.difference_update(keys)

    def _renew_all(self) -> None:
        """The life of the thread. Two renewals may come late before a claim lapses."""
        never = threading.Event()
        while True:
            never.wait(self._lease / 3)
            with self._lock:
                keys = tuple(self._keys)
                if not keys:
                    self._thread = None
                    return
            for key in keys:
                self._renew(key)

    def _renew(self, key: str) -> None:
        # What was let go of meanwhile must not be claimed again; the store says no to that.
        try:
            is_held = self._store.renew(key, self._now(), lease=self._lease)
        except Exception:  # the outermost loop of a thread: it is tried again
            log.exception("the claim of %r could not be renewed", key, extra={"key": key})
            return
        if not is_held and key in self._keys:
            self.remove((key,))
            log.warning(
                "the claim of %r has lapsed while its handler is at work: it may be consumed twice",
                key,
                extra={"key": key},
            )


def _positive(name: str, value: Duration) -> float:
    found = seconds(value, f"Idempotence.{name}")
    if found <= 0:
        raise SettingError(f"Idempotence.{name} must be positive, got {value!r}")
    return found
