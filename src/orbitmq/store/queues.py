"""All consume queues of a store, and how their newest entries get from memory to the files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from orbitmq.store.consumequeue import ConsumeQueue, QueueFiles
from orbitmq.store.descriptors import queue_files_to_keep
from orbitmq.store.errors import TopicRefused

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from orbitmq.store.files import DiskFiles
    from orbitmq.store.settings import StoreSettings

log = logging.getLogger(__name__)

_NO_NAMES = frozenset({"", ".", ".."})
_LONGEST_NAME = 255  #: what file systems take


def check_topic(topic: str) -> None:
    """Refuse a topic whose name would not stay inside the folder of the queues."""
    if topic in _NO_NAMES or "/" in topic or "\0" in topic:
        raise TopicRefused(topic)
    try:
        size = len(topic.encode())
    except UnicodeEncodeError as error:
        raise TopicRefused(topic) from error
    if size > _LONGEST_NAME:
        raise TopicRefused(topic)


class QueueTable:
    """The queues by topic and number. Memory for entries is bounded over all of them."""

    def __init__(self, folder: Path, settings: StoreSettings, files: DiskFiles) -> None:
        self.folder = folder
        self.by_key: dict[tuple[str, int], ConsumeQueue] = {}
        self.dirty: list[ConsumeQueue] = []  #: queues with something to write or to flush
        self.file_entries = settings.queue_file_entries
        self.tail_limit = settings.flush.queue_tail_bytes
        self.write_error: OSError | None = None  #: entries that the disk did not take wait here
        self._settings = settings
        self._files = files
        self._reader = QueueFiles(files, settings.open_queue_files or queue_files_to_keep())

    # ---- the table

    def load(self, recorded_entries: int | None) -> None:
        """Find the queues that have files.

        `recorded_entries` is the number of entries of a file that our own checkpoint tells.
        """
        self._files.make_folder(self.folder)
        for topic in self._files.names(self.folder):
            for name in self._files.names(self.folder / topic):
                try:
                    self._load_queue(topic, name, recorded_entries)
                except TopicRefused:
                    log.warning("not a queue of ours", extra={"folder": f"{topic!a}/{name!a}"})

    def _load_queue(self, topic: str, name: str, recorded_entries: int | None) -> None:
        # Also "²" is a digit, for Python.
        if name.isascii() and name.isdigit() and str(int(name)) == name:
            self.create(topic, int(name)).load(recorded_entries)

    def create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """A new, empty queue; its topic becomes the name of a folder."""
        check_topic(topic)
        if not 0 <= queue_id <= 0x7FFFFFFF:
            raise TopicRefused(topic, queue_id)
        queue = ConsumeQueue(
            topic,
            queue_id,
            self.folder / topic / str(queue_id),
            self._settings.queue_file_entries,
            self._files,
            self._reader,
        )
        self.by_key[topic, queue_id] = queue
        return queue

    def forget_unused(self, queue: ConsumeQueue) -> None:
        """Forget a queue that was made for messages none of which was stored."""
        if not queue.next_offset and not queue.bases:
            self.by_key.pop((queue.topic, queue.queue_id), None)

    def get(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self.by_key.get((topic, queue_id))

    def delete_topic(self, topic: str) -> int:
        """Forget the queues of a topic and delete their files; how many queues there were."""
        check_topic(topic)
        doomed = [key for key in self.by_key if key[0] == topic]
        if not doomed:
            return 0
        for key in doomed:
            queue = self.by_key.pop(key)
            queue.restart()
        self.dirty = [queue for queue in self.dirty if queue.topic != topic]
        self._files.remove_folder(self.folder / topic)
        return len(doomed)

    def delete_below(self, deleted: Mapping[str, int]) -> int:
        """Forget the queues whose messages all lie below the offset that their topic has here.

        How many there were.
        """
        doomed = {
            key: queue
            for key, queue in self.by_key.items()
            if queue.topic in deleted and queue.last_end <= deleted[queue.topic]
        }
        for key, queue in doomed.items():
            del self.by_key[key]
            queue.restart()
            self._files.remove_folder(self.folder / queue.topic / str(queue.queue_id))
        self.dirty = [queue for queue in self.dirty if (queue.topic, queue.queue_id) not in doomed]
        return len(doomed)

    def clear(self) -> None:
        """Forget all queues and delete all files."""
        for topic in {topic for topic, _ in self.by_key}:
            self.delete_topic(topic)

    def close(self) -> None:
        self._reader.close()

    # ---- memory and files

    def mark_dirty(self, queue: ConsumeQueue) -> None:
        """Note that a queue has something to write."""
        if not queue.is_dirty:
            queue.is_dirty = True
            self.dirty.append(queue)

    def spill(self, queue: ConsumeQueue) -> None:
        """Write a queue whose entries take much memory, and keep the newest half of them."""
        if self.write(queue):
            queue.trim(self.tail_limit // 2)

    def write(self, queue: ConsumeQueue) -> bool:
        """Write what a queue has only in memory. A failure is kept; nothing is lost by it."""
        try:
            queue.write_tail()
        except OSError as error:
            if self.write_error is None:
                log.exception("writing a consume queue failed", extra={"queue": repr(queue)})
            self.write_error = error
            return False
        self.write_error = None
        return True

    def trim(self) -> None:
        """Give memory back when the queues together hold more than they may."""
        budget = self._settings.flush.tail_memory
        queues = self.by_key.values()
        held = sum(len(queue.tail) for queue in queues)
        if held > budget:
            for queue in queues:
                queue.trim(0)

    @property
    def memory(self) -> int:
        return sum(len(queue.tail) for queue in self.by_key.values())
