"""Files that say how far something has come in the log, and must never be ahead of it.

A delayed message is delivered by writing it to its real topic, and then the progress of its level
goes on. If the file with the progress reached the disk and the message did not, a loss of power
would lose the message: parked no longer, delivered nowhere. So a document is written only after
the log was flushed up to where it ended when the document was made. After a crash the file may be
behind, and something is delivered once more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from orbitmq.broker.background import Background
from orbitmq.broker.configfile import ConfigFile
from orbitmq.broker.errors import ConfigNotSaved
from orbitmq.store.errors import StoreError
from orbitmq.store.store import Store
from orbitmq.wire.bodies.base import Body

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)

#: How long a stop waits for the last flush.
_LAST_FLUSH = 5.0


class LogFollowingFile(Generic[B]):
    """A table's file that follows the log. `make` gives the document, None when it is not ready."""

    def __init__(
        self,
        file: ConfigFile[B],
        make: Callable[[], B | None],
        revision: Callable[[], int],
        store: Store,
        background: Background,
    ) -> None:
        self._file = file
        self._make = make
        self._revision = revision
        self._store = store
        self._background = background
        #: Revision that the file has, or will have when what is under way is done.
        self._saved = revision()
        self._is_saving = False
        # A save that was cancelled at a stop goes on in its thread; the last one comes after it.
        self._writing = threading.Lock()

    def save_soon(self) -> None:
        """Begin to save, if something has changed and nobody is saving."""
        if self._is_saving or self._revision() == self._saved:
            return
        document = self._make()
        if document is None:
            return
        self._is_saving = True
        revision = self._revision()
        self._store.when_flushed(
            self._store.statistics().log_end,
            lambda failure: self._flushed(document, revision, failure),
        )

    def _flushed(self, document: B, revision: int, failure: StoreError | None) -> None:
        if failure is not None:
            self._is_saving = False
            return
        self._background.spawn(self._save(document, revision))

    async def _save(self, document: B, revision: int) -> None:
        try:
            await asyncio.to_thread(self._write, document)
            self._saved = revision
        except ConfigNotSaved:
            if self._file.failures_in_a_row == 1:
                log.exception("progress was not saved; it is tried again and again")
        finally:
            self._is_saving = False

    def _write(self, document: B) -> None:
        with self._writing:
            self._file.save(document)

    def close(self) -> None:
        """Save what is not saved yet, here and now: the last act of a broker that stops."""
        if self._revision() == self._saved and not self._is_saving:
            return
        document = self._make()
        try:
            if document is not None and self._store.wait_flushed(
                self._store.statistics().log_end, _LAST_FLUSH
            ):
                self._write(document)
                self._saved = self._revision()
        except (StoreError, ConfigNotSaved):
            # The file before it is good too: after the next start something is repeated.
            log.exception("progress was not saved at the stop")
