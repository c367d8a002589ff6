"""The pull loop: every owned queue has one pull, which is asked again and again.

There is no task and no thread per queue. A pull is an object; it is stepped by the answer to its
last request or by a timer, and each step ends with a request on its way, a timer set, or the pull
waiting for a connection that others wait for too. Thousands of queues therefore cost a request
each and nothing else.

Whatever happens, a step is followed by another one, until the queue is no longer ours: a broker
that is gone, an answer that cannot be read or a bug in a receiver puts the pull off and is tried
again from the same offset. Nothing is ever skipped to get on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from orbitmq.client.consumer.pullanswers import AFTER_POLLED_PULL, AFTER_PULL
from orbitmq.client.consumer.pullrequests import PullRequests
from orbitmq.client.consumer.pullsettings import PullSettings
from orbitmq.client.consumer.queuepull import QueuePull
from orbitmq.client.consumer.refusals import Refusals
from orbitmq.client.consumer.setbacks import Setback, SetbackCounts, delays
from orbitmq.client.consumer.sharedwaits import SharedWaits
from orbitmq.client.consumer.spells import Spells
from orbitmq.errors import OrbitError
from orbitmq.filter.tags import ALL

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.receiving import Receiver
    from orbitmq.client.consumer.subscription import Subscription, Subscriptions
    from orbitmq.client.engine import Engine
    from orbitmq.client.errors import AccessDenied, GroupRefused
    from orbitmq.client.queue import Queue
    from orbitmq.remoting.address import Address

log = logging.getLogger(__name__)


#: Seconds after which it is said that nothing matches: other queues may be about to answer.
_MOMENT = 1.0
#: How long a broker may keep a pull as long as neither a match nor the lack of one is known: it
#: says only then how many messages came that nobody wanted.
_UNSETTLED_HOLD = 3.0
#: How long a broker that was not reached may keep a pull: its answer shows that it is back.
_RETURN_HOLD = 0.1


class Filtered:
    """Subscriptions to a part of a topic, of which no message has come so far: a slip, maybe."""

    def __init__(self, group: str) -> None:
        self._group = group
        #: By topic: what is wanted, and how many messages were passed over; None after a match.
        self._passed: dict[str, tuple[Subscription, int | None]] = {}
        self._spells = Spells(log)

    def note(self, wanted: Subscription, matched: int, passed: int) -> None:
        """A pull has found so many messages, and was led past so many others."""
        topic = wanted.topic
        said, before = self._passed.get(topic, (wanted, 0))
        if not said.is_same_filter(wanted):
            before = 0
            self._spells.forget(topic)
        if matched:
            self._spells.over(topic)
        self._passed[topic] = (wanted, None if matched or before is None else before + passed)

    def is_unmatched(self, topic: str) -> bool:
        """Whether messages have come, and none of them was wanted."""
        return topic in self._passed and bool(self._passed[topic][1])

    def is_settled(self, wanted: Subscription) -> bool:
        """Whether something has matched, or it was said that nothing does."""
        said, passed = self._passed.get(wanted.topic, (wanted, 0))
        is_known = passed is None or self._spells.is_in_trouble(wanted.topic)
        return is_known and said.is_same_filter(wanted)

    def tell(self, topic: str) -> None:
        """Say it once; what is wanted may still come."""
        if self._spells.is_in_trouble(topic):
            return
        wanted, passed = self._passed[topic]
        kind = "tags" if wanted.is_by_tags else "condition"
        self._spells.trouble(
            topic,
            "group %s gets nothing of %s so far: of %d messages none has matched the %s %r; check "
            "how they are written, or wait for such messages",
            self._group,
            topic,
            passed,
            kind,
            wanted.expression,
        )

    def given_up(self, topic: str, left: Iterable[OwnedQueue]) -> None:
        """One queue less of a topic; the last one takes the trouble along, but no match."""
        if self.is_unmatched(topic) and not any(owned.queue.topic == topic for owned in left):
            del self._passed[topic]
            self._spells.forget(topic)

    def standing(self) -> tuple[str, ...]:
        """What is wrong now, a sentence each."""
        return self._spells.standing()


class Puller:
    """Pulls the owned queues of one consumer. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        subscriptions: Subscriptions,
        progress: ProgressStore,
        receiver: Receiver,
        settings: PullSettings | None = None,
        *,
        is_broadcasting: bool = False,
        is_polled: bool = False,
        rebuild: Callable[[OwnedQueue], None] | None = None,
        count: Callable[[str, int, float], None] | None = None,
    ) -> None:
        """`is_polled`: the application polls, keeps its own position and is merely moved.

        `count` is told of pulls that found messages: the topic, how many were for us, and after how
        many seconds.

        `rebuild` is called with a queue that was dropped because its offset was illegal, when the
        corrected offset has been stored: it is to be gained anew, unless it is gone by then.
        """
        self.engine = engine
        self.group = group
        self.subscriptions = subscriptions
        self.progress = progress
        self.receiver = receiver
        self.settings = settings or PullSettings()
        self.delays = delays(self.settings)
        self.after = AFTER_POLLED_PULL if is_polled else AFTER_PULL
        self.is_polled = is_polled
        self.requests = PullRequests(
            group,
            self.settings,
            is_polled=is_polled,
            progress=None if is_broadcasting or is_polled else progress,
        )
        self.rebuild = rebuild
        self.count = count
        self.is_paused = False
        self.refusals = Refusals(group, engine.clock)
        self.filtered = Filtered(group)
        #: Brokers, by name, that could not be asked, or did not answer, and why; until an answer
        #: comes. The kernel of a frozen broker takes connections, so that these show nothing.
        self.unreached: dict[str, str] = {}
        self._looks: dict[str, asyncio.TimerHandle] = {}
        self.shared = SharedWaits(engine)
        self._pulls: dict[OwnedQueue, QueuePull] = {}
        self._counts: dict[Queue, SetbackCounts] = {}
        self._end_watch: Callable[[], None] | None = None
        #: When the offset of a queue was last corrected.
        self._corrected: dict[Queue, float] = {}

    def begin(self, owned: OwnedQueue) -> None:
        """Pull a queue from its `next_offset` on, for as long as it is ours."""
        if owned in self._pulls:
            return
        if self._end_watch is None:
            self._end_watch = self.engine.on_connected(self._connected)
        counts = self._counts.setdefault(owned.queue, SetbackCounts())
        pull = self._pulls[owned] = QueuePull(self, owned, counts)
        self.receiver.queues_changed(len(self._pulls))
        pull.step()

    def end(self, owned: OwnedQueue) -> None:
        """Pull a queue no longer. What is on its way will be ignored."""
        pull = self._pulls.pop(owned, None)
        if pull is not None:
            pull.end()
            self.refusals.given_up(owned.queue)
            self.filtered.given_up(owned.queue.topic, self._pulls)
            self.receiver.queues_changed(len(self._pulls))

    def restart(self, owned: OwnedQueue) -> None:
        """Pull from another `next_offset`; what is on its way will be ignored."""
        self.end(owned)
        self.begin(owned)

    def wake(self, owned: OwnedQueue) -> None:
        """Look again now whether a queue that is put off can be pulled."""
        pull = self._pulls.get(owned)
        if pull is not None:
            pull.wake()

    def has_room(self, owned: OwnedQueue) -> None:
        """Messages of a queue are done with: pull it now if it was held back because of them.

        Without this it would be looked at when its timer ends, and a fast consumer would have
        nothing to do meanwhile. Costs little when nothing is held back.
        """
        pull = self._pulls.get(owned)
        if pull is not None:
            pull.has_room()

    def pause(self) -> None:
        """Begin no pull until `resume`. Queues stay ours."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on at once."""
        self.is_paused = False
        for pull in tuple(self._pulls.values()):
            pull.wake()

    def stop(self) -> None:
        """End all pulls."""
        for owned in tuple(self._pulls):
            self.end(owned)
        for look in self._looks.values():
            look.cancel()
        self._looks.clear()
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None

    @property
    def refusal(self) -> GroupRefused | AccessDenied | None:
        """Why nothing at all can be pulled, if brokers refuse the group in every queue."""
        return self.refusals.of_all(owned.queue for owned in self._pulls if not owned.is_paused)

    @property
    def troubles(self) -> tuple[str, ...]:
        """What keeps messages away now, a sentence each."""
        # A paused queue is not pulled, and would not notice that its broker answers again.
        wanted = () if self.is_paused else (each for each in self._pulls if not each.is_paused)
        brokers = {owned.queue.broker for owned in wanted}
        unreached = [
            f"group {self.group} gets nothing from {broker} until it answers: {why}"
            for broker, why in self.unreached.items()
            if broker in brokers
        ]
        return (*self.refusals.standing(), *unreached, *self.filtered.standing())

    @property
    def queues(self) -> tuple[OwnedQueue, ...]:
        """What is pulled."""
        return tuple(self._pulls)

    def owned(self, queue: Queue) -> OwnedQueue | None:
        """The queue as it is pulled now, if it is."""
        return next((owned for owned in self._pulls if owned.queue == queue), None)

    def note_found(self) -> None:
        """Have counted what pulls have found, also of messages that are on the way to handlers."""
        for pull in self._pulls.values():
            pull.note_found()

    def counts(self) -> dict[tuple[Queue, Setback], int]:
        """How often pulls were put off, by queue and reason, since the consumer was made."""
        return {
            (queue, setback): count
            for queue, counts in self._counts.items()
            for setback, count in counts.totals().items()
        }

    def _connected(self, where: Address) -> None:
        for pull in tuple(self._pulls.values()):
            pull.is_connected(where)

    # ---- for the pulls

    def hold(self, broker: str, wanted: Subscription) -> float:
        """How long a broker may keep a pull that finds nothing."""
        longest = self.settings.hold
        if broker in self.unreached:
            return min(longest, _RETURN_HOLD)
        if wanted.expression == ALL or self.filtered.is_settled(wanted):
            return longest
        return min(longest, _UNSETTLED_HOLD)

    def at_end(self, topic: str) -> None:
        """A queue has nothing more for now that is wanted: look soon whether anything has come."""
        if topic not in self._looks and self.filtered.is_unmatched(topic):
            loop = asyncio.get_running_loop()
            self._looks[topic] = loop.call_later(_MOMENT, self._look_for_matches, topic)

    def _look_for_matches(self, topic: str) -> None:
        del self._looks[topic]
        if self.filtered.is_unmatched(topic) and all(
            # One that was never answered is held, since it is empty.
            owned.max_offset is None or owned.next_offset >= owned.max_offset
            for owned in self._pulls
            if owned.queue.topic == topic
        ):
            self.filtered.tell(topic)

    def correct(self, owned: OwnedQueue, *, is_reset: bool = False) -> None:
        """A queue is dropped because its offset is illegal; begin it anew from the right one.

        `is_reset`: not illegal, but replaced by an administrator, who waits for that.
        """
        try:
            # Frozen now: handlers that still run must not move it with what they finish.
            self.progress.freeze(owned.queue, owned.next_offset)
        finally:
            self.engine.spawn(
                self._correct(owned, is_reset=is_reset), f"correct the progress of {owned.queue}"
            )

    async def _correct(self, owned: OwnedQueue, *, is_reset: bool) -> None:
        if not is_reset:
            await self._space_corrections(owned.queue)
        try:
            await self.progress.persist([owned.queue])
        except OrbitError as error:
            # Begun anew from what the store has, the queue is told the same again.
            log.warning(
                "corrected progress of group %s in %s could not be stored: %s",
                self.group,
                owned.queue,
                error,
                extra={"group": self.group, "queue": str(owned.queue)},
            )
        if self.rebuild is not None:
            self.rebuild(owned)

    async def _space_corrections(self, queue: Queue) -> None:
        """Wait, if the queue was corrected just before: a broker may say so again and again."""
        monotonic = self.engine.clock.monotonic
        last = self._corrected.get(queue)
        if last is not None:
            await asyncio.sleep(last + self.settings.correction_delay - monotonic())
        self._corrected[queue] = monotonic()
