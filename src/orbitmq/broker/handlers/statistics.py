"""Numbers about queues, groups and the broker (28, 202, 208, 303, 315, 317, 321).

Everything is read from tables and from the ends of queues. A question about a group looks at every
queue that it has progress in, and one about all groups at those of all of them, which may be tens
of thousands: others are served meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from orbitmq.broker.errors import Refused
from orbitmq.broker.handlers.apart import Steps, answered
from orbitmq.broker.lag import next_offset, topics_behind
from orbitmq.broker.parts import Parts
from orbitmq.broker.rates import SAMPLE_INTERVAL, Rates
from orbitmq.broker.runtimeinfo import runtime_info
from orbitmq.broker.statsitems import stats_data
from orbitmq.clock import milliseconds
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.wire.bodies.base import encode_body
from orbitmq.wire.bodies.route import KVTable, MessageQueue
from orbitmq.wire.bodies.stats import (
    ConsumeQueueEntries,
    ConsumeQueueEntry,
    ConsumeStats,
    ConsumeStatsList,
    ConsumeTimeSpans,
    QueueBounds,
    QueueProgress,
    QueueTimeSpan,
    TopicStats,
)
from orbitmq.wire.bodies.topics import TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.stats import (
    GetBrokerConsumeStatsRequest,
    GetConsumeStatsRequest,
    QueryConsumeQueueRequest,
    QueryConsumeTimeSpanRequest,
    ViewBrokerStatsRequest,
)
from orbitmq.wire.headers.topics import TopicRequest

#: Entries of a queue that one answer shows.
MOST_ENTRIES = 10_000


class Statistics:
    """Says how much there is, how far everybody is, and how fast it goes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.rates = Rates(parts.counters, parts.clock)
        parts.background.every(SAMPLE_INTERVAL, self.rates.sample)

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.GET_BROKER_RUNTIME_INFO: self.runtime_info,
            RequestCode.GET_TOPIC_STATS_INFO: self.topic_stats,
            RequestCode.GET_CONSUME_STATS: self.consume_stats,
            RequestCode.QUERY_CONSUME_TIME_SPAN: self.time_spans,
            RequestCode.VIEW_BROKER_STATS_DATA: self.stats_item,
            RequestCode.GET_BROKER_CONSUME_STATS: self.all_consume_stats,
            RequestCode.QUERY_CONSUME_QUEUE: self.queue_entries,
        }

    # The broker.

    def runtime_info(self, _: Connection, request: Command) -> Command:
        body = KVTable(table=runtime_info(self._parts, self.rates))
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def stats_item(self, _: Connection, request: Command) -> Command:
        """A count over the last minute, hour and day."""
        asked = request.header(ViewBrokerStatsRequest)
        parts = self._parts
        body = stats_data(
            asked.stats_name, asked.stats_key, self.rates, parts.settings.cluster, parts.topics
        )
        if body is None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"The stats <{asked.stats_name}> <{asked.stats_key}> not exist",
            )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    # Topics.

    def topic_stats(self, _: Connection, request: Command) -> Command:
        """The bounds of a topic's queues."""
        topic = self._topic(request.header(TopicRequest).topic)
        name = topic.topic_name
        store = self._parts.store
        table: dict[MessageQueue, QueueBounds] = {}
        for queue_id in range(max(topic.write_queue_nums, topic.read_queue_nums)):
            end = store.max_offset(name, queue_id)
            table[self._queue(name, queue_id)] = QueueBounds(
                min_offset=store.min_offset(name, queue_id),
                max_offset=end,
                last_update_timestamp=store.store_time(name, queue_id, end - 1) if end else 0,
            )
        body = TopicStats(offset_table=table, topic_put_tps=self.rates.put_rate(name))
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def queue_entries(self, _: Connection, request: Command) -> Command:
        """A stretch of a consume queue as it is stored."""
        asked = request.header(QueryConsumeQueueRequest)
        store, topic, queue_id = self._parts.store, asked.topic, asked.queue_id
        found = store.queue_entries(topic, queue_id, asked.index, min(asked.count, MOST_ENTRIES))
        if found is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"{queue_id}@{topic} is not exist!")
        if not found and asked.count > 0:
            return request.answer(
                ResponseCode.SUCCESS,
                remark=f"Index {asked.index} of {queue_id}@{topic} is not exist!",
            )
        group = asked.consumer_group
        subscription = None
        if group is not None:
            subscription = self._parts.consumers.subscription(group, topic)
        is_missing = group is not None and subscription is None
        body = ConsumeQueueEntries(
            filter_data=f"{group}@{topic} is not online!" if is_missing else None,
            max_queue_index=store.max_offset(topic, queue_id),
            min_queue_index=store.min_offset(topic, queue_id),
            queue_data=tuple(
                ConsumeQueueEntry(physic_offset=offset, physic_size=size, tags_code=code)
                for offset, size, code in found
            ),
            subscription_data=subscription,
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    # Groups.

    async def consume_stats(self, _: Connection, request: Command) -> Command:
        """How far a group is: in all its topics, in one, or in those of a list."""
        asked = request.header(GetConsumeStatsRequest)
        group = asked.consumer_group
        listed = [name for name in (asked.topic_list or "").split(";") if name]
        topics = dict.fromkeys(listed or self._consumed(group, asked.topic))
        table: dict[MessageQueue, QueueProgress] = {}
        rate = 0.0
        steps = Steps()
        for name in topics:
            topic = self._parts.topics.get(name)
            if topic is not None:
                table |= self._progress(group, topic, topic.read_queue_nums)
                rate += self.rates.get_rate(name, group)
                await steps.did(topic.read_queue_nums)
        body = ConsumeStats(consume_tps=rate, offset_table=table)
        return await answered(request, body, entries=len(table))

    async def all_consume_stats(self, _: Connection, request: Command) -> Command:
        """How far all groups are."""
        asked = request.header(GetBrokerConsumeStatsRequest)
        parts = self._parts
        groups: list[dict[str, tuple[ConsumeStats, ...]]] = []
        behind = in_flight = 0
        steps = Steps()
        for group in [config.group_name for config in parts.groups]:
            stats: list[ConsumeStats] = []
            for name in self._consumed(group):
                topic = parts.topics.get(name)
                if topic is None or (asked.is_order and not topic.order):
                    continue
                table = self._progress(group, topic, topic.write_queue_nums)
                for queue in table.values():
                    behind += queue.broker_offset - queue.consumer_offset
                    in_flight += queue.pull_offset - queue.consumer_offset
                rate = self.rates.get_rate(name, group)
                stats.append(ConsumeStats(consume_tps=rate, offset_table=table))
                await steps.did(topic.write_queue_nums)
            groups.append({group: tuple(stats)})
            await steps.did(1)
        body = ConsumeStatsList(
            broker_addr=str(parts.address),
            consume_stats_list=tuple(groups),
            total_diff=behind,
            total_inflight_diff=in_flight,
        )
        return await answered(request, body, entries=len(groups))

    def time_spans(self, _: Connection, request: Command) -> Command:
        """When the messages of a topic were stored, and up to when a group has consumed them."""
        asked = request.header(QueryConsumeTimeSpanRequest)
        topic = self._topic(asked.topic)
        body = ConsumeTimeSpans(
            consume_time_span_set=tuple(
                self._time_span(asked.topic, queue_id, asked.group)
                for queue_id in range(topic.write_queue_nums)
            )
        )
        return request.answer(ResponseCode.SUCCESS, body=encode_body(body))

    def _time_span(self, topic: str, queue_id: int, group: str) -> QueueTimeSpan:
        parts, store = self._parts, self._parts.store
        end = store.max_offset(topic, queue_id)
        first = store.earliest_store_time(topic, queue_id)
        last = store.store_time(topic, queue_id, end - 1)
        progress = parts.progress.query(topic, group, queue_id)
        consumed = first if not progress else store.store_time(topic, queue_id, progress - 1)
        delay = 0
        # Where a group without progress, or one whose messages are gone, would go on.
        following = max(progress or 0, store.min_offset(topic, queue_id))
        if following < end:
            waiting_since = store.store_time(topic, queue_id, following)
            delay = max(0, milliseconds(parts.clock.now()) - waiting_since)
        return QueueTimeSpan(
            message_queue=self._queue(topic, queue_id),
            min_time_stamp=first,
            min_time_stamp_str=_time_text(first),
            max_time_stamp=last,
            max_time_stamp_str=_time_text(last),
            consume_time_stamp=consumed,
            consume_time_stamp_str=_time_text(consumed),
            delay_time=delay,
        )

    def _progress(
        self, group: str, topic: TopicConfig, queues: int
    ) -> dict[MessageQueue, QueueProgress]:
        """How far a group is in the queues of a topic."""
        store, progress = self._parts.store, self._parts.progress
        name = topic.topic_name
        table: dict[MessageQueue, QueueProgress] = {}
        for queue_id in range(queues):
            consumed = next_offset(self._parts, group, name, queue_id) or 0
            pulled = progress.pulled(name, group, queue_id) or 0
            last = store.store_time(name, queue_id, consumed - 1) if consumed else 0
            table[self._queue(name, queue_id)] = QueueProgress(
                broker_offset=store.max_offset(name, queue_id),
                consumer_offset=consumed,
                last_timestamp=max(0, last),
                pull_offset=max(consumed, pulled),
            )
        return table

    def _consumed(self, group: str, topic: str | None = None) -> list[str]:
        """The topics that a group may be behind in, or only `topic`, without what it has given up.

        A group that is not there has given up nothing.
        """
        consumers = self._parts.consumers
        topics = [topic] if topic else topics_behind(self._parts, group)
        if not consumers.is_online(group):
            return topics
        return [name for name in topics if consumers.subscription(group, name) is not None]

    def _topic(self, name: str) -> TopicConfig:
        topic = self._parts.topics.get(name)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
        return topic

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(broker_name=self._parts.settings.name, queue_id=queue_id, topic=topic)


def _time_text(millis: int) -> str:
    """A time as tools show it, in the broker's zone."""
    moment = datetime.fromtimestamp(millis / 1000, UTC).astimezone()
    return f"{moment:%Y-%m-%d#%H:%M:%S}:{millis % 1000:03d}"
