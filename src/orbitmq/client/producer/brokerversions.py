"""What brokers can do, as far as their version tells: they say it with every heartbeat's answer.

A broker of the old line takes a message for a certain time, keeps the wish as a property that it
does not know, and delivers the message at once. So such a message is sent only to a broker that has
said that it is of 5.0 or later; one that has not said anything yet is asked. In a cluster with
both, as in the middle of an upgrade, the message goes to a broker that can keep it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.producer.errors import TimesUnsupported
from orbitmq.client.topicroute import MASTER
from orbitmq.errors import OrbitError
from orbitmq.wire.versions import Release, ordinal_of, release_of

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine

#: The first release that delivers at any time, and that reads a whole batch.
_NEW_LINE: Final = ordinal_of(Release(5, 0, 0))


class BrokerVersions:
    """The versions of the brokers that a producer sends to."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known = engine.broker_versions

    async def any_before_5(self, brokers: Iterable[str]) -> bool:
        """Whether one of them is of the old line, as far as they say so. Raises `OrbitError`."""
        masters = {self._engine.routes.master(broker) for broker in brokers}
        if not masters & self._known.keys():
            await self._engine.heartbeat()
        return any(self._known.get(where, _NEW_LINE) < _NEW_LINE for where in masters)

    def keeps_times(self, broker: str) -> bool:
        """Whether a broker is known to deliver at any time. May be called by any thread."""
        # The master's word counts: in a rolling upgrade its slaves are newer than it for a while.
        master = self._engine.routes.brokers.get(broker, {}).get(MASTER)
        return master is not None and self._known.get(master, 0) >= _NEW_LINE

    async def check_times(self, broker: str, wish: str, within: float) -> None:
        """Raises `TimesUnsupported` for a broker of the old line.

        One that does not say what it is within the time is not available, for this message.
        """
        master = self._engine.routes.master(broker)
        if master not in self._known:
            try:
                async with asyncio.timeout(max(0.0, within)):
                    failures = await self._engine.heartbeat()
            except TimeoutError:
                failures = {}
            if master not in self._known:
                raise _unheard(broker, failures.get(master))
        version = self._known[master]
        if version < _NEW_LINE:
            raise TimesUnsupported(wish, broker, release_of(version))


def _unheard(broker: str, why: OrbitError | None) -> BrokerUnavailable:
    reason = "it has not said its version, without which nothing is sent to it for later"
    return BrokerUnavailable(broker, reason if why is None else f"{reason} ({why})")
