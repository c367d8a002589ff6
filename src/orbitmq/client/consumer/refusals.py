"""Brokers that do not have the group, as its pulls find out.

A refusal is known by the address of its broker: others of the cluster may well have the group. It
stands until a pull is served there, or until the last queue that was refused there is given up.

It is an error in the log when it begins and, while it lasts, from time to time. That it ended does
not bring the next line forward: where brokers with the group and without it answer by turns, at
one address even, every other answer would be a beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from orbitmq.client.errors import BrokerRefused, GroupRefused
from orbitmq.remoting.occurrences import Reminders

if TYPE_CHECKING:
    from orbitmq.client.queue import Queue
    from orbitmq.clock import Clock
    from orbitmq.remoting.address import Address

log = logging.getLogger(__name__)

#: While a broker refuses a group, it is told again after so many seconds.
TELL_AGAIN: Final = 600.0


class Refusals:
    """Which brokers refuse the pulls of one group, and which topics were ever served."""

    def __init__(self, group: str, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self._told = Reminders(interval=TELL_AGAIN)
        self._standing: dict[Address, GroupRefused] = {}
        #: Of the brokers that refuse: the queues that they have refused.
        self._queues: dict[Address, set[Queue]] = {}
        self._served: set[str] = set()

    def refused(self, queue: Queue, where: Address, refused: BrokerRefused) -> None:
        """A broker says that there is no such group: that does not pass by itself."""
        self._leave(queue, but=where)
        refusal = self._standing[where] = GroupRefused(self._group, refused)
        self._queues.setdefault(where, set()).add(queue)
        if count := self._told.note(str(where), self._clock.monotonic()):
            log.error(
                "%s",
                refusal,
                extra={"group": self._group, "broker": str(where), "times": count},
            )

    def served(self, queue: Queue, where: Address | None) -> None:
        """A broker has answered a pull: it has the group."""
        self._served.add(queue.topic)
        if self._standing:
            self._leave(queue)
            if where is not None:
                self._end(where)

    def given_up(self, queue: Queue) -> None:
        """A queue is not pulled any more: who refused it does not concern us because of it."""
        if self._standing:
            self._leave(queue)

    def was_served(self, topic: str) -> bool:
        """Whether any pull of a topic ever was."""
        return topic in self._served

    def standing(self) -> tuple[GroupRefused, ...]:
        """Those of now, one for each broker."""
        return tuple(self._standing.values())

    def of_all(self, queues: Iterable[Queue]) -> GroupRefused | None:
        """One of them, if there are queues and all of them were refused."""
        wanted = set(queues)
        if not self._standing or not wanted:
            return None
        refused = set().union(*self._queues.values())
        return next(iter(self._standing.values())) if refused.issuperset(wanted) else None

    def _leave(self, queue: Queue, *, but: Address | None = None) -> None:
        """A queue may have been refused at another address of its broker before."""
        for where, queues in tuple(self._queues.items()):
            if where != but:
                queues.discard(queue)
                if not queues:
                    self._end(where)

    def _end(self, where: Address) -> None:
        self._standing.pop(where, None)
        self._queues.pop(where, None)
