"""How far every group has come: `topic@group` -> queue -> the next offset to consume.

Which commits may move progress back is decided in `commitrule`; nearly everything else is a table.

**Reset at the server.** `reset` sets the stored offset and a pending one. Until the group's next
pull of that queue takes the pending one (`take_reset`), queries answer it and commits are
swallowed: they speak about the time before the reset. (A pull may leave it for another one to take,
see `resets`.) Afterwards clients still report what they had before, some until they have consumed
something at the new place (the C++ client does, with pulls and by reports); stored, that would undo
a reset to an earlier place for a client that dies meanwhile. But nobody has consumed what no pull
has asked for since: members' commits beyond the place that pulls asked for or were answered to
(`reach`) are dropped. What is told by a request that waits for its answer is meant, and stored.
This ends when the group is sent to a slave, where nobody here sees how far it reads. Pending resets
and `reach` are in memory only; the stored offset is not: after a restart of the broker reports from
before a reset are believed again.

**Cost.** A commit is made for every pull: two dictionary lookups and a comparison. An offset that
does not differ changes nothing, so a table of idle groups is not written again (`revision`).

**After a crash** the file may say what is true no longer. It says where the log ended when it was
made, so topics that were deleted since are known, and their progress is dropped (`load`). And the
log may have lost its end, which groups had consumed: new messages get those numbers again, and
nobody may have passed them (`fit`). They get the offsets in the log again, too: a file that tells
of an end beyond is made anew before, or a later deletion would look earlier than the file.

Instants are seconds of a clock that never goes back, except for `wall`, which goes into the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping

import msgspec

from orbitmq.broker.commitrule import PERMIT_LIFE, CommitRule, Outcome, QueueProgress, Way
from orbitmq.broker.dataversion import first_version, next_version
from orbitmq.wire.bodies.base import Body, Int32, Int64
from orbitmq.wire.bodies.offsets import ConsumerOffsets
from orbitmq.wire.bodies.topics import DataVersion

log = logging.getLogger(__name__)

#: After so many commits the table counts as another version; slaves look at it.
COMMITS_PER_VERSION = 500
_SEPARATOR = "@"
#: Places that are named in a line of the log about all of them.
_SHOWN = 5


class ProgressFile(Body, frozen=True, kw_only=True):
    """consumerOffset.json. Readers ignore `group_topic_map`; brokers of 4.x write the last only.

    `log_end` is ours: where the log ended when the document was made.
    """

    data_version: DataVersion | None = None
    group_topic_map: dict[str, tuple[str, ...]] | None = None
    log_end: Int64 | None = None
    offset_table: dict[str, dict[Int32, Int64]] = msgspec.field(default_factory=dict)


#: In the file nothing is absent and integer keys are quoted, so the fast writer does.
encode_progress = msgspec.json.Encoder().encode


class ProgressTable:
    """The progress of all groups."""

    def __init__(self, *, wall: float, rule: CommitRule | None = None) -> None:
        self._rule = rule or CommitRule()
        self._table: dict[tuple[str, str], dict[int, QueueProgress]] = {}
        self._groups: dict[str, set[str]] = {}
        self._topics: dict[str, set[str]] = {}
        self._resets: dict[tuple[str, str], dict[int, int]] = {}
        self._commits = 0
        self._refused = 0
        self.data_version = first_version(wall)
        #: Counts what the file would say differently; the saver compares it with what it saved.
        self.revision = 0

    # Commits.

    def commit(
        self,
        topic: str,
        group: str,
        queue_id: int,
        offset: int,
        *,
        by: Hashable,
        way: Way,
        now: float,
        asked: int = 0,
    ) -> Outcome:
        """Store a group's progress. `by` names the client: its id, or else its connection.

        `asked` is the place of the pull that carries it.
        """
        if offset < 0:
            return Outcome.REFUSED
        key = (topic, group)
        if self._resets and queue_id in self._resets.get(key, ()):
            return Outcome.RESET_PENDING
        queues = self._table.get(key)
        if queues is None:
            queues = self._add(key)
        queue = queues.get(queue_id)
        outcome = Outcome.STORED
        if queue is None:
            queue = queues[queue_id] = QueueProgress(offset)
            self.revision += 1
        elif offset > queue.offset:
            if queue.reach is not None:
                queue.reach = max(queue.reach, asked)
                if offset > queue.reach and way is not Way.REQUEST:
                    return Outcome.BEFORE_RESET
            queue.offset = offset
            self.revision += 1
        elif offset < queue.offset:
            if not self._rule.allows(queue, offset, by, way, now):
                self._log_refusal(topic, group, queue_id, offset, queue)
                return Outcome.REFUSED
            log.warning(
                "progress moved back",
                extra={"group": group, "topic": topic, "queue": queue_id, "offset": offset}
                | {"stored": queue.offset, "client": by, "way": way.value},
            )
            queue.offset = offset
            queue.permitted = None
            self.revision += 1
            outcome = Outcome.MOVED_BACK
        queue.by = by
        queue.at = now
        self._commits += 1
        return outcome

    def permit(self, topic: str, group: str, queue_id: int, offset: int, *, now: float) -> None:
        """Remember that the group was told to go on at `offset`: OFFSET_ILLEGAL, a pushed reset.

        Good for one move back to exactly there, within `PERMIT_LIFE`.
        """
        queue = self._table.get((topic, group), {}).get(queue_id)
        if queue is not None:
            queue.permitted = offset
            queue.permitted_until = now + PERMIT_LIFE

    def _log_refusal(
        self, topic: str, group: str, queue_id: int, offset: int, queue: QueueProgress
    ) -> None:
        self._refused += 1
        if self._refused % 1000 == 1:
            log.warning(
                "commit of a lower offset refused (time %d)",
                self._refused,
                extra={"group": group, "topic": topic, "queue": queue_id, "offset": offset}
                | {"stored": queue.offset, "owner": queue.by},
            )

    @property
    def refused(self) -> int:
        """How many commits were refused because they would have moved progress back."""
        return self._refused

    # Queries.

    def query(self, topic: str, group: str, queue_id: int) -> int | None:
        """The offset to go on from, a pending reset first; None when there is none."""
        pending = self.pending_reset(topic, group, queue_id)
        return pending if pending is not None else self.stored(topic, group, queue_id)

    def stored(self, topic: str, group: str, queue_id: int) -> int | None:
        """The committed offset."""
        queue = self._table.get((topic, group), {}).get(queue_id)
        return None if queue is None else queue.offset

    def offsets(self, topic: str, group: str) -> dict[int, int]:
        """The committed offsets of a group in a topic, by queue."""
        queues = self._table.get((topic, group), {})
        return {queue_id: queue.offset for queue_id, queue in queues.items()}

    def topics_of(self, group: str) -> frozenset[str]:
        """The topics that a group has progress in."""
        return frozenset(self._topics.get(group, ()))

    def groups_of(self, topic: str) -> frozenset[str]:
        """The groups that have progress in a topic."""
        return frozenset(self._groups.get(topic, ()))

    def lowest(
        self, topic: str, minimum: Mapping[int, int], *, without: Iterable[str] = ()
    ) -> dict[int, int]:
        """By queue the lowest progress of any group that is not below the queue's minimum.

        Apache's broker deletes the groups that it is asked to leave out. This one leaves them out.
        """
        found: dict[int, int] = {}
        for group in self._groups.get(topic, set()).difference(without):
            for queue_id, queue in self._table[topic, group].items():
                if queue.offset >= minimum.get(queue_id, 0):
                    found[queue_id] = min(queue.offset, found.get(queue_id, queue.offset))
        return found

    # Where groups pull: for statistics, and after a reset.

    def note_pull(self, topic: str, group: str, queue_id: int, next_offset: int) -> None:
        """Remember where the group's next pull will begin; it must have committed before."""
        queues = self._table.get((topic, group))
        if queues is not None and (queue := queues.get(queue_id)) is not None:
            queue.pulled = next_offset
            if queue.reach is not None and next_offset > queue.reach:
                queue.reach = next_offset

    def reads_elsewhere(self, topic: str, group: str, queue_id: int) -> None:
        """The group is sent to a slave: how far pulls are answered is not known here any more."""
        queue = self._table.get((topic, group), {}).get(queue_id)
        if queue is not None:
            queue.reach = None

    def pulled(self, topic: str, group: str, queue_id: int) -> int | None:
        """Where the group's next pull will begin; where it is not known, its progress."""
        queue = self._table.get((topic, group), {}).get(queue_id)
        if queue is None or queue.pulled < 0:
            return self.query(topic, group, queue_id)
        return queue.pulled

    # Resets.

    def reset(self, topic: str, group: str, queue_id: int, offset: int) -> None:
        """Make the group go on at `offset`, whether it is there or not."""
        key = (topic, group)
        self._resets.setdefault(key, {})[queue_id] = offset
        self._overwrite(key, queue_id, offset)

    def pending_reset(self, topic: str, group: str, queue_id: int) -> int | None:
        """The offset of a reset that no pull has taken yet."""
        return self._resets.get((topic, group), {}).get(queue_id) if self._resets else None

    def take_reset(self, topic: str, group: str, queue_id: int) -> int | None:
        """The offset that this pull is to be sent to; it is pending no longer.

        What the same pull carries is committed before, and so swallowed: afterwards it would undo
        the reset for as long as the client has not read the answer.
        """
        if not self._resets:
            return None
        key = (topic, group)
        pending = self._resets.get(key)
        if pending is None:
            return None
        offset = pending.pop(queue_id, None)
        if not pending:
            del self._resets[key]
        queue = self._table.get(key, {}).get(queue_id)
        if offset is not None and queue is not None:
            queue.reach = offset
        return offset

    def clone(
        self, source: str, target: str, topic: str | None = None
    ) -> dict[str, dict[int, int]]:
        """Give a group the progress of another, in one topic or in all; what was copied.

        With an empty topic Apache copies nothing; the intention is to copy everything.
        """
        copied: dict[str, dict[int, int]] = {}
        for name in (topic,) if topic else sorted(self.topics_of(source)):
            offsets = self.offsets(name, source)
            if not offsets:
                continue
            self._drop((name, target))
            # A reset that nobody has taken yet would win over what was copied after it.
            self._resets.pop((name, target), None)
            for queue_id, offset in offsets.items():
                self._overwrite((name, target), queue_id, offset)
            copied[name] = offsets
        return copied

    def _overwrite(self, key: tuple[str, str], queue_id: int, offset: int) -> None:
        queues = self._table.get(key)
        if queues is None:
            queues = self._add(key)
        # A new object: what others reported or were permitted before says nothing any more.
        queues[queue_id] = QueueProgress(offset)
        self.revision += 1

    # Removal.

    def remove_group(self, group: str) -> int:
        """Forget a group; the number of topics it had progress in."""
        topics = self.topics_of(group)
        for key in [key for key in self._resets if key[1] == group]:
            del self._resets[key]
        for topic in topics:
            self._drop((topic, group))
        return len(topics)

    def remove_topic(self, topic: str) -> int:
        """Forget a topic; the number of groups that had progress in it."""
        groups = self.groups_of(topic)
        for key in [key for key in self._resets if key[0] == topic]:
            del self._resets[key]
        for group in groups:
            self._drop((topic, group))
        return len(groups)

    def _add(self, key: tuple[str, str]) -> dict[int, QueueProgress]:
        topic, group = key
        self._groups.setdefault(topic, set()).add(group)
        self._topics.setdefault(group, set()).add(topic)
        return self._table.setdefault(key, {})

    def _drop(self, key: tuple[str, str]) -> None:
        if self._table.pop(key, None) is None:
            return
        topic, group = key
        for index, name, entry in (
            (self._groups, topic, group),
            (self._topics, group, topic),
        ):
            index[name].discard(entry)
            if not index[name]:
                del index[name]
        self.revision += 1

    # The file, and the table as slaves ask for it.

    def load(
        self,
        file: ProgressFile,
        deleted_below: Callable[[str], int] | None = None,
        log_end: int | None = None,
    ) -> bool:
        """Take over what a file says, except about topics that were deleted after it was made.

        `deleted_below` gives the end of the log when a topic was last deleted. Where that is the
        end that the file tells, no message has been stored in between, and the topic is empty.
        `log_end` is where the log ends now. True when the file must be made anew before the log
        goes on: it tells of an end that is lost, or of a topic whose deletion is not noted forever.
        """
        self._take(file)
        if file.log_end is None:
            return False
        is_outdated = log_end is not None and file.log_end > log_end
        if deleted_below is None:
            return is_outdated
        for topic in tuple(self._groups):
            below = deleted_below(topic)
            if below and below >= file.log_end:
                groups = self.remove_topic(topic)
                is_outdated = True
                log.info(
                    "progress in a topic that was deleted is dropped",
                    extra={"topic": topic, "groups": groups},
                )
        return is_outdated

    def replace(self, master: ConsumerOffsets) -> None:
        """Become a copy of a master's table."""
        for topic, group in list(self._table):
            offsets = master.offset_table.get(topic + _SEPARATOR + group)
            if offsets is None or self._table[topic, group].keys() - offsets.keys():
                self._drop((topic, group))
        self._take(master)

    def fit(self, max_offset: Callable[[str, int], int]) -> int:
        """Move progress back that is beyond the end of its queue; how many entries.

        The next message of a queue gets the number `max_offset`, whatever was there before: the
        log lost its end with the power, or this broker was a slave and has not got all of it. So
        nobody can have consumed what is beyond.
        """
        moved: list[str] = []
        for (topic, group), queues in self._table.items():
            for queue_id, queue in queues.items():
                end = max_offset(topic, queue_id)
                if queue.offset <= end:
                    continue
                moved.append(f"{topic}@{group} queue {queue_id}: {queue.offset} -> {end}")
                queues[queue_id] = QueueProgress(end)
                self.revision += 1
        if moved:
            log.warning(
                "progress was ahead of its queue in %d places, and is moved back to the end: %s",
                *_some(moved),
            )
        return len(moved)

    def prune(self, may_keep: Callable[[str, int], bool]) -> int:
        """Drop progress in queues that never existed, and numbers that nobody can reach."""
        dropped: list[str] = []
        for key, queues in list(self._table.items()):
            topic, group = key
            for queue_id, queue in list(queues.items()):
                if queue.offset < 0 or not may_keep(topic, queue_id):
                    dropped.append(f"{topic}@{group} queue {queue_id}: {queue.offset}")
                    del queues[queue_id]
                    self.revision += 1
            if not queues:
                self._drop(key)
        if dropped:
            log.warning("progress in %d queues that never existed is dropped: %s", *_some(dropped))
        return len(dropped)

    def _take(self, file: ProgressFile | ConsumerOffsets) -> None:
        for name, offsets in file.offset_table.items():
            topic, separator, group = name.partition(_SEPARATOR)
            if not separator:
                log.warning("progress without a group is left out", extra={"key": name})
                continue
            for queue_id, offset in offsets.items():
                if self.stored(topic, group, queue_id) != offset:
                    self._overwrite((topic, group), queue_id, offset)
        if file.data_version is not None:
            self.data_version = file.data_version

    def file(self, *, wall: float, log_end: int) -> ProgressFile:
        """A copy for consumerOffset.json."""
        return ProgressFile(
            data_version=self.version(wall=wall),
            group_topic_map={group: tuple(sorted(names)) for group, names in self._topics.items()},
            log_end=log_end,
            offset_table=self._offset_table(),
        )

    def body(self, *, wall: float) -> ConsumerOffsets:
        """A copy for a slave."""
        return ConsumerOffsets(
            data_version=self.version(wall=wall), offset_table=self._offset_table()
        )

    def version(self, *, wall: float) -> DataVersion:
        """The version of the table, which goes on with every `COMMITS_PER_VERSION` commits."""
        steps, self._commits = divmod(self._commits, COMMITS_PER_VERSION)
        for _ in range(steps):
            self.data_version = next_version(self.data_version, wall)
        return self.data_version

    def _offset_table(self) -> dict[str, dict[int, int]]:
        return {
            topic + _SEPARATOR + group: {
                queue_id: queue.offset for queue_id, queue in queues.items()
            }
            for (topic, group), queues in self._table.items()
        }


def _some(places: list[str]) -> tuple[int, str]:
    """How many, and the first of them."""
    rest = ", ..." if len(places) > _SHOWN else ""
    return len(places), ", ".join(places[:_SHOWN]) + rest
