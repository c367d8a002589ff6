"""Messages of a group that failed, and wait for the delay before their next attempt.

They are in no queue of the group yet, so that no lag has them. A broker keeps them in its schedule
topic, one queue for each delay level, from the offset up to which the level is delivered to the end
of the queue, and each says where it belongs. Nobody counts them by group: they are read, and no
more than some of them, because other groups' messages lie among them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.reading import BATCH, Reading
from orbitmq.client.admin.topology import BrokerNode
from orbitmq.client.engine import Engine
from orbitmq.client.names import retry_topic
from orbitmq.client.queue import Queue
from orbitmq.console.tables import TIMEOUT, BrokerTables
from orbitmq.console.words import several
from orbitmq.errors import OrbitError
from orbitmq.message.wellknown import REAL_TOPIC
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.offsets import DelayOffsets
from orbitmq.wire.codes import RequestCode

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
#: Messages that are read of one broker, whoever they belong to.
MOST = 512
#: Brokers that are asked at once.
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class LaterAttempts:
    """How many messages of a group wait for their next attempt."""

    count: int
    #: False: more may wait, among those that were not read.
    is_all: bool = True

    def __str__(self) -> str:
        """`13 messages wait for a later attempt`, at least so many if not all were read."""
        if not self.count and not self.is_all:
            return "not known: too many wait for later, of all groups together"
        waits = several(self.count, "message waits", "messages wait")
        return f"{'' if self.is_all else 'at least '}{waits} for a later attempt"


async def later_attempts(
    engine: Engine,
    tables: BrokerTables,
    brokers: Iterable[BrokerNode],
    group: str,
    *,
    most: int = MOST,
) -> LaterAttempts | None:
    """Those of a group at all brokers; None when a broker does not tell."""
    reading = Reading(Asking(engine, at_once=_AT_ONCE, timeout=TIMEOUT))

    async def at(node: BrokerNode) -> LaterAttempts:
        return await _at_broker(engine, tables, reading, node, retry_topic(group), most)

    try:
        found = await asyncio.gather(*map(at, brokers))
    except OrbitError:
        return None
    return LaterAttempts(sum(each.count for each in found), all(each.is_all for each in found))


async def _at_broker(
    engine: Engine,
    tables: BrokerTables,
    reading: Reading,
    node: BrokerNode,
    topic: str,
    most: int,
) -> LaterAttempts:
    answer = await engine.ask(node.address, RequestCode.GET_ALL_DELAY_OFFSET, timeout=TIMEOUT)
    delivered = decode_body(DelayOffsets, answer.body or b"{}").offset_table
    content = await tables.content(node.address, SCHEDULE_TOPIC)
    count, left = 0, most
    for number, (low, end) in sorted(content.queues.items() if content else ()):
        queue = Queue(SCHEDULE_TOPIC, node.broker, number)
        # Levels are counted from 1, their queues from 0.
        offset = max(low, delivered.get(number + 1, low))
        while offset < end:
            if left <= 0:
                return LaterAttempts(count, is_all=False)
            pulled = await reading.pull(node.address, queue, offset, most=min(BATCH, left))
            here = [each for each in pulled.messages if each.queue_offset < end]
            count += sum(each.properties.get(REAL_TOPIC) == topic for each in here)
            left -= len(here)
            if pulled.next_offset <= offset:
                break
            offset = pulled.next_offset
    return LaterAttempts(count)
