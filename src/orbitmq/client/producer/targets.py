"""Where a send goes: the queues of its topic, found in the time that it has, and one of them.

Name servers that restart are not seen by callers with the time to wait, as it is with brokers: they
are asked until the time of the call is up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerRefused, MessageRefused, NoNameServer, SendFailed
from orbitmq.client.nameservers import NOT_NOW
from orbitmq.client.producer.faults import Faults
from orbitmq.client.producer.publications import Publication, Publications
from orbitmq.client.producer.sending import Sending
from orbitmq.client.queue import Queue
from orbitmq.errors import OrbitError
from orbitmq.remoting.errors import RequestTimedOut
from orbitmq.wire.codes import RequestCode

#: Between questions to name servers that do not answer; doubles.
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 0.5


class Targets:
    """The queues that one producer sends to."""

    def __init__(
        self, engine: Engine, faults: Faults, *, default_queues: int, changed: Callable[[], None]
    ) -> None:
        """`changed` is called when any route has."""
        self._engine = engine
        self._faults = faults
        self._monotonic = engine.clock.monotonic
        self.publications = Publications(
            engine, faults, default_queues=default_queues, changed=changed
        )

    async def choose(self, sending: Sending) -> tuple[Queue, bool]:
        """Where the next attempt goes, and whether there are other brokers.

        Raises `SendFailed`, or what the last broker said when none can do what is wished.
        """
        left = sending.deadline - self._monotonic()
        found = await self._found(sending.draft.topic, left)
        if isinstance(found, OrbitError):
            if sending.error is None or not isinstance(found, RequestTimedOut):
                sending.error = found
            raise sending.failed() from sending.error
        return self.choice(sending, found), found.has_others

    def choose_known(self, sending: Sending) -> tuple[Queue, bool] | None:
        """The same without asking anybody; None for a topic that is not known yet.

        May be called by any thread.
        """
        publication = self.publications.get(sending.draft.topic)
        if publication is None:
            return None
        return self.choice(sending, publication), publication.has_others

    async def queues(self, topic: str, within: float | None = None) -> tuple[Queue, ...]:
        """The queues of a topic, as brokers know them. Raises `NoRoute`.

        Without a name server, `NoNameServer` at once, or `SendFailed` after asking for `within`.
        """
        if within is None:
            return (await self.publications.find(topic)).queues
        found = await self._found(topic, within)
        if isinstance(found, OrbitError):
            raise SendFailed(topic, 0, found) from found
        return found.queues

    async def _found(self, topic: str, within: float) -> Publication | OrbitError:
        """What is known of a topic, or what was in the way when the time was up."""
        trouble: OrbitError = self.unanswered(within)
        pause = _FIRST_PAUSE
        try:
            async with asyncio.timeout(max(0.0, within)):
                while True:
                    try:
                        return await self.publications.find(topic)
                    except NoNameServer as error:
                        trouble = error
                    except BrokerRefused as error:
                        if error.code not in NOT_NOW:
                            raise
                        trouble = error
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        except TimeoutError:
            return trouble

    def unanswered(self, within: float) -> RequestTimedOut:
        """The error of one whose queues were not found within the time."""
        where = self._engine.name_servers[0]
        return RequestTimedOut(where, RequestCode.GET_ROUTEINFO_BY_TOPIC, within)

    def choice(self, sending: Sending, publication: Publication) -> Queue:
        """Where the next attempt goes, of the queues of its topic. May be called by any thread."""
        bound = sending.queue or sending.first
        if bound is not None:
            return bound
        if sending.select is None:
            queues = _able(sending, publication.queues) if sending.unable else publication.queues
            return publication.rotation.choose(queues, self._faults, sending.tried)
        message = sending.draft.message
        assert message is not None  # noqa: S101  # only messages of the application have a selector
        chosen = sending.select(publication.queues, message)
        if not isinstance(chosen, Queue):
            raise MessageRefused("queue", f"must be chosen by the selector, got {chosen!r}")
        # One choice holds for the whole call, also if queues come or go meanwhile.
        sending.queue = chosen
        return chosen


def _able(sending: Sending, queues: Sequence[Queue]) -> Sequence[Queue]:
    """Queues of brokers that have not said that they cannot do what the message wishes."""
    able = [queue for queue in queues if queue.broker not in sending.unable]
    if not able:
        raise next(reversed(sending.unable.values()))
    return able
