"""Failed messages on their way back from a task, counted by piece.

Whether a broker makes a message that it takes back a dead letter, it does not say. Who gives no
limit of his own leaves that to the group's, which is asked of each broker for the first message
that goes back to it, once in a task: for the numbers, and for copies, which carry their limit.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.retrylimits import retries_allowed
from orbitmq.client.consumer.sendback import SendingBack
from orbitmq.client.consumer.verdict import DEAD
from orbitmq.client.producer.asyncproducer import AsyncProducer
from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from orbitmq.client.consumer.verdict import Failure
    from orbitmq.client.engine import Engine
    from orbitmq.client.ranges import QueueRange
    from orbitmq.client.received import ReceivedMessage

log = logging.getLogger(__name__)

#: The producer of what no broker takes back, as Apache's clients call it.
_INNER_PRODUCER: Final = "CLIENT_INNER_PRODUCER"


class Fate(enum.Enum):
    """What became of a message that was sent back."""

    RETRIED = "retried"  #: it is delivered again
    DEAD = "dead"  #: it was given up
    HELD = "held"  #: it is delivered again, and did not fail: middleware kept it from the handler
    KEPT = "kept"  #: no broker took it


@dataclass(slots=True)
class Tally:
    """What became of the messages of a piece that were sent back."""

    retried: int = 0
    dead: int = 0
    kept: int = 0
    held: int = 0  #: put off, because middleware kept them from the handler: they did not fail
    #: Those that failed, by the attempts that were before.
    failures: Counter[int] = field(default_factory=Counter)
    reason: str | None = None


class Returns(SendingBack):
    """Sends failed messages back, and keeps count of them until they are asked for."""

    def __init__(
        self, engine: Engine, group: str, *, max_retries: int | None, timeout: float
    ) -> None:
        super().__init__(
            engine, group, LateProducer(engine), max_retries=max_retries, timeout=timeout
        )
        self._sent: list[tuple[ReceivedMessage, Failure, bool]] = []
        #: What brokers allow the group; None: they did not say.
        self._limits: dict[str, int | None] = {}
        self._asking_limit = asyncio.Lock()

    async def send_back(self, message: ReceivedMessage, failure: Failure) -> bool:
        if self._max_retries is None and failure.level != DEAD and not failure.is_held:
            await self._learn_limit(message.queue.broker)
        is_taken = await super().send_back(message, failure)
        self._sent.append((message, failure, is_taken))
        return is_taken

    async def give_up(self, message: ReceivedMessage, failure: Failure) -> bool:
        is_taken = await super().give_up(message, failure)
        self._sent.append((message, failure, is_taken))
        return is_taken

    def tally(self, piece: QueueRange) -> Tally:
        """What was sent back of a piece since this was asked last."""
        found = Tally()
        others = []
        for sent in self._sent:
            message, failure, is_taken = sent
            is_of_piece = piece.start <= message.queue_offset < piece.end
            if message.queue != piece.queue or not is_of_piece:
                others.append(sent)
                continue
            found.reason = failure.reason or found.reason
            if not failure.is_held:
                found.failures[message.reconsume_times] += 1
            match self.fate(message, failure, is_taken=is_taken):
                case Fate.RETRIED:
                    found.retried += 1
                case Fate.DEAD:
                    found.dead += 1
                case Fate.HELD:
                    found.held += 1
                case Fate.KEPT:
                    found.kept += 1
        self._sent = others
        return found

    def forget(self) -> None:
        """Count from the beginning, by what brokers allow then."""
        self._sent.clear()
        self._limits.clear()

    def fate(self, message: ReceivedMessage, failure: Failure, *, is_taken: bool) -> Fate:
        """What became of a message that was sent back since `forget`."""
        if not is_taken:
            return Fate.KEPT
        if failure.is_held:
            return Fate.HELD
        is_used_up = message.reconsume_times >= self._allowed(message.queue.broker)
        return Fate.DEAD if failure.level == DEAD or is_used_up else Fate.RETRIED

    def _allowed(self, broker: str) -> int:
        limit = self._limits.get(broker)
        return super()._allowed(broker) if limit is None else limit

    async def _learn_limit(self, broker: str) -> None:
        async with self._asking_limit:
            if broker not in self._limits:
                self._limits[broker] = await self._limit_at(broker)

    async def _limit_at(self, broker: str) -> int | None:
        try:
            return await retries_allowed(self._engine, self._group, broker, timeout=self._timeout)
        except OrbitError as error:
            # Usual for a group that the broker is yet to hear of, and for accounts that may not.
            log.debug(
                "what group %s is allowed at %s cannot be had: %s", self._group, broker, error
            )
            return None


class LateProducer:
    """A producer that is started when it is needed for the first time, which may be never."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._producer: AsyncProducer | None = None

    async def forward(
        self,
        topic: str,
        body: bytes,
        properties: Mapping[str, str],
        *,
        flag: int = 0,
        sys_flag: int = 0,
    ) -> object:
        """Send a message that exists already to another topic; raises `OrbitError`."""
        if self._producer is None:
            self._producer = AsyncProducer.on(self._engine, _INNER_PRODUCER)
            await self._producer.start()
        return await self._producer.forward(topic, body, properties, flag=flag, sys_flag=sys_flag)
