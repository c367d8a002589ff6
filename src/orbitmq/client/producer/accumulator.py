"""Messages on their way to their queues, gathered into batch frames.

A queue has one round of frames in flight. Messages that come meanwhile are the next round, so that
batches grow with the load and a lone message is not delayed. Messages that may go to any queue of
their topic wait together; their next round goes to the next queue whose broker can take more. A
message that no batch can carry goes alone, in its place between the batches of a round.

Each message has its own outcome and timeout. A broker stores a batch as a whole or not at all. A
refused batch is halved until the refused message is alone; the others keep their order. A message
that is bound to a queue is never overtaken, neither while it is sent again nor while its broker is
not connected. Everything belongs to the loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from orbitmq.client.producer.send import (
    RETRIED,
    STORED,
    SendResult,
    SendStatus,
    result_of,
    results_in,
)
from orbitmq.errors import NotRunning, OrbitError
from orbitmq.message.stored import encode_batch
from orbitmq.remoting.settings import RemotingError, RequestTimedOut
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command

if TYPE_CHECKING:
    from orbitmq.client.producer.core import Draft, Drafting, SendSettings
    from orbitmq.client.producer.send import Publication, Publisher, Sending
    from orbitmq.client.routes import Queue
    from orbitmq.remoting.connection import Connection

#: Rounds of messages for any queue that are in flight to one broker: it works on one while the
#: answer to the other is on its way.
_FREE_ROUNDS: Final = 2
#: Queues and topics that are kept while nothing waits for them.
_MOST_IDLE: Final = 1024
_NEVER: Final = float("inf")
#: A round has so many messages and bytes, or a whole batch.
_ROUND: Final = 256
_ROUND_BYTES: Final = 1024 * 1024
#: Of the refusals that are not final for a message, the one that a single message may cause.
_SYSTEM_ERROR: Final = int(ResponseCode.SYSTEM_ERROR)


class Place:
    """Where messages wait, in their order."""

    __slots__ = ("is_due", "size", "timer", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Sending] = deque()
        #: Whether what waits here is sent at the end of the loop's step.
        self.is_due = False
        #: With `linger`: how many bytes wait, roughly, and what ends the wait of the first message.
        self.size = 0
        self.timer: asyncio.TimerHandle | None = None


class Lane(Place):
    """One queue: what waits for it, and what is in flight to it."""

    __slots__ = ("queue", "round")

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue
        self.round: Round | None = None

    @property
    def is_full(self) -> bool:
        """Whether it takes nothing until the next answer."""
        return self.round is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight from here."""
        return self.round is None


class Pool(Place):
    """The messages of one topic that may go to any queue."""

    __slots__ = ("in_flight", "is_full", "next_queue", "topic")

    def __init__(self, topic: str) -> None:
        super().__init__()
        self.topic = topic
        #: Rounds by broker.
        self.in_flight: Counter[str] = Counter()
        #: Whether all brokers have as much as they can take until the next answer.
        self.is_full = False
        #: Where the next round goes, if that has been chosen.
        self.next_queue: Queue | None = None

    @property
    def is_idle(self) -> bool:
        return not any(self.in_flight.values())


class Round:
    """Frames that were sent to one queue together."""

    __slots__ = ("back", "frames", "is_open", "lane", "pool")

    def __init__(self, lane: Lane, pool: Pool | None, frames: list[Frame]) -> None:
        self.lane = lane
        #: Whose messages they are; None: the lane's own, which keep their order.
        self.pool = pool
        self.frames = frames
        #: Messages that need another connection, in their order: they come before what waits.
        self.back: list[Sending] = []
        #: Frames that have no outcome yet.
        self.is_open = len(frames)


class Frame:
    """Messages that are stored together or not at all."""

    __slots__ = ("began", "connection", "ends", "members", "parts")

    def __init__(self, members: list[Sending]) -> None:
        #: Those that are in flight; None in the place of one that has an outcome already.
        self.members: list[Sending | None] = []
        #: What is still to be sent, the next part last: halves, if the broker has refused it.
        self.parts = [members]
        self.began = 0.0
        #: When each of those in flight is given up.
        self.ends: list[float] = []
        self.connection: Connection | None = None


