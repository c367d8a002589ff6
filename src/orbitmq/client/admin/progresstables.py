"""The progress of all groups of a broker, out of one answer (GET_BROKER_CONSUME_STATS).

The answer of a big broker is megabytes of tables whose keys are objects, which is not JSON. Read in
the general way, character by character, it would stop the event loop for half a second. Nearly
always its keys have one shape, so they are made texts first, and then the fast decoder reads it;
anything else goes the general way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from orbitmq.client.queue import Queue
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.stats import ConsumeStats, ConsumeStatsList, QueueProgress

#: A queue as the key of a table. Inside of a text its quotes would have backslashes.
_KEY = re.compile(rb'\{"brokerName":"([^"\\ ]*)","queueId":(\d+),"topic":"([^"\\ ]*)"\}:')


class ProgressTable(NamedTuple):
    """How far a group is in some queues: most brokers give one table for each topic."""

    #: Messages consumed a second, in all of them together.
    rate: float
    places: Mapping[Queue, QueueProgress]

    @classmethod
    def of(cls, stats: ConsumeStats) -> ProgressTable:
        places = {
            Queue(key.topic, key.broker_name, key.queue_id): place
            for key, place in stats.offset_table.items()
        }
        return cls(stats.consume_tps, places)


class _Stats(msgspec.Struct, rename="camel"):
    consume_tps: float = 0.0
    #: By `broker queue topic`.
    offset_table: dict[str, QueueProgress] = msgspec.field(default_factory=dict)


class _StatsList(msgspec.Struct, rename="camel"):
    consume_stats_list: tuple[dict[str, tuple[_Stats, ...]], ...] = ()


_decode = msgspec.json.Decoder(_StatsList, strict=False).decode


def decode_progress_tables(
    body: bytes | memoryview, known: dict[str, Queue] | None = None
) -> dict[str, list[ProgressTable]]:
    """The tables of each group. Raises `BodyError`.

    `known` has the queues of earlier answers, and gets those of this one: who asks again and again
    saves making them.
    """
    data = bytes(body) or b"{}"
    if b'"$ref"' not in data:
        try:
            return _decoded_fast(data, {} if known is None else known)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # Another writer's spelling.
            pass
    general = decode_body(ConsumeStatsList, data)
    return {
        group: [ProgressTable.of(part) for part in stats]
        for entry in general.consume_stats_list
        for group, stats in entry.items()
    }


def _decoded_fast(data: bytes, queues: dict[str, Queue]) -> dict[str, list[ProgressTable]]:
    table = _decode(_KEY.sub(rb'"\1 \2 \3":', data))
    return {
        group: [
            ProgressTable(
                part.consume_tps,
                {
                    queues.get(key) or _queue(key, queues): place
                    for key, place in part.offset_table.items()
                },
            )
            for part in stats
        ]
        for entry in table.consume_stats_list
        for group, stats in entry.items()
    }


def _queue(key: str, known: dict[str, Queue]) -> Queue:
    """A key that was a text before has another shape, which is a `ValueError`."""
    broker, number, topic = key.split(" ")
    queue = known[key] = Queue(topic, broker, int(number))
    return queue
