"""Topics that were deleted, and how far: the queues of an older message must not come back.

The log keeps the messages of a deleted topic until retention reaches them, and a start that makes
queues from the log would find them there. So a deletion is noted, on the disk, before anything of
the topic is removed: messages of the topic below the noted offset belong to no queue.

    checksum offset "topic"

One line per deletion in `deleted-topics`, only ever appended; of several lines about a topic the
last one counts. A line that was cut short by a crash is of a deletion that nobody was told of. The
file goes when the log begins above all its offsets.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING

from orbitmq.store.files import write_all

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from orbitmq.store.files import DiskFiles


class Deletions:
    """The deleted topics of a store."""

    def __init__(self, path: Path, files: DiskFiles) -> None:
        self.by_topic: dict[str, int] = {}  #: messages below belong to no queue
        self._path = path
        self._files = files
        self._size = 0  #: bytes of whole lines

    def load(self) -> None:
        """Read what was noted."""
        if not self._files.exists(self._path):
            return
        for line in self._files.read_bytes(self._path).splitlines(keepends=True):
            found = _parse(line)
            if found is None:
                break
            self.by_topic[found[0]] = found[1]
            self._size += len(line)

    def note(self, topic: str, offset: int) -> None:
        """Return when the disk knows that messages of the topic below `offset` are deleted."""
        self.note_all({topic: offset})

    def note_all(self, deleted: Mapping[str, int]) -> None:
        """The same of several topics."""
        is_new = not self._files.exists(self._path)
        line = b"".join(_line(topic, offset) for topic, offset in deleted.items())
        fd = self._files.open(self._path, create=True)
        try:
            self._files.truncate(fd, self._size)
            write_all(self._files, fd, line, self._size)
            self._files.sync(fd)
        finally:
            self._files.close(fd)
        if is_new:
            self._files.sync_folder(self._path.parent)
        self._size += len(line)
        self.by_topic.update(deleted)

    def fit(self, log_start: int, log_end: int) -> None:
        """Forget what lies before the log, and what lies behind an end that was cut.

        The offsets behind the end will be those of new messages.
        """
        for topic, offset in list(self.by_topic.items()):
            if offset > log_end:
                self.note(topic, log_end)
        if self.by_topic and all(offset <= log_start for offset in self.by_topic.values()):
            self._files.unlink(self._path)
            self.by_topic.clear()
            self._size = 0


def _line(topic: str, offset: int) -> bytes:
    text = f"{offset} {json.dumps(topic)}"
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def _parse(line: bytes) -> tuple[str, int] | None:
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    offset, _, topic = text.partition(b" ")
    return json.loads(topic), int(offset)
