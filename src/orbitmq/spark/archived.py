"""Reads of what brokers have deleted, from an archive of their log files.

A queue is one sequence of offsets: below the first one that its broker has, the archive is read,
from there on the broker. `ArchivedCluster` answers a planner as if brokers had everything;
`ArchiveAlone` does so without any broker, for reads that end within the archive.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orbitmq.client.ranges.cluster import (
    Bounds,
    QueueResults,
    RangeCluster,
    Sample,
    TopicQueues,
)
from orbitmq.client.ranges.connections import OffsetsGone, QueueRange, RangeAccess
from orbitmq.client.routes import Queue
from orbitmq.errors import OrbitError
from orbitmq.names import is_application_topic
from orbitmq.spark.options import (
    AtOffset,
    AtOffsets,
    AtTimes,
    DataLost,
    OffsetSpec,
    OptionRefused,
    SourceError,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from orbitmq.archive import Catalog, Piece, QueueKey
    from orbitmq.spark.options import ReadOptions

log = logging.getLogger(__name__)

#: Bytes of one record batch, as for messages from brokers.
_BATCH_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class ArchivedRange:
    """A range of a queue that a task reads from the archive."""

    wanted: QueueRange
    pieces: tuple[Piece, ...]


def planning_cluster(read: ReadOptions, *, is_stream: bool = False) -> RangeCluster:
    """The cluster for a planner, with the archive if there is one. Raises `OptionRefused`."""
    retries, pause = read.offset_retries, read.offset_pause
    if read.archive is None:
        return RangeCluster(read.access, read.group, retries=retries, pause=pause)
    catalog = open_archive(read.archive)
    return ArchivedCluster(
        catalog, read.access, read.group, retries=retries, pause=pause, is_stream=is_stream
    )


def open_archive(place: str) -> Catalog:
    """Raises `OptionRefused`."""
    from orbitmq.archive import ArchiveError, Catalog, Location  # noqa: PLC0415  # imports Arrow

    try:
        return Catalog(Location(place))
    except (ArchiveError, OSError) as error:
        raise OptionRefused("archive", place, f"the place of an archive ({error})") from error


def _key(queue: Queue) -> QueueKey:
    return queue.topic, queue.broker, queue.id


def _queues(catalog: Catalog, topics: Iterable[str]) -> set[Queue]:
    wanted = set(topics)
    return {Queue(*key) for key in catalog.queues() if key[0] in wanted}


def _matching(catalog: Catalog, pattern: str) -> set[str]:
    matches = re.compile(pattern).fullmatch
    return {topic for topic in catalog.topics() if matches(topic) and is_application_topic(topic)}


class ArchivedCluster(RangeCluster):
    """A cluster whose queues begin where their archive begins.

    For a batch read, a broker that left the cluster has what its archive has. A stream goes on
    without it, because it may only be restarting. So a topic without any route is an error.
    """

    def __init__(
        self,
        catalog: Catalog,
        access: RangeAccess,
        group: str,
        *,
        retries: int,
        pause: float,
        is_stream: bool,
    ) -> None:
        super().__init__(access, group, retries=retries, pause=pause)
        self._is_stream = is_stream
        self.catalog = catalog
        #: The first offset of each queue at its broker.
        self._lows: dict[Queue, int] = {}
        #: Queues of brokers in no route.
        self._left: frozenset[Queue] = frozenset()

    def routed(self, topics: Iterable[str], *, refresh: bool = False) -> TopicQueues:
        found = super().routed(topics, refresh=refresh)
        if self._is_stream:
            return found
        # A queue that its broker lacks is of a topic that was created again, or made smaller.
        routed = {(queue.topic, queue.broker) for queue in found.queues}
        archived = _queues(self.catalog, {topic for topic, _ in routed})
        self._left = frozenset(each for each in archived if (each.topic, each.broker) not in routed)
        return TopicQueues(tuple(sorted({*found.queues, *self._left})), found.failures)

    def low_at_broker(self, queue: Queue) -> int | None:
        """Where a queue begins at its broker, as last asked; None without a broker."""
        return None if queue in self._left else self._lows.get(queue, 0)

    def _at_brokers(self, queues: Iterable[Queue]) -> list[Queue]:
        return [queue for queue in queues if queue not in self._left]

    def bounds(self, queues: Iterable[Queue], *, patient: bool = True) -> QueueResults[Bounds]:
        queues = tuple(queues)
        found = super().bounds(self._at_brokers(queues), patient=patient)
        self._lows |= {queue: each.low for queue, each in found.values.items()}
        try:
            self.catalog.refresh()
        except (OrbitError, OSError) as error:
            # What is known already stays true, and may be all that is needed.
            log.warning("the archive cannot be read now: %s", error)
        for queue in queues:
            archived, at_broker = self.catalog.bounds(_key(queue)), found.values.get(queue)
            if archived is None:
                continue
            if queue in self._left:
                found.values[queue] = Bounds(*archived)
            elif at_broker is not None and archived[0] < at_broker.low:
                found.values[queue] = Bounds(archived[0], at_broker.high)
        return found

    def ends(self, queues: Iterable[Queue], *, patient: bool = True) -> QueueResults[int]:
        queues = tuple(queues)
        found = super().ends(self._at_brokers(queues), patient=patient)
        for queue in self._left.intersection(queues):
            if (archived := self.catalog.bounds(_key(queue))) is not None:
                found.values[queue] = archived[1]
        return found

    def at_times(
        self, times: Mapping[Queue, float], *, patient: bool = True
    ) -> QueueResults[int | None]:
        at_brokers = {queue: times[queue] for queue in self._at_brokers(times)}
        found = super().at_times(at_brokers, patient=patient)
        unknown = [queue for queue in at_brokers if queue not in self._lows]
        if unknown:
            self.bounds(unknown, patient=patient)
        for queue, time in times.items():
            if queue in self._left:
                found.values[queue] = self.catalog.first_at(_key(queue), round(time * 1000))
            elif queue in found.values:
                at, low = found.values[queue], self._lows.get(queue, 0)
                if at is None or at <= low:
                    older = self.catalog.first_at(_key(queue), round(time * 1000))
                    found.values[queue] = older if older is not None and older < low else at
        return found

    def stored_at(self, offsets: Mapping[Queue, int]) -> QueueResults[int | None]:
        older = {queue: at for queue, at in offsets.items() if self._is_older(queue, at)}
        found = super().stored_at({q: at for q, at in offsets.items() if q not in older})
        for queue, at in older.items():
            found.values[queue] = self.catalog.stored_ms(_key(queue), at)
        return found

    def samples(self, offsets: Mapping[Queue, Iterable[int]]) -> QueueResults[list[Sample]]:
        wanted = {queue: tuple(each) for queue, each in offsets.items()}
        found = super().samples(
            {q: [at for at in each if not self._is_older(q, at)] for q, each in wanted.items()}
        )
        for queue, each in wanted.items():
            for at in each:
                if self._is_older(queue, at) and (known := self.catalog.sample(_key(queue), at)):
                    found.values.setdefault(queue, []).append(Sample(at, *known))
        return found

    def _is_older(self, queue: Queue, offset: int) -> bool:
        low = self.low_at_broker(queue)
        return low is None or offset < low

    # A broker that left has no progress of the group.

    def progress(
        self, queues: Iterable[Queue], *, patient: bool = True
    ) -> QueueResults[int | None]:
        queues = tuple(queues)
        found = super().progress(self._at_brokers(queues), patient=patient)
        found.values.update(dict.fromkeys(self._left.intersection(queues)))
        return found


class ArchiveAlone(ArchivedCluster):
    """The queues of an archive, without any broker: for reads that end within it."""

    def __init__(self, catalog: Catalog, error: OrbitError) -> None:
        """`error` says why no broker is asked."""
        self.catalog = catalog
        self._error = error

    def topics(self, pattern: str) -> tuple[str, ...]:
        return tuple(sorted(_matching(self.catalog, pattern)))

    def routed(self, topics: Iterable[str], *, refresh: bool = False) -> TopicQueues:
        topics = tuple(topics)
        known = self.catalog.topics()
        failures = {topic: self._error for topic in topics if topic not in known}
        return TopicQueues(tuple(sorted(_queues(self.catalog, topics))), failures)

    def low_at_broker(self, queue: Queue) -> int | None:
        return None

    def bounds(self, queues: Iterable[Queue], *, patient: bool = True) -> QueueResults[Bounds]:
        found = {queue: self.catalog.bounds(_key(queue)) for queue in queues}
        return QueueResults(
            {queue: Bounds(*each) for queue, each in found.items() if each is not None},
            {queue: self._error for queue, each in found.items() if each is None},
        )

    def ends(self, queues: Iterable[Queue], *, patient: bool = True) -> QueueResults[int]:
        found = self.bounds(queues)
        return QueueResults(
            {queue: each.high for queue, each in found.values.items()}, found.failures
        )

    def at_times(
        self, times: Mapping[Queue, float], *, patient: bool = True
    ) -> QueueResults[int | None]:
        found: QueueResults[int | None] = QueueResults()
        # Of every broker: it is not known which ones have the topic.
        until = self.catalog.complete_until_ms()
        for queue, time in times.items():
            if until < time * 1000:
                found.failures[queue] = self._error
            else:
                found.values[queue] = self.catalog.first_at(_key(queue), round(time * 1000))
        return found

    def progress(
        self, queues: Iterable[Queue], *, patient: bool = True
    ) -> QueueResults[int | None]:
        return QueueResults({}, dict.fromkeys(queues, self._error))

    def check_end(self, end: OffsetSpec) -> None:
        """Raise the error unless the archive alone can tell where this end is."""
        bounds = {Queue(*key): self.catalog.bounds(key) for key in self.catalog.queues()}
        match end:
            case AtTimes():
                return
            case AtOffsets(offsets):
                is_known = all(
                    at >= 0 and (each := bounds.get(queue)) is not None and at <= each[1]
                    for queue, at in offsets.items()
                )
            case AtOffset(offset):
                is_known = all(each is not None and offset <= each[1] for each in bounds.values())
            case _:
                is_known = False
        if not is_known:
            raise self._error


def may_do_alone(error: OrbitError) -> bool:
    """Whether an error of planning means that brokers or name servers cannot be reached."""
    return error.retriable and not isinstance(error, SourceError)


# ---- dividing a read


def divided(
    ranges: Iterable[QueueRange], cluster: RangeCluster, *, fail: bool
) -> tuple[tuple[QueueRange, ...], tuple[ArchivedRange, ...]]:
    """What a task reads from brokers, and what from the archive.

    Raises `DataLost` with `fail` if a part is in neither; otherwise it is left out.
    """
    if not isinstance(cluster, ArchivedCluster):
        return tuple(ranges), ()
    at_brokers, archived = [], []
    problems: list[str] = []
    for each in ranges:
        low = cluster.low_at_broker(each.queue)
        border = each.end if low is None else min(max(low, each.start), each.end)
        older = QueueRange(each.queue, each.start, border)
        if len(older):
            archived.append(_archived(older, cluster.catalog, problems))
        if border < each.end:
            at_brokers.append(QueueRange(each.queue, border, each.end))
    if problems and fail:
        raise DataLost(problems)
    for problem in problems:
        log.warning("messages are gone and are skipped: %s", problem)
    return tuple(at_brokers), tuple(archived)


def _archived(wanted: QueueRange, catalog: Catalog, problems: list[str]) -> ArchivedRange:
    key = _key(wanted.queue)
    problems += [
        f"{wanted.queue} has the offsets {start} to {end} (exclusive) neither in the archive nor "
        "at its broker"
        for start, end in catalog.gaps(key, wanted.start, wanted.end)
    ]
    return ArchivedRange(wanted, tuple(catalog.pieces(key, wanted.start, wanted.end)))


def archived_since(
    gone: OffsetsGone, left: Iterable[QueueRange], place: str | None
) -> ArchivedRange | None:
    """What a broker has deleted since a read was planned; None if the archive lacks it.

    `left` are the ranges that are still to be read.
    """
    wanted = next((each for each in left if each.queue == gone.wanted.queue), gone.wanted)
    if place is None or not wanted.start < gone.low:
        return None
    older = QueueRange(wanted.queue, wanted.start, min(gone.low, wanted.end))
    catalog, problems = open_archive(place), list[str]()
    found = _archived(older, catalog, problems)
    return None if problems else found


def archived_batches(
    each: ArchivedRange, place: str, columns: Iterable[str]
) -> Iterator[pa.RecordBatch]:
    """The messages of a range, in order. Raises `ArchiveError`."""
    from orbitmq.archive import Location, read_piece  # noqa: PLC0415  # imports Arrow

    location, wanted = Location(place), tuple(columns)
    for piece in each.pieces:
        yield from read_piece(location, piece, wanted, batch_bytes=_BATCH_BYTES)
