"""Seven days of history in one small SQLite file.

A point per series and five minutes, and only when it differs from the one before or that is a day
old: the highest value of the stretch, because a peak of lag is what people look for later. One
thread owns the file.

It is bounded, whatever the number of groups: beyond so many points the oldest go before their time,
and so do the oldest lines of the audit. The space is used again, so that the file does not grow.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from orbitmq.console.errors import HistoryUnusable

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Seconds that a point stands for.
STEP = 300
#: Seconds that points are kept.
KEEP = 7 * 86_400
#: Points that are kept at most; some 75 MB.
MOST_POINTS = 3_000_000
#: Lines of the audit that are kept at most.
MOST_LINES = 10_000
#: Seconds after which a value is written again that has not changed.
_LEVEL = 86_400
#: Seconds of points that go at a time when there are too many.
_CUT = 6 * 3600

_SCHEMA = """
CREATE TABLE IF NOT EXISTS series (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS points (
    series INTEGER NOT NULL, at INTEGER NOT NULL, value REAL NOT NULL, PRIMARY KEY (series, at)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS audit (at REAL NOT NULL, line TEXT NOT NULL);
"""


class HistoryFile:
    """What is kept longer than this process lives."""

    def __init__(self, path: Path | None, *, most: int = MOST_POINTS) -> None:
        """Without a path it is kept in memory only; `most` is how many points are kept."""
        self._path = path
        self._most = most
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="console-history")
        self._database: sqlite3.Connection | None = None
        #: The highest value of the stretch that is under way, and the last one that was written.
        self._highest: dict[str, float] = {}
        self._written: dict[str, tuple[float, int]] = {}
        self._stretch: int | None = None

    async def open(self) -> None:
        """Raises `HistoryUnusable` when it is no file of ours."""
        try:
            await self._run(self._open)
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown(wait=False)
            raise HistoryUnusable(f"the history {self._path} cannot be opened: {error}") from error

    async def close(self) -> None:
        """Write what is under way, and let go of the file."""
        if self._database is not None:
            await self._guarded(self._close)
        self._thread.shutdown(wait=False)

    async def add(self, at: float, values: Mapping[str, float]) -> None:
        """One sample. A stretch is written when the next one begins."""
        stretch = int(at) // STEP * STEP
        if self._stretch is not None and stretch != self._stretch:
            await self._guarded(self._write)
        self._stretch = stretch
        highest = self._highest
        for name, value in values.items():
            known = highest.get(name)
            if known is None or value > known:
                highest[name] = value

    async def since(self, name: str, start: float) -> list[tuple[float, float]]:
        """The points of a series from a time on, and the one before it."""
        return await self._guarded(lambda: self._since(name, start)) or []

    async def note(self, at: float, line: str) -> None:
        """Keep a line of the audit."""
        await self._guarded(lambda: self._note(at, line))

    async def notes(self, most: int) -> list[str]:
        """The last lines of the audit, the oldest first."""
        return await self._guarded(lambda: self._notes(most)) or []

    # On the thread.

    def _open(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(
            self._path or ":memory:", check_same_thread=False, isolation_level=None
        )
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.executescript(_SCHEMA)
        except BaseException:
            database.close()
            raise
        self._database = database

    def _write(self) -> None:
        database, stretch = self._database, self._stretch
        if database is None or stretch is None:
            return
        highest, self._highest = self._highest, {}
        rows: list[tuple[str, int, float]] = []
        written = dict(self._written)
        for name, value in highest.items():
            before, at = written.get(name, (None, 0))
            # What never changes must not be forgotten when its only point is a week old.
            if before == value and stretch - at < _LEVEL:
                continue
            if before is not None and before != value:
                # Where the rest ended, so that a line is level up to it.
                rows.append((name, stretch - STEP, before))
            rows.append((name, stretch, value))
            written[name] = (value, stretch)
        # At once for writing: another console may have the same file.
        database.execute("BEGIN IMMEDIATE")
        try:
            self._insert(database, rows)
            oldest = self._cut(database, stretch - KEEP)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        # Whose last point was cut has to be written again, although it has not changed.
        self._written = {name: each for name, each in written.items() if each[1] >= oldest}

    def _insert(self, database: sqlite3.Connection, rows: list[tuple[str, int, float]]) -> None:
        database.executemany(
            "INSERT OR IGNORE INTO series (name) VALUES (?)", {(name,) for name, _, _ in rows}
        )
        # Not remembered: who else has the file may have deleted a series and made it anew.
        identities: dict[str, int] = dict(database.execute("SELECT name, id FROM series"))
        database.executemany(
            "INSERT OR REPLACE INTO points VALUES (?, ?, ?)",
            [(identities[name], at, value) for name, at, value in rows],
        )

    def _cut(self, database: sqlite3.Connection, oldest: int) -> int:
        """Forget what is older, and as much more as there is too much of; what is now oldest."""
        database.execute("DELETE FROM points WHERE at < ?", (oldest,))
        while True:
            (count, first), *_ = database.execute("SELECT COUNT(*), MIN(at) FROM points")
            if count <= self._most:
                break
            oldest = first + _CUT
            database.execute("DELETE FROM points WHERE at < ?", (oldest,))
        database.execute(
            "DELETE FROM series "
            "WHERE NOT EXISTS (SELECT 1 FROM points WHERE points.series = series.id)"
        )
        database.execute(
            "DELETE FROM audit WHERE rowid <= (SELECT MAX(rowid) FROM audit) - ?", (MOST_LINES,)
        )
        return oldest

    def _since(self, name: str, start: float) -> list[tuple[float, float]]:
        if self._database is None:
            return []
        row = self._database.execute("SELECT id FROM series WHERE name = ?", (name,)).fetchone()
        if row is None:
            return []
        identity = row[0]
        before = self._database.execute(
            "SELECT at, value FROM points WHERE series = ? AND at < ? ORDER BY at DESC LIMIT 1",
            (identity, start),
        )
        found = list(before)
        found += self._database.execute(
            "SELECT at, value FROM points WHERE series = ? AND at >= ? ORDER BY at",
            (identity, start),
        )
        return [(float(at), value) for at, value in found]

    def _note(self, at: float, line: str) -> None:
        if self._database is not None:
            self._database.execute("INSERT INTO audit VALUES (?, ?)", (at, line))

    def _notes(self, most: int) -> list[str]:
        if self._database is None:
            return []
        rows = self._database.execute("SELECT line FROM audit ORDER BY rowid DESC LIMIT ?", (most,))
        return [line for (line,) in rows][::-1]

    def _close(self) -> None:
        self._write()
        if self._database is not None:
            self._database.close()
            self._database = None

    # Between.

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _guarded(self, work: Callable[[], T]) -> T | None:
        """A full disk costs the history, not the console."""
        try:
            return await self._run(work)
        except sqlite3.Error as error:
            log.warning("history is not kept: %s", error, extra={"file": str(self._path)})
            return None
