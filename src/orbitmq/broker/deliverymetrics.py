"""Metrics of messages that are not delivered yet: half messages and timer messages.

Under RocketMQ 5's names. How many wait for which topic is read from where they lie, when somebody
asks, up to a limit; whatever is behind it is counted without its topic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from orbitmq.broker import names
from orbitmq.broker.exposition import Exposition
from orbitmq.broker.handlers.apart import Steps
from orbitmq.broker.parking import Reading, real_place
from orbitmq.broker.parts import Parts
from orbitmq.broker.transactions import QUEUE, HalfMessages
from orbitmq.clock import milliseconds

#: Half messages that are looked at for their topic.
MOST_HALVES = 2000
#: Seconds from now within which timer messages are due; RocketMQ's own.
TIMER_BOUNDS = (5, 60, 300, 900, 3600, 14_400, 28_800, 86_400)

_READ = 64
_COUNTED_AT_ONCE = 10_000


async def add_transactions(page: Exposition, parts: Parts, steps: Steps) -> None:
    """How transactions ended, and which have not."""
    counts = parts.transactions.halves.counts
    for name, text, table in (
        ("commit", "Total number of commit messages", counts.committed),
        ("rollback", "Total number of rollback messages", counts.rolled_back),
    ):
        family = page.counter(f"rocketmq_{name}_messages_total", text)
        for topic, count in table.items():
            family.add(page.labels(topic=topic), count)
    latency = page.histogram(
        "rocketmq_finish_message_latency_milliseconds", "Transaction finish latency"
    )
    for topic, histogram in counts.latencies.items():
        latency.add_histogram(page.labels(topic=topic), histogram)
    waiting: Counter[str] = Counter(dict.fromkeys(counts.latencies, 0))
    for topic in _open_topics(parts.transactions.halves, parts):
        waiting[topic] += 1
        await steps.did(1)
    if (rest := parts.transactions.halves.open_count - waiting.total()) > 0:
        waiting[""] += rest
    family = page.gauge("rocketmq_half_messages", "Half messages of all topics")
    for topic, count in waiting.items():
        family.add(page.labels(topic=topic), count)


def _open_topics(halves: HalfMessages, parts: Parts) -> Iterator[str]:
    """The topics of open half messages, of the first ones."""
    reading = Reading(parts.store, names.HALF_TOPIC, QUEUE, halves.position)
    left = MOST_HALVES
    while left > 0:
        found = [half for batch in reading.batches(min(_READ, left)) for half in batch]
        if not found:
            return
        left -= len(found)
        for half in found:
            if halves.is_open(half) and (place := real_place(half)) is not None:
                yield place[0]


async def add_timers(page: Exposition, parts: Parts, steps: Steps) -> None:
    """What waits for its time, what came and what went."""
    timers = parts.timers
    counts = timers.counts
    stored = page.labels(storage_type="local", storage_medium="disk")
    now_ms = milliseconds(parts.clock.now())
    late_ms = timers.late(now_ms)
    behind = timers.unread
    for name, text, value in (
        ("timer_enqueue_lag", "Timer enqueue messages lag", behind),
        ("timer_enqueue_latency_milliseconds", "Timer enqueue latency", 0),
        ("timer_dequeue_latency_milliseconds", "Timer dequeue latency", late_ms),
    ):
        page.gauge(f"rocketmq_{name}", text).add(stored, value)
    tables = (
        (page.counter("rocketmq_timer_enqueue_total", "Timer messages taken"), counts.taken),
        (page.counter("rocketmq_timer_dequeue_total", "Timer messages delivered"), counts.given),
        (page.gauge("rocketmq_timing_messages", "Timer messages that wait"), counts.waiting),
    )
    for family, table in tables:
        for topic, count in list(table.items()):
            labels = page.labels(storage_type="local", storage_medium="disk", topic=topic)
            family.add(labels, count)
            await steps.did(1)
    latency = page.histogram("rocketmq_delay_message_latency_seconds", "Timer messages' delays")
    for topic, histogram in list(counts.delays.items()):
        labels = page.labels(storage_type="local", storage_medium="disk", topic=topic)
        latency.add_histogram(labels, histogram)
    overdue = await _add_snapshot(page, timers.due_times(), now_ms, steps)
    page.gauge("rocketmq_timer_dequeue_lag", "Timer dequeue messages lag").add(stored, overdue)


async def _add_snapshot(
    page: Exposition, due_times: Iterator[int], now_ms: int, steps: Steps
) -> int:
    """How many are due within which time; how many are late."""
    bounds = [now_ms - 1, *(now_ms + bound * 1000 for bound in TIMER_BOUNDS)]
    counts = [0] * (len(bounds) + 1)
    while chunk := list(islice(due_times, _COUNTED_AT_ONCE)):
        for due_ms in chunk:
            counts[bisect_left(bounds, due_ms)] += 1
        await steps.did(_COUNTED_AT_ONCE)
    overdue, *counts = counts
    counts[0] += overdue
    family = page.gauge("rocketmq_timer_message_snapshot", "Timer messages by the time to wait")
    for bound, count in zip(TIMER_BOUNDS, counts, strict=False):
        labels = page.labels(storage_type="local", storage_medium="disk", timer_bound_s=str(bound))
        family.add(labels, count)
    return overdue
