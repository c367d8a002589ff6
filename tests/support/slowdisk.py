"""A disk whose flushes a test holds back."""

from __future__ import annotations

import threading

from orbitmq.store.files import DiskFiles


class GatedFiles(DiskFiles):
    """A disk on which the flusher waits until the gate is open, or fails."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: OSError | None = None
        self.waiting = 0

    def sync(self, fd: int) -> None:
        if threading.current_thread().name == "orbitmq-flusher":
            self.waiting += 1
            self.gate.wait(20)
            self.waiting -= 1
            if self.error is not None:
                raise self.error
        super().sync(fd)
