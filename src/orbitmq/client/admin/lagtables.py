"""The lag of all groups of a broker, out of one answer (GET_BROKER_CONSUME_STATS).

The answer of a big broker is megabytes of tables whose keys are objects, which is not JSON. Read in
the general way, character by character, it would stop the event loop for half a second. Nearly
always its keys have one shape, so they are made texts first, and then the fast decoder reads it;
anything else goes the general way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from orbitmq.client.admin.groupvalues import TopicLag
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.stats import ConsumeStats, ConsumeStatsList, QueueProgress

#: A queue as the key of a table. Inside of a text its quotes would have backslashes.
_KEY = re.compile(rb'\{"brokerName":"([^"\\ ]*)","queueId":(\d+),"topic":"([^"\\ ]*)"\}:')


class _Stats(msgspec.Struct, rename="camel"):
    consume_tps: float = 0.0
    #: By `broker queue topic`.
    offset_table: dict[str, QueueProgress] = msgspec.field(default_factory=dict)


class _StatsList(msgspec.Struct, rename="camel"):
    consume_stats_list: tuple[dict[str, tuple[_Stats, ...]], ...] = ()


_decode = msgspec.json.Decoder(_StatsList, strict=False).decode


def decode_lags(body: bytes | memoryview) -> dict[str, dict[str, TopicLag]]:
    """By group and topic. Raises `BodyError`."""
    data = bytes(body) or b"{}"
    if b'"$ref"' not in data:
        try:
            table = _decode(_KEY.sub(rb'"\1 \2 \3":', data))
            return {
                group: _sums((part.consume_tps, _by_topic(part)) for part in stats)
                for entry in table.consume_stats_list
                for group, stats in entry.items()
            }
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass
    general = decode_body(ConsumeStatsList, data)
    return {
        group: lags_of(stats)
        for entry in general.consume_stats_list
        for group, stats in entry.items()
    }


def lags_of(stats: Iterable[ConsumeStats]) -> dict[str, TopicLag]:
    """The lags in tables, by topic."""
    return _sums(
        (part.consume_tps, ((key.topic, place) for key, place in part.offset_table.items()))
        for part in stats
    )


def _by_topic(part: _Stats) -> Iterable[tuple[str, QueueProgress]]:
    for key, place in part.offset_table.items():
        # A key that was a text before has another shape, and goes the general way.
        _, number, topic = key.split(" ")
        int(number)
        yield topic, place


def _sums(
    tables: Iterable[tuple[float, Iterable[tuple[str, QueueProgress]]]],
) -> dict[str, TopicLag]:
    lags: dict[str, int] = {}
    queues: dict[str, int] = {}
    rates: dict[str, float] = {}
    for rate, places in tables:
        for topic, place in places:
            lag = max(0, place.broker_offset - place.consumer_offset)
            lags[topic] = lags.get(topic, 0) + lag
            queues[topic] = queues.get(topic, 0) + 1
            rates[topic] = rate
    return {topic: TopicLag(topic, lags[topic], queues[topic], rates[topic]) for topic in lags}
