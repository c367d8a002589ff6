"""Idempotence: a middleware that drops messages that were consumed before.

A message has a key: its unique id, or one that the application chooses. A key is free, claimed by a
handler at work, or seen for the length of the window. A delivery whose key is claimed waits without
spending an attempt. The key is marked as seen when all middleware has succeeded, so a crash between
the handler's success and the mark delivers the message again.

What an ordered listener has not committed is *open*: copies are dropped and are committed or rolled
back with it, and the loss of the queue forgets it. See docs/internals/idempotence.md.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
import sqlite3
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from orbitmq.client.engine import ProcessCheck
from orbitmq.errors import SettingError, WrongUse
from orbitmq.names import wrap_group
from orbitmq.parsing import Duration, seconds

if TYPE_CHECKING:
    from orbitmq.client.consumer.window import Ownership
    from orbitmq.client.message import ReceivedMessage
    from orbitmq.client.middleware import Delivery


log = logging.getLogger(__name__)

#: The key of a message; None: the message is not tracked.
Key = Callable[["ReceivedMessage"], "str | None"]

_DAY: Final = 86400.0


def by_unique_id(message: ReceivedMessage) -> str | None:
    """The unique id of the producer: the same for all copies of one send."""
    return message.unique_id


def by_keys(message: ReceivedMessage) -> str | None:
    """The business keys: the same for all messages about one subject, from any producer."""
    return " ".join(message.keys) or None


class Idempotence:
    """Middleware that drops messages that were handled before.

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
        """`window`: how long a message is remembered; `lease`: how long a claim lasts after its
        process died (live processes renew theirs); `retry`: the pause before a delivery whose
        message is in work is checked again."""
        self.store = store if store is not None else SeenInMemory()
        self._key = key
        self._window = _positive("window", window)
        self._lease = _positive("lease", lease)
        self._retry = _positive("retry", retry)
        self._now = now
        self._renewal = _Renewal(self.store, self._lease, now)
        #: Open messages, by the ownership of their queue: the offset at which each key was handled.
        #: A queue has one call at a time, and only that call changes its entry. The entry ends with
        #: the ownership.
        self._open: weakref.WeakKeyDictionary[Ownership, dict[str, int]] = (
            weakref.WeakKeyDictionary()
        )
        #: Deliveries that were dropped.
        self.dropped = 0

    def __reduce__(self) -> tuple[Callable[[], Idempotence], tuple[()]]:
        """The same settings in another process, such as a worker of Spark; without claims."""
        made_again = partial(
            type(self),
            self.store,
            key=self._key,
            window=self._window,
            lease=self._lease,
            retry=self._retry,
            now=self._now,
        )
        return made_again, ()

    def before(self, delivery: Delivery) -> Coroutine[Any, Any, None] | None:
        if not self._may_wait(delivery):
            self._claim(delivery)
            self._begin(delivery)
            return None
        return self._before_async(delivery)

    async def _before_async(self, delivery: Delivery) -> None:
        await asyncio.to_thread(self._claim, delivery)
        # Not after a cancellation: no handler is running then, and the claims expire.
        self._begin(delivery)

    def _begin(self, delivery: Delivery) -> None:
        # In this order: a time limit that interrupts here must not leave a renewal behind.
        delivery.at_end(self._end)
        self._renewal.add(delivery.notes[self].first)

    def _end(self, delivery: Delivery) -> Coroutine[Any, Any, None] | None:
        self._renewal.remove(delivery.notes.get(self, _Claimed()).first)
        if self._may_wait(delivery):
            return asyncio.to_thread(self._settle, delivery)
        self._settle(delivery)
        return None

    def _may_wait(self, delivery: Delivery) -> bool:
        """Whether a store is called on a loop, and may wait for the disk or another process."""
        return delivery.is_async and not isinstance(self.store, SeenInMemory)

    def _claim(self, delivery: Delivery) -> None:
        """Keep from the handler what was seen, and what another handler is working on."""
        claimed = _Claimed()
        delivery.notes[self] = claimed
        now = self._now()
        try:
            for message in tuple(delivery.messages):
                key = self._name(delivery.group, message)
                if key is None:
                    continue
                if self._is_copy_of_open(delivery, key, message):
                    self.dropped += 1
                    delivery.drop(message)
                    continue
                if key in claimed.first:
                    claimed.others.setdefault(key, []).append(message)
                    delivery.hold(message, self._retry)
                    continue
                claim = self.store.claim(key, now, lease=self._lease)
                if claim is Claim.TAKEN:
                    claimed.first[key] = message
                elif claim is Claim.SEEN:
                    self.dropped += 1
                    delivery.drop(message)
                else:
                    delivery.hold(message, self._retry)
        except BaseException:
            # The handler is not called, so nothing else releases these claims.
            self._settle(delivery)
            raise

    def _is_copy_of_open(self, delivery: Delivery, key: str, message: ReceivedMessage) -> bool:
        """Whether a message with its key was handled earlier in its queue and is open."""
        handled = self._open_in(delivery)
        if key not in handled:
            return False
        if message.queue_offset <= handled[key]:
            # Not if it is behind: handled twice is better than never.
            del handled[key]
            return False
        return True

    def _open_in(self, delivery: Delivery) -> dict[str, int]:
        """The open messages of a delivery's queue; read-only."""
        ownership = delivery.ownership
        return {} if ownership is None else self._open.get(ownership, {})

    def _settle(self, delivery: Delivery) -> None:
        """Mark what is done and release the rest. Never raises: the handler has finished."""
        claimed: _Claimed = delivery.notes.get(self, _Claimed())
        succeeded = {id(message) for message in delivery.succeeded}
        good = {key: each for key, each in claimed.first.items() if id(each) in succeeded}
        for key in good:
            others = claimed.others.get(key, ())
            self.dropped += len(others)
            for other in others:
                delivery.let_go(other)
        done = self._closed(delivery, good)
        now = self._now()
        for key in done:
            self._note(key, partial(self.store.done, key, now, window=self._window))
        for key in claimed.first:
            if key not in done:
                self._note(key, partial(self.store.release, key))

    def _closed(self, delivery: Delivery, good: Mapping[str, ReceivedMessage]) -> set[str]:
        """The keys that are done now, of the succeeded and of the open messages."""
        outcome, handled = delivery.outcome, self._open_in(delivery)
        if outcome.is_rolled_back:
            handled.clear()
            return set()
        if outcome.commits(is_open=bool(handled)):
            done = {*good, *handled}
            handled.clear()
            return done
        # A single requested call leaves nothing open: no commit will ever follow.
        if good and delivery.ownership is not None:
            handled = self._open.setdefault(delivery.ownership, {})
            handled.update((key, message.queue_offset) for key, message in good.items())
        return set()

    @staticmethod
    def _note(key: str, note: Callable[[], None]) -> None:
        try:
            note()
        except Exception:  # a failing store must not repeat what was consumed
            log.exception("that %r was consumed could not be noted", key, extra={"key": key})

    def _name(self, group: str, message: ReceivedMessage) -> str | None:
        key = self._key(message)
        if key is None:
            return None
        # A store may serve several consumers: a message that one group has seen is new to another
        # group, and groups with the same name in two namespaces are two.
        return f"{wrap_group(message.namespace, group)}\x00{message.topic}\x00{key}"


