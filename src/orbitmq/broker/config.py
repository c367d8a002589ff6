"""The files in `config`, in RocketMQ's format: JSON documents that are replaced as a whole.

    topics.json  subscriptionGroup.json       written when they change
    consumerOffset.json                       every five seconds, and when a group is deleted
    delayOffset.json  timerOffset.json        every ten seconds, after the log

A complete document can be read at every instant: the last one whose `save` returned, the one before
it, or the one being saved. A damaged file never becomes the backup: it is set aside as
`<name>.damaged-<n>`. (Apache deletes it.) All tables are written once more at a stop. After a crash
they may be ahead of the log or behind it, so a master makes them agree with its queues at a start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from orbitmq.atomicfile import replace_file
from orbitmq.broker.errors import ConfigNotSaved, ConfigUnreadable
from orbitmq.broker.parked import adopt
from orbitmq.broker.progress import ProgressFile, ProgressPlaces, encode_progress
from orbitmq.clock import Clock
from orbitmq.store.files import DiskFiles
from orbitmq.store.settings import StoreError
from orbitmq.store.store import Store
from orbitmq.wire.bodies import SubscriptionGroupTable, TopicConfigTable
from orbitmq.wire.codes import BodyError, WireLimits
from orbitmq.wire.javajson import Body, decode_body, encode_body

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)

#: Limits for our own files, which may be much longer than a peer's body.
_LIMITS = WireLimits(body_values=100_000_000)


class ConfigFile(Generic[B]):
    """One configuration file and its backup.

    `save` takes a value that shares nothing with live tables, so it may run in another thread than
    the one that made the value; two saves at a time are the caller's to prevent.
    """

    def __init__(
        self,
        path: Path,
        kind: type[B],
        *,
        disk: DiskFiles | None = None,
        encode: Callable[[B], bytes] = encode_body,
    ) -> None:
        self.path = path
        self.backup = path.with_name(path.name + ".bak")
        self._kind = kind
        self._disk = disk or DiskFiles()
        self._encode = encode
        self._is_checked = False
        #: Whether the name of the folder was synchronised; an earlier run may not have done it.
        self._is_folder_kept = False
        #: Why the last save failed; None when it did not, or there was none.
        self.problem: str | None = None
        #: Saves that failed since the last that did not, and in all.
        self.failures_in_a_row = 0
        self.failures = 0

    def load(self) -> B | None:
        """The newest complete document, or None. Raises `ConfigUnreadable` when the disk fails."""
        value = self._read(self.path)
        if value is None:
            value = self._read(self.backup)
            if value is not None:
                log.warning("configuration taken from its backup", extra={"file": str(self.path)})
        self._is_checked = True
        return value

    def save(self, value: B) -> None:
        """Make `value` the current document; it is on the disk when this returns.

        Raises `ConfigNotSaved`; then `load` still returns the previous document, or this one.
        """
        try:
            self._save(value)
        except ConfigNotSaved as error:
            self.failures += 1
            self.failures_in_a_row += 1
            self.problem = str(error)
            raise
        if self.failures_in_a_row:
            log.warning(
                "configuration is saved again, after %d attempts that failed",
                self.failures_in_a_row,
                extra={"file": str(self.path)},
            )
        self.failures_in_a_row = 0
        self.problem = None

    def _save(self, value: B) -> None:
        if not self._is_checked:
            self.load()
        data = self._encode(value)
        try:
            replace_file(self.path, data, disk=self._disk, backup=self.backup)
        except OSError as error:
            raise ConfigNotSaved(self.path, error) from error
        if not self._is_folder_kept:
            self._is_folder_kept = True
            self._keep_folder()

    def _keep_folder(self) -> None:
        """Synchronise the folder above, without which the folder's own name could be lost.

        It may not be ours to open; the document is saved nevertheless.
        """
        above = self.path.parent.parent
        try:
            self._disk.sync_folder(above)
        except OSError as error:
            log.warning(
                "the parent of the configuration folder cannot be flushed: a power failure soon "
                "after the folder was created may lose it and its files (%s)",
                error,
                extra={"file": str(self.path), "folder": str(above)},
            )

    def _read(self, path: Path) -> B | None:
        try:
            data = self._disk.read_bytes(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigUnreadable(path, error) from error
        try:
            return decode_body(self._kind, data, _LIMITS)
        except BodyError as damage:
            aside = self._free_name(path)
            try:
                self._disk.rename(path, aside)
            except OSError as error:
                raise ConfigUnreadable(path, error) from damage
            log.warning(
                "configuration file is damaged and was set aside: %s",
                damage,
                extra={"file": str(path), "kept_as": str(aside), "bytes": len(data)},
            )
            return None

    def _free_name(self, path: Path) -> Path:
        taken = set(self._disk.names(path.parent))
        number = 1
        while (name := f"{path.name}.damaged-{number}") in taken:
            number += 1
        return path.with_name(name)


#: Seconds between attempts to save a table.
_RETRY_INTERVAL = 5.0
#: How long a stop waits for the last flush of the log, in seconds.
_LAST_FLUSH = 5.0


class SavedTable(Generic[B]):
    """Writes a table to its file when the table has changed, one write at a time.

    The document is made on the loop, from live tables, and written in a thread; None says that it
    cannot be made now. If a `store` is given, the document is written after the log was flushed up
    to its end at the time of the document: progress that reached the disk before the delivered
    message would lose that message in a power failure.
    """

    def __init__(
        self,
        file: ConfigFile[B],
        *,
        revision: Callable[[], int],
        document: Callable[[], B | None],
        clock: Clock,
        store: Store | None = None,
    ) -> None:
        self._file = file
        self._revision = revision
        self._document = document
        self._monotonic = clock.monotonic
        self._store = store
        self._saved = revision()
        self._not_before = 0.0
        #: Why the last save failed; None when it did not.
        self._problem: ConfigNotSaved | None = None
        self._is_saving = False
        self._task: asyncio.Task[None] | None = None
        #: Whether another save was requested during the write.
        self._is_asked_again = False

    @property
    def is_stale(self) -> bool:
        """Whether the table has changed since its file was written."""
        return self._revision() != self._saved

    def outdate(self) -> None:
        """Have the file written although the table has not changed."""
        self._saved = -1

    def save_soon(self) -> None:
        """Begin to write if the table has changed; after a write that is under way."""
        if self._is_saving:
            self._is_asked_again = True
            return
        if not self.is_stale or self._monotonic() < self._not_before:
            return
        revision, document = self._revision(), self._document()
        if document is None:
            return
        self._is_saving = True
        if self._store is None:
            self._write_soon(document, revision)
        else:
            self._store.when_flushed(
                self._store.statistics().log_end,
                lambda failure: self._flushed(failure, document, revision),
            )

    def _flushed(self, failure: StoreError | None, document: B, revision: int) -> None:
        if failure is None:
            self._write_soon(document, revision)
        else:
            self._is_saving = False

    def _write_soon(self, document: B, revision: int) -> None:
        # Not one of the tasks that a stop cancels: the thread would go on writing.
        self._task = asyncio.get_running_loop().create_task(self._write(document, revision))

    async def _write(self, document: B, revision: int) -> None:
        try:
            await asyncio.to_thread(self._file.save, document)
            self._saved = revision
            self._problem = None
        except ConfigNotSaved as error:
            self._problem = error
            self._not_before = self._monotonic() + _RETRY_INTERVAL
            if self._file.failures_in_a_row == 1:
                log.exception(
                    "configuration was not saved; trying again every %g s", _RETRY_INTERVAL
                )
        finally:
            self._task = None
            self._is_saving = False
        if self._is_asked_again:
            self._is_asked_again = False
            self.save_soon()

    async def saved(self) -> None:
        """Return when the file has the present state, or a later one. Raises `ConfigNotSaved`."""
        wanted = self._revision()
        while self._saved < wanted:
            if self._task is None:
                self._not_before = 0.0
                self.save_soon()
            if self._task is not None:
                await asyncio.shield(self._task)
            if self._saved < wanted and self._problem is not None:
                raise self._problem

    async def close(self) -> None:
        """Write changes, after a write that is under way. Raises `ConfigNotSaved`.

        If a table that follows the log cannot be saved, the previous file stays, which is valid as
        well: some messages are delivered again.
        """
        if self._store is not None and (
            not (self.is_stale or self._is_saving) or not _is_flushed(self._store)
        ):
            return
        while self._task is not None:
            await asyncio.wait((self._task,))
        try:
            self.save_now()
        except ConfigNotSaved:
            if self._store is None:
                raise
            log.exception("progress was not saved at the stop")

    def save_now(self) -> None:
        """Write changes; no write may be under way. Raises `ConfigNotSaved`."""
        if self.is_stale and (document := self._document()) is not None:
            revision = self._revision()
            self._file.save(document)
            self._saved = revision


def _is_flushed(store: Store) -> bool:
    try:
        return store.wait_flushed(store.statistics().log_end, _LAST_FLUSH)
    except StoreError:
        log.exception("progress was not saved at the stop")
        return False


# The tables of a broker.


class ConfigTables:
    """Loads the tables of a broker from its files, and keeps the files up to date."""

    def __init__(self, parts: Parts, disk: DiskFiles | None = None) -> None:
        self._parts = parts
        folder = parts.settings.root / "config"
        self._topics = ConfigFile(folder / "topics.json", TopicConfigTable, disk=disk)
        self._groups = ConfigFile(
            folder / "subscriptionGroup.json", SubscriptionGroupTable, disk=disk
        )
        self._progress = ConfigFile(
            folder / "consumerOffset.json", ProgressFile, disk=disk, encode=encode_progress
        )
        parts.config_files += (self._topics, self._groups, self._progress)
        #: Saved as soon as they change.
        self._at_once: tuple[SavedTable[Any], ...] = ()
        self._later: tuple[SavedTable[Any], ...] = ()

    def load(self) -> None:
        """Load the files, and begin to watch for changes."""
        parts = self._parts
        if (topics := self._topics.load()) is not None:
            parts.topics.load(topics)
        if (groups := self._groups.load()) is not None:
            parts.groups.load(groups)
        is_outdated = False
        if (progress := self._progress.load()) is not None:
            is_outdated = parts.progress.load(
                progress, parts.store.deleted_below, parts.store.mirroring.written
            )
        progress_table = self._watch()
        if not parts.settings.is_slave:
            self._adopt_orphans()
            places = ProgressPlaces(parts.topics, parts.progress, parts.store)
            parts.progress.prune(places.may_keep)
            if parts.progress.fit(parts.store.max_offset):
                is_outdated = True
        if is_outdated:
            progress_table.outdate()
            _save_before_serving(progress_table)

    def _watch(self) -> SavedTable[ProgressFile]:
        parts, clock = self._parts, self._parts.clock
        topics = SavedTable(
            self._topics,
            revision=lambda: parts.topics.revision,
            document=parts.topics.file,
            clock=clock,
        )
        groups = SavedTable(
            self._groups,
            revision=lambda: parts.groups.revision,
            document=parts.groups.file,
            clock=clock,
        )
        progress = SavedTable(
            self._progress,
            revision=lambda: parts.progress.revision,
            document=lambda: parts.progress.file(
                wall=clock.now(), log_end=parts.store.mirroring.written
            ),
            clock=clock,
        )
        self._at_once = (topics, groups)
        self.add(progress, parts.settings.progress.save_interval)
        parts.progress_saved = progress.saved
        return progress

    def _adopt_orphans(self) -> None:
        """Create the topics of queues that have messages and no topic.

        A topic that is created by sending is saved a moment after its first message is answered,
        and a crash may come in between.
        """
        parts = self._parts
        queues: dict[str, int] = {}
        for queue in parts.store.queues():
            if queue.topic not in parts.topics:
                queues[queue.topic] = max(queues.get(queue.topic, 0), queue.queue_id + 1)
        for topic, count in queues.items():
            adopt(parts.topics, topic, count, now=parts.clock.now())

    def add(self, table: SavedTable[Any], interval: float) -> None:
        """Save another table at this interval in seconds, and at the stop."""
        self._parts.scheduler.every(interval, table.save_soon)
        self._later += (table,)

    def save_changed(self) -> None:
        """Begin to save the tables that are saved as soon as they change."""
        for table in self._at_once:
            table.save_soon()

    async def close(self) -> None:
        """Save everything that can be saved. Raises the first `ConfigNotSaved`."""
        problems: list[ConfigNotSaved] = []
        for table in (*self._later, *self._at_once):
            try:
                await table.close()
            except ConfigNotSaved as error:
                problems.append(error)
        if problems:
            raise problems[0]


def _save_before_serving(progress: SavedTable[ProgressFile]) -> None:
    """Save progress that is no longer valid before new messages replace lost ones.

    Otherwise the old file would look valid at the next start, and be about other messages.
    """
    try:
        progress.save_now()
    except ConfigNotSaved:
        # Then the disk takes no messages either; the save is repeated.
        log.exception("progress that was made to agree with the log was not saved")
