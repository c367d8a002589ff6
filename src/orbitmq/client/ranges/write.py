"""Sends many messages that have their own ids: in frames, each queue in order.

The caller blocks; a producer on a background thread sends. A queue has one frame in flight, so its
messages are stored in order; queues are served in parallel, with a limit on the bytes in flight.
Trap: nothing counts as sent before `finish` returns. An error is raised there or by the next call.

A broker refuses a batch for one message that is too large for its settings. A refused batch is
halved repeatedly until the refused messages are alone; the others keep their order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, overload

from orbitmq.client.engine import Engine
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.producer.core import Draft, SendSettings
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.producer.send import Sending
from orbitmq.client.ranges.connections import RangeAccess
from orbitmq.client.routes import Queue, similar_topic
from orbitmq.errors import BrokerRefused, NoRoute, OrbitError, SendFailed
from orbitmq.message.properties import (
    ITEM_END,
    NAME_END,
    TIMER_DELIVER_MS,
    UNIQ_KEY,
    WAIT,
    decode_properties,
)
from orbitmq.message.stored import BatchElement, encode_batch, split_batch
from orbitmq.parsing import Fields
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.frame import Bytes

KIB: Final = 1024
MIB: Final = 1024 * KIB

#: Seconds for one attempt, and between attempts.
_ONE_ATTEMPT: Final = 5.0
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
#: As properties of a batch: its answer comes when the messages are safe.
_WAITS: Final = f"{WAIT}{NAME_END}true{ITEM_END}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingSettings:
    """How much is sent ahead, and for how long a frame is tried."""

    timeout: float = 30.0  #: for one frame with all attempts: longer than a broker's restart
    ahead_bytes: int = 16 * MIB  #: in flight; above this, `send` blocks

    def __post_init__(self) -> None:
        fields = Fields(self, "writing")
        fields.durations("timeout")
        fields.whole("ahead_bytes")


class EncodedElements(Sequence[BatchElement]):
    """Messages that are encoded already; taken apart only when a broker refuses them."""

    def __init__(self, data: memoryview, count: int) -> None:
        self.data = data
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> BatchElement: ...

    @overload
    def __getitem__(self, place: slice) -> list[BatchElement]: ...

    def __getitem__(self, place: int | slice) -> BatchElement | list[BatchElement]:
        return split_batch(self.data)[place]


class Frame(NamedTuple):
    """Messages for one queue that are stored all or none."""

    queue: Queue
    elements: Sequence[BatchElement]
    #: The id of the first message, used for the frame.
    unique_id: str
    #: Whether another queue of the topic may be used when this one does not answer.
    may_go_elsewhere: bool = True
    #: Delayed messages, and those of the maximum size, cannot be in a batch.
    is_alone: bool = False
    #: The caller's number of each message, for `take_refused`; without them a refused message is an
    #: error.
    numbers: Sequence[int] = ()

    def halves(self) -> tuple[Frame, Frame]:
        middle = len(self.elements) // 2
        return self._part(0, middle), self._part(middle, len(self.elements))

    def alone(self) -> Frame:
        """The only message, without a batch around it."""
        return self._replace(is_alone=True)

    def _part(self, start: int, end: int) -> Frame:
        elements = self.elements[start:end]
        first = decode_properties(elements[0].properties).get(UNIQ_KEY, self.unique_id)
        return self._replace(elements=elements, unique_id=first, numbers=self.numbers[start:end])


class Refusal(NamedTuple):
    """A message that a broker refused."""

    number: int
    reason: BrokerRefused


class RangeWriter:
    """A producer of frames, for one thread."""

    def __init__(
        self, access: RangeAccess, group: str, settings: WritingSettings | None = None
    ) -> None:
        self._settings = settings or WritingSettings()
        self._access = access
        self._group = group
        self._thread = LoopThread("orbitmq-writing")
        self._engine: Engine | None = None
        self._producer: AsyncProducer | None = None
        self._turns: dict[Queue, asyncio.Lock] = {}
        self._is_old_topic: dict[str, bool] = {}
        self._on_their_way: dict[concurrent.futures.Future[None], int] = {}
        self._ahead = 0
        self._failure: OrbitError | None = None
        #: The sending thread appends, the caller's thread takes.
        self._refused: deque[Refusal] = deque()

    def start(self) -> None:
        self._thread.start()
        self._thread.run(self._start())

    def stop(self) -> None:
        """Close everything. May be called again."""
        if self._producer is not None:
            self._thread.run(self._stop(self._producer))
            self._producer = None
        self._thread.stop()

    async def _start(self) -> None:
        sending = SendSettings(timeout=self._settings.timeout, retries=1000)
        self._engine = Engine(self._access.settings())
        await self._engine.start()
        self._producer = AsyncProducer.on(self._engine, self._group, sending=sending)
        await self._producer.start()

    async def _stop(self, producer: AsyncProducer) -> None:
        await producer.stop()
        if self._engine is not None:
            await self._engine.stop()

    def queues(self, topic: str, *, may_create: bool = True) -> tuple[Queue, ...]:
        """The queues of a topic that can be written. Raises `NoRoute`, or `NoNameServer` in time.

        With `may_create` also those of a topic that the first send creates.
        """
        asking = self._started.publisher.queues(topic, self._settings.timeout)
        try:
            queues = self._thread.run(asking)
        except SendFailed as failed:
            # Nothing was sent: the cause says more.
            if isinstance(failed.cause, OrbitError):
                raise failed.cause from None
            raise
        if not may_create:
            self._thread.run(self._check_exists(topic))
        return queues

    async def _check_exists(self, topic: str) -> None:
        engine = self._engine
        assert engine is not None  # noqa: S101  # started with the producer
        try:
            await engine.routes.get(topic)
        except NoRoute as missing:
            similar = await similar_topic(engine, topic)
            raise NoRoute(topic, missing.name_servers, similar=similar) from None

    def send(self, frame: Frame) -> None:
        """Send a frame in the background; blocks while too much is in flight."""
        draft = _draft(frame)
        size = len(draft.body)
        while self._on_their_way and self._ahead + size > self._settings.ahead_bytes:
            self._wait(concurrent.futures.FIRST_COMPLETED)
        self._raise_failure()
        future = self._thread.submit(self._carry(frame, draft))
        self._on_their_way[future] = size
        self._ahead += size

    def finish(self) -> None:
        """Wait until everything is stored. Raises the first error."""
        self._wait(concurrent.futures.ALL_COMPLETED)
        self._raise_failure()

    def take_refused(self) -> Sequence[Refusal]:
        """The messages refused since the last call, of frames with numbers."""
        return tuple(self._refused.popleft() for _ in range(len(self._refused)))

    def abandon(self) -> None:
        """Wait for what is in flight and forget its result."""
        self._wait(concurrent.futures.ALL_COMPLETED)
        self._failure = None
        self._refused.clear()

    def _wait(self, until: str) -> None:
        done, _ = concurrent.futures.wait(self._on_their_way, return_when=until)
        for future in done:
            self._ahead -= self._on_their_way.pop(future)
            future.result()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._wait(concurrent.futures.ALL_COMPLETED)
            failure, self._failure = self._failure, None
            raise failure

    async def _carry(self, frame: Frame, draft: Draft) -> None:
        # The lock is fair, so frames of a queue keep their order.
        async with self._turns.setdefault(frame.queue, asyncio.Lock()):
            if self._failure is not None:
                return  # nothing is sent behind a gap
            try:
                await self._store(frame, draft)
            except OrbitError as error:
                if self._failure is None:
                    self._failure = error

    async def _store(self, frame: Frame, draft: Draft) -> None:
        try:
            await self._attempt(draft, frame.queue, is_bound=not frame.may_go_elsewhere)
        except BrokerRefused as refused:
            if refused.code != ResponseCode.MESSAGE_ILLEGAL:
                raise
            if len(frame.elements) > 1:
                for half in frame.halves():
                    await self._store(half, _draft(half))
            elif not frame.is_alone:
                # The batch's own bytes count as well.
                alone = frame.alone()
                await self._store(alone, _draft(alone))
            elif frame.numbers:
                self._refused.append(Refusal(frame.numbers[0], refused))
            else:
                raise

    async def _attempt(self, draft: Draft, queue: Queue, *, is_bound: bool) -> None:
        now = asyncio.get_running_loop().time
        deadline = now() + self._settings.timeout
        if draft.is_batch and await self._is_old(draft.topic):
            draft = _batch(draft.topic, draft.body, _WAITS, draft.unique_id)
        if is_bound:
            await self._insist(draft, queue, deadline)
            return
        try:
            # Half of the time is for the frame's own queue.
            await self._insist(draft, queue, now() + self._settings.timeout / 2)
        except SendFailed:
            left = deadline - now()
            await self._started.publisher.send(Sending(draft, made=now(), timeout=left))

    async def _is_old(self, topic: str) -> bool:
        """Whether a broker of the topic is of RocketMQ 4.

        It appends the batch's properties to each message, so that all would have the batch's id.
        """
        known = self._is_old_topic.get(topic)
        if known is None:
            known = await self._started.publisher.is_before_5(topic, self._settings.timeout)
            self._is_old_topic[topic] = known
        return known

    async def _insist(self, draft: Draft, queue: Queue, deadline: float) -> None:
        """Send to one queue until it answers or the deadline passes.

        Unlike a producer, which cannot know whether a lost answer was a success: a frame that is
        stored twice has the same ids twice, which at-least-once allows.
        """
        now = asyncio.get_running_loop().time
        pause = _FIRST_PAUSE
        while True:
            left = min(deadline - now(), _ONE_ATTEMPT)
            try:
                await self._started.publisher.send(
                    Sending(draft, made=now(), timeout=left, queue=queue)
                )
            except SendFailed:
                if now() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                return

    @property
    def _started(self) -> AsyncProducer:
        if self._producer is None:
            raise OrbitError("the writer is not started")
        return self._producer


def _draft(frame: Frame) -> Draft:
    if frame.is_alone:
        (element,) = frame.elements
        text = element.properties.decode()
        return Draft(
            frame.queue.topic,
            bytes(element.body),
            text,
            frame.unique_id,
            flag=element.flag,
            timed_by="deliver_at" if TIMER_DELIVER_MS in decode_properties(text) else None,
        )
    elements = frame.elements
    return _batch(
        frame.queue.topic,
        elements.data if isinstance(elements, EncodedElements) else encode_batch(elements),
        f"{UNIQ_KEY}{NAME_END}{frame.unique_id}{ITEM_END}{_WAITS}",
        frame.unique_id,
    )


def _batch(topic: str, body: Bytes, properties: str, unique_id: str) -> Draft:
    code = int(RequestCode.SEND_BATCH_MESSAGE)
    return Draft(topic, body, properties, unique_id, code=code, is_batch=True)
