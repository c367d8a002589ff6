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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from orbitmq.client.ranges.cluster import (
    Bounds,
    CommitResult,
    QueueResults,
    RangeCluster,
    TopicQueues,
)
from orbitmq.client.ranges.connections import QueueRange
from orbitmq.client.routes import Queue
from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import NoRoute, OrbitError
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
    starting,
    starts_here,
    stream_start,
    to_json,
)
from orbitmq.spark.plan import (
    TriggerGate,
    available,
    batch_ends,
    clamp_to_bounds,
    partition,
    resolve,
    subscribed_queues,
)

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
        heads: BoundsSettings | None = None,
    ) -> None:
        read = options.read
        self._options = options
        clock = clock or SystemClock()
        self._monotonic = clock.monotonic
        self._cluster = RangeCluster(
            read.access, read.group, retries=read.offset_retries, pause=read.offset_pause
        )
        self._bounds_cache = BoundsCache(
            self._cluster,
            read.subscription,
            heads or BoundsSettings(route=read.route_life),
            clock,
        )
        self._late = NewQueues(read.start, self._cluster, clock)
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
        self._report_pauses = BrokerBackoff(_REPORT_AGAIN)
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
        found = clamp_to_bounds(
            positions | again, bounds, fail=self._options.read.fail_on_data_loss
        )
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
        bounds = self._bounds_cache.bounds()
        return to_json({queue: each.high for queue, each in bounds.items()}) if bounds else None

    def ends(self) -> Json:
        """Where all queues end now, for a batch whose start is not known; raises if one is silent.

        If it is the first of all batches, the stream begins where the options say now.
        """
        ends = self._cluster.ends(self._bounds_cache.queues).or_raise()
        marks = self._marked(ends)
        if isinstance(self._options.read.start, Latest):
            return starts_here(ends, marks=marks)
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
        self._target = self._cluster.bounds(self._bounds_cache.queues).or_raise()

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
                self._options.read.start,
                self._bounds_cache.queues,
                self._cluster,
                seen=self._target,
            )
        return self._resolved

    def _bounds(self, *, fresh: bool = False, take_all: bool = False) -> dict[Queue, Bounds]:
        """What is known of every queue.

        A run that ends must not end well without what a silent broker has. Where it makes one
        batch, everybody has to answer; otherwise they all have when it began, and what is not heard
        of since then is taken from that.
        """
        if take_all:
            return self._cluster.bounds(self._bounds_cache.queues).or_raise()
        return (self._target or {}) | self._bounds_cache.bounds(fresh=fresh)

    def _first_batch_end(self, *, take_all: bool) -> Json:
        begin, read = self._begin(), self._options.read
        self._marks_looked_at = self._marks_renewed_at = self._monotonic()
        # A stream that begins at the end has nothing to take, however much came since.
        if isinstance(read.start, Latest):
            return starts_here(begin, marks=self._marked(begin))
        bounds = self._bounds(fresh=True, take_all=take_all)
        found = begin
        if isinstance(read.start, AtOffsets | GroupProgress):
            # The others stand for offsets that are there.
            found = clamp_to_bounds(begin, bounds, fail=read.fail_on_data_loss)
        if not take_all:
            return starts_here(found, marks=self._marked(found))
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
        return batch_ends(positions, highs, limit)

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
            positions = new_queue_starts(end) | self._own(start) | reread_from(end)
        if self._marks_looked_at == float("-inf"):
            # A batch that was planned before a restart, or with an end that knew of no start.
            known, anew = marks_in(start), reread_from(end)
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
        begin = stream_start(end)
        if begin is not None:
            return begin
        # Logged by a version that went by the options whenever it was asked. A batch that only
        # says where the stream begins takes nothing: it ends there.
        return from_json(end) if isinstance(self._options.read.start, Latest) else self._begin()

    # ---- whether queues are still the same

    def _is_time_to_look(self) -> bool:
        is_over = self._monotonic() - self._marks_looked_at >= _LOOK_AT_MARKS
        return self._bounds_cache.take_doubt() or is_over

    def _begun_again(self, positions: Positions, marks: Mapping[Queue, Mark]) -> dict[Queue, int]:
        """Where queues are read from that are not the same any more. Raises `DataLost`."""
        known = {q: mark for q, mark in marks.items() if q in positions}
        asked = {q: mark.offset for q, mark in known.items() if q not in self._bounds_cache.silent}
        stored = self._cluster.stored_at(asked).values
        suspects = [queue for queue, at in stored.items() if at != known[queue].stored_ms]
        bounds = self._bounds_cache.look_again(suspects) if suspects else {}
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
        last = {
            q: at - 1 for q, at in ends.items() if at > 0 and q not in self._bounds_cache.silent
        }
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
        self, positions: dict[Queue, int], tell: Callable[[Mapping[Queue, int]], CommitResult]
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


