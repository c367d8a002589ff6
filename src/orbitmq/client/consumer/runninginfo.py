"""What a consumer tells whoever asks what it is and does (307)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from orbitmq.client.calltimes import property_of
from orbitmq.client.consumer.sendback import DEFAULT_RETRIES
from orbitmq.clock import milliseconds
from orbitmq.wire.bodies.membership import ConsumeType
from orbitmq.wire.versions import OUR_VERSION, release_of

if TYPE_CHECKING:
    from orbitmq.client.consumer.flowcontrol import FlowSettings
    from orbitmq.client.consumer.pullsettings import PullSettings
    from orbitmq.client.consumer.settings import ConsumeSettings
    from orbitmq.client.consumer.statistics import Statistics
    from orbitmq.client.consumer.subscription import Subscriptions
    from orbitmq.wire.bodies.membership import ConsumeFromWhere, MessageModel
    from orbitmq.wire.bodies.stats import ConsumerRunningInfo

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Particulars:
    """What is the same for as long as a consumer lives."""

    group: str
    name_servers: Iterable[object]
    model: MessageModel
    begins: ConsumeFromWhere
    strategy: str
    is_ordered: bool
    started_at: float
    consume: ConsumeSettings
    pull: PullSettings
    flow: FlowSettings

    def properties(self, workers: int) -> dict[str, str]:
        """Under the names that Apache's tools look for."""
        release = release_of(OUR_VERSION)
        version = str(OUR_VERSION) if release is None else f"V{release}".replace(".", "_")
        consume, pull, flow = self.consume, self.pull, self.flow
        retries = consume.max_retries
        if retries is None:
            retries = -1 if self.is_ordered else DEFAULT_RETRIES
        found: dict[str, object] = {
            "PROP_NAMESERVER_ADDR": ";".join(map(str, self.name_servers)) + ";",
            "PROP_CONSUME_TYPE": ConsumeType.CONSUME_PASSIVELY.value,
            "PROP_CONSUMEORDERLY": str(self.is_ordered).lower(),
            "PROP_THREADPOOL_CORE_SIZE": workers,
            "PROP_CLIENT_VERSION": version,
            "PROP_CONSUMER_START_TIMESTAMP": milliseconds(self.started_at),
            "consumerGroup": self.group,
            "messageModel": self.model.value,
            "consumeFromWhere": self.begins.value,
            "allocateMessageQueueStrategy": self.strategy,
            "consumeThreadMin": workers,
            "consumeThreadMax": workers,
            "consumeTimeout": round(consume.timeout / 60),
            "maxReconsumeTimes": retries,
            "suspendCurrentQueueTimeMillis": round(consume.suspend * 1000),
            "pullBatchSize": pull.batch_size,
            "pullInterval": round(pull.interval * 1000),
            "pullThresholdForQueue": flow.max_cached_messages,
            "pullThresholdSizeForQueue": flow.max_cached_bytes // _MIB,
            "consumeConcurrentlyMaxSpan": flow.max_span,
        }
        return {name: str(value) for name, value in found.items()}


def describe(
    info: ConsumerRunningInfo,
    particulars: Particulars,
    subscriptions: Subscriptions,
    statistics: Statistics,
    *,
    workers: int,
    stacks: str | None = None,
) -> ConsumerRunningInfo:
    """Everything that is known, added to what `info` says about the queues.

    What Apache's consumers do not have is among the user's own facts, which its tools print as they
    are: brokers and tools of any version pass them on.
    """
    counted = statistics.snapshot()
    own = {
        "passedOver": counted.passed_over,
        "duplicates": counted.duplicates,
        "sentBack": counted.sent_back,
        "keptBack": counted.kept_back,
        "timedOut": counted.timed_out,
        "deadLetters": counted.dead_letters,
    }
    return msgspec.structs.replace(
        info,
        properties=particulars.properties(workers) | info.properties,
        subscription_set=subscriptions.to_data(),
        status_table={topic: statistics.status(topic) for topic in subscriptions.topics},
        user_consumer_info={name: str(count) for name, count in own.items()}
        | {
            property_of(topic): each.consume_times.told()
            for topic, each in counted.topics.items()
            if each.consume_times.calls
        },
        jstack=stacks,
    )
