"""Which queues went to others while their owner stood still.

A pause that nobody used proves nothing about what happens when the paused one wakes up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from tools.chaos.history import Assigned, Entered, Event, Fault, Read
from tools.chaos.programs import DEADLINE, ScenarioFailed, Stage, wait_until


@dataclass(frozen=True, slots=True)
class Takeover:
    """A queue that another member worked on while its owner was stopped."""

    owner: str
    stopped_at: float
    queue: str
    done: int  #: messages that others have done with meanwhile


def takeovers(events: Sequence[Event], group: str) -> list[Takeover]:
    """One for every pause and queue, in the order of the first work of another member."""
    owned: dict[str, frozenset[str]] = {}
    stopped: dict[str, float] = {}
    found: dict[tuple[str, float, str], int] = {}
    for event in events:
        if isinstance(event, Assigned) and event.group == group:
            # What a stopped member had when it was stopped is what it believes in.
            if event.reader not in stopped:
                owned[event.reader] = frozenset(event.queues)
        elif isinstance(event, Fault) and event.what == "pause":
            if event.is_over:
                stopped.pop(event.target, None)
            else:
                stopped[event.target] = event.at
        elif isinstance(event, Entered | Read) and event.group == group:
            for owner, at in stopped.items():
                if owner != event.reader and event.queue in owned.get(owner, ()):
                    place = (owner, at, event.queue)
                    found[place] = found.get(place, 0) + isinstance(event, Read)
    return [Takeover(*place, done) for place, done in found.items()]


def is_taken_over(events: Sequence[Event], group: str) -> bool:
    """Whether others are at work on a queue of the member that was stopped last."""
    stops = [event.at for event in events if isinstance(event, Fault) and event.what == "pause"]
    return any(each.stopped_at >= max(stops) for each in takeovers(events, group))


def until_taken_over(stage: Stage, group: str, deadline: float = DEADLINE) -> None:
    """Let a member stand still until others have a queue of it; the figures tell if none do."""
    with contextlib.suppress(ScenarioFailed):
        wait_until(
            lambda: is_taken_over(stage.events(), group), "a queue is taken over", deadline, 0.25
        )
