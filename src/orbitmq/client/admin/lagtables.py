"""The lag of groups by topic, out of their tables of progress."""

from __future__ import annotations

from collections.abc import Iterable

from orbitmq.client.admin.groupvalues import TopicLag
from orbitmq.client.admin.progresstables import ProgressTable, decode_progress_tables
from orbitmq.wire.bodies.stats import ConsumeStats


def decode_lags(body: bytes | memoryview) -> dict[str, dict[str, TopicLag]]:
    """By group and topic, for all groups of a broker. Raises `BodyError`."""
    return {group: _sums(tables) for group, tables in decode_progress_tables(body).items()}


def lags_of(stats: Iterable[ConsumeStats]) -> dict[str, TopicLag]:
    """The lags in tables of one group, by topic."""
    return _sums(map(ProgressTable.of, stats))


def _sums(tables: Iterable[ProgressTable]) -> dict[str, TopicLag]:
    lags: dict[str, int] = {}
    queues: dict[str, int] = {}
    rates: dict[str, float] = {}
    for rate, places in tables:
        for queue, place in places.items():
            topic = queue.topic
            lags[topic] = lags.get(topic, 0) + max(0, place.broker_offset - place.consumer_offset)
            queues[topic] = queues.get(topic, 0) + 1
            rates[topic] = rate
    return {topic: TopicLag(topic, lags[topic], queues[topic], rates[topic]) for topic in lags}
