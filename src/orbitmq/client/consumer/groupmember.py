"""A member of a consumer group towards its brokers, whoever handles its messages.

It says in heartbeats what it wants, describes itself when it is asked, and goes on elsewhere when
an administrator resets its progress.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from orbitmq.client.consumer.allocation import name_of
from orbitmq.client.consumer.consuming import Bindings
from orbitmq.client.consumer.runninginfo import Particulars, describe
from orbitmq.client.consumer.statistics import Statistics
from orbitmq.client.consumer.subscription import Subscription, Subscriptions
from orbitmq.client.names import retry_topic
from orbitmq.wire.bodies.membership import ConsumerData, ConsumeType

if TYPE_CHECKING:
    from orbitmq.client.consumer.calls import DirectCall
    from orbitmq.client.consumer.options import ConsumerOptions
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.rebalancing import Rebalancer
    from orbitmq.client.consumer.registering import Registration
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue
    from orbitmq.client.received import ReceivedMessage
    from orbitmq.wire.bodies.stats import ConsumerRunningInfo

log = logging.getLogger(__name__)


class GroupMember(ABC):
    """What the two kinds of members have in common. Belongs to the loop of its engine."""

    producer_group: str | None = None
    progress: ProgressStore
    rebalancer: Rebalancer

    def __init__(
        self,
        engine: Engine,
        group: str,
        registrations: Sequence[Registration],
        options: ConsumerOptions,
    ) -> None:
        """On a running engine; `group` as brokers know it."""
        self.engine = engine
        self.group = group
        self.options = options
        self.is_ordered = options.ordered
        self.subscriptions = Subscriptions(engine.clock.now)
        for registration in registrations:
            self.subscriptions.put(registration.subscription)
        if not options.is_broadcasting:
            self.subscriptions.put(Subscription(retry_topic(group)))
        self.bindings = Bindings(
            {registration.topic: registration.binding for registration in registrations}, group
        )
        self.statistics = Statistics(engine.clock.monotonic)
        self._started_at = engine.clock.now()

    @abstractmethod
    async def consume_directly(self, message: ReceivedMessage) -> DirectCall:
        """Call a handler once, with a message that an administrator chose."""

    @abstractmethod
    def running_info(self, *, with_stacks: bool = False) -> ConsumerRunningInfo:
        """What the member is and does."""

    def consumer_data(self) -> ConsumerData:
        """What heartbeats say."""
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.CONSUME_PASSIVELY,
            message_model=self.options.model,
            consume_from_where=self.options.consume_from.wire_name,
            subscription_data_set=self.subscriptions.to_data(),
        )

    async def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Go on from other offsets; returns when they are put by.

        What runs on a queue is waited for before that is begun anew: as long as a hand-over takes
        at most, and in order until it has ended, as two would run at once otherwise.
        """
        await self.rebalancer.reset(offsets)

    def _described(self, *, workers: int, stacks: str | None = None) -> ConsumerRunningInfo:
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
            workers=workers,
            stacks=stacks,
        )

    def _tell_start(self, what: str) -> None:
        log.info(
            "%s started: group %s as %s, topics %s",
            what,
            self.group,
            self.engine.client_id,
            ", ".join(sorted(self.subscriptions.topics)),
            extra={"group": self.group, "client": self.engine.client_id},
        )

    def _tell_stop(self, what: str) -> None:
        log.info(
            "%s stopped: group %s as %s",
            what,
            self.group,
            self.engine.client_id,
            extra={"group": self.group, "client": self.engine.client_id},
        )
