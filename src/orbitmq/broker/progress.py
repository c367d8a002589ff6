"""Consumer progress: `topic@group` -> queue -> the next offset to consume, resets and lag.

A reset sets the stored offset and a pending one. Until the group takes the pending one (see
`is_there`), queries return it and other commits are ignored. Afterwards, commits beyond
what pulls have asked for or were answered since (`reach`) are dropped, because clients go on
reporting offsets from before the reset for a while. Pending resets and `reach` are lost by a
restart. `CommitRule` decides which commits may move progress back.

Trap: a commit is made for every pull, so it must stay cheap, and one that changes nothing must not
change `revision`. After a crash the file may be ahead of the log; see `load` and `fit`. Instants
are monotonic, except for `wall`, which is written to the file.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from orbitmq import names
from orbitmq.broker.topics import TopicTable, first_version, next_version
from orbitmq.store.store import Store
from orbitmq.wire.bodies import ConsumerOffsets, DataVersion, MessageModel, TopicConfig
from orbitmq.wire.headers import PullFlag, PullMessageRequest
from orbitmq.wire.javajson import Body, Int32, Int64

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts


log = logging.getLogger(__name__)

#: Commits after which the version of the table changes; slaves compare it.
COMMITS_PER_VERSION = 500
_SEPARATOR = "@"
#: Entries that one log line about all of them names.
_SHOWN = 5


class ProgressFile(Body, frozen=True, kw_only=True):
    """consumerOffset.json. Readers ignore `group_topic_map`; brokers of 4.x write the last only.

    `log_end` is our own: the end of the log when the document was made.
    """

    data_version: DataVersion | None = None
    group_topic_map: dict[str, tuple[str, ...]] | None = None
    log_end: Int64 | None = None
    offset_table: dict[str, dict[Int32, Int64]] = msgspec.field(default_factory=dict)


#: The file has no absent values, and quoted integer keys, so the fast encoder writes it.
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
        #: Commits refused because they would have moved progress back.
        self.refused = 0
        self.data_version = first_version(wall)
        #: Increases with every change of the content of the file.
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
        way: CommitSource,
        now: float,
        asked: int = 0,
    ) -> CommitOutcome:
        """Store a group's progress. `by` is the client: its id, or else its connection.

        `asked` is the offset of the pull that carries the commit.
        """
        if offset < 0:
            return CommitOutcome.REFUSED
        key = (topic, group)
        pending = self.pending_reset(topic, group, queue_id) if self._resets else None
        if pending is not None:
            if offset != pending or way is not CommitSource.REQUEST:
                return CommitOutcome.RESET_PENDING
            self.take_reset(topic, group, queue_id)  # the owner of the queue has followed it
        queues = self._table.get(key)
        if queues is None:
            queues = self._add(key)
        queue = queues.get(queue_id)
        outcome = CommitOutcome.STORED
        if queue is None:
            queue = queues[queue_id] = QueueProgress(offset)
            self.revision += 1
        elif offset > queue.offset:
            if queue.reach is not None:
                queue.reach = max(queue.reach, asked)
                if offset > queue.reach and way is not CommitSource.REQUEST:
                    return CommitOutcome.BEFORE_RESET
            queue.offset = offset
            self.revision += 1
        elif offset < queue.offset:
            if not self._rule.allows(queue, offset, by, way, now):
                self._log_refusal(topic, group, queue_id, offset, queue)
                return CommitOutcome.REFUSED
            log.warning(
                "progress moved back",
                extra={"group": group, "topic": topic, "queue": queue_id, "offset": offset}
                | {"stored": queue.offset, "client": by, "way": way.value},
            )
            queue.offset = offset
            queue.permitted = None
            self.revision += 1
            outcome = CommitOutcome.MOVED_BACK
        queue.by = by
        queue.at = now
        self._commits += 1
        return outcome

    def permit(self, topic: str, group: str, queue_id: int, offset: int, *, now: float) -> None:
        """Let the group move back to `offset`, where the broker sent it.

        Valid for one commit of exactly this offset, within `PERMIT_LIFE`.
        """
        queue = self._table.get((topic, group), {}).get(queue_id)
        if queue is not None:
            queue.permitted = offset
            queue.permitted_until = now + PERMIT_LIFE

    def _log_refusal(
        self, topic: str, group: str, queue_id: int, offset: int, queue: QueueProgress
    ) -> None:
        self.refused += 1
        if self.refused % 1000 == 1:
            log.warning(
                "commit of a lower offset refused (time %d)",
                self.refused,
                extra={"group": group, "topic": topic, "queue": queue_id, "offset": offset}
                | {"stored": queue.offset, "owner": queue.by},
            )

    # Queries.

    def query(self, topic: str, group: str, queue_id: int) -> int | None:
        """The offset to continue from, a pending reset first; None when there is none."""
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
        """By queue, the lowest progress of any group that is not below the queue's minimum.

        The groups to be left out are left out. (Apache's broker deletes their progress.)
        """
        found: dict[int, int] = {}
        for group in self._groups.get(topic, set()).difference(without):
            for queue_id, queue in self._table[topic, group].items():
                if queue.offset >= minimum.get(queue_id, 0):
                    found[queue_id] = min(queue.offset, found.get(queue_id, queue.offset))
        return found

    # The offsets of pulls: for statistics, and after a reset.

    def note_pull(self, topic: str, group: str, queue_id: int, next_offset: int) -> None:
        """Remember the offset of the group's next pull; it must have committed before."""
        queues = self._table.get((topic, group))
        if queues is not None and (queue := queues.get(queue_id)) is not None:
            queue.pulled = next_offset
            if queue.reach is not None and next_offset > queue.reach:
                queue.reach = next_offset

    def reads_elsewhere(self, topic: str, group: str, queue_id: int) -> None:
        """The group is sent to a slave, so the broker no longer knows how far its pulls get."""
        queue = self._table.get((topic, group), {}).get(queue_id)
        if queue is not None:
            queue.reach = None

    def pulled(self, topic: str, group: str, queue_id: int) -> int | None:
        """The offset of the group's next pull; if that is not known, its progress."""
        queue = self._table.get((topic, group), {}).get(queue_id)
        if queue is None or queue.pulled < 0:
            return self.query(topic, group, queue_id)
        return queue.pulled

    # Resets.

    def reset(self, topic: str, group: str, queue_id: int, offset: int) -> None:
        """Make the group continue at `offset`, online or not."""
        key = (topic, group)
        self._resets.setdefault(key, {})[queue_id] = offset
        self._overwrite(key, queue_id, offset)

    def pending_reset(self, topic: str, group: str, queue_id: int) -> int | None:
        """The offset of a reset that no pull has taken yet."""
        return self._resets.get((topic, group), {}).get(queue_id) if self._resets else None

    def take_reset(self, topic: str, group: str, queue_id: int) -> int | None:
        """The offset that this pull is sent to; the reset is then no longer pending.

        The commit that the same pull carries comes before, and is ignored: later it would undo the
        reset until the client has read the answer.
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
            # A pending reset would override the copied progress.
            self._resets.pop((name, target), None)
            for queue_id, offset in offsets.items():
                self._overwrite((name, target), queue_id, offset)
            copied[name] = offsets
        return copied

    def _overwrite(self, key: tuple[str, str], queue_id: int, offset: int) -> None:
        queues = self._table.get(key)
        if queues is None:
            queues = self._add(key)
        # A new object: earlier reports and permissions no longer count.
        queues[queue_id] = QueueProgress(offset)
        self.revision += 1

    # Removal.

    def remove_group(self, group: str) -> int:
        """Remove a group; the number of topics it had progress in."""
        topics = self.topics_of(group)
        for key in [key for key in self._resets if key[1] == group]:
            del self._resets[key]
        for topic in topics:
            self._drop((topic, group))
        return len(topics)

    def remove_topic(self, topic: str) -> int:
        """Remove a topic; the number of groups that had progress in it."""
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

    # The file, and the copy for slaves.

    def load(
        self,
        file: ProgressFile,
        deleted_below: Callable[[str], int] | None = None,
        log_end: int | None = None,
    ) -> bool:
        """Take over a file, except for topics that were deleted after it was written.

        `deleted_below` gives the end of the log when a topic was last deleted. If the file has that
        end, no message has been stored in between, and the topic is empty. `log_end` is the present
        end of the log. True when the file must be written again before the log goes on, because it
        has an end that was lost, or a topic whose deletion is not recorded permanently.
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
        """Move progress back that is beyond the end of its queue; the number of entries.

        The log lost its end in a crash, or a former slave has not got all of it. The next message
        of a queue gets the number `max_offset`, so it cannot have been consumed.
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
        """Drop progress in queues that never existed, and impossible offsets."""
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
        """The version of the table, which increases with every `COMMITS_PER_VERSION` commits."""
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
    """The number of entries, and the first of them."""
    rest = ", ..." if len(places) > _SHOWN else ""
    return len(places), ", ".join(places[:_SHOWN]) + rest


# Which commits may move progress back. Apache's broker stores every commit, so a consumer that lost
# its queues while it was paused overwrites the new owner's progress, and the group repeats
# messages. But clients also move back for good reasons: after OFFSET_ILLEGAL, a seek, a reset by a
# tool. An owner repeats its report every 5 s, so a lower offset is:
#
# * refused when a pull carries it (`CommitSource.PULL`): clients report first that they go back;
# * stored from a one-way report (`REPORT`) of the last reporter; of another client when the last
#   report is older than `OWNERSHIP`, or when the broker sent the group there (`permit`);
# * stored when the request waits for its answer (`REQUEST`), and by `reset` and `clone`.
#
# A client that took the queue over less than `OWNERSHIP` ago and seeks is refused at first; it
# repeats its report. `BackwardRule.APACHE` stores everything, `NEVER` only `REQUEST` and permits.


#: How long a report protects the queue's progress against others: several report intervals.
OWNERSHIP = 30.0
#: How long a client may take to go back; clients of 4.x wait 10 s first.
PERMIT_LIFE = 60.0


class CommitSource(enum.Enum):
    """How a commit was sent."""

    PULL = "pull"
    REPORT = "report"
    REQUEST = "request"


class CommitOutcome(enum.Enum):
    """The result of a commit."""

    STORED = "stored"
    MOVED_BACK = "moved back"
    REFUSED = "refused"
    RESET_PENDING = "reset pending"
    #: It is from before a reset that was taken.
    BEFORE_RESET = "before reset"


class BackwardRule(enum.Enum):
    """Which clients may move progress back by a commit."""

    APACHE = "apache"
    OWNER = "owner"
    NEVER = "never"


class QueueProgress:
    """The progress of a group in one queue."""

    __slots__ = ("at", "by", "offset", "permitted", "permitted_until", "pulled", "reach")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        #: The last reporter, and the time; None after a restart or a reset.
        self.by: Hashable | None = None
        self.at = 0.0
        #: An offset that the broker sent the group back to.
        self.permitted: int | None = None
        self.permitted_until = 0.0
        #: The offset of the group's next pull, for statistics.
        self.pulled = -1
        #: How far pulls were answered since a reset was taken. None without a reset, or when the
        #: group may read at a slave.
        self.reach: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRule:
    """Decides which commits may move progress back."""

    #: All clients as with Apache, the last reporter, or none.
    backward: BackwardRule = BackwardRule.OWNER
    ownership: float = OWNERSHIP  #: how long a report makes its sender the last reporter

    def allows(
        self, queue: QueueProgress, offset: int, by: Hashable, way: CommitSource, now: float
    ) -> bool:
        """Whether `offset`, which is lower than the stored one, is stored."""
        if self.backward is BackwardRule.APACHE or way is CommitSource.REQUEST:
            return True
        if way is CommitSource.PULL:
            return False
        if offset == queue.permitted and now <= queue.permitted_until:
            return True
        if self.backward is BackwardRule.NEVER:
            return False
        return queue.by is None or queue.by == by or now - queue.at > self.ownership


# Which queues may have progress: those that the topic has, for reading or writing, and those that
# it had, since members with an older route finish their messages. Progress in other queues comes
# from faulty clients and would be kept forever. A topic that is not known is accepted in a file,
# which may be older than the topic; no commit adds to it.


class ProgressPlaces:
    """Tells queues that exist or existed from those that never did."""

    def __init__(self, topics: TopicTable, progress: ProgressTable, store: Store) -> None:
        self._topics = topics
        self._progress = progress
        self._store = store

    def problem(self, topic: TopicConfig, group: str, queue_id: int) -> str | None:
        """Why a group cannot have consumed from this queue; None when it can."""
        if has_number(topic, queue_id):
            return None
        name = topic.topic_name
        if queue_id >= 0 and (
            self._store.max_offset(name, queue_id)
            # The queue existed when the group was assigned to it, but got no message.
            or self._progress.stored(name, group, queue_id) is not None
        ):
            return None
        return f"topic {name!r} has no queue {queue_id} and never had; it has {_numbers(topic)}"

    def may_keep(self, topic: str, queue_id: int) -> bool:
        """Whether progress in a file can be about an existing queue."""
        if queue_id < 0:
            return False
        config = self._topics.get(topic)
        return (
            config is None
            or has_number(config, queue_id)
            or self._store.max_offset(topic, queue_id) > 0
        )


def has_number(topic: TopicConfig, queue_id: int) -> bool:
    """Whether the topic has this queue now."""
    return 0 <= queue_id < max(topic.read_queue_nums, topic.write_queue_nums)


def _numbers(topic: TopicConfig) -> str:
    count = max(topic.read_queue_nums, topic.write_queue_nums)
    return f"0 to {count - 1}" if count else "none"


# How pulls are answered after a reset. A pull of a foreign client takes it: it is reported once.
# OrbitMQ's consumers and Spark's tasks ask to keep it (`keep_reset`), as an answer may be lost.
# Then it is reported until a consumer commits the offset or pulls there with nothing unfinished, or
# until Spark's driver pulls.


#: The remark of a pull that is sent to the offset of a reset.
OFFSET_RESET = "OFFSET_RESET"

_COMMIT = int(PullFlag.COMMIT_OFFSET)


def is_there(header: PullMessageRequest, reset: int) -> bool:
    """Whether the client of a pull already is at the offset of a reset, with nothing unfinished.

    Clients stop for ten seconds when they are sent elsewhere. One that queried its progress after
    the reset and begins there need not be sent. One that pulls there but reports less still has
    older messages to consume, and one that does not report may not know of the reset.
    """
    if header.queue_offset != reset:
        return False
    is_reported = bool(header.sys_flag & _COMMIT) and header.commit_offset == reset
    return is_reported or not (reset or header.keep_reset)


# Lag. Apache shows it for groups that are online, and for the topics that they subscribe to. Here
# it is shown for all topics in which a group has progress, because a group that is gone is what
# alarms are for, and for its retry topic in any case. Messages that were deleted unread do not
# count.


class Lag(NamedTuple):
    """The lag of a group in a topic. Times are those of the oldest message, in milliseconds."""

    messages: int = 0  #: not consumed
    latency_ms: int = 0  #: of those
    in_flight: int = 0  #: pulled and not consumed
    ready: int = 0  #: not pulled
    queueing_ms: int = 0  #: of those


def consumed_topics(parts: Parts) -> Iterator[tuple[str, TopicConfig]]:
    """Every group with each topic that it is behind in, or could be.

    Broadcasting groups are left out: only their members know their progress. The tables may change
    between two pairs.
    """
    for group in [config.group_name for config in parts.groups]:
        if parts.consumers.model(group) is MessageModel.BROADCASTING:
            continue
        if parts.consumers.is_online(group):
            topics = sorted(parts.consumers.subscriptions(group))
        else:
            topics = topics_behind(parts, group)
        for name in topics:
            topic = parts.topics.get(name)
            if topic is not None:
                yield group, topic


def topics_behind(parts: Parts, group: str) -> list[str]:
    """The topics that a group has progress in, then its retry topic if that is not empty.

    Their order is Apache's.
    """
    found = sorted(parts.progress.topics_of(group))
    retries = names.retry_topic(group)
    topic = None if retries in found else parts.topics.get(retries)
    if topic is not None and any(
        parts.store.max_offset(retries, queue_id) > parts.store.min_offset(retries, queue_id)
        for queue_id in range(topic.read_queue_nums)
    ):
        found.append(retries)
    return found


def next_offset(parts: Parts, group: str, topic: str, queue_id: int) -> int | None:
    """The next message of a group; None where only its members know where they begin."""
    consumed = parts.progress.query(topic, group, queue_id)
    if consumed is None and topic == names.retry_topic(group):
        return parts.store.min_offset(topic, queue_id)
    return consumed


def lag_of(parts: Parts, group: str, topic: TopicConfig, now_ms: int) -> Lag:
    """The lag of a group in a topic."""
    store, progress, name = parts.store, parts.progress, topic.topic_name
    messages = in_flight = ready = 0
    oldest_lagging = oldest_ready = now_ms
    for queue_id in range(max(topic.write_queue_nums, topic.read_queue_nums)):
        consumed = next_offset(parts, group, name, queue_id)
        if consumed is None:
            continue
        end = store.max_offset(name, queue_id)
        if consumed >= end:
            continue
        first = store.min_offset(name, queue_id)
        consumed = max(consumed, first)
        pulled = min(max(progress.pulled(name, group, queue_id) or 0, consumed), end)
        messages += end - consumed
        in_flight += pulled - consumed
        ready += end - pulled
        oldest_lagging = min(oldest_lagging, _time(parts, name, queue_id, consumed, now_ms))
        if pulled < end:
            oldest_ready = min(oldest_ready, _time(parts, name, queue_id, pulled, now_ms))
    return Lag(messages, now_ms - oldest_lagging, in_flight, ready, now_ms - oldest_ready)


def _time(parts: Parts, topic: str, queue_id: int, offset: int, now_ms: int) -> int:
    """When a message was stored; now, if that is not known."""
    stored = parts.store.store_time(topic, queue_id, offset)
    return stored if stored >= 0 else now_ms
