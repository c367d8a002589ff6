"""Queues change hands without anybody in the middle, and are never in two hands.

A member that loses a queue holds it until its handler calls are done and its progress is with the
broker, and says so whenever it is asked what it holds. A member that gains a queue first *claims*
it, which it says when asked as well, and then asks everybody else; it begins when nobody holds or
claims the queue. Asking goes through the broker, with the request that tools use to look at a
consumer (GET_CONSUMER_RUNNING_INFO), so that Java members and Apache's brokers take part.

Why two members never both begin a queue, although each works out its share by itself and their
views of the group may differ for a moment:

* Both claim before they ask. Of two who claim the same queue, the later asker is told of the
  other's claim, or of its ownership, and waits. Both waiting is possible, and ends as soon as the
  views agree: for one of them the queue is then not its own, and the claim is dropped.
* Asking presupposes that one knows the other. So the members are read once more *after* claiming.
  A newcomer registers before it asks anything: either it is in that second list, and everything is
  worked out again, or it registered later and finds our claim.

What ends the wait otherwise: a member that holds a queue longer than it may (`handover`) and a
little; and one that does not answer. The latter is waited for as long as that only if the queue was
its own before, by the strategy; else for one `answer`.

Java members are asked otherwise. A Java client of 5.x answers from as many threads as it has
processors, asks the broker itself while it describes what it does (for progress that it does not
remember, five seconds long), and needs one of these threads to hear the broker's answer: as many
such questions at once as it has processors block it, and repeated, for good. So it is asked for its
positions (GET_CONSUMER_STATUS_FROM_CLIENT), which it answers from memory. A position is there
before a queue is begun, and goes after the queue was let go and reported. Only a queue without any
progress, of which the broker did not say 0, has none while it is consumed. Because of those, a
queue that a Java member had before is begun a moment after it was claimed (`_UNLISTED`), by when
the member has heard of the change as well.

One that does not answer is left alone for a while (`silence`). Where accounts are checked, and the
group's may not ask (in ACL 2.0 that is Get on the group), a claim waits for one `answer`, no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from orbitmq.client.consumer.allocation import AllocationError, Strategy, share
from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from orbitmq.client.consumer.members import GroupMembers
    from orbitmq.client.consumer.ownership import Claim
    from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
    from orbitmq.client.queue import Queue
    from orbitmq.clock import Clock

log = logging.getLogger(__name__)

#: What is added to the longest hand-over, for the way of the last report and the next question.
_ALLOWANCE = 1.0
#: How long a claim waits when its queue was a Java member's, which does not name it.
_UNLISTED = 0.3


class Inquiry:
    """Asks the other members of a group what they hold, until nothing stands against a claim.

    A member that holds nothing of what is claimed is not asked again: should the queue become its
    own later, it will ask us.
    """

    def __init__(
        self,
        members: GroupMembers,
        topic: str,
        strategy: Strategy,
        settings: RebalanceSettings,
        clock: Clock,
    ) -> None:
        self._members = members
        self._topic = topic
        self._strategy = strategy
        self._settings = settings
        self._clock = clock
        self._cleared: set[str] = set()
        #: The members of which it is known, and whether they are Java push consumers.
        self._is_java: dict[str, bool] = {}
        #: When those who did not answer may be asked again.
        self._silent_until: dict[str, float] = {}
        self._time = 0

    def again(self) -> None:
        """Something was claimed since, or somebody came: everybody is to be asked."""
        self._cleared.clear()
        self._time += 1

    async def free(
        self, claims: Iterable[Claim], others: Iterable[str], queues: Iterable[Queue]
    ) -> tuple[list[Claim], list[Claim]]:
        """The claims that nobody else stands against, and those that were waited for long enough.

        `others` are the other members, `queues` all of the topic.
        """
        time, others = self._time, tuple(others)
        concerned = [member for member in dict.fromkeys(others) if member not in self._cleared]
        asked = [member for member in concerned if not self._is_left_alone(member)]
        await self._find_java(asked)
        answers = await asyncio.gather(*(self._holdings(member) for member in asked))
        claims, queues = list(claims), tuple(queues)
        java = [member for member in dict.fromkeys(others) if self._is_java.get(member)]
        wanted = {claim.queue for claim in claims}
        held: set[Queue] = set()
        silent = [member for member in concerned if member not in asked]
        for member, holdings in zip(asked, answers, strict=True):
            if holdings is None:
                silent.append(member)
                self._silent_until[member] = self._clock.monotonic() + self._settings.silence
            elif theirs := holdings & wanted:
                held |= theirs
            elif time == self._time:
                # Unless there is more to ask about than when this was asked.
                self._cleared.add(member)
        free, overdue = [], []
        now = self._clock.monotonic()
        for claim in claims:
            waited = now - claim.since
            is_blocked = (
                claim.queue in held
                or self._may_be_held(claim, silent, queues, waited)
                or (waited < _UNLISTED and self._was_owned(java, claim, queues))
            )
            if not is_blocked:
                free.append(claim)
            elif waited >= self._settings.handover + _ALLOWANCE:
                overdue.append(claim)
        return free, overdue

    def _is_left_alone(self, member: str) -> bool:
        return self._clock.monotonic() < self._silent_until.get(member, 0.0)

    async def _find_java(self, members: list[str]) -> None:
        """Learn which members are Java's; if nobody can say, they are asked as ours are."""
        if all(member in self._is_java for member in members):
            return
        try:
            java = await self._members.java(self._topic)
        except OrbitError as error:
            log.debug("the languages of members are not known: %s", error)
            return
        self._is_java.update({member: member in java for member in members})

    async def _holdings(self, member: str) -> frozenset[Queue] | None:
        try:
            if self._is_java.get(member):
                return await self._members.begun(member, self._topic)
            return await self._members.holdings(member, self._topic)
        except OrbitError as error:
            log.debug("%s does not say what it holds: %s", member, error)
            return None

    def _may_be_held(
        self, claim: Claim, silent: list[str], queues: Iterable[Queue], waited: float
    ) -> bool:
        """Whether a member that does not answer has to be waited for."""
        if not silent:
            return False
        if waited < self._settings.answer:
            return True
        if not self._members.may_ask:
            # They would be waited for as long as can be, whenever anybody comes or goes.
            return False
        return self._was_owned(silent, claim, queues)

    def _was_owned(self, members: list[str], claim: Claim, queues: Iterable[Queue]) -> bool:
        return any(self._was_owner(member, claim, queues) for member in members)

    def _was_owner(self, member: str, claim: Claim, queues: Iterable[Queue]) -> bool:
        if member not in claim.former:
            return False
        try:
            return claim.queue in share(self._strategy, queues, claim.former, member)
        except AllocationError:
            return True
