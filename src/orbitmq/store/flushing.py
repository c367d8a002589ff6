"""Bringing the log to the disk: in the background, or before a message counts as stored.

A thread waits in fdatasync, so the owner never does. Everything that was written while a flush
was under way shares the next one, however many wait for it: that is group commit, and it needs no
timer. The thread knows only how far to flush and says how far it came; whom this concerns is
settled by the owner, in its own thread, when it is told to look (`post`).

A failed flush is final. The kernel may have marked the pages clean without writing them, so a
second fdatasync would report success for data that is not there. Nobody who waits is told that
his message is stored, and the store refuses writes until it is opened again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from orbitmq.store.errors import StoreFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from orbitmq.clock import Clock
    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.settings import FlushSettings

    Post = Callable[[Callable[[], None]], object]
    WhenFlushed = Callable[[StoreFailed | None], None]

log = logging.getLogger(__name__)


class Flusher:
    """Flushes the log up to what is asked for, and from time to time unasked."""

    def __init__(
        self,
        commit_log: CommitLog,
        settings: FlushSettings,
        clock: Clock,
        wake_owner: Callable[[], None],
    ) -> None:
        self.flushed = commit_log.end  #: everything below is on the disk
        self.failure: StoreFailed | None = None
        self.flush_count = 0
        self._log = commit_log
        self._settings = settings
        self._clock = clock
        self._wake_owner = wake_owner
        self._asked = commit_log.end
        self._last_thorough = clock.monotonic()
        self._is_stopping = False
        #: Rouses the thread. It costs less than a condition, and is in the way of every message
        #: that waits for the disk.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._is_rung = False
        self._changed = threading.Condition()
        self._sleepers = 0  #: who waits for `_changed`
        self._thread: threading.Thread | None = None
        self._waiting: deque[tuple[int, WhenFlushed]] = deque()

    # ---- the owner's side

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="orbitmq-flusher", daemon=True)
        self._thread.start()

    def ask(self, upto: int) -> None:
        """Have the log flushed up to `upto` as soon as possible."""
        if upto > self._asked:
            self._asked = upto
            self._ring()

    def when_flushed(self, upto: int, call: WhenFlushed) -> bool:
        """Have `settle` call when the log below `upto` is on the disk, or has failed.

        Returns whether that is so already. The call is left to `settle` even then, because others
        who asked earlier may not have been told yet.
        """
        self._waiting.append((upto, call))
        self.ask(upto)
        return self.failure is not None or upto <= self.flushed

    def wait(self, upto: int, timeout: float | None) -> bool:
        """Wait here until everything below `upto` is on the disk; False when time is up."""
        self.ask(upto)
        if self._thread is None:
            self.flush_now()
        with self._changed:
            self._sleepers += 1
            self._changed.wait_for(
                lambda: self.flushed >= upto or self.failure is not None, timeout
            )
            self._sleepers -= 1
        if self.failure is not None:
            raise self.failure
        return self.flushed >= upto

    def settle(self, flushed: int) -> None:
        """Tell those who waited for less than `flushed`, which the owner has made readable."""
        waiting = self._waiting
        if self.failure is not None:
            while waiting:
                waiting.popleft()[1](self.failure)
            return
        while waiting and waiting[0][0] <= flushed:
            waiting.popleft()[1](None)

    def flush_now(self) -> None:
        """Without a thread: do here what it would do now."""
        if self._thread is None and self.failure is None:
            self._flush_upto(self._due())

    def stop(self) -> None:
        """Flush what was asked for and end the thread."""
        if self._thread is not None:
            self._is_stopping = True
            self._ring()
            self._thread.join()
            self._thread = None

    def _ring(self) -> None:
        if not self._is_rung and self._thread is not None:
            self._is_rung = True
            self._bell.put(None)

    # ---- the thread's side

    def _run(self) -> None:
        try:
            self._flush_until_stopped()
        except Exception as error:
            # A thread that ends unheard would leave everybody waiting.
            log.exception("the flusher failed; writes are refused from now on")
            self.fail(error)

    def _flush_until_stopped(self) -> None:
        interval = self._settings.interval
        while self.failure is None:
            with suppress(Empty):
                self._bell.get(timeout=interval)
            # Before looking at what was asked for: who asks later rings again, and who found the
            # bell rung had asked before.
            self._is_rung = False
            is_stopping = self._is_stopping
            self._flush_upto(self._due())
            if is_stopping and self._asked <= self.flushed:
                return

    def _due(self) -> int:
        """How far to flush now: what was asked for, or all when it is much or old."""
        now = self._clock.monotonic()
        end = self._log.end
        is_thorough = now - self._last_thorough >= self._settings.thorough_interval
        if is_thorough or end - self.flushed >= self._settings.least_bytes:
            self._last_thorough = now
            return max(self._asked, end)
        return self._asked

    def _flush_upto(self, target: int) -> None:
        if target <= self.flushed:
            return
        try:
            self._log.sync(self.flushed, target)
        except Exception as error:
            # Whatever it is: what cannot be flushed must not be acknowledged by silence.
            log.exception("flushing the commit log failed; writes are refused from now on")
            self.fail(error)
        else:
            self.flushed = target
            self.flush_count += 1
            self._rouse_sleepers()
        self._wake_owner()

    def _rouse_sleepers(self) -> None:
        # Who comes to sleep now sees that it is over: he counts himself before he looks.
        if self._sleepers:
            with self._changed:
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Refuse everything from now on."""
        failure = StoreFailed(
            f"the disk did not take what was written ({error}); what waits is not stored, "
            "and nothing is accepted until the store is opened again"
        )
        failure.__cause__ = error
        self.failure = self.failure or failure
        self._rouse_sleepers()
