"""What pulls want of the engine that takes time, done once for all of them.

A thousand queues of a broker that is away wait for one attempt to connect, ask for its route once,
and need one heartbeat.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine
    from orbitmq.remoting.address import Address

log = logging.getLogger(__name__)

#: Seconds between two questions for the same thing.
SPACING = 1.0


class Waiting(Protocol):
    """A pull that waits for a connection."""

    def step(self) -> None:
        """There is one now."""

    def not_connected(self, error: OrbitError) -> None:
        """There is none, for now."""


class SharedWaits:
    """Connections, routes and heartbeats for callers that cannot wait."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[Address, list[Waiting]] = {}
        #: When routes were last asked for, and when the last heartbeat was wanted.
        self._refreshed: dict[str, float] = {}
        self._beaten: float | None = None

    def wait_for(self, address: Address, pull: Waiting) -> None:
        """Step the pull when there is a connection, or tell it that there is none."""
        waiting = self._waiting.get(address)
        if waiting is not None:
            waiting.append(pull)
            return
        self._waiting[address] = [pull]
        self._engine.spawn(self._connect(address), f"connect to {address} for pulls")

    async def _connect(self, address: Address) -> None:
        failure: OrbitError | None = None
        try:
            await self._engine.connection(address)
        except OrbitError as error:
            failure = error
        finally:
            waiting = self._waiting.pop(address)
        for pull in waiting:
            if failure is None:
                pull.step()
            else:
                pull.not_connected(failure)

    def refresh_route(self, topic: str) -> None:
        """Ask where a topic is, unless that has just been asked."""
        now = self._engine.clock.monotonic()
        asked = self._refreshed.get(topic)
        if self._engine.is_running and (asked is None or now - asked >= SPACING):
            self._refreshed[topic] = now
            self._engine.spawn(self._refresh(topic), f"refresh the route of {topic} for pulls")

    async def _refresh(self, topic: str) -> None:
        try:
            await self._engine.routes.get(topic, refresh=True)
        except OrbitError as error:
            log.debug("route not refreshed: %s", error, extra={"topic": topic})

    def heartbeat(self) -> None:
        """Tell the brokers who we are, unless that has just been done: one does not know it."""
        now = self._engine.clock.monotonic()
        beaten = self._beaten
        if self._engine.is_running and (beaten is None or now - beaten >= SPACING):
            self._beaten = now
            self._engine.spawn(self._engine.heartbeat(), "heartbeat for pulls")
