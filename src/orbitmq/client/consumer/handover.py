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
* Asking presupposes that one knows the other. So the members are read once more *after* claiming,
  from all brokers of the topic: not each of them knows everybody (see `survey`). A newcomer
  registers before it asks anything: either it is in that second list, and everything is worked out
  again, or it registered later and finds our claim.

What ends the wait otherwise:

* A member that lets go of a queue for longer than it may (`handover`) and a little. It says that it
  is letting go; the time begins when we first hear that. A member that holds the queue and does not
  say so consumes it, and may be right: it looks at routes less often than we, or cannot. As long as
  it answers it keeps the queue, up to `longest_wait` (or two of our own looks at routes, if that is
  longer): something is wrong by then, which only somebody who looks at both can mend, and a queue
  with two owners is better than one that nobody may ever have. Java's members do not say that they
  let go, and are not believed for so long: see below.
* Two that claim a queue, and do not agree for longer than a hand-over takes: the one whose client
  id is less begins then, and the other is told that it holds the queue.
* A member that does not answer. If it last said that it holds the queue, it is waited for from then
  on as if it were letting go; if it never said anything, from the claim on, and only if the queue
  was its own before, by the strategy; else for one `answer`.

Java members are asked otherwise. A Java client of 5.x answers from as many threads as it has
processors, asks the broker itself while it describes what it does (for progress that it does not
remember, five seconds long), and needs one of these threads to hear the broker's answer: as many
such questions at once as it has processors block it, and repeated, for good. So it is asked for its
positions (GET_CONSUMER_STATUS_FROM_CLIENT), which it answers from memory. A position is there
before a queue is begun, and goes when the queue was let go and reported. That is not all:

* A pull that is answered after the queue was let go puts its position back. The member takes it
  away with its next report, within seconds, but makes none while it has no queue at all: then it
  names a queue for good that it has no longer. So a Java member that names a queue is waited for as
  long as a hand-over takes, or until it must have heard of the change: two of our looks at routes.
* A queue without any progress, of which the broker did not say 0, has none while it is consumed. So
  a queue that a Java member had before is begun a moment after it was claimed (`_UNLISTED`), by
  when the member has heard of the change as well.

One that does not answer is left alone for a while (`silence`). Where accounts are checked, and the
group's may not ask (in ACL 2.0 that is Get on the group), a claim waits for one `answer`, no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq.client.consumer.allocation import AllocationError, Strategy, share
from orbitmq.client.consumer.members import Holdings
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


@dataclass(frozen=True, slots=True)
class _Said:
    """What a member said last of the queues that were claimed then."""

    at: float
    held: frozenset[Queue]
    claimed: frozenset[Queue]
    #: Those that it is letting go of, and when it said so first.
    leaving: dict[Queue, float]


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
        *,
        me: str,
        route_refresh: float = 0.0,
    ) -> None:
        """`me` is the client id of who asks; every `route_refresh` it looks at routes."""
        self._members = members
        self._topic = topic
        self._strategy = strategy
        self._settings = settings
        self._clock = clock
        self._me = me
        #: Who looks at routes as seldom as we do has heard of the queues by then.
        self._heard = 2 * route_refresh
        self._said: dict[str, _Said] = {}
        #: How many questions had been sent when everybody concerned had answered last.
        self._asked_after = 0
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
        claims, queues = list(claims), tuple(queues)
        after = max((self._asked_after, *(claim.after for claim in claims)))
        await self._find_java(asked, after)
        answers = await asyncio.gather(*(self._holdings(member, after) for member in asked))
        self._asked_after = self._members.asked
        java = [member for member in dict.fromkeys(others) if self._is_java.get(member)]
        wanted = {claim.queue for claim in claims}
        answered: list[str] = []
        silent = [member for member in concerned if member not in asked]
        for member, holdings in zip(asked, answers, strict=True):
            if holdings is None:
                silent.append(member)
                self._silent_until[member] = self._clock.monotonic() + self._settings.silence
                continue
            answered.append(member)
            self._note(member, holdings, wanted)
            if not wanted & (holdings.held | holdings.claimed) and time == self._time:
                # Unless there is more to ask about than when this was asked.
                self._cleared.add(member)
        free, overdue = [], []
        now = self._clock.monotonic()
        for claim in claims:
            ends = [
                *self._held_until(claim, answered),
                *self._last_held_until(claim, silent),
            ]
            waited = now - claim.since
            if self._may_be_held(claim, silent, queues, waited) or (
                waited < _UNLISTED and self._was_owned(java, claim, queues)
            ):
                ends.append(claim.since + self._patience)
            if not ends:
                free.append(claim)
            elif now >= max(ends):
                overdue.append(claim)
        return free, overdue

    @property
    def _patience(self) -> float:
        """How long it takes at most to let go of a queue."""
        return self._settings.handover + _ALLOWANCE

    def _note(self, member: str, holdings: Holdings, wanted: set[Queue]) -> None:
        now = self._clock.monotonic()
        before = self._said[member].leaving if member in self._said else {}
        leaving = {queue: before.get(queue, now) for queue in holdings.leaving & wanted}
        self._said[member] = _Said(now, holdings.held & wanted, holdings.claimed & wanted, leaving)

    def _held_until(self, claim: Claim, members: list[str]) -> Iterator[float]:
        """When those are overdue with a queue who have just said that they hold it."""
        for member in members:
            said = self._said[member]
            if claim.queue in said.leaving:
                yield max(claim.since, said.leaving[claim.queue]) + self._patience
            elif claim.queue in said.claimed and self._me < member:
                yield claim.since + self._patience
            elif claim.queue in said.held | said.claimed:
                # What a Java member names, it need not have any more.
                longest = 0.0 if self._is_java.get(member) else self._settings.longest_wait
                yield claim.since + max(longest, self._heard, self._patience)

    def _last_held_until(self, claim: Claim, silent: list[str]) -> Iterator[float]:
        """When those are overdue with a queue who held it when they last said anything."""
        for said in map(self._said.get, silent):
            if said is not None and claim.queue in said.held | said.claimed:
                since = said.leaving.get(claim.queue, said.at)
                yield max(claim.since, since) + self._patience

    def _is_left_alone(self, member: str) -> bool:
        return self._clock.monotonic() < self._silent_until.get(member, 0.0)

    async def _find_java(self, members: list[str], after: int) -> None:
        """Learn which members are Java's; if nobody can say, they are asked as ours are."""
        if all(member in self._is_java for member in members):
            return
        try:
            self._is_java.update(await self._members.java(self._topic, members, after=after))
        except OrbitError as error:
            log.debug("the languages of members are not known: %s", error)

    async def _holdings(self, member: str, after: int) -> Holdings | None:
        try:
            if self._is_java.get(member):
                return Holdings(await self._members.begun(member, self._topic))
            return await self._members.holdings(member, self._topic, after=after)
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