@dataclass(frozen=True, slots=True)
class _Claimed:
    """The claims of one delivery."""

    #: The message of each key that the handler gets.
    first: dict[str, ReceivedMessage] = field(default_factory=dict)
    #: Later messages with the same key.
    others: dict[str, list[ReceivedMessage]] = field(default_factory=dict)


class _Renewal:
    """Renews the claims of running handlers, on a thread that exists while there are any."""

    def __init__(self, store: SeenStore, lease: float, now: Callable[[], float]) -> None:
        self._store = store
        self._lease = lease
        self._now = now
        self._lock = threading.Lock()
        self._keys: set[str] = set()
        self._thread: threading.Thread | None = None

    def add(self, keys: Iterable[str]) -> None:
        """Handlers began to work on these keys."""
        with self._lock:
            new = set(keys)
            # Not alive: a thread of the parent process, or one that could not be started.
            if new and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(
                    target=self._renew_all, name="orbitmq idempotence", daemon=True
                )
                self._thread.start()
            self._keys |= new

    def remove(self, keys: Iterable[str]) -> None:
        """Handlers have finished these keys."""
        with self._lock:
            self._keys.difference_update(keys)

    def _renew_all(self) -> None:
        """The main loop of the thread. Two renewals may be late before a claim expires."""
        never = threading.Event()
        while True:
            never.wait(min(self._lease / 3, threading.TIMEOUT_MAX))
            with self._lock:
                keys = tuple(self._keys)
                if not keys:
                    self._thread = None
                    return
            for key in keys:
                self._renew(key)

    def _renew(self, key: str) -> None:
        # A key that was released meanwhile must not be claimed again; the store refuses that.
        try:
            is_held = self._store.renew(key, self._now(), lease=self._lease)
        except Exception:  # the outermost loop of a thread: it tries again
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


# ---- stores of seen messages: in memory for one process, in a SQLite file for several
#
# Both may be created before a process forks (`gunicorn --preload`). The first use binds a store to
# its process; in a fork of that process it raises `UsedAfterFork`.


class Claim(enum.Enum):
    """The answer to a claim."""

    TAKEN = enum.auto()
    SEEN = enum.auto()
    BUSY = enum.auto()


class SeenStore(Protocol):
    """A store of handled messages. Several threads call it at a time."""

    def claim(self, key: str, now: float, *, lease: float) -> Claim:
        """Claim a key for at most `lease` seconds."""

    def renew(self, key: str, now: float, *, lease: float) -> bool:
        """Extend a claim of this store by `lease` seconds; False if it was lost."""

    def done(self, key: str, now: float, *, window: float) -> None:
        """The handler succeeded: remember the key for `window` seconds."""

    def release(self, key: str) -> None:
        """The handler failed: release the key."""

    def close(self) -> None:
        """No more calls follow."""


