"""Dead letters that are being sent again: in the background, with the outcome of each."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing
from dataclasses import dataclass, field

from orbitmq.client.admin import (
    AsyncAdmin,
    DeadLetterFilter,
    ResendOutcome,
    ResendResult,
    ResendTo,
)
from orbitmq.console.audit import Audit
from orbitmq.console.errors import BadInput, NotThere
from orbitmq.console.events import Events
from orbitmq.errors import OrbitError

#: Outcomes that are kept one by one; beyond that they are only counted.
MOST_OUTCOMES = 10_000
_MOST_REPLAYS = 100


@dataclass(slots=True)
class Replay:
    """A resending that is under way or over."""

    id: str
    group: str
    command: str
    is_dry_run: bool
    started_at: float
    ended_at: float | None = None
    counts: dict[str, int] = field(default_factory=dict)
    outcomes: list[ResendOutcome] = field(default_factory=list)
    problem: str | None = None
    was_stopped: bool = False

    @property
    def is_running(self) -> bool:
        return self.ended_at is None

    def add(self, outcome: ResendOutcome) -> None:
        self.counts[outcome.result] = self.counts.get(outcome.result, 0) + 1
        if len(self.outcomes) < MOST_OUTCOMES:
            self.outcomes.append(outcome)

    @property
    def summary(self) -> str:
        """`10 sent, 1 failed`"""
        parts = [f"{number} {result}" for result, number in sorted(self.counts.items())]
        text = ", ".join(parts) or "no letter matched"
        if self.problem is not None:
            return f"{text}; ended by: {self.problem}"
        return f"{text}; stopped" if self.was_stopped else text


class Replays:
    """Runs them."""

    def __init__(self, admin: AsyncAdmin, audit: Audit, events: Events) -> None:
        self._admin = admin
        self._audit = audit
        self._events = events
        self._all: dict[str, Replay] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(
        self,
        group: str,
        where: DeadLetterFilter,
        *,
        to: ResendTo,
        rate: float | None,
        limit: int | None,
        again: bool,
        dry_run: bool,
        who: str,
        command: str,
        now: float,
    ) -> Replay:
        """Send letters from now on. Raises `BadInput` while others of the group are sent."""
        if any(each.group == group and each.is_running for each in self._all.values()):
            raise BadInput(f"dead letters of {group!r} are being sent already; wait, or stop that")
        replay = Replay(secrets.token_urlsafe(9), group, command, dry_run, now)
        self._all[replay.id] = replay
        self._forget_some()
        work = self._run(replay, where, to, rate, limit, again, who)
        self._tasks[replay.id] = asyncio.create_task(work, name=f"replay of {group}")
        return replay

    def get(self, identity: str) -> Replay:
        """Raises `NotThere`."""
        if identity not in self._all:
            raise NotThere("no such replay; it was long ago, or the console was started since")
        return self._all[identity]

    async def end(self, identity: str) -> Replay:
        """Stop one; what was sent is sent."""
        replay = self.get(identity)
        task = self._tasks.get(identity)
        if task is not None and not task.done():
            replay.was_stopped = True
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return replay

    async def stop(self) -> None:
        for identity in list(self._tasks):
            await self.end(identity)

    @property
    def all(self) -> list[Replay]:
        """The newest first."""
        return list(reversed(self._all.values()))

    async def _run(
        self,
        replay: Replay,
        where: DeadLetterFilter,
        to: ResendTo,
        rate: float | None,
        limit: int | None,
        again: bool,
        who: str,
    ) -> None:
        outcomes = self._admin.dead_letters.resending(
            replay.group,
            where,
            to=to,
            rate=rate,
            limit=limit,
            again=again,
            dry_run=replay.is_dry_run,
        )
        try:
            async with aclosing(outcomes):
                async for outcome in outcomes:
                    replay.add(outcome)
                    self._events.publish("replay", {"id": replay.id, "counts": replay.counts})
        except OrbitError as error:
            replay.problem = str(error)
        finally:
            replay.ended_at = self._audit.now()
            self._tasks.pop(replay.id, None)
            self._events.publish("replay", {"id": replay.id, "counts": replay.counts})
            if not replay.is_dry_run:
                is_done = replay.problem is None and not replay.counts.get(ResendResult.FAILED)
                await self._audit.note(who, replay.command, replay.summary, is_done=is_done)

    def _forget_some(self) -> None:
        for identity, each in list(self._all.items()):
            if len(self._all) <= _MOST_REPLAYS:
                return
            if not each.is_running:
                del self._all[identity]
