"""Which commits may move a group's progress back.

Apache's broker stores whatever it is sent, so a consumer that
lost its queues while it was paused overwrites, when it wakes up, what the new owner has reported
since: the group then repeats everything in between after the next restart. Yet real clients have
to be able to move back: a push consumer that was told OFFSET_ILLEGAL reports the corrected offset
(one-way), a lite pull consumer reports where it sought to (one-way), the admin tools reset and
clone by the same request (and wait for the answer). What tells a straggler from these is that
*somebody else* has been reporting progress just now: an owner repeats its report every 5 s,
changed or not. Hence, for an offset lower than the stored one:

* carried by a pull (`Way.PULL`) it is refused: clients report on its own that they go back,
  first;
* one-way (`Way.REPORT`) it is stored from whoever reported last, from anybody once that report is
  older than `OWNERSHIP`, and if it is where this broker told the group to go (`permit`);
  otherwise it is refused;
* as a request that waits for its answer (`Way.REQUEST`) it is stored: a tool or an application
  that means it;
* `reset` and `clone` store it always.

A client with a good reason that is refused nevertheless (it took the queue over within the last
`OWNERSHIP` seconds, and seeks) repeats its report and is believed at the latest when that time is
over. `BackwardRule.APACHE` stores everything, `BackwardRule.NEVER` only `REQUEST` and what was
permitted.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass

#: How long a report keeps others from moving the queue's progress back: several report intervals.
OWNERSHIP = 30.0
#: How long a client may take to go back to where it was told to; clients of 4.x wait 10 s first.
PERMIT_LIFE = 60.0


class Way(enum.Enum):
    """How a commit came."""

    PULL = "pull"
    REPORT = "report"
    REQUEST = "request"


class Outcome(enum.Enum):
    """What became of a commit."""

    STORED = "stored"
    MOVED_BACK = "moved back"
    REFUSED = "refused"
    RESET_PENDING = "reset pending"
    #: It is from before a reset that has been taken.
    BEFORE_RESET = "before reset"


class BackwardRule(enum.Enum):
    """Who may move progress back by a commit."""

    APACHE = "apache"
    OWNER = "owner"
    NEVER = "never"


class QueueProgress:
    """The progress of a group in one queue."""

    __slots__ = ("at", "by", "offset", "permitted", "permitted_until", "pulled", "reach")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        #: Who reported last, and when; None after a restart or a reset: nobody's.
        self.by: Hashable | None = None
        self.at = 0.0
        #: An offset that this broker told the group to go back to.
        self.permitted: int | None = None
        self.permitted_until = 0.0
        #: Where the group's next pull will begin, for the statistics.
        self.pulled = -1
        #: Since a reset was taken: how far pulls have been answered. None when there was no reset,
        #: or the group may read elsewhere.
        self.reach: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRule:
    """The rule above and how strictly it is taken."""

    #: Who may move progress back by a commit: everybody as with Apache, its last reporter, nobody.
    backward: BackwardRule = BackwardRule.OWNER
    ownership: float = OWNERSHIP  #: how long a report makes its sender the last reporter

    def allows(self, queue: QueueProgress, offset: int, by: Hashable, way: Way, now: float) -> bool:
        """Whether `offset`, which is lower than what is stored, is to be stored."""
        if self.backward is BackwardRule.APACHE or way is Way.REQUEST:
            return True
        if way is Way.PULL:
            return False
        if offset == queue.permitted and now <= queue.permitted_until:
            return True
        if self.backward is BackwardRule.NEVER:
            return False
        return queue.by is None or queue.by == by or now - queue.at > self.ownership