# Where the queues of a stream begin and end, asked for no more often than is needed.
#
# Spark asks an idle stream for news about eighty times a second. Brokers are asked a few times a
# second instead, and at once after a batch. A broker that does not answer is no reason to stop: its
# queues keep the ends that were last known, it is left alone for a while, and the stream goes on
# with the others. Nor is a topic that nobody serves any more: its queues stay known, and new ones
# of the other topics are found.
#
# A broker that refuses costs nothing and is tried again soon, however often it does. One that hangs
# keeps whoever asks it waiting until time is up, and with it all the others: the longer and the
# more often it did, the longer it is left alone. One hiccup is nothing; in the long run it takes no
# more than a ninth of the time.


#: Brokers are asked again after this part of the time in which nothing has happened.
_PART: Final = 0.1
#: How many times as long as it kept us waiting a broker is left alone at most. It begins with once
#: and doubles.
_MOST_TIMES: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundsSettings:
    """How often brokers are asked, in seconds."""

    idle: float = 0.25  #: for the ends of queues, while nothing happens
    busy: float = 0.03  #: the same shortly after something happened: more is likely to follow
    lows: float = 30.0  #: for their beginnings
    route: float = 30.0  #: for the queues themselves
    #: For anything, of a broker that did not answer; less often if it kept us waiting.
    silence: float = 5.0


class BoundsCache:
    """The bounds of the queues of a subscription, as they were last heard of."""

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
        self._is_doubted = False
        self._pauses = BrokerBackoff(settings.silence)

    @property
    def queues(self) -> tuple[Queue, ...]:
        """The queues of the subscription; asks for them when they are not known lately."""
        if self._monotonic() - self._routed_at < self._settings.route:
            return self._queues
        found = self._routed()
        if added := sorted(set(found) - set(self._queues)):
            log.info("queues found", extra={"queues": ", ".join(map(str, added))})
            self._queues = tuple(sorted({*self._queues, *added}))
        # After the answer: a name server that hangs is left alone as long as another one.
        self._routed_at = self._monotonic()
        return self._queues

    def _routed(self) -> tuple[Queue, ...]:
        """The queues that can be heard of now."""
        is_first = self._routed_at == float("-inf")
        try:
            found = subscribed_queues(self._cluster, self._subscription, refresh=not is_first)
            failures = list(found.failures.values())
        except OrbitError as error:
            found, failures = TopicQueues(), [error]
        for failure in failures:
            # Once known, a topic whose only broker restarts has no route for a while, and queues
            # that were assigned by name are not in it.
            is_away = isinstance(failure, NoRoute | OptionRefused)
            if not self._queues or not (failure.retriable or is_away):
                raise failure
            log.warning("the route stays as it was: %s", failure)
        return found.queues

    def bounds(self, *, fresh: bool = False) -> dict[Queue, Bounds]:
        """What is known of every queue; asks if it is `fresh` that is wanted, or it is time."""
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
        """The queues whose brokers did not answer when they were last asked."""
        return self._silent

    def look_again(self, queues: Iterable[Queue]) -> dict[Queue, Bounds]:
        """The bounds of some queues as they are now, as far as brokers say."""
        found = self._cluster.bounds(queues).values
        self._known.update(found)
        return found

    def take_doubt(self) -> bool:
        """Whether, since the last call, a queue was cut, or answered again after a silence.

        It may then have been made anew, or have lost its end.
        """
        is_doubted, self._is_doubted = self._is_doubted, False
        return is_doubted

    def _pause(self, now: float) -> float:
        """The longer nothing has happened, the less often brokers are asked."""
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
            # A queue that ends before it ended was made anew or cut: it may begin elsewhere, too.
            cut = {queue for queue, end in ends.values.items() if end < self._known[queue].high}
            answers = [ends]
            for queue in ends.values.keys() - cut:
                self._known[queue] = Bounds(self._known[queue].low, ends.values[queue])
            if cut:
                self._is_doubted = True
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
                "%s says nothing, and the stream goes on without it: %s", queue, failures[queue]
            )
        for queue in sorted(self._silent - silent):
            log.info("queue answers again", extra={"queue": str(queue)})
            self._is_doubted = True
        self._pauses.note(
            (queue.broker for queue in asked),
            longest_waits(failures, waited),
            self._monotonic(),
        )
        self._silent = frozenset(silent)


