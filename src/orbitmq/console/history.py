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
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from orbitmq.client.routes import Queue
from orbitmq.clock import Clock
from orbitmq.console.answers import Events, HistoryUnusable

if TYPE_CHECKING:
    from orbitmq.console.collect import GroupPositions


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
        try:
            self._write()
        finally:
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


# Numbers over time, in little memory.
#
# Most of what is watched rests most of the time: of a run of equal values only the first and the
# last are kept, so that a group that sleeps costs two points and not seven hundred.


#: Seconds for which every sample is kept in memory.
FINE = 3600.0


class Series:
    """One number over time."""

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
        """Drop what ended before a time; the value at that time is kept."""
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

    def __len__(self) -> int:
        return len(self._times)


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

    def last(self, name: str) -> float | None:
        series = self._series.get(name)
        last = None if series is None else series.last
        return None if last is None else last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

    def _forget(self, before: float) -> None:
        for name, series in list(self._series.items()):
            last = series.last
            # A series that nobody adds to belongs to what is gone.
            if last is not None and last[0] < before:
                del self._series[name]
            else:
                series.forget(before)


def thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most so many points: of every stretch the lowest and the highest, so that peaks stay."""
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


# Lag of single queues over time, for heat maps: only of groups that are behind.
#
# One queue that stands still among sixteen that move is invisible in a sum and plain in a picture.


#: Seconds that a column stands for, and how many there are: an hour.
COLUMN = 30.0
COLUMNS = 120
#: Groups that are followed at the same time; those with the largest lag.
MOST_GROUPS = 300
MOST_QUEUES = 256


@dataclass(frozen=True, slots=True)
class Column:
    """The lag of each queue at one time."""

    at: float
    lags: dict[Queue, int]


class HeatMaps:
    """One map for each group that is, or lately was, behind."""

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
        """Groups that were not behind at any time of the hour are left alone."""
        for group, columns in list(self._maps.items()):
            is_old = columns[-1].at < at - COLUMN * COLUMNS
            if is_old or not any(any(column.lags.values()) for column in columns):
                del self._maps[group]


# Rates out of counters: what producers stored and what a group finished, per second.
#
# Consumers report every few seconds, so that a single step shows nothing or twice as much; a window
# of several samples shows what is going on.


#: Seconds over which a rate is measured.
WINDOW = 30.0
#: Seconds between two reports of a consumer's progress, as RocketMQ's clients have it.
REPORT_INTERVAL = 5.0


class RateMeter:
    """Two counters of a group in a topic: stored and finished."""

    __slots__ = ("_points", "moved_at")

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque()
        #: When `done` last changed, or nothing waited.
        self.moved_at: float | None = None

    def add(self, at: float, end: int, done: int) -> None:
        """A sample; `at` is monotonic."""
        points = self._points
        if points and done < points[-1][2]:
            # Progress was set back: what was before does not count.
            points.clear()
        if not points or done != points[-1][2] or done >= end or self.moved_at is None:
            self.moved_at = at
        points.append((at, end, done))
        while len(points) > 2 and points[1][0] <= at - WINDOW:
            points.popleft()

    @property
    def seconds(self) -> float:
        """Over how long the rates are measured."""
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


# Who changed what: a line for every action, in the log, in the history and on the page.


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
    """Remembers actions."""

    def __init__(self, clock: Clock, file: HistoryFile, events: Events) -> None:
        self._clock = clock
        self._file = file
        self._events = events
        self._lines: deque[AuditLine] = deque(maxlen=KEPT)

    async def load(self) -> None:
        """Take up what earlier runs did."""
        for text in await self._file.notes(KEPT):
            self._lines.append(msgspec.json.decode(text, type=AuditLine))

    def now(self) -> float:
        return self._clock.now()

    async def note(self, who: str, command: str, outcome: str, *, is_done: bool = True) -> None:
        line = AuditLine(self._clock.now(), who, command, outcome, is_done)
        self._lines.append(line)
        log.info(
            "console action" if is_done else "console action failed",
            extra={"who": who, "command": command, "outcome": outcome},
        )
        self._events.publish("audit", line)
        await self._file.note(line.at, msgspec.json.encode(line).decode())

    @property
    def lines(self) -> list[AuditLine]:
        """The newest first."""
        return list(reversed(self._lines))
