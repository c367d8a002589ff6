"""A member of a group whose messages are handled elsewhere: in other processes, batch by batch.

To its group it is a member like any other. It says what it wants in heartbeats, owns queues by the
group's strategy, hands them over in order, holds the order locks, reports progress, and answers
what brokers ask. What becomes of the messages of its queues is the business of `hands`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from orbitmq.client.consumer.allocation import name_of
from orbitmq.client.consumer.brokerprogress import BrokerProgress
from orbitmq.client.consumer.brokerrequests import BrokerRequests
from orbitmq.client.consumer.calls import DirectCall
from orbitmq.client.consumer.consuming import Bindings
from orbitmq.client.consumer.gaining import Beginning
from orbitmq.client.consumer.locks import QueueLocks
from orbitmq.client.consumer.rebalancing import Rebalancer
from orbitmq.client.consumer.releasing import Draining
from orbitmq.client.consumer.runninginfo import Particulars, describe
from orbitmq.client.consumer.statistics import Statistics
from orbitmq.client.consumer.subscription import Subscription, Subscriptions
from orbitmq.client.consumer.subscriptioncheck import check_subscriptions
from orbitmq.client.names import retry_topic
from orbitmq.wire.bodies.membership import ConsumerData, ConsumeType

if TYPE_CHECKING:
    from orbitmq.client.consumer.core import ConsumerOptions
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.registering import Registration
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue
    from orbitmq.client.received import ReceivedMessage
    from orbitmq.wire.bodies.stats import ConsumerRunningInfo

log = logging.getLogger(__name__)


class Hands(Beginning, Draining, Protocol):
    """Who has the messages of owned queues handled. Everything is called on the event loop."""


class DelegatedMember:
    """One member of a consumer group. Belongs to the loop of its engine; started once."""

    producer_group: str | None = None

    def __init__(
        self,
        engine: Engine,
        group: str,
        registrations: Sequence[Registration],
        options: ConsumerOptions,
        hands: Hands,
    ) -> None:
        """On a running engine; `group` as brokers know it."""
        self.engine = engine
        self.group = group
        self.options = options
        self.is_ordered = options.ordered
        self.subscriptions = Subscriptions(engine.clock.now)
        for registration in registrations:
            self.subscriptions.put(registration.subscription)
        self.subscriptions.put(Subscription(retry_topic(group)))
        self.bindings = Bindings(
            {registration.topic: registration.binding for registration in registrations}, group
        )
        self.progress: ProgressStore = BrokerProgress(
            engine, group, strict_last=options.strict_last
        )
        self.statistics = Statistics(engine.clock.monotonic)
        self.locks = QueueLocks(engine, group, options.locks) if options.ordered else None
        self._hands = hands
        #: Topics whose queues were looked at, so that the own ones are owned or claimed.
        self._seen: set[str] = set()
        self.rebalancer = Rebalancer(
            engine,
            group,
            lambda: self.subscriptions.topics,
            progress=self.progress,
            puller=hands,
            consumption=hands,
            strategy=options.strategy,
            consume_from=options.consume_from,
            locks=self.locks,
            settings=options.rebalance,
            listener=self._assigned,
        )
        self._requests = BrokerRequests(engine, self)
        self._started_at = engine.clock.now()

    # ---- life

    async def start(self) -> None:
        """Returns when brokers know the member, and it has begun to gain queues."""
        await self.progress.load()
        await check_subscriptions(self.engine, self.group, self.subscriptions)
        self.engine.join(self)
        self._requests.start()
        await self.rebalancer.start()
        log.info("member started", extra={"group": self.group, "client": self.engine.client_id})

    async def stop(self) -> None:
        """Give everything back, in bounded time: what is handled is reported before it is gone."""
        await self.rebalancer.stop()
        self._requests.stop()
        await self.engine.leave(self)
        log.info("member stopped", extra={"group": self.group, "client": self.engine.client_id})

    def consumer_data(self) -> ConsumerData:
        """What heartbeats say."""
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.CONSUME_PASSIVELY,
            message_model=self.options.model,
            consume_from_where=self.options.consume_from.wire_name,
            subscription_data_set=self.subscriptions.to_data(),
        )

    # ---- while it runs

    @property
    def is_settled(self) -> bool:
        """Whether it has the queues that are its own, as far as that can be known."""
        if self.rebalancer.claimed:
            return False
        # A group's retry topic is made when it is first needed.
        return self._seen >= set(self.subscriptions.topics) - {retry_topic(self.group)}

    def _assigned(
        self, topic: str, queues: tuple[Queue, ...], own: tuple[Queue, ...]
    ) -> Awaitable[None] | None:
        self._seen.add(topic)
        listener = self.options.on_assignment
        return None if listener is None else listener(topic, queues, own)

    async def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Go on from other offsets: what runs is waited for, in bounded time, and no longer."""
        owned = [
            self.rebalancer.owned[queue] for queue in offsets if queue in self.rebalancer.owned
        ]
        limit = self.options.rebalance.handover
        await asyncio.gather(*(self._hands.drain(each, limit) for each in owned))
        await self.rebalancer.reset(offsets)

    async def consume_directly(self, message: ReceivedMessage) -> DirectCall:
        """Call a handler once, in this process, with a message that an administrator chose."""
        binding = self.bindings.of_message(message)
        call = DirectCall(binding, message.queue, message, self.engine.clock.monotonic)
        if call.is_async:
            await call.run_async()
        else:
            await asyncio.to_thread(call.run)
        return call

    def running_info(self, *, with_stacks: bool = False) -> ConsumerRunningInfo:
        """What it is and does. There are no stacks: handlers run elsewhere."""
        options = self.options
        particulars = Particulars(
            group=self.group,
            name_servers=self.engine.settings.name_servers,
            model=options.model,
            begins=options.consume_from.wire_name,
            strategy=name_of(options.strategy),
            is_ordered=options.ordered,
            started_at=self._started_at,
            consume=options.consume,
            pull=options.pull,
            flow=options.flow,
        )
        return describe(
            self.rebalancer.running_info(),
            particulars,
            self.subscriptions,
            self.statistics,
            workers=options.consume.workers,
        )
