"""What is in topics and how fast it changes, with a fixed number of requests per broker."""

from __future__ import annotations

from collections.abc import Sequence

from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.missingtopics import not_found
from orbitmq.client.admin.topicvalues import QueueStatus, Rate, TopicRates, TopicStatus
from orbitmq.client.admin.topology import BrokerNode, Directory, Topology, unreachable
from orbitmq.client.names import TOOLS_GROUP
from orbitmq.client.queue import Queue
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.route import MessageQueue
from orbitmq.wire.bodies.stats import BrokerStatsData, ConsumeTimeSpans, TopicStats
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.stats import QueryConsumeTimeSpanRequest, ViewBrokerStatsRequest
from orbitmq.wire.headers.topics import TopicRequest

_FOUND_OR_NOT = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.TOPIC_NOT_EXIST)})
#: Brokers know no rate of what nobody has sent or pulled yet.
_RATE_OR_NONE = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.SYSTEM_ERROR)})


def queue_of(queue: MessageQueue) -> Queue:
    """A queue as the wire names it."""
    return Queue(queue.topic, queue.broker_name, queue.queue_id)


class TopicInsight:
    """Looks into topics."""

    def __init__(self, asking: Asking, directory: Directory) -> None:
        self._asking = asking
        self._directory = directory

    async def status(self, topic: str) -> TopicStatus:
        """What is in each queue."""

        async def ask(node: BrokerNode) -> tuple[TopicStats, ConsumeTimeSpans] | None:
            stats = await self.stats(node, topic)
            return None if stats is None else (stats, await self._spans(node, topic))

        outcomes = await self._directory.of_readers(ask)
        queues: list[QueueStatus] = []
        rate = 0.0
        for found in outcomes.done.values():
            if found is None:
                continue
            stats, spans = found
            first = {
                queue_of(span.message_queue): span.min_time_stamp / 1000
                for span in spans.consume_time_span_set
                if span.message_queue is not None and span.min_time_stamp > 0
            }
            rate += stats.topic_put_tps
            for key, bounds in stats.offset_table.items():
                queue = queue_of(key)
                is_empty = bounds.max_offset <= bounds.min_offset
                last = bounds.last_update_timestamp
                queues.append(
                    QueueStatus(
                        queue,
                        bounds.min_offset,
                        max(bounds.min_offset, bounds.max_offset),
                        None if is_empty else first.get(queue),
                        last / 1000 if last > 0 and not is_empty else None,
                    )
                )
        if not queues and not outcomes.failed:
            raise await not_found(self._asking, topic)
        queues.sort(key=lambda each: each.queue)
        return TopicStatus(topic, tuple(queues), rate, unreachable(outcomes))

    async def stats(self, node: BrokerNode, topic: str) -> TopicStats | None:
        """The bounds of a topic's queues on one broker; None when it does not have the topic."""
        answer = await self._asking.ask(
            node.address,
            RequestCode.GET_TOPIC_STATS_INFO,
            TopicRequest(topic=topic),
            accept=_FOUND_OR_NOT,
        )
        if answer.code != ResponseCode.SUCCESS:
            return None
        return decode_body(TopicStats, answer.body or b"{}")

    async def bounds(self, topology: Topology, topic: str) -> dict[Queue, tuple[int, int]]:
        """The first and the next offset of every queue. Raises `TopicNotFound`."""
        outcomes = await self._asking.each(topology.readers(), lambda node: self.stats(node, topic))
        found = {
            queue_of(key): (bounds.min_offset, max(bounds.min_offset, bounds.max_offset))
            for stats in outcomes.check(f"looking into topic {topic!r}").values()
            if stats is not None
            for key, bounds in stats.offset_table.items()
        }
        if not found:
            raise await not_found(self._asking, topic)
        return dict(sorted(found.items()))

    async def _spans(self, node: BrokerNode, topic: str) -> ConsumeTimeSpans:
        # Meant for a group; the times of the queue's own messages are in it whoever is named.
        header = QueryConsumeTimeSpanRequest(topic=topic, group=TOOLS_GROUP)
        code = RequestCode.QUERY_CONSUME_TIME_SPAN
        return await self._asking.told(ConsumeTimeSpans, node.address, code, header)

    async def rates(self, topic: str, groups: Sequence[str]) -> TopicRates:
        """How fast it is written, and read by these groups."""

        async def ask(node: BrokerNode) -> tuple[Rate, dict[str, Rate]]:
            incoming = await self._rate(node, "TOPIC_PUT_NUMS", "TOPIC_PUT_SIZE", topic)
            outgoing = await self._asking.all(
                self._rate(node, "GROUP_GET_NUMS", "GROUP_GET_SIZE", f"{topic}@{group}")
                for group in groups
            )
            return incoming, dict(zip(groups, outgoing, strict=True))

        outcomes = await self._directory.of_readers(ask)
        incoming = Rate()
        outgoing = dict.fromkeys(groups, Rate())
        for came, went in outcomes.done.values():
            incoming += came
            for group, rate in went.items():
                outgoing[group] += rate
        return TopicRates(topic, incoming, outgoing, unreachable(outcomes))

    async def _rate(self, node: BrokerNode, numbers: str, sizes: str, key: str) -> Rate:
        counts, amounts = await self._asking.all(
            (self._statistic(node, numbers, key), self._statistic(node, sizes, key))
        )
        return Rate(counts.stats_minute.tps, amounts.stats_minute.tps, counts.stats_day.sum)

    async def _statistic(self, node: BrokerNode, name: str, key: str) -> BrokerStatsData:
        answer = await self._asking.ask(
            node.address,
            RequestCode.VIEW_BROKER_STATS_DATA,
            ViewBrokerStatsRequest(stats_name=name, stats_key=key),
            accept=_RATE_OR_NONE,
        )
        if answer.code != ResponseCode.SUCCESS:
            return BrokerStatsData()
        return decode_body(BrokerStatsData, answer.body or b"{}")
