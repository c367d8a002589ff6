"""Where the queues of a stream begin and end, asked for no more often than is needed.

Spark asks an idle stream for news about eighty times a second. Brokers are asked a few times a
second instead, and at once after a batch. A broker that does not answer is no reason to stop: its
queues keep the ends that were last known, it is left alone for a while, and the stream goes on with
the others. Nor is a topic that nobody serves any more: its queues stay known, and new ones of the
other topics are found.

A broker that refuses costs nothing and is tried again soon, however often it does. One that hangs
keeps whoever asks it waiting until time is up, and with it all the others: the longer and the more
often it did, the longer it is left alone. One hiccup is nothing; in the long run it takes no more
than a ninth of the time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from orbitmq.client.errors import NoRoute
from orbitmq.client.queue import Queue
from orbitmq.client.rangecluster import Bounds, Found, RangeCluster, Routed
from orbitmq.clock import Clock
from orbitmq.errors import OrbitError
from orbitmq.spark.errors import OptionRefused
from orbitmq.spark.options import Subscription
from orbitmq.spark.places import subscribed

log = logging.getLogger(__name__)

#: Brokers are asked again after this part of the time in which nothing has happened.
_PART: Final = 0.1
#: How many times as long as it kept us waiting a broker is left alone at most. It begins with once
#: and doubles.
_MOST_TIMES: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """How often brokers are asked, in seconds."""

    idle: float = 0.25  #: for the ends of queues, while nothing happens
    busy: float = 0.03  #: the same shortly after something happened: more is likely to follow
    lows: float = 30.0  #: for their beginnings
    route: float = 30.0  #: for the queues themselves
    #: For anything, of a broker that did not answer; less often if it kept us waiting.
    silence: float = 5.0


class Heads:
    """The bounds of the queues of a subscription, as they were last heard of."""

    def __init__(
        self,
        cluster: RangeCluster,
        subscription: Subscription,
        settings: HeadSettings,
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
        self._pauses = BrokerPauses(settings.silence)

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
            found = subscribed(self._cluster, self._subscription, refresh=not is_first)
            failures = list(found.failures.values())
        except OrbitError as error:
            found, failures = Routed(), [error]
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
            answers: list[Found[Bounds] | Found[int]] = [found]
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

    def _note(self, asked: list[Queue], answers: list[Found[Bounds] | Found[int]]) -> None:
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


class BrokerPauses:
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
