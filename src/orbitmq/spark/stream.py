"""The driver of a stream: where batches begin and end, and which offsets are committed.

Invariants: Spark's offset log is the only truth; the group's offset at the brokers is written after
it. A batch's end says where the stream and new queues started, so a repeated batch reads the same
messages. Marks, which identify the last message read of a queue, are renewed only after a check, so
that a queue with other messages is noticed.

Trap: only `latestOffset(start, ...)` reports the last finished batch in time; offsets are committed
there. See docs/internals/spark-progress.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from orbitmq.client.ranges.cluster import (
    Bounds,
    CommitResult,
    QueueResults,
    RangeCluster,
    Sample,
    TopicQueues,
)
from orbitmq.client.ranges.connections import QueueRange
from orbitmq.client.routes import Queue
from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import NoRoute, OrbitError
from orbitmq.spark.archived import ArchivedRange, divided, planning_cluster
from orbitmq.spark.options import (
    AtOffsets,
    AtTimes,
    CheckpointOfOtherTopics,
    DataLost,
    GroupProgress,
    Json,
    Latest,
    Mark,
    OffsetSpec,
    OptionRefused,
    Positions,
    SourceError,
    StreamOptions,
    Subscription,
    from_json,
    is_starting,
    marks_in,
    new_queue_starts,
    reread_from,
    since_in,
    starting,
    starts_here,
    stream_start,
    to_json,
)
from orbitmq.spark.plan import (
    ByteEstimate,
    TriggerGate,
    available,
    batch_ends,
    between,
    clamp_to_bounds,
    ends_within_bytes,
    partition,
    resolve,
    subscribed_queues,
)

log = logging.getLogger(__name__)

#: Seconds before a failed commit is tried again.
_COMMIT_AGAIN: Final = 1.0
#: Seconds between two checks that brokers still have the committed offsets: one that was killed
#: restarts with what it had persisted.
_CHECK_COMMITS: Final = 30.0
#: Seconds between two checks of the marks.
_CHECK_MARKS: Final = 30.0
#: Seconds between two checks for other members of the group.
_CHECK_MEMBERS: Final = 30.0
#: Messages of a queue that are looked at, to know the bytes of a batch.
_SAMPLES: Final = 8
#: How often as many more are, where other sizes may hide.
_CLOSER_LOOKS: Final = 2


class StreamDriver:
    """A running stream. Spark makes one call after the other."""

    def __init__(
        self,
        options: StreamOptions,
        *,
        clock: Clock | None = None,
        heads: BoundsSettings | None = None,
    ) -> None:
        read = options.read
        self._options = options
        clock = clock or SystemClock()
        self._monotonic = clock.monotonic
        self.cluster = planning_cluster(read, is_stream=True)
        self._bounds_cache = BoundsCache(
            self.cluster,
            read.subscription,
            heads or BoundsSettings(route=read.route_life),
            clock,
        )
        self._late = NewQueues(read.start, self.cluster, clock)
        start = read.start
        self._since_ms = (
            int(start.time * 1000)
            if isinstance(start, AtTimes) and start.is_relative and start.time is not None
            else None
        )
        #: The last known average size of a queue's messages.
        self._sizes: dict[Queue, int] = {}
        self._gate = TriggerGate(options.min_offsets, options.max_delay)
        self._initial: Json | None = None
        self._resolved: dict[Queue, int] | None = None
        #: The end of a run that takes only what is there when it starts.
        self._target: dict[Queue, Bounds] | None = None
        self._last_start: Json | None = None
        self._marks_checked_at = float("-inf")
        #: Queues whose marks were right then.
        self._same: frozenset[Queue] = frozenset()
        self._marks_renewed_at = float("-inf")
        self._assigned = frozenset(read.subscription.queues)
        #: Topics and queues of the checkpoint that the query no longer reads.
        self._given_up: tuple[str, ...] = ()
        self._reported: dict[Queue, int] = {}
        #: Those that brokers may have lost.
        self._doubtful: set[Queue] = set()
        self._check_commits_at = float("-inf")
        self._report_pauses = BrokerBackoff(_COMMIT_AGAIN)
        self._joined: frozenset[str] = frozenset()
        self._check_members_at = float("-inf")
        self._others: tuple[str, ...] = ()

    def start(self) -> None:
        self.cluster.start()

    def stop(self) -> None:
        """Leave the group. May be called again; nothing is lost if it is never called."""
        self.cluster.stop()

    # ---- called by Spark

    def initial_offset(self) -> Json:
        """The start of the stream: always the same for one query."""
        if self._initial is None:
            self._initial = starting(self._options.read.start)
        return self._initial

    def latest_offset(self, start: Json, *, limit: int | None, take_all: bool = False) -> Json:
        """The end of the batch that begins at `start`; `start` itself when there is none.

        The batch takes at most `limit` messages. `take_all` means that it is the only one.
        """
        is_new_start = start != self._last_start
        self._last_start = start
        if is_starting(start):
            return self._first_batch_end(take_all=take_all)
        positions, marks = self._own(start), marks_in(start)
        if self._is_draining():
            self._report(positions)
            return start
        is_look = self._is_time_to_check()
        again = self._begun_again(positions, marks) if is_look else {}
        self._report({queue: at for queue, at in positions.items() if queue not in again})
        bounds = self._bounds(fresh=is_new_start or bool(again), take_all=take_all)
        # Reports missing data before the batch.
        found = clamp_to_bounds(
            positions | again, bounds, fail=self._options.read.fail_on_data_loss
        )
        self._check_brokers(positions)
        late = {q: each for q, each in bounds.items() if q not in found and self._is_taken(q)}
        since = since_in(start)
        begins = self._late.begins(late, since)
        ends = self._ends(found, bounds, limit, take_all=take_all) | {
            queue: max(at, late[queue].high) if take_all else at for queue, at in begins.items()
        }
        if ends == positions and not again:
            return start
        if not is_look and self._monotonic() - self._marks_renewed_at >= _CHECK_MARKS:
            # Marks are renewed only after a check.
            is_look = True
            if self._begun_again(positions, marks):
                self._marks_checked_at = float("-inf")
                return self.latest_offset(start, limit=limit, take_all=take_all)
        kept = {queue: mark for queue, mark in marks.items() if queue not in again}
        moved = {queue for queue, at in ends.items() if at != positions.get(queue)}
        wanted = {queue for queue in moved if queue not in kept}
        if is_look:
            self._marks_renewed_at = self._monotonic()
            wanted |= self._same
        fresh = self._marked({queue: ends[queue] for queue in wanted if queue in ends})
        marks = {queue: mark for queue, mark in (kept | fresh).items() if queue in ends}
        return to_json(ends, marks=marks, begins=begins, again=again, since_ms=since)

    def latest_known(self) -> Json | None:
        """The known ends of queues, for the lag; asks no broker."""
        bounds = self._bounds_cache.bounds()
        return to_json({queue: each.high for queue, each in bounds.items()}) if bounds else None

    def ends(self) -> Json:
        """The present ends of all queues, for a batch with an unknown start; raises if one fails.

        If it is the first batch, the stream starts where the options say now. If it is not, a
        relative start was another time, so the end does not say one.
        """
        ends = self.cluster.ends(self._bounds_cache.queues).or_raise()
        marks = self._marked(ends)
        if isinstance(self._options.read.start, Latest):
            return starts_here(ends, marks=marks)
        try:
            begin = self._begin()
        except SourceError as error:
            # The start options do not matter to a stream that has started.
            log.debug("the start of a new stream is not known: %s", error)
            return to_json(ends, marks=marks)
        begins = {q: min(at, ends[q]) for q, at in begin.items() if q in ends}
        return to_json(ends, marks=marks, begins=begins)

    def take_only_what_is_there(self) -> None:
        """Let no batch go beyond the present ends of the queues."""
        self._target = self.cluster.bounds(self._bounds_cache.queues).or_raise()

    def partitions(self, start: Json, end: Json) -> list[tuple[QueueRange, ...]]:
        """The ranges of a batch, by task."""
        read = self._options.read
        ranges = list(self._ranges(start, end))
        return partition(ranges, min_partitions=read.min_partitions, max_records=read.max_records)

    def divided(
        self, part: tuple[QueueRange, ...]
    ) -> tuple[tuple[QueueRange, ...], tuple[ArchivedRange, ...]]:
        """What a task reads from brokers, and what from the archive."""
        return divided(part, self.cluster, fail=self._options.read.fail_on_data_loss)

    def finished(self, end: Json) -> None:
        """Commit a finished batch."""
        if not is_starting(end):
            self._report(self._own(end))

    # ---- whose checkpoint it is

    def _own(self, offset: Json) -> dict[Queue, int]:
        """The positions of an offset, without topics and queues that are no longer read.

        These are neither committed, since others may continue there, nor kept: one batch with
        `failOnDataLoss=false` drops them.
        """
        read = self._options.read
        positions = from_json(offset)
        topics = dict.fromkeys(queue.topic for queue in positions)
        others = tuple(topic for topic in topics if not read.subscription.names(topic))
        if others and len(others) == len(topics):
            raise CheckpointOfOtherTopics(others, read.subscription.text)
        own = {
            queue: at
            for queue, at in positions.items()
            if (queue in self._assigned if self._assigned else queue.topic not in others)
        }
        if len(own) == len(positions):
            return own
        left = [str(queue) for queue in positions if queue not in own and queue.topic not in others]
        given_up = (*(f"topic {topic}" for topic in others), *(f"queue {each}" for each in left))
        if read.fail_on_data_loss:
            raise DataLost(
                f"{each} is in the checkpoint, and the query no longer reads it"
                for each in given_up
            )
        if given_up != self._given_up:
            self._given_up = given_up
            log.warning("in the checkpoint, and no longer read: %s", ", ".join(given_up))
        return own

    # ---- the end of a batch

    def _begin(self) -> dict[Queue, int]:
        if self._resolved is None:
            self._resolved = resolve(
                self._options.read.start,
                self._bounds_cache.queues,
                self.cluster,
                seen=self._target,
            )
        return self._resolved

    def _bounds(self, *, fresh: bool = False, take_all: bool = False) -> dict[Queue, Bounds]:
        """The known bounds of every queue.

        A run that ends must not leave out the messages of a broker that does not answer. In a run
        of one batch all brokers must answer; in others all answered when it started, and those
        bounds are used for a broker that is silent now.
        """
        if take_all:
            return self.cluster.bounds(self._bounds_cache.queues).or_raise()
        return (self._target or {}) | self._bounds_cache.bounds(fresh=fresh)

    def _first_batch_end(self, *, take_all: bool) -> Json:
        begin, read = self._begin(), self._options.read
        self._marks_checked_at = self._marks_renewed_at = self._monotonic()
        # A stream that starts at the end takes nothing, even if messages have arrived since.
        if isinstance(read.start, Latest):
            return starts_here(begin, marks=self._marked(begin))
        since = self._since_ms
        bounds = self._bounds(fresh=True, take_all=take_all)
        found = begin
        if isinstance(read.start, AtOffsets | GroupProgress):
            # Other starts mean existing offsets.
            found = clamp_to_bounds(begin, bounds, fail=read.fail_on_data_loss)
        if not take_all:
            return starts_here(found, marks=self._marked(found), since_ms=since)
        ends = {queue: max(at, bounds[queue].high) for queue, at in found.items()}
        return to_json(ends, marks=self._marked(ends), begins=found, since_ms=since)

    def _ends(
        self,
        positions: dict[Queue, int],
        bounds: dict[Queue, Bounds],
        limit: int | None,
        *,
        take_all: bool,
    ) -> dict[Queue, int]:
        highs = {
            queue: self._limited(queue, each.high)
            for queue, each in bounds.items()
            if queue in positions and self._is_taken(queue)
        }
        waiting = sum(max(0, high - positions[queue]) for queue, high in highs.items())
        is_open = take_all or self._target is not None
        if not is_open and not self._gate.opens(waiting, self._monotonic()):
            return positions
        options = self._options
        ends = batch_ends(positions, highs, limit, min_rows=options.min_rows)
        if options.max_bytes is None or take_all:
            return ends
        # The part that is left is sampled more closely.
        cut = self._within_bytes(positions, ends, options.max_bytes)
        return cut if cut == ends else self._within_bytes(positions, cut, options.max_bytes)

    def _within_bytes(
        self, positions: dict[Queue, int], ends: dict[Queue, int], limit: int
    ) -> dict[Queue, int]:
        """The ends of a batch of about `limit` bytes, by samples of its messages."""
        spans = {q: (positions[q], end) for q, end in ends.items() if end > positions.get(q, end)}
        found: dict[Queue, list[Sample]] = {queue: [] for queue in spans}

        def look(offsets: Mapping[Queue, Iterable[int]]) -> dict[Queue, ByteEstimate]:
            for queue, samples in self.cluster.samples(offsets).values.items():
                found[queue] += samples
                if samples:
                    self._sizes[queue] = sum(each.size for each in samples) // len(samples)
            # For a queue whose broker does not answer.
            usual = max((self._sizes[queue] for queue in spans if queue in self._sizes), default=1)
            return {
                queue: ByteEstimate(*span, found[queue], usual=self._sizes.get(queue, usual))
                for queue, span in spans.items()
            }

        estimates = look({queue: {low, high - 1} for queue, (low, high) in spans.items()})
        most = [each.most for each in estimates.values()]
        if sum(each or 0 for each in most) <= limit and None not in most:
            return ends
        estimates = look({q: between(low, high - 1, _SAMPLES) for q, (low, high) in spans.items()})
        for _ in range(_CLOSER_LOOKS):
            doubts = {queue: each.doubts(_SAMPLES) for queue, each in estimates.items()}
            estimates = look({queue: offsets for queue, offsets in doubts.items() if offsets})
        return ends_within_bytes(positions, ends, estimates, limit, min_rows=self._options.min_rows)

    def _is_draining(self) -> bool:
        """Whether the stream should start no further batch, so that it can be stopped.

        Spark's own stop interrupts the running batch.
        """
        drain_file = self._options.drain_file
        return drain_file is not None and drain_file.exists()

    def _is_taken(self, queue: Queue) -> bool:
        return self._target is None or queue in self._target

    def _limited(self, queue: Queue, high: int) -> int:
        return high if self._target is None else min(high, self._target[queue].high)

    def _check_brokers(self, positions: dict[Queue, int]) -> None:
        """Fail a run that takes what is there if a broker of the checkpoint has left the routes."""
        if self._target is None or not self._options.read.fail_on_data_loss:
            return
        present = {(queue.topic, queue.broker) for queue in self._target}
        problems = [
            f"{queue} was read up to offset {at}, and its broker is in no route now"
            for queue, at in sorted(positions.items())
            if (queue.topic, queue.broker) not in present
        ]
        if problems:
            raise DataLost(problems)

    # ---- the ranges of a batch

    def _ranges(self, start: Json, end: Json) -> Iterator[QueueRange]:
        """The ranges between two offsets of the stream."""
        read = self._options.read
        ends = self._own(end)
        if is_starting(start):
            begin = self._begin_of(end)
            positions = {queue: min(begin.get(queue, at), at) for queue, at in ends.items()}
        else:
            positions = new_queue_starts(end) | self._own(start) | reread_from(end)
        if self._marks_checked_at == float("-inf"):
            # A batch that was planned before a restart, or whose end does not say where it starts.
            known, reread = marks_in(start), reread_from(end)
            marks = marks_in(end) | {q: mark for q, mark in known.items() if q not in reread}
            again = self._begun_again(positions, marks)
            positions |= {queue: min(at, positions[queue]) for queue, at in again.items()}
            if again:
                # Its end has the old marks, which the next batch must notice as well.
                self._marks_checked_at = float("-inf")
        bounds = self._bounds()
        wanted: list[QueueRange] = []
        problems: list[str] = []
        for queue, to in sorted(ends.items()):
            low = bounds[queue].low if queue in bounds else 0
            at = positions.get(queue, min(low, to))
            if to < at:
                # Planned and logged where losses were allowed.
                problems.append(f"{queue} was read up to offset {at} and now ends at {to}")
                continue
            wanted.append(QueueRange(queue, at, to))
        if problems and read.fail_on_data_loss:
            raise DataLost(problems)
        yield from available(wanted, bounds, fail=read.fail_on_data_loss)

    def _begin_of(self, end: Json) -> dict[Queue, int]:
        """The start of the stream whose first batch has this end."""
        begin = stream_start(end)
        if begin is not None:
            return begin
        # Logged by an old version, which used the options at each call. Its first batch from the
        # end took nothing.
        return from_json(end) if isinstance(self._options.read.start, Latest) else self._begin()

    # ---- whether queues are still the same

    def _is_time_to_check(self) -> bool:
        is_over = self._monotonic() - self._marks_checked_at >= _CHECK_MARKS
        return self._bounds_cache.take_changed() or is_over

    def _begun_again(self, positions: Positions, marks: Mapping[Queue, Mark]) -> dict[Queue, int]:
        """Check marks: the offsets from which changed queues are read. Raises `DataLost`."""
        known = {q: mark for q, mark in marks.items() if q in positions}
        asked = {q: mark.offset for q, mark in known.items() if q not in self._bounds_cache.silent}
        stored = self.cluster.stored_at(asked).values
        suspects = [queue for queue, at in stored.items() if at != known[queue].stored_ms]
        bounds = self._bounds_cache.ask_again(suspects) if suspects else {}
        changed = [queue for queue in suspects if stored[queue] is not None]
        # In the others the message has expired, or lies beyond the end of a queue that was cut.
        cut = [q for q in bounds if q not in changed and bounds[q].high <= known[q].offset]
        self._marks_checked_at = self._monotonic()
        self._same = frozenset(stored.keys() - {*changed, *cut})
        if self._options.read.fail_on_data_loss:
            if changed:
                raise DataLost(
                    f"{queue} was read up to offset {positions[queue]} and has another message at "
                    f"offset {known[queue].offset} now: it was created again, or has lost its end"
                    for queue in sorted(changed)
                )
            return {}  # planning reports a queue that was cut
        again = self._younger({queue: known[queue] for queue in (*changed, *cut)})
        for queue in changed:
            again.setdefault(queue, bounds[queue].low if queue in bounds else 0)
        for queue, at in sorted(again.items()):
            log.warning(
                "%s was created again, or has lost its end, since it was read up to offset %d; it "
                "is read from offset %d, where younger messages begin",
                *(queue, positions[queue], at),
            )
        return again

    def _younger(self, marks: Mapping[Queue, Mark]) -> dict[Queue, int]:
        """The first offset of each queue that was stored after its mark, if any."""
        times = {queue: (mark.stored_ms + 1) / 1000 for queue, mark in marks.items()}
        found = self.cluster.at_times(times).or_raise()
        return {queue: at for queue, at in found.items() if at is not None}

    def _marked(self, ends: Positions) -> dict[Queue, Mark]:
        """The marks of queues that are read up to these ends, as far as brokers answer."""
        last = {
            q: at - 1 for q, at in ends.items() if at > 0 and q not in self._bounds_cache.silent
        }
        stored = self.cluster.stored_at(last).values if last else {}
        return {q: Mark(last[q], at) for q, at in stored.items() if at is not None}

    # ---- the group

    def _report(self, positions: dict[Queue, int]) -> None:
        """Commit finished offsets. A failure is logged and tried again."""
        if not self._options.commit_progress:
            return
        self._join_group(positions)
        now = self._monotonic()
        if now >= self._check_commits_at:
            self._check_commits_at = now + _CHECK_COMMITS
            self._doubtful.update(self._reported)
        self._commit(
            {queue: at for queue, at in positions.items() if self._reported.get(queue) != at},
            self.cluster.report,
        )
        self._commit(
            {queue: at for queue, at in positions.items() if queue in self._doubtful},
            self.cluster.repeat,
        )

    def _commit(
        self, positions: dict[Queue, int], commit: Callable[[Mapping[Queue, int]], CommitResult]
    ) -> None:
        """Commit positions at brokers that are not paused, by `commit`."""
        now = self._monotonic()
        due = {q: at for q, at in positions.items() if self._report_pauses.is_over(q.broker, now)}
        if not due:
            return
        outcome = commit(due)
        failures = outcome.failures
        taken = {queue: at for queue, at in due.items() if queue not in failures}
        self._reported |= taken
        self._doubtful -= taken.keys()
        self._report_pauses.note(
            (queue.broker for queue in due),
            longest_waits(failures, outcome.waited),
            self._monotonic(),
        )
        if failures:
            queue, reason = next(iter(failures.items()))
            log.warning("offsets of %d queues not committed: %s: %s", len(failures), queue, reason)

    def _join_group(self, positions: dict[Queue, int]) -> None:
        topics = frozenset(queue.topic for queue in positions)
        now = self._monotonic()
        try:
            if topics - self._joined:
                self.cluster.join(topics, self._options.read.wanted)
                self._joined |= topics
            if topics and now >= self._check_members_at:
                self._check_members_at = now + _CHECK_MEMBERS
                self._warn_of(self.cluster.others(min(topics)))
        except OrbitError as error:
            self._check_members_at = self._monotonic() + _CHECK_MEMBERS
            log.warning("brokers do not answer about the group: %s", error)

    def _warn_of(self, others: tuple[str, ...]) -> None:
        if others and others != self._others:
            log.warning(
                "group %s has other members (%s): this stream reads all queues with offsets of its "
                "own, and both commit for the group; give the stream a group of its own",
                self._options.read.group,
                ", ".join(others[:5]),
            )
        self._others = others


#: Brokers are asked again after this part of the time without a change.
_PART: Final = 0.1
#: The longest pause of a broker as a multiple of the time that it took to fail; doubles from 1.
_MOST_TIMES: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundsSettings:
    """Seconds between two questions to brokers."""

    idle: float = 0.25  #: for the ends of queues, without changes
    busy: float = 0.03  #: the same shortly after a change
    lows: float = 30.0  #: for the starts of queues
    route: float = 30.0  #: for routes
    #: For anything, to a broker that did not answer; longer if it took long to fail.
    silence: float = 5.0


class BoundsCache:
    """The last known bounds of a subscription's queues.

    Spark asks an idle stream about 80 times a second; brokers are asked a few times a second, and
    immediately after a batch. The queues of a broker that does not answer, or of a topic without a
    route, stay known, and the stream continues with the others.
    """

    def __init__(
        self,
        cluster: RangeCluster,
        subscription: Subscription,
        settings: BoundsSettings,
        clock: Clock,
    ) -> None:
        self._cluster = cluster
        self._subscription = subscription
        self._settings = settings
        self._monotonic = clock.monotonic
        self._queues: tuple[Queue, ...] = ()
        self._known: dict[Queue, Bounds] = {}
        self._routed_at = self._asked_at = self._lows_at = float("-inf")
        self._changed_at = float("-inf")
        self._silent: frozenset[Queue] = frozenset()
        self._has_changed = False
        self._pauses = BrokerBackoff(settings.silence)

    @property
    def queues(self) -> tuple[Queue, ...]:
        """The queues of the subscription; asks for routes that are too old."""
        if self._monotonic() - self._routed_at < self._settings.route:
            return self._queues
        found = self._routed()
        if added := sorted(set(found) - set(self._queues)):
            log.info("queues found", extra={"queues": ", ".join(map(str, added))})
            self._queues = tuple(sorted({*self._queues, *added}))
        # After the answer, so that a slow name server is asked no more often.
        self._routed_at = self._monotonic()
        return self._queues

    def _routed(self) -> tuple[Queue, ...]:
        """The queues of the present routes."""
        is_first = self._routed_at == float("-inf")
        try:
            found = subscribed_queues(self._cluster, self._subscription, refresh=not is_first)
            failures = list(found.failures.values())
        except OrbitError as error:
            found, failures = TopicQueues(), [error]
        for failure in failures:
            # While its only broker restarts, a topic has no route, or one without assigned queues.
            is_away = isinstance(failure, NoRoute | OptionRefused)
            if not self._queues or not (failure.retriable or is_away):
                raise failure
            log.warning("the route stays as it was: %s", failure)
        return found.queues

    def bounds(self, *, fresh: bool = False) -> dict[Queue, Bounds]:
        """The known bounds of every queue; asks brokers if `fresh`, or if it is time."""
        queues = self.queues
        now = self._monotonic()
        if fresh or now - self._asked_at >= self._pause(now):
            before = dict(self._known)
            self._ask(queues, now)
            if self._known != before:
                self._changed_at = now
        return dict(self._known)

    @property
    def silent(self) -> frozenset[Queue]:
        """The queues whose brokers did not answer the last question."""
        return self._silent

    def ask_again(self, queues: Iterable[Queue]) -> dict[Queue, Bounds]:
        """Ask for the present bounds of some queues."""
        found = self._cluster.bounds(queues).values
        self._known.update(found)
        return found

    def take_changed(self) -> bool:
        """Whether, since the last call, a queue became shorter or answered after a silence.

        Such a queue may have been created again, or have lost its end.
        """
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def _pause(self, now: float) -> float:
        """The pause between questions, which grows with the time since the last change."""
        settings = self._settings
        return min(max((now - self._changed_at) * _PART, settings.busy), settings.idle)

    def _ask(self, queues: tuple[Queue, ...], now: float) -> None:
        self._asked_at = now
        asked = [each for each in queues if self._pauses.is_over(each.broker, now)]
        unknown = set(asked) - self._known.keys()
        if unknown or now - self._lows_at >= self._settings.lows:
            self._lows_at = now
            found = self._cluster.bounds(asked, patient=False)
            self._known.update(found.values)
            answers: list[QueueResults[Bounds] | QueueResults[int]] = [found]
        else:
            ends = self._cluster.ends(asked, patient=False)
            # A shorter queue may have another start as well.
            cut = {queue for queue, end in ends.values.items() if end < self._known[queue].high}
            answers = [ends]
            for queue in ends.values.keys() - cut:
                self._known[queue] = Bounds(self._known[queue].low, ends.values[queue])
            if cut:
                self._has_changed = True
                found = self._cluster.bounds(cut, patient=False)
                self._known.update(found.values)
                answers.append(found)
        self._note(asked, answers)

    def _note(
        self, asked: list[Queue], answers: list[QueueResults[Bounds] | QueueResults[int]]
    ) -> None:
        failures = {queue: why for each in answers for queue, why in each.failures.items()}
        waited = {queue: wait for each in answers for queue, wait in each.waited.items()}
        silent = (self._silent - set(asked)) | failures.keys()
        for queue in sorted(silent - self._silent):
            log.warning(
                "%s does not answer, and the stream continues without it: %s",
                queue,
                failures[queue],
            )
        for queue in sorted(self._silent - silent):
            log.info("queue answers again", extra={"queue": str(queue)})
            self._has_changed = True
        self._pauses.note(
            (queue.broker for queue in asked),
            longest_waits(failures, waited),
            self._monotonic(),
        )
        self._silent = frozenset(silent)


class BrokerBackoff:
    """When brokers that did not answer are asked again. Does not read the clock.

    A broker that refuses costs nothing and is tried again soon. One that hangs delays all others,
    so its pause doubles up to eight times the wait: it takes at most a ninth of the time.
    """

    def __init__(self, least: float) -> None:
        """`least` is the shortest pause in seconds."""
        self._least = least
        self._not_before: dict[str, float] = {}
        #: The next pause as a multiple of the wait.
        self._times: dict[str, float] = {}

    def is_over(self, broker: str, now: float) -> bool:
        """Whether a broker may be asked."""
        return self._not_before.get(broker, now) <= now

    def note(self, asked: Iterable[str], waits: Mapping[str, float], now: float) -> None:
        """Pause those of the `asked` brokers that did not answer.

        These are in `waits`, each with the seconds that its own questions took.
        """
        for broker in set(asked):
            if broker not in waits:
                self._times.pop(broker, None)
                continue
            wait, times = waits[broker], self._times.get(broker, 1.0)
            self._not_before[broker] = now + max(self._least, times * wait)
            # A short wait never changes the pause, and must not count for a later one.
            if wait * _MOST_TIMES > self._least:
                self._times[broker] = min(2 * times, _MOST_TIMES)


def longest_waits(silent: Iterable[Queue], waited: Mapping[Queue, float]) -> dict[str, float]:
    """The longest wait for a silent queue, by broker."""
    found: dict[str, float] = {}
    for queue in silent:
        found[queue.broker] = max(found.get(queue.broker, 0.0), waited.get(queue, 0.0))
    return found


#: Seconds before brokers are asked again for the start of a new queue.
_AGAIN: Final = 1.0


class NewQueues:
    """The starts of queues that appear after the stream's start.

    They are new, or their broker was away. A stream that started at a time or at the group's offset
    starts them there as well, otherwise at their first message. For a stream that started at the
    end this may bring older messages; the present end could leave out new ones, which is worse. A
    relative time is the one of the first run, which the offsets have; without it, as in those of
    PySpark 4.1 after a restart, all messages are read.
    """

    def __init__(self, place: OffsetSpec, cluster: RangeCluster, clock: Clock) -> None:
        self._place = place
        self._cluster = cluster
        self._monotonic = clock.monotonic
        self._not_before = float("-inf")
        self._unanswered: frozenset[Queue] = frozenset()

    def begins(self, bounds: Mapping[Queue, Bounds], since_ms: int | None) -> dict[Queue, int]:
        """The starts of queues with these bounds, without those whose brokers do not answer.

        A stream with a relative start began at `since_ms`.
        """
        match self._place:
            case AtTimes(is_relative=True) as place if bounds and since_ms is not None:
                return self._at_times(replace(place, time=since_ms / 1000), bounds)
            case AtTimes(is_relative=False) as place if bounds:
                return self._at_times(place, bounds)
            case GroupProgress() if bounds:
                return self._at_progress(bounds)
            case _:
                return {queue: each.low for queue, each in bounds.items()}

    def _at_times(self, place: AtTimes, bounds: Mapping[Queue, Bounds]) -> dict[Queue, int]:
        times = {queue: place.times.get(queue, place.time) for queue in bounds}
        begins = {queue: bounds[queue].low for queue, time in times.items() if time is None}
        dated = {queue: time for queue, time in times.items() if time is not None}
        if self._may_ask():
            for queue, at in self._heard(self._cluster.at_times(dated, patient=False)).items():
                # The end was asked for before, so everything up to it is older than the time.
                begins[queue] = bounds[queue].high if at is None else at
        return begins

    def _at_progress(self, bounds: Mapping[Queue, Bounds]) -> dict[Queue, int]:
        begins: dict[Queue, int] = {}
        if self._may_ask():
            for queue, at in self._heard(self._cluster.progress(bounds, patient=False)).items():
                low, high = bounds[queue].low, bounds[queue].high
                begins[queue] = low if at is None else at
                if begins[queue] > high:
                    log.warning(
                        "%s has %d to %d and is read from its start, although the group is at "
                        "offset %d: it was created again, or has lost its end",
                        *(queue, low, high, at),
                    )
                    begins[queue] = low
        return begins

    def _may_ask(self) -> bool:
        return self._monotonic() >= self._not_before

    def _heard(self, found: QueueResults[int | None]) -> dict[Queue, int | None]:
        """The answers; brokers that did not answer are not asked for a while."""
        if found.failures:
            self._not_before = self._monotonic() + _AGAIN
        for queue in sorted(found.failures.keys() - self._unanswered):
            log.warning("the start of %s is not known yet: %s", queue, found.failures[queue])
        self._unanswered = frozenset(found.failures)
        return found.values
