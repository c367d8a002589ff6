"""Plans that somebody looks at, kept until they are applied: what was shown is what is done."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from orbitmq.client.admin import ResetPlan
from orbitmq.clock import Clock
from orbitmq.console.errors import NotThere

#: Seconds for which a plan can be applied; then progress has moved on too far.
VALID = 600.0
_MOST = 200


@dataclass(frozen=True, slots=True)
class Planned:
    """Plans for one wish: one for each topic."""

    id: str
    plans: tuple[ResetPlan, ...]
    command: str
    until: float


class Plans:
    """Keeps plans for a while."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all: dict[str, Planned] = {}

    def keep(self, plans: tuple[ResetPlan, ...], command: str) -> Planned:
        now = self._clock.monotonic()
        self._all = {key: each for key, each in self._all.items() if each.until > now}
        while len(self._all) >= _MOST:
            del self._all[next(iter(self._all))]
        planned = Planned(secrets.token_urlsafe(12), plans, command, now + VALID)
        self._all[planned.id] = planned
        return planned

    def take(self, identity: str) -> Planned:
        """The plan, once. Raises `NotThere`."""
        planned = self._all.pop(identity, None)
        if planned is None or planned.until <= self._clock.monotonic():
            raise NotThere("this plan is applied already or too old; make a new one")
        return planned
