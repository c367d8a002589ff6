"""What tests of consumer groups on Spark share.

Handlers run in other processes. What they did is in a file that all of them append to: short lines
are written whole, one after the other, by whichever process. They are made by functions, so that
they travel by value and workers need not import any test.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.spark.consuming.pipeline import BatchSettings, ConsumePipeline
from orbitmq.testing.cluster import EmbeddedCluster

#: For anything that Spark does; its first batch alone may take many seconds.
DEADLINE = 60

#: Short waits, so that tests need not wait either.
QUICK = BatchSettings(idle=0.02, seconds=5.0, first_pause=0.05)
SOON = RebalanceSettings(interval=1.0, retry=0.2, persist=0.5)

Handler = Callable[[ReceivedMessage], object]


class Entry(NamedTuple):
    """A call of a handler."""

    began: float
    ended: float
    process: int
    topic: str
    queue: int
    offset: int
    attempt: int
    body: str


class Journal:
    """What handlers did, wherever they ran."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def writing(self, then: Handler | None = None) -> Handler:
        """A handler that does `then`, and writes down that it was called, whatever came of it."""
        path = str(self.path)

        def handle(message: ReceivedMessage) -> object:
            began = time.monotonic()
            try:
                return then(message) if then is not None else None
            finally:
                fields = (
                    *(f"{began:.6f}", f"{time.monotonic():.6f}", os.getpid(), message.topic),
                    *(message.queue.id, message.queue_offset, message.attempt, message.text()),
                )
                file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.write(file, (" ".join(map(str, fields)) + "\n").encode())
                os.close(file)

        return handle

    def entries(self) -> list[Entry]:
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text().splitlines():
            began, ended, process, topic, queue, offset, attempt, body = line.split(" ", 7)
            found.append(
                Entry(
                    *(float(began), float(ended), int(process), topic),
                    *(int(queue), int(offset), int(attempt), body),
                )
            )
        return found

    def bodies(self) -> list[str]:
        return [entry.body for entry in self.entries()]


def progress_of(cluster: EmbeddedCluster, group: str, topic: str) -> Mapping[int, int]:
    """The committed offsets of a group, by queue."""
    return {queue: at for (_, queue), at in cluster.progress(group, topic).items()}


def idle(run: ConsumePipeline) -> None:
    """Return when a pipeline has nothing left to do."""
    assert run.until_idle(DEADLINE), run.progress()
