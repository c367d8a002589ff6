"""How far groups are behind, in messages and in seconds.

The lag in seconds is the age of the oldest message that the group has not finished, by the clock of
the broker that holds it: 0 when none waits. (Tools that subtract the time of the last consumed
message from now show a growing lag for a group that has consumed everything.)

All groups of a broker are one request; the time of waiting messages is one more for each topic of
a group that has any.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.groupvalues import GroupProgress, QueueProgress, TopicLag
from orbitmq.client.admin.lagtables import decode_lags, lags_of
from orbitmq.client.admin.topicstatus import TopicInsight, queue_of
from orbitmq.client.admin.topology import BrokerNode, Directory, Topology, unreachable
from orbitmq.client.errors import BrokerRefused
from orbitmq.client.names import retry_topic
from orbitmq.client.queue import Queue
from orbitmq.remoting.errors import ConnectionLost
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.stats import (
    ConsumeStats,
    ConsumeTimeSpans,
    QueueTimeSpan,
)
from orbitmq.wire.bodies.stats import QueueProgress as ToldProgress
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.offsets import OffsetResponse, QueryConsumerOffsetRequest
from orbitmq.wire.headers.stats import (
    GetBrokerConsumeStatsRequest,
    GetConsumeStatsRequest,
    QueryConsumeTimeSpanRequest,
)

log = logging.getLogger(__name__)

_TIMES_OR_NONE = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.TOPIC_NOT_EXIST)})
_FOUND_OR_NOT = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.QUERY_NOT_FOUND)})
#: A broker with thousands of groups takes its time.
ALL_GROUPS_TIMEOUT = 30.0


class Progress:
    """Reads it from brokers."""

    def __init__(self, asking: Asking, directory: Directory) -> None:
        self._asking = asking
        self._directory = directory
        self._topics = TopicInsight(asking, directory)

    async def of_group(
        self,
        group: str,
        *,
        topic: str | None = None,
        subscribed: Collection[str] = (),
        topology: Topology | None = None,
        owners: Mapping[Queue, str] | None = None,
    ) -> GroupProgress:
        """One group, queue by queue, with the age of what waits.

        Brokers tell of topics in which the group has progress. Of those that it has `subscribed`
        to and has not reported from yet they tell when asked by name. What waits in the retry topic
        of a group that is gone and never reported from it counts from its first message: there the
        group will go on.
        """
        retries = retry_topic(group)

        async def ask(
            node: BrokerNode,
        ) -> tuple[list[ConsumeStats], dict[Queue, float | None]]:
            parts = [await self._stats(node, group, topic)]
            told = {key.topic for key in parts[0].offset_table}
            silent = [name for name in subscribed if name not in told and topic in (None, name)]
            parts += await self._asking.all(self._stats(node, group, name) for name in silent)
            if not subscribed and retries not in told and topic in (None, retries):
                parts.append(await self._unbegun(node, retries))
            behind = {
                key.topic
                for part in parts
                for key, place in part.offset_table.items()
                if place.broker_offset > place.consumer_offset
            }
            ages = await self._asking.all(self.ages(node, group, name) for name in sorted(behind))
            return parts, {queue: age for part in ages for queue, age in part.items()}

        nodes = (topology or await self._directory.look()).readers()
        outcomes = await self._asking.each(nodes, ask)
        queues: dict[Queue, QueueProgress] = {}
        rate = 0.0
        for parts, ages in outcomes.done.values():
            for part in parts:
                rate += part.consume_tps
                queues |= {each.queue: each for each in _queues(part, ages, owners or {})}
        shown = tuple(place for _, place in sorted(queues.items()))
        return GroupProgress(group, shown, rate, unreachable(outcomes))

    async def _stats(self, node: BrokerNode, group: str, topic: str | None) -> ConsumeStats:
        return await self._asking.told(
            ConsumeStats,
            node.address,
            RequestCode.GET_CONSUME_STATS,
            GetConsumeStatsRequest(consumer_group=group, topic=topic),
        )

    async def _unbegun(self, node: BrokerNode, topic: str) -> ConsumeStats:
        """The queues of a topic with anything in them, for a group that begins with the first."""
        stats = await self._topics.stats(node, topic)
        bounds = {} if stats is None else stats.offset_table
        return ConsumeStats(
            offset_table={
                queue: ToldProgress(
                    broker_offset=each.max_offset,
                    consumer_offset=each.min_offset,
                    pull_offset=each.min_offset,
                )
                for queue, each in bounds.items()
                if each.max_offset > each.min_offset
            }
        )

    async def ages(self, node: BrokerNode, group: str, topic: str) -> dict[Queue, float | None]:
        """How long the oldest message of each queue has waited."""
        answer = await self._asking.ask(
            node.address,
            RequestCode.QUERY_CONSUME_TIME_SPAN,
            QueryConsumeTimeSpanRequest(topic=topic, group=group),
            accept=_TIMES_OR_NONE,
        )
        if answer.code != ResponseCode.SUCCESS:
            return {}
        spans = decode_body(ConsumeTimeSpans, answer.body or b"{}").consume_time_span_set
        return {
            queue_of(span.message_queue): self._age(span)
            for span in spans
            if span.message_queue is not None
        }

    def _age(self, span: QueueTimeSpan) -> float | None:
        delay = span.delay_time / 1000
        if span.min_time_stamp <= 0:
            return None
        # For a group without progress Apache counts from the year 1969: its oldest message is the
        # oldest there is.
        oldest = self._asking.clock.now() - span.min_time_stamp / 1000
        return max(0.0, oldest if delay > oldest + 3600 else delay)

    async def offset(self, node: BrokerNode, group: str, queue: Queue) -> int | None:
        """The progress in one queue; None when there is none."""
        header = QueryConsumerOffsetRequest(
            consumer_group=group,
            topic=queue.topic,
            queue_id=queue.id,
            # Otherwise a queue without progress would look like one at its beginning.
            set_zero_if_not_found=False,
        )
        answer = await self._asking.ask(
            node.address, RequestCode.QUERY_CONSUMER_OFFSET, header, accept=_FOUND_OR_NOT
        )
        if answer.code != ResponseCode.SUCCESS:
            return None
        return answer.header(OffsetResponse).offset

    async def of_all_groups(
        self, node: BrokerNode, groups: Iterable[str]
    ) -> dict[str, dict[str, TopicLag]]:
        """All groups of a broker, by group and topic: in one answer, or else one by one."""
        try:
            answer = await self._asking.ask(
                node.address,
                RequestCode.GET_BROKER_CONSUME_STATS,
                GetBrokerConsumeStatsRequest(is_order=False),
                timeout=ALL_GROUPS_TIMEOUT,
            )
        except (BrokerRefused, ConnectionLost) as error:
            # Not known there, or more than a frame can hold.
            log.info(
                "groups are asked for one by one at %s: %s",
                node.broker,
                error,
                extra={"broker": node.broker},
            )
            return await self._one_by_one(node, groups)
        return decode_lags(answer.body)

    async def _one_by_one(
        self, node: BrokerNode, groups: Iterable[str]
    ) -> dict[str, dict[str, TopicLag]]:
        names = tuple(groups)
        stats = await self._asking.all(self._stats(node, group, None) for group in names)
        return {group: _shared(lags_of([part])) for group, part in zip(names, stats, strict=True)}


def _queues(
    stats: ConsumeStats, ages: Mapping[Queue, float | None], owners: Mapping[Queue, str]
) -> Iterable[QueueProgress]:
    for key, place in stats.offset_table.items():
        queue = queue_of(key)
        waits = place.broker_offset > place.consumer_offset
        # 4.x does not tell where pulls are.
        knows_pulls = place.pull_offset >= place.consumer_offset > 0
        yield QueueProgress(
            queue,
            place.broker_offset,
            max(0, place.consumer_offset),
            place.pull_offset if knows_pulls else None,
            place.last_timestamp / 1000 if place.last_timestamp > 0 else None,
            ages.get(queue) if waits else 0.0,
            owners.get(queue),
        )


def _shared(lags: Mapping[str, TopicLag]) -> dict[str, TopicLag]:
    """The same, where the rate is that of all topics together: each gets an equal part of it."""
    return {
        topic: replace(lag, consume_rate=lag.consume_rate / len(lags))
        for topic, lag in lags.items()
    }
