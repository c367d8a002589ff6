"""A member of a group whose messages are handled elsewhere: in other processes, batch by batch.

To its group it is a member like any other. It says what it wants in heartbeats, owns queues by the
group's strategy, hands them over in order, holds the order locks, reports progress, and answers
what brokers ask. What becomes of the messages of its queues is the business of `hands`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Protocol

from orbitmq.client.consumer.brokerprogress import BrokerProgress
from orbitmq.client.consumer.brokerrequests import BrokerRequests
from orbitmq.client.consumer.calls import DirectCall
from orbitmq.client.consumer.gaining import Beginning
from orbitmq.client.consumer.groupmember import GroupMember
from orbitmq.client.consumer.locks import QueueLocks
from orbitmq.client.consumer.rebalancing import Rebalancer
from orbitmq.client.consumer.releasing import Draining
from orbitmq.client.consumer.subscriptioncheck import check_subscriptions
from orbitmq.client.names import retry_topic

if TYPE_CHECKING:
    from orbitmq.client.consumer.options import ConsumerOptions
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.registering import Registration
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue
    from orbitmq.client.received import ReceivedMessage
    from orbitmq.wire.bodies.stats import ConsumerRunningInfo


class Hands(Beginning, Draining, Protocol):
    """Who has the messages of owned queues handled. Everything is called on the event loop."""


class DelegatedMember(GroupMember):
    """One member of a consumer group. Belongs to the loop of its engine; started once."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        registrations: Sequence[Registration],
        options: ConsumerOptions,
        hands: Hands,
    ) -> None:
        """On a running engine; `group` as brokers know it."""
        super().__init__(engine, group, registrations, options)
        self.progress: ProgressStore = BrokerProgress(
            engine, group, strict_last=options.strict_last
        )
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

    # ---- life

    async def start(self) -> None:
        """Returns when brokers know the member, and it has begun to gain queues."""
        await self.progress.load()
        await check_subscriptions(self.engine, self.group, self.subscriptions)
        self.engine.join(self)
        self._requests.start()
        await self.rebalancer.start()
        self._tell_start("member")

    async def stop(self) -> None:
        """Give everything back, in bounded time: what is handled is reported before it is gone."""
        await self.rebalancer.stop()
        self._requests.stop()
        await self.engine.leave(self)
        self._tell_stop("member")

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
        return self._described(workers=self.options.consume.workers)
