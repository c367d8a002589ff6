"""What the console keeps over time: seven days in a file, an hour in memory, rates, the audit.

The file has one point per series and five minutes, the highest value of that time, and only if it
differs from the point before or that is a day old. It is bounded: above `MOST_POINTS` the oldest
points are deleted early, and SQLite uses their space again. One thread owns the file.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from orbitmq.client.routes import Queue
from orbitmq.clock import Clock
from orbitmq.console.settings import HistoryUnusable

if TYPE_CHECKING:
    from orbitmq.console.collect import GroupPositions
    from orbitmq.console.http import Events


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
#: The value of a series that has none at a time: what is measured here is never negative.
GONE = -1.0
#: Seconds after which an unchanged value is written again.
_LEVEL = 86_400
#: Seconds of points that are deleted at a time when there are too many.
_CUT = 6 * 3600

_SCHEMA = """
CREATE TABLE IF NOT EXISTS series (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS points (
    series INTEGER NOT NULL, at INTEGER NOT NULL, value REAL NOT NULL, PRIMARY KEY (series, at)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS audit (at REAL NOT NULL, line TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS kept (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class HistoryFile:
    """The history in an SQLite file, which outlives the process."""

    def __init__(self, path: Path | None, *, most: int = MOST_POINTS) -> None:
        """Without a path it is kept in memory only; `most` is the limit on points."""
        self._path = path
        self._most = most
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="console-history")
        self._database: sqlite3.Connection | None = None
        #: The highest values of the current five minutes, and the last value and time written.
        self._highest: dict[str, float] = {}
        self._written: dict[str, tuple[float, int]] = {}
        self._stretch: int | None = None

    async def open(self) -> None:
        """Raises `HistoryUnusable` when the file is not one of a console."""
        try:
            await self._run(self._open)
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown(wait=False)
            raise HistoryUnusable(f"the history {self._path} cannot be opened: {error}") from error

    async def close(self) -> None:
        """Write the current values and close the file."""
        if self._database is not None:
            await self._guarded(self._close)
        self._thread.shutdown(wait=False)

    async def add(self, at: float, values: Mapping[str, float]) -> None:
        """Add one sample; the five minutes before are written when the next begin."""
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

    async def keep(self, name: str, value: str | None) -> None:
        """Keep a text under a name; None forgets it."""
        await self._guarded(lambda: self._keep(name, value))

    async def kept(self, prefix: str) -> dict[str, str]:
        """The kept texts whose names begin so."""
        return await self._guarded(lambda: self._kept(prefix)) or {}

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
            if before == value and stretch - at < _LEVEL:
                continue
            if before is not None and before != value:
                # The end of the level part, so that a chart shows a step.
                rows.append((name, stretch - STEP, before))
            rows.append((name, stretch, value))
            written[name] = (value, stretch)
        # Lock for writing first: another console may have the same file.
        database.execute("BEGIN IMMEDIATE")
        try:
            self._insert(database, rows)
            oldest = self._cut(database, stretch - KEEP)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        # A series whose last point was deleted is written again, even if unchanged.
        self._written = {name: each for name, each in written.items() if each[1] >= oldest}

    def _insert(self, database: sqlite3.Connection, rows: list[tuple[str, int, float]]) -> None:
        database.executemany(
            "INSERT OR IGNORE INTO series (name) VALUES (?)", {(name,) for name, _, _ in rows}
        )
        # Read each time: another console may have deleted and created a series.
        identities: dict[str, int] = dict(database.execute("SELECT name, id FROM series"))
        database.executemany(
            "INSERT OR REPLACE INTO points VALUES (?, ?, ?)",
            [(identities[name], at, value) for name, at, value in rows],
        )

    def _cut(self, database: sqlite3.Connection, oldest: int) -> int:
        """Delete points before `oldest`, and more while there are too many; the new oldest time."""
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

    def _keep(self, name: str, value: str | None) -> None:
        if self._database is None:
            return
        if value is None:
            self._database.execute("DELETE FROM kept WHERE name = ?", (name,))
        else:
            self._database.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (name, value))

    def _kept(self, prefix: str) -> dict[str, str]:
        if self._database is None:
            return {}
        rows = self._database.execute("SELECT name, value FROM kept")
        return {name: value for name, value in rows if name.startswith(prefix)}

    def _close(self) -> None:
        try:
            self._write()
        finally:
            if self._database is not None:
                self._database.close()
                self._database = None

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _guarded(self, work: Callable[[], T]) -> T | None:
        """Do work on the thread; a full disk costs the history, not the console."""
        try:
            return await self._run(work)
        except sqlite3.Error as error:
            log.warning("history is not kept: %s", error, extra={"file": str(self._path)})
            return None


#: Seconds for which every sample is kept in memory.
FINE = 3600.0


class Series:
    """One number over time; of a run of equal values only the first and the last are kept."""

    __slots__ = ("_times", "_values")

    def __init__(self) -> None:
        self._times = array("d")
        self._values = array("d")

    def add(self, at: float, value: float) -> None:
        """The next sample; one that is not later than the last replaces it."""
        times, values = self._times, self._values
        if times and at <= times[-1]:
            values[-1] = value
            return
        if len(values) > 1 and values[-1] == value == values[-2]:
            times[-1] = at
            return
        times.append(at)
        values.append(value)

    def forget(self, before: float) -> None:
        """Drop the points before a time, except the one that is valid then."""
        place = bisect_left(self._times, before)
        if place > 1:
            del self._times[: place - 1]
            del self._values[: place - 1]

    def since(self, start: float) -> list[tuple[float, float]]:
        """The points from a time on, and the one before it."""
        place = max(0, bisect_left(self._times, start) - 1)
        return list(zip(self._times[place:], self._values[place:], strict=True))

    @property
    def last(self) -> tuple[float, float] | None:
        return (self._times[-1], self._values[-1]) if self._times else None


class FineHistory:
    """Every sample of the last hour, by the name of its series."""

    def __init__(self, keep: float = FINE) -> None:
        self._keep = keep
        self._series: dict[str, Series] = {}
        self._samples = 0

    def add(self, at: float, values: Mapping[str, float]) -> None:
        """One sample of many series."""
        for name, value in values.items():
            series = self._series.get(name)
            if series is None:
                series = self._series[name] = Series()
            series.add(at, value)
        self._samples += 1
        if self._samples % 60 == 0:
            self._forget(at - self._keep)

    def since(self, name: str, start: float) -> list[tuple[float, float]]:
        series = self._series.get(name)
        return [] if series is None else series.since(start)

    def _forget(self, before: float) -> None:
        for name, series in list(self._series.items()):
            last = series.last
            # A series without new points belongs to something deleted.
            if last is not None and last[0] < before:
                del self._series[name]
            else:
                series.forget(before)


def thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points: the lowest and the highest of every stretch, so that peaks stay."""
    if len(points) <= most or most < 4:
        return points
    stretches = most // 2
    size = len(points) / stretches
    kept: list[tuple[float, float]] = []
    for number in range(stretches):
        part = points[int(number * size) : int((number + 1) * size)]
        if not part:
            continue
        low = min(part, key=lambda point: point[1])
        high = max(part, key=lambda point: point[1])
        kept += sorted({low, high})
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def with_gaps(points: list[tuple[float, float]]) -> list[tuple[float, float | None]]:
    """The points with None where the series had no value, so that its line ends there."""
    return [(at, None if value == GONE else value) for at, value in points]


#: Seconds of a column of a heat map, and columns: an hour.
COLUMN = 30.0
COLUMNS = 120
#: Groups with a heat map at the same time: those with the largest lag.
MOST_GROUPS = 300
MOST_QUEUES = 256


@dataclass(frozen=True, slots=True)
class Column:
    """The lag of each queue at one time."""

    at: float
    lags: dict[Queue, int]


class HeatMaps:
    """The lag of each queue over an hour, of groups with lag: shows a stuck queue in a picture."""

    def __init__(self) -> None:
        self._maps: dict[str, deque[Column]] = {}
        self._last = 0.0

    def add(self, at: float, positions: GroupPositions) -> None:
        """A sample; samples of one column replace each other."""
        begins = at - self._last >= COLUMN
        if begins:
            self._last = at
            self._forget(at)
        lags = {
            group: {queue: place.lag for queue, place in queues.items()}
            for group, queues in positions.items()
        }
        behind = sorted(((sum(each.values()), group) for group, each in lags.items()), reverse=True)
        wanted = {group for lag, group in behind[:MOST_GROUPS] if lag} | self._maps.keys()
        for group in wanted & lags.keys():
            column = Column(self._last or at, dict(list(lags[group].items())[:MOST_QUEUES]))
            columns = self._maps.setdefault(group, deque(maxlen=COLUMNS))
            if columns and columns[-1].at == column.at:
                columns[-1] = column
            else:
                columns.append(column)

    def of(self, group: str) -> list[Column]:
        """The columns of a group, the oldest first."""
        return list(self._maps.get(group, ()))

    def _forget(self, at: float) -> None:
        """Drop the maps of groups without lag in the whole hour."""
        for group, columns in list(self._maps.items()):
            is_old = columns[-1].at < at - COLUMN * COLUMNS
            if is_old or not any(any(column.lags.values()) for column in columns):
                del self._maps[group]


#: Seconds over which a rate is measured: several commits of a consumer.
WINDOW = 30.0
#: Seconds between two commits of a consumer, as RocketMQ's clients have it.
REPORT_INTERVAL = 5.0


class RateMeter:
    """The rates of two counters of a group in a topic: stored and finished."""

    __slots__ = ("_points", "moved_at")

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque()
        #: When `done` last changed, or nothing waited.
        self.moved_at: float | None = None

    def add(self, at: float, end: int, done: int) -> None:
        """A sample; `at` is monotonic."""
        points = self._points
        if points and done < points[-1][2]:
            # The group was reset: samples before that do not count.
            points.clear()
        if not points or done != points[-1][2] or done >= end or self.moved_at is None:
            self.moved_at = at
        points.append((at, end, done))
        while len(points) > 2 and points[1][0] <= at - WINDOW:
            points.popleft()

    @property
    def seconds(self) -> float:
        """The time over which the rates are measured."""
        return self._points[-1][0] - self._points[0][0] if self._points else 0.0

    @property
    def rates(self) -> tuple[float, float]:
        """Stored and finished per second."""
        if len(self._points) < 2:
            return 0.0, 0.0
        first, last = self._points[0], self._points[-1]
        seconds = self.seconds
        if seconds <= 0:
            return 0.0, 0.0
        return max(0, last[1] - first[1]) / seconds, max(0, last[2] - first[2]) / seconds


#: Lines that the page shows.
KEPT = 500


class AuditLine(msgspec.Struct, frozen=True):
    """One action."""

    at: float
    who: str
    #: The command that does the same.
    command: str
    outcome: str
    is_done: bool


class Audit:
    """A line for every change, in the log, in the history and on the page."""

    def __init__(self, clock: Clock, file: HistoryFile, events: Events, name: str = "") -> None:
        """`name` is that of the cluster among several."""
        self._cluster = {"cluster": name} if name else {}
        self._clock = clock
        self._file = file
        self._events = events
        self._lines: deque[AuditLine] = deque(maxlen=KEPT)

    async def load(self) -> None:
        """Load the lines of earlier runs."""
        for text in await self._file.notes(KEPT):
            self._lines.append(msgspec.json.decode(text, type=AuditLine))

    def now(self) -> float:
        return self._clock.now()

    async def note(self, who: str, command: str, outcome: str, *, is_done: bool = True) -> None:
        line = AuditLine(self._clock.now(), who, command, outcome, is_done)
        self._lines.append(line)
        log.info(
            "console action" if is_done else "console action failed",
            extra={"who": who, "command": command, "outcome": outcome, **self._cluster},
        )
        self._events.publish("audit", line)
        await self._file.note(line.at, msgspec.json.encode(line).decode())

    @property
    def lines(self) -> list[AuditLine]:
        """The newest first."""
        return list(reversed(self._lines))
