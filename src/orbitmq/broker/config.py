"""The tables that are saved in `config`, in Apache's format.

    topics.json  subscriptionGroup.json       written when they change
    consumerOffset.json                       every five seconds, and when a group is deleted

All of them are written once more at a stop. After a crash they may be ahead of the log or behind
it. At a start the store makes its queues agree with the log, and then the tables are made to agree
with the queues; those of a slave describe the master's log, and are left alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from orbitmq.broker.configfile import ConfigFile, SavedTable
from orbitmq.broker.errors import ConfigNotSaved
from orbitmq.broker.progress import ProgressFile, ProgressPlaces, encode_progress
from orbitmq.broker.scheduled import adopt
from orbitmq.store.files import DiskFiles
from orbitmq.wire.bodies import SubscriptionGroupTable, TopicConfigTable

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts


log = logging.getLogger(__name__)


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
        if (topics := self._topics.load().value) is not None:
            parts.topics.load(topics)
        if (groups := self._groups.load().value) is not None:
            parts.groups.load(groups)
        is_outdated = False
        if (progress := self._progress.load().value) is not None:
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
        background = parts.scheduler
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
        self._later = (progress,)
        background.every(parts.settings.progress.save_interval, progress.save_soon)
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

    def save_changed(self) -> None:
        """Begin to save the tables that are saved as soon as they change."""
        for table in self._at_once:
            table.save_soon()

    async def close(self) -> None:
        """Save everything. Raises `ConfigNotSaved`."""
        for table in (*self._later, *self._at_once):
            await table.close()


def _save_before_serving(progress: SavedTable[ProgressFile]) -> None:
    """Save progress that is no longer valid before new messages replace lost ones.

    Otherwise the old file would look valid at the next start, and be about other messages.
    """
    try:
        progress.save_now()
    except ConfigNotSaved:
        # Then the disk takes no messages either; the save is repeated.
        log.exception("progress that was made to agree with the log was not saved")
