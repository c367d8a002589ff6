"""The topics that a producer sends to: their queues, and whose turn it is.

Threads read what is known here while the loop changes it; entries are replaced as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from orbitmq.client.engine import Engine
from orbitmq.client.errors import NoRoute, NotRunning
from orbitmq.client.producer.faults import Faults
from orbitmq.client.producer.queuechoice import RoundRobin
from orbitmq.client.queue import Queue
from orbitmq.client.topicroute import TopicRoute
from orbitmq.errors import OrbitError

log = logging.getLogger(__name__)

#: Seconds between two questions for a route because sends to its brokers failed.
_REFRESH_PAUSE: Final = 1.0


class Publication:
    """A topic that is sent to: its queues, and whose turn it is."""

    __slots__ = ("has_others", "queues", "rotation")

    def __init__(self, queues: tuple[Queue, ...], rotation: RoundRobin) -> None:
        self.queues = queues
        self.rotation = rotation
        #: Whether more than one broker takes messages.
        self.has_others = len({queue.broker for queue in queues}) > 1


class Publications:
    """What is known of each topic, kept as fresh as the routes of the client."""

    def __init__(
        self,
        engine: Engine,
        faults: Faults,
        *,
        default_queues: int,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when any route has; `default_queues` are those of a new topic."""
        self._engine = engine
        self._faults = faults
        self._default_queues = default_queues
        self._changed = changed
        #: By topic as brokers know it: real routes with queues, not those of the template.
        self._known: dict[str, Publication] = {}
        #: What is known of a topic, without asking. May be called by any thread.
        self.get: Callable[[str], Publication | None] = self._known.get
        self._rotations: dict[str, RoundRobin] = {}
        self._refreshed: dict[str, float] = {}
        #: Topics that were not there when they were sent to for the first time.
        self._made: set[str] = set()
        self._is_closed = False
        self._end_watch = engine.routes.on_change(self._route_changed)

    def close(self) -> None:
        """Track no routes any more."""
        self._is_closed = True
        self._end_watch()
        for topic in self._rotations:
            self._engine.routes.untrack(topic)
        self._rotations.clear()
        self._known.clear()

    async def find(self, topic: str) -> Publication:
        """What is known of a topic, or what the name server says. Raises `NoRoute`."""
        known = self._known.get(topic)
        if known is not None:
            return known
        if self._is_closed:
            raise NotRunning("this producer", was_stopped=True)
        routes = self._engine.routes
        if topic not in self._rotations:
            self._rotations[topic] = RoundRobin(self._engine.chance)
            routes.track(topic)
        route = await routes.publish_route(topic, default_queues=self._default_queues)
        if self._is_closed:
            raise NotRunning("this producer", was_stopped=True)
        publication = self._note(topic, route)
        if not publication.queues:
            raise NoRoute(topic, self._engine.name_servers)
        if route.is_provisional:
            self._tell_made(publication)
        return publication

    def _tell_made(self, publication: Publication) -> None:
        """Say once that a topic comes into being: it may be one that was mistyped."""
        first = publication.queues[0]
        if first.topic in self._made:
            return
        self._made.add(first.topic)
        count = sum(queue.broker == first.broker for queue in publication.queues)
        log.info(
            "topic %s does not exist and is made by sending to it, with %d queue%s on each broker "
            "that a message goes to",
            first.topic,
            count,
            "" if count == 1 else "s",
            extra={"topic": first.topic, "queues": count},
        )

    def refresh_soon(self, topic: str) -> None:
        """A broker did not do: maybe the name server knows better by now."""
        now = self._engine.clock.monotonic()
        if now - self._refreshed.get(topic, -_REFRESH_PAUSE) < _REFRESH_PAUSE:
            return
        self._refreshed[topic] = now
        if self._engine.is_running:
            self._engine.spawn(self._refresh(topic), f"refresh the route of {topic}")

    async def _refresh(self, topic: str) -> None:
        try:
            await self._engine.routes.get(topic, refresh=True)
        except OrbitError as error:  # also an answer that cannot be read
            log.debug("route not refreshed: %s", error, extra={"topic": topic})

    def _route_changed(self, topic: str, route: TopicRoute) -> None:
        self._changed()
        if topic not in self._rotations:
            return
        before = self._known.get(topic)
        known = set() if before is None else {queue.broker for queue in before.queues}
        for queue in self._note(topic, route).queues:
            if queue.broker not in known:
                # It registered just now, whatever was wrong with it before.
                self._faults.forgive(queue.broker)

    def _note(self, topic: str, route: TopicRoute) -> Publication:
        publication = Publication(route.publish_queues, self._rotations[topic])
        if route.is_provisional or not publication.queues:
            # The topic is made by the first send; its own route may have other queues.
            self._known.pop(topic, None)
        else:
            self._known[topic] = publication
        return publication
