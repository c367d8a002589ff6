"""Archives the broker's closed log files in a thread, and says which of them may be deleted.

The event loop hands over what is closed; the thread does the rest in slices with pauses between
them, because it shares the interpreter with the loop. A log file may be deleted when its entry, its
Parquet files and its fingerprint were checked within the last minute: the archive may be a disk
that people clean up, and a master and its slaves share one.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from orbitmq.archive import ArchiveError, Entries, Location, LogEntry
from orbitmq.broker.settings import ArchiveWriter
from orbitmq.errors import OrbitError
from orbitmq.logonce import LogOncePerOutage
from orbitmq.store.archive import archive_log_file, check_same_log

if TYPE_CHECKING:
    from orbitmq.atomicfile import FolderLock
    from orbitmq.broker.broker import Parts
    from orbitmq.store.commitlog import ClosedLogFile

log = logging.getLogger(__name__)

#: Seconds for which a check that a log file is archived counts.
_CHECKED: Final = 60.0
#: The oldest log files, which are checked together.
_OLDEST: Final = 10
#: Seconds for the thread to end its slice.
_LAST_SLICE: Final = 10.0


class LogArchiver:
    """The archive of one broker."""

    def __init__(self, parts: Parts) -> None:
        settings = parts.settings
        self._store = parts.store
        self._name = settings.name
        self._settings = settings.archive
        self._folder = settings.archive.folder or ""
        role = ArchiveWriter.SLAVE if settings.is_slave else ArchiveWriter.MASTER
        self._is_writer = settings.archive.writer is role
        self._writer = f"{role.value} {socket.gethostname()}:{parts.address.port}"
        self._forced_ratio = settings.store.retention.forced_ratio
        self._closed: list[ClosedLogFile] = []
        self._deleted: Mapping[str, int] = {}
        self._bell = threading.Event()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._outage = LogOncePerOutage(log)
        self._lock: FolderLock | None = None
        self._entries: Entries | None = None
        #: Log files whose fingerprints are those of their entries.
        self._same: set[int] = set()
        #: When log files were last found to be archived, as monotonic time.
        self._checked: dict[int, float] = {}
        self._is_asked = False
        self.behind = 0  #: bytes of closed log files that are not archived
        self.written = 0  #: log files that this process has archived

    @property
    def problem(self) -> str:
        """Why nothing is archived now; empty if it is."""
        return next(iter(self._outage.current()), "")

    @property
    def is_failing(self) -> bool:
        return self._outage.is_failing("archive")

    # ---- the event loop's side

    def start(self) -> None:
        self._end.clear()
        self._thread = threading.Thread(target=self._run, name="orbitmq-archiver", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its slice. The next run archives the log file in progress."""
        self._end.set()
        self._bell.set()
        if self._thread is not None:
            self._thread.join(_LAST_SLICE)
            self._thread = None

    def look(self) -> None:
        """Hand over what is closed by now."""
        self._deleted = self._store.deletions()
        self._closed = self._store.closed_log_files()
        self._bell.set()

    def may_delete(self, start: int) -> bool:
        """Whether a log file is safe in the archive. If that is not known, it will be soon."""
        if self._checked.get(start, float("-inf")) >= time.monotonic() - _CHECKED:
            return True
        self._is_asked = True
        self._bell.set()
        is_short = self._store.statistics().used_ratio > self._forced_ratio
        return self._settings.delete_unarchived and is_short

    # ---- the thread's side

    def _run(self) -> None:
        while not self._end.is_set():
            self._bell.wait()
            self._bell.clear()
            try:
                self._pass(self._closed)
            except (OrbitError, OSError) as error:
                self._outage.failed("archive", "log files are not archived: %s", error)
            except Exception as error:
                if not self.is_failing:
                    log.exception("archiving failed; it is tried again")
                self._outage.failed("archive", "log files are not archived: %r", error)
            else:
                self._outage.recovered("archive")
        if self._lock is not None:
            self._lock.release()

    def _pass(self, closed: list[ClosedLogFile]) -> None:
        if self._entries is None:
            self._entries = Entries(Location(self._folder))
        entries = self._entries
        archived = set(entries.log_files(self._name))
        waiting = [file for file in closed if file.start not in archived]
        self.behind = sum(file.end - file.start for file in waiting)
        if self._is_asked:
            self._is_asked = False
            self._check(entries, self._archived(entries))
        if not self._is_writer:
            return
        if self._lock is None:
            self._lock = entries.location.lock(self._name)
        # If the newest is the same, all older ones are.
        for file in [file for file in closed if file.start in archived][-1:]:
            self._check_log(entries.read(self._name, file.start), file)
        for file in waiting:
            self._archive(entries, file)
            if self._end.is_set():
                return
            self.behind -= file.end - file.start

    def _archive(self, entries: Entries, file: ClosedLogFile) -> None:
        began = time.monotonic()
        share = self._settings.share
        at = began
        for entry in archive_log_file(
            file, entries, self._name, writer=self._writer, deleted=self._deleted
        ):
            now = time.monotonic()
            if entry is not None:
                self._wrote(entry, now - began)
            elif self._end.wait((now - at) * (1 - share) / share):
                return
            if self._is_asked:
                # Retention does not wait until everything is archived.
                self._is_asked = False
                self._check(entries, self._archived(entries))
            at = time.monotonic()

    def _wrote(self, entry: LogEntry, seconds: float) -> None:
        self.written += 1
        self._same.add(entry.log_start)
        log.info(
            "log file archived",
            extra={
                "file": entry.log_start,
                "messages": sum(part.rows for part in entry.files),
                "seconds": round(seconds, 2),
            },
        )

    def _archived(self, entries: Entries) -> list[ClosedLogFile]:
        """The oldest closed log files that have an entry."""
        archived = set(entries.log_files(self._name))
        return [file for file in self._closed if file.start in archived][:_OLDEST]

    def _check(self, entries: Entries, oldest: list[ClosedLogFile]) -> None:
        """Find out which of the oldest log files are safe."""
        now, place = time.monotonic(), entries.location.text
        for file in oldest:
            entry = entries.read(self._name, file.start)
            self._check_log(entry, file)
            if not entries.is_whole(entry):
                raise ArchiveError(
                    f"the archive {place} lacks files of log file {file.path.name}; "
                    f"orbitmq archive verify {place} names them"
                )
            self._checked[file.start] = now
        self._checked = {start: at for start, at in self._checked.items() if at > now - _CHECKED}

    def _check_log(self, entry: LogEntry, file: ClosedLogFile) -> None:
        if file.start not in self._same:
            check_same_log(entry, file)
            self._same.add(file.start)


def start_archiver(parts: Parts) -> LogArchiver:
    """Archive the log where the settings say."""
    archiver = LogArchiver(parts)
    parts.store.delete_only_if(archiver.may_delete)
    parts.scheduler.add(archiver)
    parts.scheduler.every(parts.settings.archive.interval, archiver.look)
    return archiver
