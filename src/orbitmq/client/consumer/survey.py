"""What a round of rebalancing has to know of a topic: its queues, and the members of the group.

Whatever cannot be found out is told once, and again when it lasts; until it is found out the topic
is left as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from orbitmq.client.errors import BrokerRefused, NoNameServer, NoRoute
from orbitmq.client.names import is_retry_topic
from orbitmq.errors import OrbitError

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
        self, engine: Engine, members: GroupMembers | None, spells: Spells, *, return_grace: float
    ) -> None:
        """Without `members` nobody shares anything: broadcasting."""
        self._engine = engine
        self._members = members
        self._spells = spells
        self._return_grace = return_grace
        self._connected_to: set[Address] = set()
        self._returned_at = float("-inf")

    def connected(self, where: Address) -> None:
        """A broker was connected to; maybe it was before, and has been away."""
        if where in self._connected_to:
            self._returned_at = self._engine.clock.monotonic()
        self._connected_to.add(where)

    async def queues(self, topic: str) -> tuple[Queue, ...] | None:
        """The queues that can be read; None when that cannot be said."""
        about = ("route", topic)
        try:
            queues = await self._engine.routes.subscribe_queues(topic)
        except NoRoute as error:
            if is_retry_topic(topic):
                # Brokers make it when they hear of the group, which is just now.
                log.debug("%s", error)
            else:
                self._spells.trouble(about, "%s", error)
            return None
        except NoNameServer as error:
            # Once for all topics: it is the same for each of them.
            self._spells.trouble(
                _NAME_SERVERS, "nothing new is consumed until a name server answers: %s", error
            )
            return None
        except OrbitError as error:
            self._spells.trouble(about, "the route of %s cannot be had: %s", topic, error)
            return None
        self._spells.over(about)
        self._spells.over(_NAME_SERVERS)
        return queues

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
            await self._engine.heartbeat()
            members = await self._members.of(topic)
        missing = set(before) - set(members)
        since_return = self._engine.clock.monotonic() - self._returned_at
        if missing and since_return < self._return_grace:
            # The broker knows those who have returned to it. Its list is no proof yet that the
            # others are gone, and they go on consuming what they own.
            return None
        return members
