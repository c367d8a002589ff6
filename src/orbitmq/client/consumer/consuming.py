"""What the rest of a consumer knows about consumption, and what both kinds of it share.

Pulling gives messages (`accept`), rebalancing takes queues away (`drain`), and handlers are found
by topic. A message that was retried has its handler by the topic that it was sent to.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from orbitmq.client.consumer.calls import DirectCall
from orbitmq.client.consumer.crew import Crew
from orbitmq.client.consumer.handlers import Binding, bind_handler
from orbitmq.client.consumer.verdict import Failure, Outcome, Retry, reason_of
from orbitmq.message.wellknown import RETRY_TOPIC

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.sendback import SendingBack
    from orbitmq.client.consumer.settings import ConsumeSettings
    from orbitmq.client.consumer.statistics import Statistics
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue
    from orbitmq.client.received import ReceivedMessage

log = logging.getLogger(__name__)

#: How long workers have to end once their queues are drained. They have nothing left to do then.
WORKERS_END: Final = 1.0


class Consumption(Protocol):
    """What pulling and rebalancing know of it. Everything is called on the event loop."""

    async def start(self) -> None:
        """Before the first message."""

    async def stop(self) -> None:
        """After the last one; what still runs is waited for, in bounded time."""

    def accept(self, owned: OwnedQueue, messages: list[ReceivedMessage]) -> None:
        """Consume these, in time. Never blocks."""

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Begin nothing new for a queue, and wait for what runs; True when nothing runs."""


class Bindings:
    """Which handler a message is for."""

    def __init__(self, by_topic: Mapping[str, Binding], group: str) -> None:
        """Topics as brokers know them."""
        self._by_topic = dict(by_topic)
        self._stranger = bind_handler(_refuse_stranger, group=group)

    def put(self, topic: str, binding: Binding) -> None:
        self._by_topic[topic] = binding

    def remove(self, topic: str) -> None:
        self._by_topic.pop(topic, None)

    def of_queue(self, queue: Queue) -> Binding | None:
        """The handler of all messages of a queue; None: each has its own, as in a retry topic."""
        return self._by_topic.get(queue.topic)

    def of_message(self, message: ReceivedMessage) -> Binding:
        """The handler of one message; one that fails if the topic has none.

        Members of a group that are newer may have handlers that we do not, and their failed
        messages come to us as well: they are tried again, and reach somebody who has one.
        """
        topic = message.stored.get_property(RETRY_TOPIC) or message.queue.topic
        return self._by_topic.get(topic, self._stranger)

    def split(
        self, queue: Queue, messages: Sequence[ReceivedMessage]
    ) -> Iterable[tuple[Binding, Sequence[ReceivedMessage]]]:
        """Messages of a queue as calls, in their order: each for one handler, none too large.

        In tuples: whoever gets them cannot change what others go by.
        """
        messages = tuple(messages)
        binding = self.of_queue(queue)
        if binding is not None:
            size = binding.batch_size
            if size == 1:  # most handlers, and it takes half of what slices do
                return zip(itertools.repeat(binding), zip(messages, strict=True))
            return (
                (binding, messages[begin : begin + size]) for begin in range(0, len(messages), size)
            )
        return self._split_by_message(messages)

    def _split_by_message(
        self, messages: Sequence[ReceivedMessage]
    ) -> Iterator[tuple[Binding, Sequence[ReceivedMessage]]]:
        begin = 0
        for at, message in enumerate(messages):
            binding = self.of_message(message)
            following = messages[at + 1] if at + 1 < len(messages) else None
            is_full = at + 1 - begin >= binding.batch_size
            if is_full or following is None or self.of_message(following) is not binding:
                yield binding, messages[begin : at + 1]
                begin = at + 1


@dataclass(frozen=True, slots=True)
class Parts:
    """What consumption works with."""

    engine: Engine
    #: As brokers know it.
    group: str
    bindings: Bindings
    progress: ProgressStore
    #: None for broadcasting, where what fails is dropped.
    sending_back: SendingBack | None
    settings: ConsumeSettings
    statistics: Statistics