class BrokerBackoff:
    """When brokers that did not answer are asked again. Does not look at the clock itself."""

    def __init__(self, least: float) -> None:
        """`least` is how long one is left alone at least, in seconds."""
        self._least = least
        self._not_before: dict[str, float] = {}
        #: How many times as long as the next wait a broker will be left alone.
        self._times: dict[str, float] = {}

    def is_over(self, broker: str, now: float) -> bool:
        """Whether a broker may be asked."""
        return self._not_before.get(broker, now) <= now

    def note(self, asked: Iterable[str], waits: Mapping[str, float], now: float) -> None:
        """Brokers were asked, and those in `waits` did not answer: they are left alone from now on.

        `waits` says how long each of them itself kept us waiting, in seconds, however long others
        did at the same time.
        """
        for broker in set(asked):
            if broker not in waits:
                self._times.pop(broker, None)
                continue
            wait, times = waits[broker], self._times.get(broker, 1.0)
            self._not_before[broker] = now + max(self._least, times * wait)
            # So short a wait never makes a difference. It must not make one for the next, either.
            if wait * _MOST_TIMES > self._least:
                self._times[broker] = min(2 * times, _MOST_TIMES)


def longest_waits(silent: Iterable[Queue], waited: Mapping[Queue, float]) -> dict[str, float]:
    """By broker the longest wait for one of its queues that were silent."""
    found: dict[str, float] = {}
    for queue in silent:
        found[queue.broker] = max(found.get(queue.broker, 0.0), waited.get(queue, 0.0))
    return found


# Where queues begin that a stream finds only after it has begun.
#
# They are new, or their broker was away when the stream began; from here these look alike. Where
# the stream began at a time, or at its group's progress, such a queue is begun there as well: that
# place is the same whenever it is asked for. Otherwise it is read from its first message. For a
# stream that began at the end, this may bring what was there before it; the end as it is now would
# leave out what came to a new queue meanwhile, which is worse.


#: How soon brokers that did not say where a queue begins are asked again, in seconds.
_AGAIN: Final = 1.0


class NewQueues:
    """Begins queues that come late. Brokers are asked only where the place is one to ask for."""

    def __init__(self, place: OffsetSpec, cluster: RangeCluster, clock: Clock) -> None:
        self._place = place
        self._cluster = cluster
        self._monotonic = clock.monotonic
        self._not_before = float("-inf")
        self._unanswered: frozenset[Queue] = frozenset()

    def begins(self, bounds: Mapping[Queue, Bounds]) -> dict[Queue, int]:
        """Where queues with these bounds begin; without those whose brokers cannot say now."""
        match self._place:
            case AtTimes() as place if bounds:
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
                # The end was asked for before: all that it has up to there is older than the time.
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
                        "%s has %d to %d and is read from its beginning, though the group has "
                        "read it up to offset %d: it was made anew, or has lost its end",
                        *(queue, low, high, at),
                    )
                    begins[queue] = low
        return begins

    def _may_ask(self) -> bool:
        return self._monotonic() >= self._not_before

    def _heard(self, found: QueueResults[int | None]) -> dict[Queue, int | None]:
        """What brokers said; those who did not are left alone for a while."""
        if found.failures:
            self._not_before = self._monotonic() + _AGAIN
        for queue in sorted(found.failures.keys() - self._unanswered):
            log.warning("where to begin %s is not known yet: %s", queue, found.failures[queue])
        self._unanswered = frozenset(found.failures)
        return found.values