class SeenInMemory:
    """Seen keys in the memory of this process, up to `limit`: the oldest are dropped first."""

    def __init__(self, *, limit: int = 1_000_000) -> None:
        if limit < 1:
            raise SettingError(f"SeenInMemory.limit must be 1 or more, got {limit!r}")
        self._limit = limit
        self._lock = threading.Lock()
        # Until when each key is remembered or claimed; separate, because they expire separately.
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._claimed: dict[str, float] = {}
        self._check_process = ProcessCheck("SeenInMemory", from_start=True)

    def __len__(self) -> int:
        return len(self._seen)

    def __reduce__(self) -> NoReturn:
        raise WrongUse(
            "SeenInMemory is the memory of one process and cannot be sent to another one; for "
            "several processes, give Idempotence a SeenInSqlite with the path of a file"
        )

    def claim(self, key: str, now: float, *, lease: float) -> Claim:
        self._check_process.begin()
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
        """Does nothing."""


class SeenInSqlite:
    """Seen keys in a SQLite file that several processes of a machine may share."""

    def __init__(self, path: Path | str, *, timeout: Duration = 10.0, sweep: int = 1000) -> None:
        """`timeout`: how long to wait for another process; each `sweep` marks expired ones go."""
        # Absolute: a process that it is pickled for may have another working directory.
        self._path = Path(path).absolute()
        self._lock = threading.Lock()
        self._timeout = seconds(timeout, "SeenInSqlite.timeout")
        self._sweep = sweep
        self._marks = 0
        # An expired claim may belong to another process by now; then it is not ours to release.
        self._owner = ""
        #: None until the first use: SQLite connections must not cross a fork.
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False
        self._check_process = ProcessCheck("SeenInSqlite", from_start=True)
        connection = self._connect()
        # Write-ahead: readers and the writer do not block each other. It is a property of the
        # file, as the table is.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS seen ("
            "key TEXT PRIMARY KEY, until REAL NOT NULL, is_done INTEGER NOT NULL, owner TEXT"
            ") WITHOUT ROWID"
        )
        connection.execute("CREATE INDEX IF NOT EXISTS seen_until ON seen (until)")
        connection.close()

    def _connect(self) -> sqlite3.Connection:
        self._owner = uuid.uuid4().hex
        connection = sqlite3.connect(
            self._path, timeout=self._timeout, isolation_level=None, check_same_thread=False
        )
        # A power failure may lose the last marks. Their messages are consumed again.
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    def _opened(self) -> sqlite3.Connection:
        """The connection of this process; called under the lock."""
        if self._connection is None:
            if self._is_closed:
                raise WrongUse(f"the store of seen messages in {self._path} is closed")
            self._connection = self._connect()
        return self._connection

    def __reduce__(self) -> tuple[Callable[[], SeenInSqlite], tuple[()]]:
        """The same file, opened by the process that unpickles it."""
        return functools.partial(
            type(self), self._path, timeout=self._timeout, sweep=self._sweep
        ), ()

    def claim(self, key: str, now: float, *, lease: float) -> Claim:
        self._check_process.begin()
        with self._lock:
            # One statement, so that only one of two processes gets a row back.
            connection = self._opened()
            rows = connection.execute(
                "INSERT INTO seen (key, until, is_done, owner) VALUES (?, ?, 0, ?) "
                "ON CONFLICT (key) DO UPDATE "
                "SET until = excluded.until, is_done = 0, owner = excluded.owner "
                "WHERE seen.until <= ? RETURNING key",
                (key, now + lease, self._owner, now),
            ).fetchall()
            if rows:
                return Claim.TAKEN
            found = connection.execute("SELECT is_done FROM seen WHERE key = ?", (key,)).fetchone()
        return Claim.SEEN if found is not None and found[0] else Claim.BUSY

    def renew(self, key: str, now: float, *, lease: float) -> bool:
        with self._lock:
            renewed = self._opened().execute(
                "UPDATE seen SET until = ? WHERE key = ? AND is_done = 0 AND owner = ?",
                (now + lease, key, self._owner),
            )
            return renewed.rowcount > 0

    def done(self, key: str, now: float, *, window: float) -> None:
        with self._lock:
            self._opened().execute(
                "INSERT INTO seen (key, until, is_done) VALUES (?, ?, 1) "
                "ON CONFLICT (key) DO UPDATE SET until = excluded.until, is_done = 1",
                (key, now + window),
            )
            self._marks += 1
            if self._marks >= self._sweep:
                self._marks = 0
                self._opened().execute("DELETE FROM seen WHERE until <= ?", (now,))

    def release(self, key: str) -> None:
        with self._lock:
            self._opened().execute(
                "DELETE FROM seen WHERE key = ? AND is_done = 0 AND owner = ?", (key, self._owner)
            )

    def close(self) -> None:
        if not self._check_process.is_same:
            return
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None
