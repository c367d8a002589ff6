"""What a round of rebalancing has to know of a topic: its queues, and the members of the group.

Whatever cannot be found out is told once, and again when it lasts; until it is found out the topic
is left as it is.

What keeps a consumer from all of its topics, since the beginning, is an obstacle: a wrong address,
a name that was mistyped, a group that the broker does not make. Whoever is asked for messages can
say so instead of returning none. Once one of the topics was consumed, trouble is something that
passes, or concerns another of them: then there may simply be no messages.

That there is no such group is known by the broker that says so: another one may have it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from orbitmq.client.errors import (
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
_OBSTACLES: Final = (NoNameServer, NoRoute, GroupRefused)

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

    def connected(self, where: Address) -> None:
        """A broker was connected to; maybe it was before, and has been away."""
        if where in self._connected_to:
            self._returned_at = self._engine.clock.monotonic()
        self._connected_to.add(where)

    # ---- obstacles

    @property
    def obstacle(self) -> OrbitError | None:
        """What has kept all topics from being consumed, ever; None without one of the known.

        One of `NoNameServer`, `NoRoute`, `GroupRefused`.
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
        self._spells.over(about)
        self._spells.over(_NAME_SERVERS)
        return queues

    async def _with_similar(self, error: NoRoute) -> NoRoute:
        """The same error, with the topic that was perhaps meant; that is looked for once."""
        topic = error.topic
        if topic not in self._similar:
            self._similar[topic] = await similar_topic(self._engine, topic)
        return NoRoute(topic, error.name_servers, similar=self._similar[topic])

    async def members(self, topic: str, before: Collection[str]) -> tuple[str, ...] | None:
        """The members of the group; None when it is better to wait for some of those `before`."""
        if self._members is None:
            return ()
        members: tuple[str, ...] = ()
        # So Apache's brokers say that there is nobody in the group, not even us.
        with suppress(BrokerRefused):
            members, broker = await self._members.listed(topic)
        if self._engine.client_id not in members:
            # A broker that was restarted, or has thought us dead, hears of us before we believe it.
            failed = await self._engine.heartbeat()
            try:
                members, broker = await self._members.listed(topic)
            except BrokerRefused as refused:
                if self._is_no_group(topic, refused, failed):
                    raise self._refused(topic, refused) from refused
                raise
        self._has_group(topic, str(broker))
        missing = set(before) - set(members)
        since_return = self._engine.clock.monotonic() - self._returned_at
        if missing and since_return < self._return_grace:
            # The broker knows those who have returned to it. Its list is no proof yet that the
            # others are gone, and they go on consuming what they own.
            return None
        return members

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