class Accumulator:
    """The messages of one producer that are submitted, or sent by coroutines."""

    def __init__(self, publisher: Publisher, drafting: Drafting, settings: SendSettings) -> None:
        self._publisher = publisher
        self._drafting = drafting
        self._loop = asyncio.get_running_loop()
        self._monotonic = publisher.monotonic
        self._most = settings.batch_messages
        self._most_bytes = settings.largest_batch
        self._linger = settings.linger
        # Two rounds are to share the window, or the second one has what the first one left over.
        self._most_of_round = min(max(self._most, _ROUND), max(1, settings.max_in_flight // 2))
        self._lanes: dict[Queue, Lane] = {}
        self._pools: dict[str, Pool] = {}
        #: What is sent at the end of the loop's step, or of a burst: see `burst`.
        self._due: list[Lane | Pool] = []
        self._in_burst = False
        #: When the first message may run out of time, and the timer for it.
        self._watched = _NEVER
        self._timer: asyncio.TimerHandle | None = None

    # ---- taking messages

    def take(self, sending: Sending) -> bool:
        """Send a message when its turn has come; its sender gets the outcome.

        False, and nothing is done, if something has to be found out before. Raises what a selector
        raises.
        """
        publisher, draft = self._publisher, sending.draft
        publication = publisher.known(draft.topic)
        if publication is None:
            return False
        deadline = sending.made + sending.timeout
        place: Lane | Pool | None
        is_timed = draft.timed_by is not None
        if (sending.queue or sending.select or sending.first) is None and not is_timed:
            place = self._pools.get(draft.topic)
            if place is None or not place.waiting:
                queue = publisher.choice(sending, publication)
                if not publisher.is_ready(draft, queue):
                    sending.first = queue
                    return False
                place = place or self._pool(draft.topic)
                place.next_queue = queue
        else:
            queue = publisher.choice(sending, publication)
            place = self._lanes.get(queue)
            if place is None or is_timed or (place.round is None and not place.waiting):
                if not publisher.is_ready(draft, queue):
                    sending.first = queue
                    return False
                place = place or self._lane(queue)
        place.waiting.append(sending)
        if deadline < self._watched:
            self._watch(deadline)
        if self._linger:
            place.size += draft.size
        if not place.is_due and not place.is_full:
            if place.is_idle and not self._in_burst:
                self._push(place)
            else:
                # Others that come in this step go with it.
                self._push_soon(place)
        return True

    @contextmanager
    def burst(self) -> Iterator[None]:
        """What is taken meanwhile goes together at the end."""
        self._in_burst = True
        try:
            yield
        finally:
            self._in_burst = False
            self._push_due()

    def _lane(self, queue: Queue) -> Lane:
        lane = self._lanes.get(queue)
        if lane is None:
            if len(self._lanes) >= _MOST_IDLE:
                self._lanes = {
                    queue: lane
                    for queue, lane in self._lanes.items()
                    if lane.round is not None or lane.waiting
                }
            lane = self._lanes[queue] = Lane(queue)
        return lane

    def _pool(self, topic: str) -> Pool:
        if len(self._pools) >= _MOST_IDLE:
            self._pools = {
                topic: pool
                for topic, pool in self._pools.items()
                if pool.waiting or any(pool.in_flight.values())
            }
        pool = self._pools[topic] = Pool(topic)
        return pool

    # ---- sending what waits

    def _push_soon(self, place: Lane | Pool) -> None:
        """Send what waits there at the end of the loop's step."""
        if place.is_due:
            return
        if not self._due and not self._in_burst:
            self._loop.call_soon(self._push_due)
        place.is_due = True
        self._due.append(place)

    def _push_due(self) -> None:
        due, self._due = self._due, []
        for place in due:
            place.is_due = False
        try:
            while due:
                self._push(due.pop(0))
        finally:
            for place in due:  # a callback wants the program to end
                self._push_soon(place)

    def _push(self, place: Lane | Pool) -> None:
        """Send what waits there, as far as it may go now."""
        if not place.waiting or (self._linger and not self._has_enough(place)):
            return
        if isinstance(place, Pool):
            self._push_pool(place)
        elif place.round is not None:
            return
        elif self._publisher.open_connection(place.queue.broker) is None:
            self._reconnect(place)
        else:
            self._start(place, place.waiting, None)

    def _has_enough(self, place: Lane | Pool) -> bool:
        """Whether the messages are enough, or have waited long enough; if not, they will go."""
        left = place.waiting[0].made + self._linger - self._monotonic()
        if left <= 0 or len(place.waiting) >= self._most or place.size >= self._most_bytes:
            return True

        def push() -> None:
            place.timer = None
            self._push(place)

        if place.timer is None:
            place.timer = self._loop.call_later(left, push)
        return False

    def _push_pool(self, pool: Pool) -> None:
        waiting = pool.waiting
        while waiting and not pool.is_full:
            publication = self._publisher.known(pool.topic)
            lane = None if publication is None else self._free_lane(pool, publication)
            if lane is not None:
                self._start(lane, waiting, pool)
            elif not pool.is_full:
                self._leave(waiting)

    def _free_lane(self, pool: Pool, publication: Publication) -> Lane | None:
        """Where the next round goes: to a queue whose broker can take more.

        If none can, the pool is full; or else there is no connection. A broker that is not
        connected while others are busy gets the first message, which connects it.
        """
        unready: Queue | None = None
        for _ in publication.queues:
            queue = pool.next_queue or self._publisher.choice(pool.waiting[0], publication)
            pool.next_queue = None
            lane = self._lanes.get(queue)
            if self._publisher.open_connection(queue.broker) is None:
                unready = queue
            elif pool.in_flight[queue.broker] >= _FREE_ROUNDS or (
                lane is not None and lane.round is not None
            ):
                pool.is_full = True
            else:
                pool.is_full = False
                return lane or self._lane(queue)
        if unready is not None and pool.is_full:
            first = pool.waiting.popleft()
            first.first = unready
            first.sender.not_ready(first)
        return None

    def _start(self, lane: Lane, waiting: deque[Sending], pool: Pool | None) -> None:
        """Send a round of messages to a queue, whose broker is connected."""
        broker = lane.queue.broker
        # Until a broker has said what it is, nothing is known of its batches.
        may_batch = self._most > 1 and self._publisher.is_old(broker) is not None
        most, most_bytes = self._most_of_round, max(self._most_bytes, _ROUND_BYTES)
        frames: list[Frame] = []
        run: list[Sending] = []
        count = size = taken = run_size = 0
        while waiting and count < most:
            sending = waiting[0]
            draft = sending.draft
            its_size = draft.size
            size += its_size
            if count and size > most_bytes:
                break
            is_plain = may_batch and draft.is_plain
            begins = (
                not is_plain
                or not run
                or len(run) >= self._most
                or run_size + its_size > self._most_bytes
            )
            if begins and pool is None and len(run) > 1:
                break  # if the batch is refused, its halves come before what follows
            waiting.popleft()
            taken += its_size
            count += 1
            sending.first = None
            if begins:
                run, run_size = [], 0
                frames.append(Frame(run))
            run.append(sending)
            run_size += its_size
            if not is_plain:
                run = []
        place = pool or lane
        place.size = max(0, place.size - taken) if waiting else 0
        lane.round = round_ = Round(lane, pool, frames)
        if pool is not None:
            pool.in_flight[broker] += 1
        for frame in frames:
            self._advance(round_, frame)

    def _advance(self, round_: Round, frame: Frame) -> None:
        """Send what is still to be sent of a frame. After the last one its round is over."""
        while frame.parts:
            frame.connection = self._publisher.open_connection(round_.lane.queue.broker)
            if frame.connection is None:
                round_.back += [sending for part in reversed(frame.parts) for sending in part]
                frame.parts.clear()
            elif self._is_sent(round_, frame, frame.parts.pop(), frame.connection):
                return
        round_.is_open -= 1
        if not round_.is_open:
            self._close(round_)

    def _close(self, round_: Round) -> None:
        """Have the next messages sent."""
        lane, pool = round_.lane, round_.pool
        lane.round = None
        lane.waiting.extendleft(reversed(round_.back))
        if pool is not None:
            pool.in_flight[lane.queue.broker] -= 1
        # At the end of the step: those who waited for an outcome have sent what follows by then.
        self._push_soon(lane)
        pool = self._pools.get(lane.queue.topic)
        if pool is not None:
            pool.is_full = False
            self._push_soon(pool)

    def _reconnect(self, lane: Lane) -> None:
        """Keep what is bound to a queue there, in its order, until its broker is connected again.

        Other messages may go elsewhere.
        """
        lane.round = round_ = Round(lane, None, [])
        waiting, lane.waiting = lane.waiting, deque()
        lane.waiting.extend(sending for sending in waiting if sending.is_bound)
        for sending in waiting:
            if not sending.is_bound:
                sending.first = None
                sending.sender.not_ready(sending)
        try:
            task = self._publisher.spawn(self._connect(lane), "connect again")
        except NotRunning:
            self._leave(lane.waiting)
            return

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                self._leave(lane.waiting)
            self._close(round_)

        task.add_done_callback(ended)

    async def _connect(self, lane: Lane) -> None:
        """Connect to the broker of a queue. Returns also when nothing waits for it any more."""
        publisher, queue = self._publisher, lane.queue
        while lane.waiting:
            await asyncio.sleep(publisher.pause(lane.waiting[0], queue.broker))
            lane.waiting = deque(self._in_time(lane.waiting, self._monotonic(), queue))
            if not lane.waiting or publisher.open_connection(queue.broker) is not None:
                return
            first = lane.waiting[0]
            await publisher.connect(first, queue, others=False)
            if publisher.open_connection(queue.broker) is not None:
                return
            for sending in lane.waiting:
                sending.error = sending.error or first.error
                sending.note_tried(queue.broker)

    def _is_sent(
        self, round_: Round, frame: Frame, part: list[Sending], connection: Connection
    ) -> bool:
        """Send a part of a frame; False if it has its outcome already."""
        publisher, queue = self._publisher, round_.lane.queue
        frame.began = now = self._monotonic()
        members = part
        deadlines = [sending.made + sending.timeout for sending in part]
        if min(deadlines) <= now:
            members = self._in_time(part, now, queue)
            deadlines = [sending.made + sending.timeout for sending in members]
        frame.members = [*members]
        if not members:
            return False
        frame.ends = publisher.ends(members, now) or deadlines
        if (earliest := min(frame.ends)) < self._watched:
            self._watch(earliest)
        try:
            if len(members) == 1:
                draft = members[0].draft
            else:
                draft = self._batch(members, is_before_5=bool(publisher.is_old(queue.broker)))
            encode = publisher.frames.encoder(draft, queue, connection)
            answered = partial(self._answered, round_, frame)
            connection.submit_encoded(draft.code, encode, answered, timeout=max(frame.ends) - now)
        except RemotingError as error:
            self._settle(round_, frame, error)
            return False
        except Exception as error:  # noqa: BLE001  # no frame can be made of it: the caller's to see
            self._refused(frame, error)
            return False
        return True

    def _batch(self, members: Sequence[Sending], *, is_before_5: bool) -> Draft:
        drafts = [sending.draft for sending in members]
        new = [draft for draft in drafts if not draft.unique_id]
        for draft, unique_id in zip(new, self._drafting.ids.texts(len(new)), strict=True):
            draft.identify(unique_id)
        body = encode_batch(
            [(each.body, each.flag, each.properties.encode("utf-8", "replace")) for each in drafts]
        )
        first = drafts[0]
        return self._drafting.batch(
            first.topic, body, len(drafts), is_before_5=is_before_5, message=first.message
        )

    @staticmethod
    def _leave(waiting: deque[Sending]) -> None:
        """Give back messages for which there is no connection."""
        left = list(waiting)
        waiting.clear()
        for sending in left:
            sending.sender.not_ready(sending)

    # ---- outcomes

    def _answered(self, round_: Round, frame: Frame, outcome: Command | RemotingError) -> None:
        try:
            self._settle(round_, frame, outcome)
        finally:
            self._advance(round_, frame)

    def _settle(self, round_: Round, frame: Frame, outcome: Command | RemotingError) -> None:
        queue, members, frame.members = round_.lane.queue, frame.members, []
        if len(members) > 1 and isinstance(outcome, Command):
            if outcome.code in STORED:
                self._stored(queue, frame, members, outcome)
                return
            left = [sending for sending in members if sending is not None]
            if len(left) > 1 and _may_be_of_one(outcome.code):
                _halve(frame, left)
                return
        for sending in members:
            if sending is None:
                continue
            sending.began = frame.began
            if self._publisher.settle(sending, queue, outcome, frame.connection):
                continue
            if sending.is_bound:
                # Nothing was taken. It goes on in its order, on another connection.
                round_.back.append(sending)
            else:
                sending.sender.retry(sending)

    def _stored(
        self, queue: Queue, frame: Frame, members: Sequence[Sending | None], answer: Command
    ) -> None:
        publisher, status = self._publisher, STORED[answer.code]
        ids = ["" if sending is None else sending.draft.unique_id for sending in members]
        try:
            batch = result_of("", queue, status, answer, is_batch=True)
            outcomes: Sequence[SendResult | OrbitError] = results_in(ids, batch)
        except OrbitError as error:
            outcomes = [error] * len(ids)
        publisher.answered(queue.broker, self._monotonic() - frame.began)
        is_ok = status is SendStatus.OK
        for sending, outcome in zip(members, outcomes, strict=True):
            if sending is None:
                continue
            if is_ok or not isinstance(outcome, SendResult):
                sending.sender.finish(sending, outcome)
            elif not publisher.settle_stored(sending, outcome):
                sending.sender.retry(sending)

    @staticmethod
    def _refused(frame: Frame, error: Exception) -> None:
        """No frame can be made of the messages."""
        members = [sending for sending in frame.members if sending is not None]
        frame.members = []
        if len(members) > 1:
            _halve(frame, members)
        else:
            members[0].sender.finish(members[0], error)

    # ---- running out of time

    def _watch(self, at: float) -> None:
        """Look at all messages at this time."""
        self._watched = at
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, at - self._monotonic()), self._expire)

    def _expire(self) -> None:
        """Tell the messages whose time is up, wherever they are."""
        self._watched, now = _NEVER, self._monotonic()
        for pool in tuple(self._pools.values()):
            publication = self._publisher.known(pool.topic)
            queue = None if publication is None else publication.queues[0]
            pool.waiting = deque(self._in_time(pool.waiting, now, queue))
        for lane in tuple(self._lanes.values()):
            lane.waiting = deque(self._in_time(lane.waiting, now, lane.queue))
            for frame in () if lane.round is None else lane.round.frames:
                frame.parts = [self._in_time(part, now, lane.queue) for part in frame.parts]
                self._expire_in_flight(frame, lane.queue, now)
        left = self._times()
        earliest = min(left, default=_NEVER)
        if earliest < self._watched:
            self._watch(earliest)

    def _in_time(
        self, sendings: Iterable[Sending], now: float, queue: Queue | None
    ) -> list[Sending]:
        """Those that have time left; the others get their outcome."""
        kept: list[Sending] = []
        for sending in sendings:
            if sending.made + sending.timeout > now:
                kept.append(sending)
            else:
                sending.sender.finish(sending, self._publisher.expired(sending, queue))
        return kept

    def _expire_in_flight(self, frame: Frame, queue: Queue, now: float) -> None:
        connection = frame.connection
        for place, sending in enumerate(frame.members):
            if sending is None or connection is None or frame.ends[place] > now:
                continue
            frame.members[place] = None
            sending.began = frame.began
            late = RequestTimedOut(connection.remote, sending.draft.code, now - frame.began)
            if not self._publisher.settle(sending, queue, late, connection):
                sending.sender.retry(sending)

    def _times(self) -> Iterator[float]:
        """When each message runs out of time."""
        places: list[Lane | Pool] = [*self._pools.values(), *self._lanes.values()]
        for place in places:
            for sending in place.waiting:
                yield sending.deadline
        for lane in self._lanes.values():
            for frame in () if lane.round is None else lane.round.frames:
                for part in frame.parts:
                    for sending in part:
                        yield sending.deadline
                for flying, end in zip(frame.members, frame.ends, strict=False):
                    if flying is not None:
                        yield end


def _may_be_of_one(code: int) -> bool:
    """Whether a single message of a batch may be what a broker refuses."""
    return code not in RETRIED or code == _SYSTEM_ERROR


def _halve(frame: Frame, members: list[Sending]) -> None:
    middle = len(members) // 2
    frame.parts += (members[middle:], members[:middle])
