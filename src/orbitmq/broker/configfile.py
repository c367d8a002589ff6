"""RocketMQ's configuration files: one JSON document each, replaced as a whole, with a backup.

The invariant: a complete document can be read at every instant, either the last one whose `save`
returned, or the one before it, or the one being saved. A damaged file never becomes the backup: it
is looked for before the first save, and set aside as `<name>.damaged-<n>`. (Apache deletes it.)

Files of Apache brokers are read with their bare integer keys; files are written as standard JSON,
which Apache reads as well.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from orbitmq.atomicfile import replace_file
from orbitmq.broker.errors import ConfigNotSaved, ConfigUnreadable
from orbitmq.clock import Clock
from orbitmq.store.files import DiskFiles
from orbitmq.wire.codes import BodyError, WireLimits
from orbitmq.wire.javajson import Body, decode_body, encode_body

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)

#: Limits for our own files, which may be much longer than a peer's body.
_LIMITS = WireLimits(body_values=100_000_000)


class Origin(enum.Enum):
    """The file a document was read from."""

    CURRENT = "current"
    BACKUP = "backup"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class Loaded(Generic[B]):
    """A document, or None when there was none to be read."""

    value: B | None
    origin: Origin
    #: The new names of unreadable files.
    set_aside: tuple[Path, ...] = ()


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

    def load(self) -> Loaded[B]:
        """The newest complete document. Raises `ConfigUnreadable` when the disk fails."""
        set_aside: list[Path] = []
        for path, origin in ((self.path, Origin.CURRENT), (self.backup, Origin.BACKUP)):
            value = self._read(path, set_aside)
            if value is not None:
                if origin is Origin.BACKUP:
                    log.warning("configuration taken from its backup", extra={"file": str(path)})
                self._is_checked = True
                return Loaded(value, origin, tuple(set_aside))
        self._is_checked = True
        return Loaded(None, Origin.NOWHERE, tuple(set_aside))

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
                "the folder above that of the configuration cannot be synchronised: if the power "
                "fails soon after the folder was made, it may be gone with all that is in it (%s)",
                error,
                extra={"file": str(self.path), "folder": str(above)},
            )

    def _read(self, path: Path, set_aside: list[Path]) -> B | None:
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
            set_aside.append(aside)
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


class SavedTable(Generic[B]):
    """Writes a table to its file when the table has changed, one write at a time.

    The document is made on the loop, from live tables, and written in a thread.
    """

    def __init__(
        self,
        file: ConfigFile[B],
        *,
        revision: Callable[[], int],
        document: Callable[[], B],
        clock: Clock,
    ) -> None:
        self._file = file
        self._revision = revision
        self._document = document
        self._monotonic = clock.monotonic
        self._saved = revision()
        self._not_before = 0.0
        #: Why the last save failed; None when it did not.
        self._problem: ConfigNotSaved | None = None
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
        if self._task is not None:
            self._is_asked_again = True
        elif self.is_stale and self._monotonic() >= self._not_before:
            # Not one of the tasks that a stop cancels: the thread would go on writing.
            self._task = asyncio.get_running_loop().create_task(self._save())

    async def _save(self) -> None:
        try:
            revision = self._revision()
            await asyncio.to_thread(self._file.save, self._document())
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
        """Write changes, after a write that is under way. Raises `ConfigNotSaved`."""
        while self._task is not None:
            await asyncio.wait((self._task,))
        self.save_now()

    def save_now(self) -> None:
        """Write changes; no write may be under way. Raises `ConfigNotSaved`."""
        if self.is_stale:
            revision = self._revision()
            self._file.save(self._document())
            self._saved = revision
