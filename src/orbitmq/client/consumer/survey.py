"""What a round of rebalancing has to know of a topic: its queues, and the members of the group.

Whatever cannot be found out is told once, and again when it lasts; until it is found out the topic
is left as it is.

Who is a member. A broker lists those who are connected to it, and as a rule that is everybody. But
a broker that is new in a topic's route is heard of by each member when it next looks at the route,
up to half a minute after the first; a broker that was restarted knows those who are back; and a
member may be cut off from one broker alone. To believe such a list is to take the queues of members
that go on consuming them. So *a member is whoever any broker of the topic lists, and nobody has
left before all of them say so*:

* In quiet times one broker is asked, any one, as Java does it. Its list is enough if it names
  everybody we know of.
* If it does not, or names others, or anything has happened since all were asked (we are new,
  members came or went, a broker was connected to, the second look of `gaining` found somebody else,
  the lists differed), all brokers are asked, side by side. So nobody is overlooked either whom one
  broker alone knows. All topics of a round share the answers, which are the same for each.
* Whoever is listed twice by a broker, because it does not know yet that an old connection is dead,
  is one member. Members of other kinds than ours count what the one broker lists that they happen
  to ask, so beside them he counts as often as the list has him that has him most often. (Shares are
  then as theirs when they ask that broker.) Lists in which he is not as often differ.
* A broker that cannot be reached, or refuses, has no say. One that takes longer than an `answer`
  may know those who are missing: they are waited for, for one `return_grace`.
* After a broker was connected to while we consume, those who are missing everywhere are waited for
  as long as well: they may be on their way to it.

Brokers see within moments of each other that a member has left, or was killed, and tell so; each
time all are asked. Should one not tell, lists that differ are looked at again after a second, and
ever later then. A broker from which a member was cut off lists it until it thinks it dead, after
120 s, and no longer; so the wait for the one list that still has it ends as well. Members that ask
one broker only, as Java's do, see the same as we as soon as all brokers list the same.

What keeps a consumer from all of its topics, since the beginning, is an obstacle: a wrong address,
a name that was mistyped, a group that the broker does not make. Whoever is asked for messages can
say so instead of returning none. Once one of the topics was consumed, trouble is something that
passes, or concerns another of them: then there may simply be no messages. (What an account may not
do does not pass at any time: see `refusals`.)

That there is no such group is known by the broker that says so: another one may have it.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.members import Listing
from orbitmq.client.errors import (
    AccessDenied,
    BrokerRefused,
    GroupRefused,
    NoNameServer,
    NoRoute,
    NotANameServer,
)
from orbitmq.client.names import is_retry_topic
from orbitmq.client.similartopics import similar_topic
from orbitmq.errors import OrbitError
from orbitmq.remoting.address import parse_address
from orbitmq.wire.codes import ResponseCode

if TYPE_CHECKING:
    from orbitmq.client.consumer.members import GroupMembers
    from orbitmq.client.consumer.spells import Spells
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue
    from orbitmq.remoting.address import Address

log = logging.getLogger(__name__)

#: What trouble with them is about.
_NAME_SERVERS: Final = "name servers"
#: What somebody can do something about.
_OBSTACLES: Final = (NoNameServer, NoRoute, GroupRefused, AccessDenied)

#: So Apache's brokers begin to say that nobody is in a group, with a code for anything.
_NOBODY_LISTED: Final = "no consumer for this group"
#: When they have said so this often, each time after a heartbeat that they took, they have no such
#: group, and make none: a heartbeat of a group that is not there is taken and not looked at.
_ROUNDS_UNLISTED: Final = 3


class Survey:
    """Asks name servers and brokers on behalf of one consumer."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        members: GroupMembers | None,
        spells: Spells,
        *,
        return_grace: float,
    ) -> None:
        """Without `members` nobody shares anything: broadcasting."""
        self._engine = engine
        self._group = group
        self._members = members
        self._spells = spells
        self._return_grace = return_grace
        #: Why a topic has never been consumed so far, if something is in the way.
        self._hindered: dict[str, OrbitError] = {}
        self._consumed: set[str] = set()
        #: Brokers that do not have the group, and the topics about which they were asked.
        self._refused_by: dict[str, set[str]] = {}
        #: In how many rounds brokers of a topic have listed nobody, after they were told of us.
        self._unlisted: dict[str, int] = {}
        #: Topics that are not there, and which others they may be a slip of.
        self._similar: dict[str, str | None] = {}
        self._connected_to: set[Address] = set()
        self._returned_at = float("-inf")
        #: What all brokers of a topic listed, of which nothing has happened since.
        self._agreed: dict[str, Counter[str]] = {}
        self._happenings = 0
        #: How many questions had been sent when something happened last.
        self._happened_after = 0
        #: In how many rounds, one after the other, brokers have listed different members.
        self._split: dict[str, int] = {}
        #: Since when somebody is missing whom a broker may know that does not answer.
        self._unheard: dict[str, float] = {}

    def connected(self, where: Address) -> None:
        """A broker was connected to; maybe it was before, and has been away."""
        if where in self._connected_to or self._consumed:
            self._returned_at = self._engine.clock.monotonic()
        self._connected_to.add(where)
        self.happened()

    def happened(self, topic: str | None = None) -> None:
        """Members, maybe of one topic only, may be others than those that one broker lists."""
        self._happenings += 1
        self._happened_after = self.asked
        if topic is None:
            self._agreed.clear()
        else:
            self._agreed.pop(topic, None)

    @property
    def asked(self) -> int:
        """How many questions about members were sent so far."""
        return 0 if self._members is None else self._members.asked

    def split_rounds(self, topic: str) -> int:
        """For how many rounds brokers of a topic have listed different members."""
        return self._split.get(topic, 0)

    # ---- obstacles

    @property
    def obstacle(self) -> OrbitError | None:
        """What has kept all topics from being consumed, ever; None without one of the known.

        One of `NoNameServer`, `NoRoute`, `GroupRefused`, `AccessDenied`.
        """
        if self._consumed:
            return None
        return next(
            (each for each in self._hindered.values() if isinstance(each, _OBSTACLES)), None
        )

    @property
    def topics(self) -> set[str]:
        """Those of which something is remembered."""
        return self._consumed.union(self._hindered, *self._refused_by.values())

    def hindered(self, topic: str, error: OrbitError) -> None:
        """A topic cannot be consumed now."""
        if topic not in self._consumed and not is_retry_topic(topic):
            self._hindered[topic] = error

    def succeeded(self, topic: str) -> None:
        """Everything that had to be known of a topic is known."""
        self._consumed.add(topic)
        self._hindered.pop(topic, None)
        self._similar.pop(topic, None)

    def forget(self, topic: str) -> None:
        """A topic is not wanted any more."""
        self._consumed.discard(topic)
        self._hindered.pop(topic, None)
        self._similar.pop(topic, None)
        self._unlisted.pop(topic, None)
        self._agreed.pop(topic, None)
        self._split.pop(topic, None)
        self._unheard.pop(topic, None)
        self._spells.forget(_route(topic))
        for broker in tuple(self._refused_by):
            self._not_refused(topic, broker)

    # ---- asking

    async def queues(self, topic: str) -> tuple[Queue, ...] | None:
        """The queues that can be read; None when that cannot be said."""
        about = _route(topic)
        try:
            queues = await self._engine.routes.subscribe_queues(topic)
        except NoRoute as error:
            if is_retry_topic(topic):
                # Brokers make it when they hear of the group, which is just now.
                log.debug("%s", error)
            else:
                missing = await self._with_similar(error)
                self.hindered(topic, missing)
                self._spells.trouble(about, "group %s waits for a topic: %s", self._group, missing)
            # A name server that knows no topic answers all the same.
            self._spells.over(_NAME_SERVERS)
            return None
        except (NoNameServer, NotANameServer) as error:
            self.hindered(topic, _as_no_name_server(error))
            # Once for all topics: it is the same for each of them.
            self._spells.trouble(
                _NAME_SERVERS,
                "group %s consumes nothing new until a name server answers: %s",
                self._group,
                error,
            )
            return None
        except OrbitError as error:
            self.hindered(topic, error)
            self._spells.trouble(about, "the route of %s cannot be had: %s", topic, error)
            return None
        self._spells.over(_NAME_SERVERS)
        if queues or is_retry_topic(topic):
            self._spells.over(about)
        else:
            self._spells.trouble(
                about,
                "group %s gets nothing of %s for now: its read permission is off, at the topic or "
                "at its broker; turn it on with: orbitmq topic update %s --permission rw, or with "
                "permission = 6 in the settings of the broker",
                self._group,
                topic,
                topic,
            )
        return queues

    async def _with_similar(self, error: NoRoute) -> NoRoute:
        """The same error, with the topic that was perhaps meant; that is looked for once."""
        topic = error.topic
        if topic not in self._similar:
            self._similar[topic] = await similar_topic(self._engine, topic)
        return NoRoute(topic, error.name_servers, similar=self._similar[topic])

    async def members(
        self, topic: str, before: Collection[str], *, after: int | None = None
    ) -> tuple[str, ...] | None:
        """The members of the group; None when it is better to wait for some of those `before`.

        What was asked for another topic will do if it was none of the first `after` questions.
        """
        group = self._members
        if group is None:
            return ()
        after = self.asked if after is None else max(after, self._happened_after)
        # What happens while brokers are asked has happened since.
        happenings, agreed = self._happenings, self._agreed.pop(topic, None)
        members, broker, after, failed = await self._listed(group, topic, after)
        if agreed is not None and agreed == Counter(members) and set(before) <= agreed.keys():
            found = Listing(members)
        else:
            found = await group.everywhere(topic, members, broker, after=after)
        if found.is_agreed:
            self._split.pop(topic, None)
        else:
            self._split[topic] = self._split.get(topic, 0) + 1
        if found.is_agreed and found.is_whole and happenings == self._happenings:
            self._agreed[topic] = Counter(found.members)
        if self._engine.client_id not in found.members:
            self._check_welcome(topic, failed)
        if self._may_come(topic, before, found):
            return None
        once = tuple(dict.fromkeys(found.members))
        if len(once) < len(found.members) and not await group.are_ours(topic, once, after=after):
            return found.members
        return once

    async def _listed(
        self, group_members: GroupMembers, topic: str, after: int
    ) -> tuple[tuple[str, ...], Address, int, Mapping[Address, OrbitError]]:
        """What one broker lists, once it knows us; and after how many questions it was asked.

        Also which brokers have not taken the heartbeat, if one was sent for that.
        """
        members: tuple[str, ...] = ()
        failed: Mapping[Address, OrbitError] = {}
        # So Apache's brokers say that there is nobody in the group, not even us.
        with suppress(BrokerRefused):
            members, broker = await group_members.listed(topic, after=after)
        if self._engine.client_id not in members:
            # A broker that was restarted, or has thought us dead, hears of us before we believe it.
            failed = await self._engine.heartbeat()
            after = self.asked
            try:
                members, broker = await group_members.listed(topic, after=after)
            except BrokerRefused as refused:
                self._check_welcome(topic, failed)
                if self._is_no_group(topic, refused, failed):
                    raise self._refused(topic, refused) from refused
                raise
        self._has_group(topic, str(broker))
        return members, broker, after, failed

    def _check_welcome(self, topic: str, failed: Mapping[Address, OrbitError]) -> None:
        """Raise why no broker of a topic takes us as a member, if they have said so."""
        route = self._engine.routes.known(topic)
        brokers = [] if route is None else [set(each.values()) for each in route.brokers.values()]
        refused = {
            where: error for where, error in failed.items() if isinstance(error, BrokerRefused)
        }
        if brokers and all(each & refused.keys() for each in brokers):
            raise copy.copy(refused[next(iter(brokers[0] & refused.keys()))])

    def _may_come(self, topic: str, before: Collection[str], found: Listing) -> bool:
        """Whether somebody is missing of whom it is no proof yet that nobody lists him.

        A broker knows those who have returned to it, or found it; the others go on consuming what
        they own.
        """
        is_missing = not set(before) <= set(found.members)
        now, grace = self._engine.clock.monotonic(), self._return_grace
        if not is_missing or found.is_whole:
            self._unheard.pop(topic, None)
        if not is_missing:
            return False
        if now - self._returned_at < grace:
            return True
        return not found.is_whole and now - self._unheard.setdefault(topic, now) < grace

    # ---- brokers without the group

    def _is_no_group(self, topic: str, refused: BrokerRefused, failed: Collection[Address]) -> bool:
        """Whether a broker says that it has no such group, or as good as says so.

        `failed` are those that did not take the heartbeat before.
        """
        if refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
            return True
        is_unlisted = (
            refused.code == ResponseCode.SYSTEM_ERROR
            and refused.remark.startswith(_NOBODY_LISTED)
            and refused.address not in map(str, failed)
        )
        if not is_unlisted:
            self._unlisted.pop(topic, None)
            return False
        times = self._unlisted[topic] = self._unlisted.get(topic, 0) + 1
        return times >= _ROUNDS_UNLISTED

    def _refused(self, topic: str, refused: BrokerRefused) -> GroupRefused:
        """Note that a broker has no such group; that does not pass unless somebody creates it."""
        refusal = GroupRefused(self._group, refused)
        self._refused_by.setdefault(refused.address, set()).add(topic)
        # Once for all topics: it is the same for each of them.
        self._spells.trouble(_group_at(refused.address), "%s", refusal, level=logging.ERROR)
        return refusal

    def _has_group(self, topic: str, broker: str) -> None:
        """A broker has listed the group, so it has it; and those that are gone do not matter."""
        self._unlisted.pop(topic, None)
        if not self._refused_by:
            return
        if self._refused_by.pop(broker, None) is not None:
            self._spells.over(_group_at(broker))
        route = self._engine.routes.known(topic)
        if route is not None:
            there = {str(each) for brokers in route.brokers.values() for each in brokers.values()}
            for gone in self._refused_by.keys() - there:
                self._not_refused(topic, gone)

    def _not_refused(self, topic: str, broker: str) -> None:
        """A broker is not asked about a topic any more; its last one takes the trouble along."""
        topics = self._refused_by[broker]
        topics.discard(topic)
        if not topics:
            del self._refused_by[broker]
            self._spells.forget(_group_at(broker))


def _route(topic: str) -> tuple[str, str]:
    """What trouble with the route of a topic is about."""
    return ("route", topic)


def _group_at(broker: str) -> tuple[str, str]:
    """What trouble with the group at a broker is about."""
    return ("group", broker)


def _as_no_name_server(error: NoNameServer | NotANameServer) -> NoNameServer:
    """To those who wait for messages it is the same: what they gave is no name server."""
    if isinstance(error, NoNameServer):
        return error
    return NoNameServer([(parse_address(error.address), str(error))])
