"""What a stream decides on the driver: where batches begin and end, and what the broker is told.

The truth about progress is Spark's log of offsets. The group's progress at the broker is told from
it, after the fact, and is never read back except by a new stream that asks for it
(`startingOffsets=group`). Spark says in the first argument of `latestOffset` up to where all is
done; only that sign comes in time also for the last batch, so progress is told there.

A stream begins at a place. The first batch takes nothing and ends at the offsets that the place
stands for; where there will be no other batch, it takes what is there. Either way its end says
where it began, and Spark logs the end before anything is read. So neither time nor another
`startingOffsets` can move the place when a first batch that failed is repeated.

A queue that appears later is begun where `latequeues` says, and in the same way: the batch in which
it appears takes nothing of it, and its end says where the queue begins. Where losses are allowed, a
batch takes nothing of a queue that ends before the stream's position, and the stream goes on at
that end: it never goes further back.

A position is about the queue that it was taken from. A topic that was deleted and created again has
the same queues with other messages. So ends say which messages the stream has passed last, its
marks, and a mark whose place has another message counts as lost data. Where losses are allowed, the
queue is read from the first message on that is younger than the mark. Marks are looked at when a
stream starts, when a queue was cut or silent, and now and then: a batch may be planned before. But
they are renewed only after a look, so that nothing is passed over unnoticed.

A checkpoint is of the topics that the query reads. If it is of others only, it belongs to another
query, and nothing is read, nor told to brokers. If the query has given up some of them, or queues
that were assigned, what they have beyond it counts as lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from orbitmq.client.queue import Queue
from orbitmq.client.rangecluster import Bounds, RangeCluster, Reported
from orbitmq.client.ranges import QueueRange
from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import OrbitError
from orbitmq.spark.errors import CheckpointOfOtherTopics, DataLost, SourceError
from orbitmq.spark.heads import BrokerPauses, Heads, HeadSettings, longest_waits
from orbitmq.spark.latequeues import LateQueues
from orbitmq.spark.offsets import (
    AtOffsets,
    GroupProgress,
    Json,
    Latest,
    Mark,
    Positions,
    begun_again,
    begun_here,
    from_json,
    is_starting,
    marks_in,
    queue_begins,
    starting,
    stream_begin,
    to_json,
)
from orbitmq.spark.options import StreamOptions
from orbitmq.spark.places import available, placed, resolve
from orbitmq.spark.plan import TriggerGate, admit, partition

log = logging.getLogger(__name__)

#: How soon a report that a broker did not take is tried again, in seconds.
_REPORT_AGAIN: Final = 1.0
#: How often brokers are asked if they still have what they took, in seconds: one that was killed
#: comes back with what it had saved before.
_REPORT_ALL: Final = 30.0
#: How often it is looked whether queues are still the same ones, in seconds.
_LOOK_AT_MARKS: Final = 30.0
#: How often the other members of the group are looked for, in seconds.
_LOOK_FOR_OTHERS: Final = 30.0


class StreamDriver:
    """One running stream. Called by Spark, one call after the other."""

    def __init__(
        self,
        options: StreamOptions,
        *,
        clock: Clock | None = None,
        heads: HeadSettings | None = None,
    ) -> None:
        read = options.read
        self._options = options
        clock = clock or SystemClock()
        self._monotonic = clock.monotonic
        self._cluster = RangeCluster(
            read.access, read.group, retries=read.offset_retries, pause=read.offset_pause
        )
        self._heads = Heads(
            self._cluster,
            read.subscription,
            heads or HeadSettings(route=read.route_life),
            clock,
        )
        self._late = LateQueues(read.start, self._cluster, clock)
        self._gate = TriggerGate(options.min_offsets, options.max_delay)
        self._initial: Json | None = None
        self._resolved: dict[Queue, int] | None = None
        #: Where the run is to end that takes only what is there when it begins.
        self._target: dict[Queue, Bounds] | None = None
        self._last_start: Json | None = None
        self._marks_looked_at = float("-inf")
        #: Queues that still were the same ones then.
        self._same: frozenset[Queue] = frozenset()
        self._marks_renewed_at = float("-inf")
        self._assigned = frozenset(read.subscription.queues)
        #: Topics and queues of the checkpoint that the query does not read any more.
        self._given_up: tuple[str, ...] = ()
        self._reported: dict[Queue, int] = {}
        #: Those of them that brokers may have lost by now.
        self._doubtful: set[Queue] = set()
        self._report_all_at = float("-inf")
        self._report_pauses = BrokerPauses(_REPORT_AGAIN)
        self._joined: frozenset[str] = frozenset()
        self._look_at = float("-inf")
        self._others: tuple[str, ...] = ()

    def start(self) -> None:
        self._cluster.start()

    def stop(self) -> None:
        """Leave the group. May be called again; the stream loses nothing if it never is."""
        self._cluster.stop()

    # ---- what Spark asks

    def initial_offset(self) -> Json:
        """Where the stream begins: always the same for one query."""
        if self._initial is None:
            self._initial = starting(self._options.read.start)
        return self._initial

    def latest_offset(self, start: Json, *, limit: int | None, take_all: bool = False) -> Json:
        """Where the batch that begins at `start` ends; `start` itself when there is none.

        `limit` is how many messages it may take, `take_all` that there will be no other batch.
        """
        is_new_start = start != self._last_start
        self._last_start = start
        if is_starting(start):
            return self._first_batch_end(take_all=take_all)
        positions, marks = self._own(start), marks_in(start)
        if self._is_draining():
            self._report(positions)
            return start
        is_look = self._is_time_to_look()
        again = self._begun_again(positions, marks) if is_look else {}
        self._report({queue: at for queue, at in positions.items() if queue not in again})
        bounds = self._bounds(fresh=is_new_start or bool(again), take_all=take_all)
        # Says early what a batch would find missing.
        found = placed(positions | again, bounds, fail=self._options.read.fail_on_data_loss)
        self._check_brokers(positions)
        late = {q: each for q, each in bounds.items() if q not in found and self._is_taken(q)}
        begins = self._late.begins(late)
        ends = self._ends(found, bounds, limit, take_all=take_all) | {
            queue: max(at, late[queue].high) if take_all else at for queue, at in begins.items()
        }
        if ends == positions and not again:
            return start
        if not is_look and self._monotonic() - self._marks_renewed_at >= _LOOK_AT_MARKS:
            # Marks are about to be renewed, and that is not done unseen.
            is_look = True
            if self._begun_again(positions, marks):
                self._marks_looked_at = float("-inf")
                return self.latest_offset(start, limit=limit, take_all=take_all)
        kept = {queue: mark for queue, mark in marks.items() if queue not in again}
        moved = {queue for queue, at in ends.items() if at != positions.get(queue)}
        wanted = {queue for queue in moved if queue not in kept}
        if is_look:
            self._marks_renewed_at = self._monotonic()
            wanted |= self._same
        fresh = self._marked({queue: ends[queue] for queue in wanted if queue in ends})
        marks = {queue: mark for queue, mark in (kept | fresh).items() if queue in ends}
        return to_json(ends, marks=marks, begins=begins, again=again)

    def latest_known(self) -> Json | None:
        """Where queues end, for whoever watches the lag; asks nobody."""
        bounds = self._heads.bounds()
        return to_json({queue: each.high for queue, each in bounds.items()}) if bounds else None

    def ends(self) -> Json:
        """Where all queues end now, for a batch whose start is not known; raises if one is silent.

        If it is the first of all batches, the stream begins where the options say now.
        """
        ends = self._cluster.ends(self._heads.queues).or_raise()
        marks = self._marked(ends)
        if isinstance(self._options.read.start, Latest):
            return begun_here(ends, marks=marks)
        try:
            begin = self._begin()
        except SourceError as error:
            # Options that a stream cannot begin with do not matter to one that has begun.
            log.debug("where a new stream would begin is not known: %s", error)
            return to_json(ends, marks=marks)
        begins = {q: min(at, ends[q]) for q, at in begin.items() if q in ends}
        return to_json(ends, marks=marks, begins=begins)

    def take_only_what_is_there(self) -> None:
        """From now on no batch goes beyond what the queues have at this moment."""
        self._target = self._cluster.bounds(self._heads.queues).or_raise()

    def partitions(self, start: Json, end: Json) -> list[tuple[QueueRange, ...]]:
        """The ranges of a batch, dealt out to tasks."""
        read = self._options.read
        ranges = list(self._ranges(start, end))
        return partition(ranges, min_partitions=read.min_partitions, max_records=read.max_records)

    def finished(self, end: Json) -> None:
        """A batch is done."""
        if not is_starting(end):
            self._report(self._own(end))

    # ---- whose checkpoint it is

    def _own(self, offset: Json) -> dict[Queue, int]:
        """The positions of an offset, without those of topics and queues that are read no more.

        They are neither reported, since others may go on there, nor kept: one batch with
        `failOnDataLoss` false forgets them.
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
                f"{each} is in the checkpoint, and the query does not read it any more"
                for each in given_up
            )
        if given_up != self._given_up:
            self._given_up = given_up
            log.warning("in the checkpoint, and not read any more: %s", ", ".join(given_up))
        return own

    # ---- where batches end

    def _begin(self) -> dict[Queue, int]:
        if self._resolved is None:
            self._resolved = resolve(
                self._options.read.start, self._heads.queues, self._cluster, seen=self._target
            )
        return self._resolved

    def _bounds(self, *, fresh: bool = False, take_all: bool = False) -> dict[Queue, Bounds]:
        """What is known of every queue.

        A run that ends must not end well without what a silent broker has. Where it makes one
        batch, everybody has to answer; otherwise they all have when it began, and what is not heard
        of since then is taken from that.
        """
        if take_all:
            return self._cluster.bounds(self._heads.queues).or_raise()
        return (self._target or {}) | self._heads.bounds(fresh=fresh)

    def _first_batch_end(self, *, take_all: bool) -> Json:
        begin, read = self._begin(), self._options.read
        self._marks_looked_at = self._marks_renewed_at = self._monotonic()
        # A stream that begins at the end has nothing to take, however much came since.
        if isinstance(read.start, Latest):
            return begun_here(begin, marks=self._marked(begin))
        bounds = self._bounds(fresh=True, take_all=take_all)
        found = begin
        if isinstance(read.start, AtOffsets | GroupProgress):
            # The others stand for offsets that are there.
            found = placed(begin, bounds, fail=read.fail_on_data_loss)
        if not take_all:
            return begun_here(found, marks=self._marked(found))
        ends = {queue: max(at, bounds[queue].high) for queue, at in found.items()}
        return to_json(ends, marks=self._marked(ends), begins=found)

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
        return admit(positions, highs, limit)

    def _is_draining(self) -> bool:
        """Whether whoever runs the stream wants it to come to rest, to be stopped between batches.

        Spark's own way to stop a stream cuts off the batch that runs.
        """
        drain_file = self._options.drain_file
        return drain_file is not None and drain_file.exists()

    def _is_taken(self, queue: Queue) -> bool:
        return self._target is None or queue in self._target

    def _limited(self, queue: Queue, high: int) -> int:
        return high if self._target is None else min(high, self._target[queue].high)

    def _check_brokers(self, positions: dict[Queue, int]) -> None:
        """A run that takes what is there must not end well without what an absent broker has."""
        if self._target is None or not self._options.read.fail_on_data_loss:
            return
        present = {(queue.topic, queue.broker) for queue in self._target}
        problems = [
            f"{queue} was read up to offset {at}, and nobody serves that broker's queues now"
            for queue, at in sorted(positions.items())
            if (queue.topic, queue.broker) not in present
        ]
        if problems:
            raise DataLost(problems)

    # ---- what batches take

    def _ranges(self, start: Json, end: Json) -> Iterator[QueueRange]:
        """What lies between two offsets of the stream."""
        read = self._options.read
        ends = self._own(end)
        if is_starting(start):
            begin = self._begin_of(end)
            positions = {queue: min(begin.get(queue, at), at) for queue, at in ends.items()}
        else:
            positions = queue_begins(end) | self._own(start) | begun_again(end)
        if self._marks_looked_at == float("-inf"):
            # A batch that was planned before a restart, or with an end that knew of no start.
            known, anew = marks_in(start), begun_again(end)
            marks = marks_in(end) | {q: mark for q, mark in known.items() if q not in anew}
            again = self._begun_again(positions, marks)
            positions |= {queue: min(at, positions[queue]) for queue, at in again.items()}
            if again:
                # Its end has the old marks: the next batch is to see that, too.
                self._marks_looked_at = float("-inf")
        bounds = self._bounds()
        wanted: list[QueueRange] = []
        problems: list[str] = []
        for queue, to in sorted(ends.items()):
            low = bounds[queue].low if queue in bounds else 0
            at = positions.get(queue, min(low, to))
            if to < at:
                # Planned where losses were allowed, and warned of there.
                problems.append(f"{queue} was read up to offset {at} and now ends at {to}")
                continue
            wanted.append(QueueRange(queue, at, to))
        if problems and read.fail_on_data_loss:
            raise DataLost(problems)
        yield from available(wanted, bounds, fail=read.fail_on_data_loss)

    def _begin_of(self, end: Json) -> dict[Queue, int]:
        """Where the stream began whose first batch has this end."""
        begin = stream_begin(end)
        if begin is not None:
            return begin
        # Logged by a version that went by the options whenever it was asked. A batch that only
        # says where the stream begins takes nothing: it ends there.
        return from_json(end) if isinstance(self._options.read.start, Latest) else self._begin()

    # ---- whether queues are still the same

    def _is_time_to_look(self) -> bool:
        is_over = self._monotonic() - self._marks_looked_at >= _LOOK_AT_MARKS
        return self._heads.take_doubt() or is_over

    def _begun_again(self, positions: Positions, marks: Mapping[Queue, Mark]) -> dict[Queue, int]:
        """Where queues are read from that are not the same any more. Raises `DataLost`."""
        known = {q: mark for q, mark in marks.items() if q in positions}
        asked = {q: mark.offset for q, mark in known.items() if q not in self._heads.silent}
        stored = self._cluster.stored_at(asked).values
        suspects = [queue for queue, at in stored.items() if at != known[queue].stored_ms]
        bounds = self._heads.look_again(suspects) if suspects else {}
        changed = [queue for queue in suspects if stored[queue] is not None]
        # Of the others, the message has expired, or is beyond the end: the queue was cut.
        cut = [q for q in bounds if q not in changed and bounds[q].high <= known[q].offset]
        self._marks_looked_at = self._monotonic()
        self._same = frozenset(stored.keys() - {*changed, *cut})
        if self._options.read.fail_on_data_loss:
            if changed:
                raise DataLost(
                    f"{queue} was read up to offset {positions[queue]} and has another message at "
                    f"offset {known[queue].offset} now: it was made anew, or has lost its end"
                    for queue in sorted(changed)
                )
            return {}  # that a queue was cut is told where batches end
        again = self._younger({queue: known[queue] for queue in (*changed, *cut)})
        for queue in changed:
            again.setdefault(queue, bounds[queue].low if queue in bounds else 0)
        for queue, at in sorted(again.items()):
            log.warning(
                "%s was made anew, or has lost its end, since it was read up to offset %d; it is "
                "read from offset %d on, where younger messages begin",
                *(queue, positions[queue], at),
            )
        return again

    def _younger(self, marks: Mapping[Queue, Mark]) -> dict[Queue, int]:
        """The first message in each queue that was stored after its mark, where there is one."""
        times = {queue: (mark.stored_ms + 1) / 1000 for queue, mark in marks.items()}
        found = self._cluster.at_times(times).or_raise()
        return {queue: at for queue, at in found.items() if at is not None}

    def _marked(self, ends: Positions) -> dict[Queue, Mark]:
        """The marks of queues that are read up to these ends, as far as brokers say."""
        last = {q: at - 1 for q, at in ends.items() if at > 0 and q not in self._heads.silent}
        stored = self._cluster.stored_at(last).values if last else {}
        return {q: Mark(last[q], at) for q, at in stored.items() if at is not None}

    # ---- the group

    def _report(self, positions: dict[Queue, int]) -> None:
        """Tell brokers up to where everything is done. A failure is logged and tried again."""
        if not self._options.commit_progress:
            return
        self._be_member(positions)
        now = self._monotonic()
        if now >= self._report_all_at:
            self._report_all_at = now + _REPORT_ALL
            self._doubtful.update(self._reported)
        self._tell(
            {queue: at for queue, at in positions.items() if self._reported.get(queue) != at},
            self._cluster.report,
        )
        self._tell(
            {queue: at for queue, at in positions.items() if queue in self._doubtful},
            self._cluster.repeat,
        )

    def _tell(
        self, positions: dict[Queue, int], tell: Callable[[Mapping[Queue, int]], Reported]
    ) -> None:
        """Report or repeat positions to the brokers that are not left alone now."""
        now = self._monotonic()
        told = {q: at for q, at in positions.items() if self._report_pauses.is_over(q.broker, now)}
        if not told:
            return
        outcome = tell(told)
        failures = outcome.failures
        taken = {queue: at for queue, at in told.items() if queue not in failures}
        self._reported |= taken
        self._doubtful -= taken.keys()
        self._report_pauses.note(
            (queue.broker for queue in told),
            longest_waits(failures, outcome.waited),
            self._monotonic(),
        )
        if failures:
            queue, reason = next(iter(failures.items()))
            log.warning("progress of %d queues not taken: %s: %s", len(failures), queue, reason)

    def _be_member(self, positions: dict[Queue, int]) -> None:
        topics = frozenset(queue.topic for queue in positions)
        now = self._monotonic()
        try:
            if topics - self._joined:
                self._cluster.join(topics, self._options.read.wanted)
                self._joined |= topics
            if topics and now >= self._look_at:
                self._look_at = now + _LOOK_FOR_OTHERS
                self._warn_of(self._cluster.others(min(topics)))
        except OrbitError as error:
            self._look_at = self._monotonic() + _LOOK_FOR_OTHERS
            log.warning("the group cannot be asked: %s", error)

    def _warn_of(self, others: tuple[str, ...]) -> None:
        if others and others != self._others:
            log.warning(
                "group %s has other members (%s): this stream reads all queues and keeps its own "
                "offsets, and both change the group's progress; give the stream a group of its own",
                self._options.read.group,
                ", ".join(others[:5]),
            )
        self._others = others
