"""A consumer that is pushed to: everything that it consists of, put together on an event loop.

    heartbeat -> rebalance -> pull -> window -> handlers -> verdict -> progress
                     ^                                  \\-> send back -> delay -> retry topic

Start: progress is loaded, workers are ready, brokers hear of the group, queues are gained. Stop is
the way back: no queue is pulled or gained any more, handlers that run finish, progress is reported
and acknowledged, locks are given back, and only then brokers hear that this member is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from orbitmq.client.consumer.brokerprogress import BrokerProgress
from orbitmq.client.consumer.brokerrequests import BrokerRequests
from orbitmq.client.consumer.concurrent import ConcurrentConsumption
from orbitmq.client.consumer.consuming import Parts
from orbitmq.client.consumer.groupmember import GroupMember
from orbitmq.client.consumer.localprogress import LocalFileProgress, progress_path
from orbitmq.client.consumer.locks import QueueLocks
from orbitmq.client.consumer.orderly import OrderlyConsumption
from orbitmq.client.consumer.ownprogress import OwnProgress
from orbitmq.client.consumer.pulling import Puller
from orbitmq.client.consumer.rebalancing import Rebalancer
from orbitmq.client.consumer.receiving import IntoWindow
from orbitmq.client.consumer.sendback import SendingBack
from orbitmq.client.consumer.statistics import ConsumerStatistics
from orbitmq.client.consumer.subscriptioncheck import check_subscriptions
from orbitmq.client.producer.asyncproducer import AsyncProducer

if TYPE_CHECKING:
    from orbitmq.client.consumer.calls import DirectCall
    from orbitmq.client.consumer.options import ConsumerOptions
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.registering import Registration
    from orbitmq.client.engine import Engine
    from orbitmq.client.errors import AccessDenied
    from orbitmq.client.received import ReceivedMessage
    from orbitmq.wire.bodies.stats import ConsumerRunningInfo

#: The producer of what no broker takes back, as Apache's clients call it.
_INNER_PRODUCER = "CLIENT_INNER_PRODUCER"


class ConsumerCore(GroupMember):
    """One member of a consumer group. Belongs to the loop of its engine; started once."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        registrations: Sequence[Registration],
        options: ConsumerOptions,
    ) -> None:
        """On a running engine; `group` as brokers know it."""
        super().__init__(engine, group, registrations, options)
        own = options.progress
        self._kept = self._default_progress() if own is None else own
        self.progress: ProgressStore = self._kept if own is None else OwnProgress(own)
        self._producer = _InnerProducer(engine)
        self.consumption = self._consumption()
        self.puller = Puller(
            engine,
            group,
            self.subscriptions,
            self.progress,
            IntoWindow(
                self.progress,
                self.consumption,
                flow=options.flow,
                is_orderly=options.ordered,
                group=self.group,
                namespace=engine.settings.namespace,
            ),
            options.pull,
            is_broadcasting=options.is_broadcasting,
            count=self.statistics.pulled,
        )
        self.statistics.catch_up = self.puller.note_found
        self.consumption.has_room = self._has_room
        self.locks = QueueLocks(engine, group, options.locks) if self._needs_locks else None
        self.rebalancer = Rebalancer(
            engine,
            group,
            lambda: self.subscriptions.topics,
            progress=self.progress,
            puller=self.puller,
            consumption=self.consumption,
            strategy=options.strategy,
            consume_from=options.consume_from,
            is_broadcasting=options.is_broadcasting,
            locks=self.locks,
            settings=options.rebalance,
            listener=options.on_assignment,
            refusals=self.puller.refusals,
        )
        self.puller.rebuild = self.rebalancer.rebuild
        #: Called when nothing can arrive any more, since brokers do not let this account.
        self.on_denied: Callable[[AccessDenied], None] | None = None
        self._look: asyncio.Handle | None = None
        self.puller.refusals.on_refused = self._refused
        self._requests = BrokerRequests(engine, self)

    @property
    def _needs_locks(self) -> bool:
        return self.options.ordered and not self.options.is_broadcasting

    def _default_progress(self) -> ProgressStore:
        if self.options.is_broadcasting:
            return LocalFileProgress(progress_path(self.group, self.engine.client_id))
        return BrokerProgress(self.engine, self.group, strict_last=self.options.strict_last)

    def _consumption(self) -> ConcurrentConsumption | OrderlyConsumption:
        options = self.options
        sending_back = None
        if not options.is_broadcasting:
            sending_back = SendingBack(
                self.engine,
                self.group,
                self._producer,
                max_retries=options.consume.max_retries,
                timeout=options.consume.send_back_timeout,
            )
        parts = Parts(
            self.engine,
            self.group,
            self.bindings,
            self.progress,
            sending_back,
            options.consume,
            self.statistics,
        )
        if options.ordered:
            return OrderlyConsumption(parts, lapsed=self._lock_lapsed)
        return ConcurrentConsumption(parts)

    # ---- life

    async def start(self) -> None:
        """Returns when brokers know the consumer, and it has begun to gain queues."""
        await self.progress.load()
        await check_subscriptions(self.engine, self.group, self.subscriptions)
        await self.consumption.start()
        self.engine.join(self)
        self._requests.start()
        await self.rebalancer.start()
        self._tell_start("consumer")

    async def stop(self) -> None:
        """Give everything back, in bounded time. See the head of the module."""
        async with AsyncExitStack() as rest:
            # In the opposite order, and each whatever became of those before.
            rest.push_async_callback(self.abandon)
            rest.push_async_callback(self.engine.leave, self)
            rest.callback(self._requests.stop)
            rest.callback(self.puller.stop)
            await self.rebalancer.stop()
        self._tell_stop("consumer")

    async def abandon(self) -> None:
        """End what is here and nowhere else: workers, the inner producer, the hold on a file."""
        try:
            await self.consumption.stop()
            await self._producer.stop()
        finally:
            if isinstance(self._kept, LocalFileProgress):
                self._kept.close()

    # ---- while it runs

    async def subscribe(self, registration: Registration) -> None:
        """Consume one topic more, or other messages of one. Raises `SubscriptionRefused`."""
        await check_subscriptions(self.engine, self.group, [registration.subscription])
        self.bindings.put(registration.topic, registration.binding)
        self.subscriptions.put(registration.subscription)
        await self._tell_subscriptions()
        for owned in self.puller.queues:
            if owned.queue.topic == registration.topic:
                # What is held at the broker still waits for what was wanted before.
                self.puller.restart(owned)

    async def unsubscribe(self, topic: str) -> None:
        """Consume a topic no more; its queues are given up in order."""
        if self.subscriptions.remove(topic):
            await self._tell_subscriptions()

    async def _tell_subscriptions(self) -> None:
        await self.engine.heartbeat()
        self.rebalancer.wake()

    async def consume_directly(self, message: ReceivedMessage) -> DirectCall:
        """Call a handler once, with a message that an administrator chose."""
        return await self.consumption.consume_directly(message)

    def running_info(self, *, with_stacks: bool = False) -> ConsumerRunningInfo:
        """What the consumer is and does."""
        crew = self.consumption.crew
        return self._described(workers=crew.size, stacks=crew.stacks() if with_stacks else None)

    def snapshot(self) -> ConsumerStatistics:
        # Pulls and rounds of rebalancing may have heard the same.
        troubles = dict.fromkeys((*self.rebalancer.troubles, *self.puller.troubles))
        return self.statistics.snapshot(tuple(troubles), self.puller.counts())

    def _refused(self) -> None:
        """Look once for all queues whose refusals have just come."""
        if self._look is None:
            self._look = asyncio.get_running_loop().call_soon(self._look_for_denial)

    def _look_for_denial(self) -> None:
        self._look = None
        denial = self.rebalancer.denial
        if denial is not None and self.on_denied is not None:
            self.on_denied(denial)

    def _has_room(self, owned: OwnedQueue) -> None:
        """Messages of a queue are done with."""
        self.puller.has_room(owned)
        if not len(owned.window):
            self.rebalancer.reporting.became_empty()

    def _lock_lapsed(self, owned: OwnedQueue) -> None:
        """Gain a queue anew, and have the other locks looked at now: they may have lapsed too."""
        self.rebalancer.lock_lapsed(owned)
        if self.locks is not None:
            self.engine.spawn(self.locks.renew(), f"look at locks of {self.group}")


class _InnerProducer:
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
        if self._producer is None:
            self._producer = AsyncProducer.on(self._engine, _INNER_PRODUCER)
            await self._producer.start()
        return await self._producer.forward(topic, body, properties, flag=flag, sys_flag=sys_flag)

    async def stop(self) -> None:
        if self._producer is not None:
            await self._producer.stop()