class Consuming(ABC):
    """What both kinds of consumption have: workers, statistics, direct calls."""

    def __init__(self, parts: Parts) -> None:
        self._engine = parts.engine
        self._group = parts.group
        self._bindings = parts.bindings
        self._progress = parts.progress
        self._sending_back = parts.sending_back
        self._settings = parts.settings
        self.statistics = parts.statistics
        self._monotonic = parts.engine.clock.monotonic
        self.crew = Crew(parts.settings.workers, self._finished, group=parts.group)
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_stopped = False
        #: Told of queues with fewer messages than before: fetching may have waited for that.
        self.has_room: Callable[[OwnedQueue], None] = _ignore

    async def stop(self) -> None:
        """Begin nothing more, and end the workers; a call that goes on is left to itself."""
        self._is_stopped = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        late = await self.crew.stop(WORKERS_END)
        if late:
            log.warning(
                "%d handler calls of group %s did not end; their messages are delivered again",
                late,
                self._group,
                extra={"group": self._group},
            )

    async def consume_directly(self, message: ReceivedMessage) -> DirectCall:
        """Call the handler of a message, and let nothing follow from what it says."""
        binding = self._bindings.of_message(message)
        call = DirectCall(binding, message.queue, message, self._monotonic)
        self.crew.submit(call)
        await call.done
        return call

    def _finished(self, jobs: list[Any]) -> None:
        """Workers are done with these; called on the loop."""
        direct = [job for job in jobs if isinstance(job, DirectCall)]
        for call in direct:
            call.settle()
        self._settle([job for job in jobs if not isinstance(job, DirectCall)] if direct else jobs)

    @abstractmethod
    def _settle(self, jobs: list[Any]) -> None:
        """Take what came of calls of this kind of consumption."""

    def _report(self, owned: OwnedQueue, position: int | None, *, increase_only: bool) -> None:
        """Messages of a queue before `position` are done with."""
        if position is None or owned.is_dropped:
            return
        try:
            self._progress.update(owned.queue, position, increase_only=increase_only)
        except Exception:
            # The application's own store. What is done stays done, and the next report says more.
            log.exception(
                "progress of group %s in %s could not be noted: offset %d",
                self._group,
                owned.queue,
                position,
                extra={"group": self._group, "queue": str(owned.queue), "offset": position},
            )
        self.has_room(owned)

    def _later(self, delay: float, work: Any, *arguments: Any) -> asyncio.TimerHandle:
        """Have something called on the loop, unless consumption is stopped before."""

        def call() -> None:
            self._timers.discard(timer)
            work(*arguments)

        timer = asyncio.get_running_loop().call_later(delay, call)
        self._timers.add(timer)
        return timer

    @abstractmethod
    def _next(self, message: ReceivedMessage, outcome: Outcome, failure: Failure) -> str:
        """What becomes of a message that failed, in words."""

    def _log_failure(self, owned: OwnedQueue, outcome: Outcome, handler: str) -> None:
        """One line, with the traceback of what the application raised and did not expect."""
        for messages, failure in outcome.failures:
            self._log_failed(owned, outcome, handler, messages, failure)

    def _log_failed(
        self,
        owned: OwnedQueue,
        outcome: Outcome,
        handler: str,
        messages: Sequence[ReceivedMessage],
        failure: Failure,
    ) -> None:
        first = messages[0]
        log.log(
            logging.INFO if failure.error is None else logging.WARNING,
            "%s of group %s failed on %d message(s) of %s from offset %d (id %s; %s): %s",
            handler,
            self._group,
            len(messages),
            owned.queue,
            first.queue_offset,
            first.msg_id,
            self._next(first, outcome, failure),
            failure.reason or "no reason given",
            exc_info=failure.error,
            extra={
                "group": self._group,
                "queue": str(owned.queue),
                "offset": first.queue_offset,
                "message_id": first.msg_id,
                "attempt": first.attempt,
            },
        )

    def _log_not_begun(self, owned: OwnedQueue, count: int, error: Exception) -> None:
        """No worker could be started: the system has no thread left."""
        log.error(
            "%d message(s) of %s wait for a worker of group %s, which could not be started: %s",
            count,
            owned.queue,
            self._group,
            reason_of(error),
            extra={"group": self._group, "queue": str(owned.queue)},
        )

    def _log_not_taken(self, message: ReceivedMessage, error: Exception) -> None:
        """Something went wrong with a message on its way back that nobody expects there."""
        log.error(
            "message %s of group %s (offset %d of %s) could not be sent back; it is tried again "
            "here",
            message.msg_id,
            self._group,
            message.queue_offset,
            message.queue,
            exc_info=error,
            extra={
                "group": self._group,
                "queue": str(message.queue),
                "offset": message.queue_offset,
                "message_id": message.msg_id,
            },
        )


def _ignore(_: OwnedQueue) -> None:
    """For consumption without fetching."""


def _refuse_stranger(message: ReceivedMessage) -> None:
    raise Retry(f"this consumer has no handler for topic {message.topic}")
