"""Failed messages on their way back from a task, counted by piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.sendback import SendingBack
from orbitmq.client.consumer.verdict import DEAD
from orbitmq.client.producer.asyncproducer import AsyncProducer

if TYPE_CHECKING:
    from orbitmq.client.consumer.verdict import Failure
    from orbitmq.client.engine import Engine
    from orbitmq.client.ranges import QueueRange
    from orbitmq.client.received import ReceivedMessage

#: The producer of what no broker takes back, as Apache's clients call it.
_INNER_PRODUCER: Final = "CLIENT_INNER_PRODUCER"


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

    async def send_back(self, message: ReceivedMessage, failure: Failure) -> bool:
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
            if not is_taken:
                found.kept += 1
            elif failure.is_held:
                found.held += 1
            elif self._is_dead(message, failure):
                found.dead += 1
            else:
                found.retried += 1
        self._sent = others
        return found

    def forget(self) -> None:
        """Count from the beginning."""
        self._sent.clear()

    def _is_dead(self, message: ReceivedMessage, failure: Failure) -> bool:
        """As far as it can be known here: the group may have another number at the broker."""
        return failure.level == DEAD or message.reconsume_times >= self._allowed


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
