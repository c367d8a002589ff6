"""Where it is kept which messages were consumed: in memory, for one process, or in SQLite.

A key is free, claimed by somebody for some time, or seen; see `orbitmq.client.idempotence` for what
is made of that. The SQLite file is shared by several processes of a machine, and outlives them.

Both may be made before a process forks (`gunicorn --preload`), and used before and after that. Each
process then has a memory of its own, with what was seen until then. With SQLite each is an owner of
its own, who releases no claims but its own. SQLite's state in a process must not be taken along: a
fork would believe in file locks that only its parent has, and the end of the parent would remove
the log under its feet. So the connection is closed for the moment of a fork, on both sides, and
opened again with the next use. Where a statement is under way for long, because another process
has the file, the fork does not wait for it: the child leaves that connection alone for ever.
"""

from __future__ import annotations

import enum
import functools
import sqlite3
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn, Protocol

from orbitmq.client.durations import Duration, seconds
from orbitmq.client.errors import SettingError, WrongUse
from orbitmq.client.forks import tell_of_forks

#: How long a fork waits for a statement, which itself may wait for another process for long.
_FORK_PATIENCE: Final = 0.5
#: SQLite's names for a database that is in memory, or gone when it is closed; for tests.
_NO_FILES: Final = (":memory:", "")


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
        tell_of_forks(self)

    def before_fork(self) -> None:
        """Nothing to do."""

    def after_fork(self, *, is_child: bool) -> None:
        if is_child:
            # A thread that is not here may have held it.
            self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._seen)

    def __reduce__(self) -> NoReturn:
        raise _of_one_process(type(self).__name__)

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
        # Absolute: a process that it is sent to may be in another folder.
        self._path = path if str(path) in _NO_FILES else Path(path).absolute()
        self._lock = threading.Lock()
        self._timeout = seconds(timeout, "SeenInSqlite.timeout")
        self._sweep = sweep
        self._marks = 0
        self._left_behind: list[sqlite3.Connection] = []
        # A claim that lapsed may be somebody else's by now, and is not ours to release.
        self._owner = uuid.uuid4().hex
        #: None: as soon as it is needed.
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False
        #: The thread that forks, and holds the lock meanwhile.
        self._forking: int | None = None
        with self._lock:
            # Write-ahead: readers and the writer do not wait for each other. It is a property of
            # the file, as the table is.
            connection = self._opened()
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS seen ("
                "key TEXT PRIMARY KEY, until REAL NOT NULL, is_done INTEGER NOT NULL, owner TEXT"
                ") WITHOUT ROWID"
            )
            connection.execute("CREATE INDEX IF NOT EXISTS seen_until ON seen (until)")
        tell_of_forks(self)

    def _opened(self) -> sqlite3.Connection:
        """The connection of this process; called under the lock."""
        if self._connection is None:
            if self._is_closed:
                raise WrongUse(f"the store of seen messages in {self._path} is closed")
            self._connection = sqlite3.connect(
                self._path, timeout=self._timeout, isolation_level=None, check_same_thread=False
            )
            # What a power cut may take with it are the last marks, and their messages are consumed
            # again.
            self._connection.execute("PRAGMA synchronous=NORMAL")
        return self._connection

    @property
    def _is_file(self) -> bool:
        return str(self._path) not in _NO_FILES

    def before_fork(self) -> None:
        # Until it is over: no other thread shall open it again, or be in the middle of a statement.
        # One that waits for another process is not waited for: the child has to leave it behind.
        if not self._lock.acquire(timeout=_FORK_PATIENCE if self._is_file else -1):
            return
        self._forking = threading.get_ident()
        if self._is_file and self._connection is not None:
            self._connection.close()
            self._connection = None

    def after_fork(self, *, is_child: bool) -> None:
        if not is_child:
            if self._forking == threading.get_ident():
                self._forking = None
                self._lock.release()
            return
        self._forking = None
        self._lock = threading.Lock()
        self._owner = uuid.uuid4().hex
        if self._is_file and self._connection is not None:
            # Who forked did not say so before, or a statement was under way for too long. It must
            # not be used, nor even be closed.
            self._left_behind.append(self._connection)
            self._connection = None

    def __reduce__(self) -> tuple[Callable[[], SeenInSqlite], tuple[()]]:
        """The same file, opened by the process that this is sent to."""
        if not self._is_file:
            raise _of_one_process(f"{type(self).__name__}({str(self._path)!r})")
        return functools.partial(
            type(self), self._path, timeout=self._timeout, sweep=self._sweep
        ), ()

    def claim(self, key: str, now: float, *, lease: float) -> Claim:
        with self._lock:
            # One statement, so that of two processes one gets a row back.
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
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _of_one_process(store: str) -> WrongUse:
    return WrongUse(
        f"{store} is the memory of one process and cannot be sent to another one; for several "
        "processes, give Idempotence a SeenInSqlite with the path of a file"
    )
