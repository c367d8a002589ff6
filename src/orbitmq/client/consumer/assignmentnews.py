"""Tells an application which queues its consumer has."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from orbitmq.client.queue import Queue

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine

log = logging.getLogger(__name__)

#: Called on the loop with a topic, all its queues and the own ones, when either has changed.
AssignmentListener: TypeAlias = Callable[
    [str, tuple[Queue, ...], tuple[Queue, ...]], Awaitable[None] | None
]
#: All queues of a topic and the own ones, as they are now.
Assignment: TypeAlias = Callable[[str], tuple[tuple[Queue, ...], tuple[Queue, ...]]]


class AssignmentNews:
    """Calls a listener, one change after the other; what it raises is logged."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        listener: AssignmentListener | None,
        assignment: Assignment,
    ) -> None:
        self._engine = engine
        self._group = group
        self._listener = listener
        self._assignment = assignment
        self._untold: dict[str, None] = {}
        self._last_told: dict[str, object] = {}
        self._task: asyncio.Task[None] | None = None

    def changed(self, topic: str) -> None:
        """Something about a topic is different now."""
        if self._listener is None:
            return
        self._untold[topic] = None
        if self._task is None or self._task.done():
            self._task = self._engine.spawn(
                self._tell(self._listener), f"tell {self._group} its queues"
            )

    async def stop(self) -> None:
        """Return when everything is told, or when the listener takes too long."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=self._engine.settings.stop_timeout)

    async def _tell(self, listener: AssignmentListener) -> None:
        while self._untold:
            # What changes in one go is told as one.
            await asyncio.sleep(0)
            topic = next(iter(self._untold))
            del self._untold[topic]
            queues, own = self._assignment(topic)
            if self._last_told.get(topic) == (queues, own):
                continue
            self._last_told[topic] = (queues, own)
            try:
                told = listener(topic, queues, own)
                if inspect.isawaitable(told):
                    await told
            except Exception:
                log.exception(
                    "the assignment listener of group %s failed on %s",
                    self._group,
                    topic,
                    extra={"group": self._group, "topic": topic},
                )
