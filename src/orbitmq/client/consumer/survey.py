"""What a round of rebalancing has to know of a topic: its queues, and the members of the group.

Whatever cannot be found out is told once, and again when it lasts; until it is found out the topic
is left as it is.

What keeps a topic from being consumed at all, since the beginning, is an obstacle: a wrong address,
a name that was mistyped, a group that the broker does not make. Whoever is asked for messages can
say so instead of returning none. Once a topic was consumed, trouble with it is something that
passes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from orbitmq.client.errors import BrokerRefused, GroupRefused, NoNameServer, NoRoute
from orbitmq.client.names import is_retry_topic
from orbitmq.client.similartopics import similar_topic
from orbitmq.errors import OrbitError
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
        self._obstacles: dict[str, OrbitError] = {}
        self._consumed: set[str] = set()
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
    def obstacles(self) -> Mapping[str, OrbitError]:
        """What keeps topics from being consumed that never were."""
        return self._obstacles

    def hindered(self, topic: str, error: OrbitError) -> None:
        """A topic cannot be consumed now."""
        if topic not in self._consumed and not is_retry_topic(topic):
            self._obstacles[topic] = error

    def succeeded(self, topic: str) -> None:
        """Everything that had to be known of a topic is known."""
        self._consumed.add(topic)
        self._obstacles.pop(topic, None)
        self._similar.pop(topic, None)

    def forget(self, topic: str) -> None:
        """A topic is not wanted any more."""
        self._consumed.discard(topic)
        self._obstacles.pop(topic, None)
        self._similar.pop(topic, None)
        self._spells.forget(_route(topic))

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
        except NoNameServer as error:
            self.hindered(topic, error)
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
        try:
            members = await self._members.of(topic)
        except BrokerRefused:
            # So Apache's brokers say that there is nobody in the group, not even us.
            members = ()
        if self._engine.client_id not in members:
            # A broker that was restarted, or has thought us dead, hears of us before we believe it.
            failed = await self._engine.heartbeat()
            try:
                members = await self._members.of(topic)
            except BrokerRefused as refused:
                if self._is_no_group(topic, refused) and not failed:
                    raise GroupRefused(self._group, refused) from refused
                raise
        missing = set(before) - set(members)
        since_return = self._engine.clock.monotonic() - self._returned_at
        if missing and since_return < self._return_grace:
            # The broker knows those who have returned to it. Its list is no proof yet that the
            # others are gone, and they go on consuming what they own.
            return None
        return members

    def _is_no_group(self, topic: str, refused: BrokerRefused) -> bool:
        """Whether a broker that took a heartbeat of the group says that it has no such group.

        Apache's brokers only say that nobody is in it, and with a code for anything.
        """
        return refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST or (
            refused.code == ResponseCode.SYSTEM_ERROR and topic not in self._consumed
        )


def _route(topic: str) -> tuple[str, str]:
    """What trouble with the route of a topic is about."""
    return ("route", topic)
