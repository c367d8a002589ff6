"""What work with messages takes, by the clocks of its process: of ours, and of others in Python."""

from __future__ import annotations

import itertools
import threading
import time

from benchmarks.load.clientwork import Spent

#: Seconds, longer than anything that is measured takes.
SILENCE = 60.0


class Taking:
    """The clocks at the beginning."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._began = time.monotonic()

    def spent(self, count: int) -> Spent:
        ended = time.monotonic()
        cpu = time.process_time() - self._cpu
        return Spent(messages=count, began=self._began, ended=ended, cpu=cpu)


class Arriving:
    """Counts messages, from the first one on, in any thread.

    Handlers of several threads call it. `next` of a count is one step of the interpreter: none is
    lost, without a lock, which would be dearer than all else here.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sum = 0
        self._taking: Taking | None = None
        self._first = 0
        self._spent: Spent | None = None
        self._ended = threading.Event()

    @property
    def is_complete(self) -> bool:
        return self._ended.is_set()

    def note_one(self) -> None:
        self._note(next(self._numbers))

    def note(self, count: int) -> None:
        with self._lock:  # once for a batch: cheap enough
            self._sum += count
            had = self._sum
        self._note(had)

    def _note(self, had: int) -> None:
        if self._taking is None:
            self._taking = Taking()
            self._first = had
        elif had >= self._wanted and self._spent is None:
            self._spent = self._taking.spent(had - self._first)
            self._ended.set()

    def wait(self) -> Spent:
        if not self._ended.wait(SILENCE) or self._spent is None:
            raise TimeoutError(f"{self._wanted} messages did not come within {SILENCE:g} s")
        return self._spent
