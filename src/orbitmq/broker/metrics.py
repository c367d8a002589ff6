"""The broker's metrics for Prometheus, under the names of RocketMQ 5.

Everything comes from counters and tables when it is scraped; nothing is done per message. A scrape
of many groups is made in steps of the event loop. The text is written here and not by
`prometheus_client`, which needs twenty times the CPU for 20,000 pairs of topic and group, in one
step. Counts of deleted topics and groups disappear; `rate()` takes that for a restart.

Differences to Apache: the type of a message is the one that its topic declares; bytes in are those
of bodies, bytes out those of records. Own names begin with `orbitmq_`. Recent releases append the
unit to some names (`rocketmq_consumer_lag_latency_milliseconds`); those have both names.
"""

from __future__ import annotations

import asyncio
import shutil
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar

from orbitmq import names
from orbitmq.broker.counters import CREATING, Histogram, Rates
from orbitmq.broker.groups import DIFFERENT_SUBSCRIPTIONS, Client, findings_table
from orbitmq.broker.parked import Reading, real_place
from orbitmq.broker.progress import consumed_topics, lag_of
from orbitmq.broker.scheduler import Steps
from orbitmq.broker.topics import MESSAGE_TYPE
from orbitmq.broker.transactions import QUEUE
from orbitmq.clock import milliseconds
from orbitmq.names import SCHEDULE_TOPIC
from orbitmq.store.settings import StoreError
from orbitmq.store.store import StoreStatistics
from orbitmq.store.verify import store_time
from orbitmq.wire.bodies import ConsumeType
from orbitmq.wire.codes import OUR_VERSION, RequestCode, ResponseCode, release_of

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts
    from orbitmq.broker.transactions import HalfMessages


K = TypeVar("K")
V = TypeVar("V")

#: Topics, and groups in a topic, with metrics of their own. Lag takes about 1 KB for each.
MOST_PAIRS = 20_000
#: Findings about groups with metrics of their own.
MOST_FINDINGS = 1000

_CONSUME_MODES = {
    ConsumeType.CONSUME_ACTIVELY: "pull",
    ConsumeType.CONSUME_PASSIVELY: "push",
    ConsumeType.CONSUME_POP: "pop",
}


_MILLISECONDS = "_milliseconds"
#: In the order of `lag_of`.
_LAGS = (
    ("lag_messages", "Consumer lag messages", ("",)),
    ("lag_latency", "Consumer lag time, in milliseconds", ("", _MILLISECONDS)),
    ("inflight_messages", "Consumer inflight messages", ("",)),
    ("ready_messages", "Consumer ready messages", ("",)),
    ("queueing_latency", "Consumer queueing time, in milliseconds", ("", _MILLISECONDS)),
)
#: RocketMQ's thread pools. In this broker requests wait in two places only.
_PROCESSORS = (
    *("send", "async_put", "pull", "ack", "query_message", "client_manager", "heartbeat"),
    *("lite_pull", "transaction", "consumer_manager", "admin", "reply"),
)


class Metrics:
    """The metrics of one broker."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._one_at_a_time = asyncio.Lock()
        self._rounds = 0
        self._text: tuple[bytes, ...] = ()

    async def text(self) -> tuple[bytes, ...]:
        """The present text, in pieces: it may have many megabytes.

        Scrapes that come while it is being made share the next one.
        """
        wanted = self._rounds + 1 + self._one_at_a_time.locked()
        async with self._one_at_a_time:
            if self._rounds < wanted:
                text = await self._make()
                self._rounds += 1
                self._text = text
            return self._text

    async def _make(self) -> tuple[bytes, ...]:
        settings = self._parts.settings
        page = Exposition(
            {"cluster": settings.cluster, "node_type": "broker", "node_id": settings.name}
        )
        steps = Steps()
        self._broker(page)
        self._storage(page)
        await self._messages(page, steps)
        await self._connections(page, steps)
        await self._lags(page, steps)
        await add_transactions(page, self._parts, steps)
        await add_timers(page, self._parts, steps)
        await self._latencies(page, steps)
        self._own(page)
        return page.pieces()

    # The broker and its store.

    def _broker(self, page: Exposition) -> None:
        parts = self._parts
        plain = page.labels()
        watermark = page.gauge("rocketmq_processor_watermark", "Request processor watermark")
        waiting = {"send": parts.writes.waiting, "pull": len(parts.pacing)}
        for processor in _PROCESSORS:
            watermark.add(page.labels(processor=processor), waiting.get(processor, 0))
        for name, text, value in (
            ("rocketmq_broker_permission", "Broker permission", parts.settings.permission),
            ("rocketmq_topic_number", "Active topic number", len(parts.topics)),
            (
                "rocketmq_consumer_group_number",
                "Active subscription group number",
                len(parts.groups),
            ),
        ):
            page.gauge(name, text).add(plain, value)

    def _storage(self, page: Exposition) -> None:
        state = self._parts.store.statistics()
        labels = page.labels(storage_type="local", storage_medium="disk")
        used = shutil.disk_usage(self._parts.settings.root).used
        for name, text, value in (
            ("size", "Broker storage size, in bytes", used),
            ("size_bytes", "Broker storage size", used),
            ("flush_behind_bytes", "Broker flush behind bytes", state.log_end - state.flushed),
            (
                "dispatch_behind_bytes",
                "Broker dispatch behind bytes",
                state.log_end - state.dispatched,
            ),
        ):
            page.gauge(f"rocketmq_storage_{name}", text).add(labels, value)
        try:
            first = store_time(self._parts.store.message_at(state.log_start))
        except StoreError:
            return
        for unit in ("", _MILLISECONDS):
            reserve = page.gauge(
                f"rocketmq_storage_message_reserve_time{unit}",
                "Broker message reserve time, in milliseconds",
            )
            reserve.add(labels, max(0, self._now_ms() - first))

    # Messages.

    async def _messages(self, page: Exposition, steps: Steps) -> None:
        parts = self._parts
        messages_in = page.counter("rocketmq_messages_in_total", "Incoming messages")
        bytes_in = page.counter("rocketmq_throughput_in_total", "Bytes of incoming messages")
        sizes = page.histogram("rocketmq_message_size", "Incoming messages size")
        for topic, put in self._some(page, "topics", parts.counters.topics):
            labels = page.labels(
                topic=topic,
                message_type=self._message_type(topic),
                is_system=parts.topics.is_system(topic),
            )
            messages_in.add(labels, put.puts)
            bytes_in.add(labels, put.put_bytes)
            sizes.add_histogram(labels, put.sizes())
            await steps.did(1)
        messages_out = page.counter("rocketmq_messages_out_total", "Outgoing messages")
        bytes_out = page.counter("rocketmq_throughput_out_total", "Bytes of outgoing messages")
        dead = page.counter(
            "rocketmq_send_to_dlq_messages_total", "Messages that became dead letters"
        )
        for (topic, group), got in self._some(page, "groups", parts.counters.groups):
            if got.pulls:
                labels = self._consumption(page, topic, group)
                messages_out.add(labels, got.gets)
                bytes_out.add(labels, got.get_bytes)
            if got.dead_letters:
                labels = page.labels(
                    consumer_group=group, topic=topic, is_system=self._is_system(topic, group)
                )
                dead.add(labels, got.dead_letters)
            await steps.did(1)

    @staticmethod
    def _some(page: Exposition, what: str, table: Mapping[K, V]) -> list[tuple[K, V]]:
        """The part of a table that is shown; the table may change meanwhile."""
        _left_out(page, what, max(0, len(table) - MOST_PAIRS))
        return list(islice(table.items(), MOST_PAIRS))

    def _message_type(self, topic: str) -> str:
        config = self._parts.topics.get(topic)
        declared = None if config is None else config.attributes.get(MESSAGE_TYPE)
        return (declared or "NORMAL").lower()

    def _consumption(self, page: Exposition, topic: str, group: str) -> str:
        return page.labels(
            consumer_group=group,
            topic=topic,
            is_retry=topic.startswith((names.RETRY_PREFIX, names.DEAD_LETTER_PREFIX)),
            is_system=self._is_system(topic, group),
        )

    def _is_system(self, topic: str, group: str) -> bool:
        return self._parts.topics.is_system(topic) or _is_system_group(group)

    # Clients.

    async def _connections(self, page: Exposition, steps: Steps) -> None:
        parts = self._parts
        producing: Counter[str] = Counter()
        for group in parts.producers.groups():
            clients = parts.producers.clients(group)
            for client in clients:
                producing[_speaks(page, client.language.value.lower(), client.version)] += 1
            await steps.did(len(clients))
        family = page.gauge("rocketmq_producer_connections", "Producer connections")
        for labels, count in producing.items():
            family.add(labels, count)
        family = page.gauge("rocketmq_consumer_connections", "Consumer connections")
        for group in parts.consumers.groups():
            consuming: Counter[str] = Counter()
            members_of_group = parts.consumers.members(group)
            for member in members_of_group:
                mode = member.data.consume_type if member.data else None
                consuming[self._consumer(page, group, member.client, mode)] += 1
            for labels, count in consuming.items():
                family.add(labels, count)
            await steps.did(len(members_of_group))

    @staticmethod
    def _consumer(page: Exposition, group: str, client: Client, mode: ConsumeType | None) -> str:
        return _speaks(
            page,
            client.language.value.lower(),
            client.version,
            consumer_group=group,
            consume_mode=_CONSUME_MODES.get(mode, "unknown") if mode else "unknown",
            is_system=_is_system_group(group),
        )

    # Lag.

    async def _lags(self, page: Exposition, steps: Steps) -> None:
        families = [
            [page.gauge(f"rocketmq_consumer_{name}{unit}", text) for unit in units]
            for name, text, units in _LAGS
        ]
        left_out = 0
        for number, (group, topic) in enumerate(consumed_topics(self._parts)):
            if number >= MOST_PAIRS:
                left_out += 1
                await steps.did(1)
                continue
            lag = lag_of(self._parts, group, topic, self._now_ms())
            labels = self._consumption(page, topic.topic_name, group)
            for named, value in zip(families, lag, strict=True):
                for family in named:
                    family.add(labels, value)
            await steps.did(max(1, topic.write_queue_nums))
        _left_out(page, "lags", left_out)

    # Latencies.

    async def _latencies(self, page: Exposition, steps: Steps) -> None:
        latencies = self._parts.latencies
        family = page.histogram("rocketmq_rpc_latency_milliseconds", "Rpc latency")
        for (code, response, was_held), histogram in latencies.calls():
            labels = page.labels(
                protocol_type="remoting",
                request_code=_word(RequestCode, code),
                response_code=_word(ResponseCode, response),
                is_long_polling=was_held,
                result="success",
            )
            family.add_histogram(labels, histogram)
            await steps.did(1)
        for (code, is_success), histogram in latencies.creations.items():
            name = CREATING[RequestCode(code)]
            family = page.histogram(name + _MILLISECONDS, "Time that it took to create one")
            status = "success" if is_success else "failure"
            labels = page.labels(invocation_status=status, is_system=False)
            family.add_histogram(labels, histogram)

    # What only this broker has.

    def _own(self, page: Exposition) -> None:
        parts, plain = self._parts, page.labels()
        state = parts.store.statistics()
        frames = parts.listeners.capacity.frames
        refused = page.counter("orbitmq_access_refused_total", "Requests refused by access rules")
        for reason, count in parts.access.refused.items():
            refused.add(page.labels(reason=reason.value), count)
        for name, text, value in (
            ("log_flushes", "Times the log was brought to the disk", state.flushes),
            ("sends_failed", "Sends answered with an error", parts.counters.failed_puts),
            ("sends_busy", "Sends refused by flow control", parts.counters.busy_puts),
            (
                "parked_dropped",
                "Delayed and timer messages that could not go where they belong, and half messages",
                parts.destinations.dropped,
            ),
            ("pulls_crowded_out", "Pulls that found no room to wait", parts.held.crowded_out),
            ("pulls_displaced", "Held pulls that gave way to others", parts.held.displaced),
            ("pulls_refused", "Pulls answered that the broker is busy", parts.held.refused),
            ("commits_refused", "Commits of lower offsets refused", parts.progress.refused),
            (
                "connections_refused",
                "Connections that were refused",
                parts.listeners.capacity.refused,
            ),
            ("frames_waited", "Long frames that had to wait for memory", frames.waited),
            ("frames_evicted", "Long frames given up because others waited", frames.evicted),
            ("frames_too_slow", "Frames given up because they did not go on", frames.too_slow),
        ):
            page.counter(f"orbitmq_{name}_total", text).add(plain, value)
        archive = parts.archiver
        for name, text, value in (
            (
                "behind_bytes",
                "Closed log files that are not archived",
                archive.behind if archive else 0,
            ),
            ("failing", "Whether archiving fails", int(archive is not None and archive.is_failing)),
            (
                "deletions_held_back",
                "Whether a log file is due for deletion and waits for the archive",
                int(state.is_held_back),
            ),
        ):
            page.gauge(f"orbitmq_archive_{name}", text).add(plain, value)
        written = page.counter("orbitmq_archive_files_total", "Log files archived")
        written.add(plain, archive.written if archive else 0)
        dropped = page.counter(
            "orbitmq_sends_deduplicated_total", "Messages that were stored before, by their id"
        )
        for topic, count in islice(parts.dedup.dropped.items(), MOST_PAIRS):
            dropped.add(page.labels(topic=topic), count)
        unsaved = page.gauge("orbitmq_config_unsaved", "Whether a file could not be saved")
        failures = page.counter("orbitmq_config_save_failures_total", "Saves that failed")
        for file in parts.config_files:
            labels = page.labels(file=file.path.name)
            unsaved.add(labels, int(file.problem is not None))
            failures.add(labels, file.failures)
        unreachable = len(parts.registration.unreachable)
        for name, text, value in (
            ("held_pulls", "Pulls that wait for messages", len(parts.held)),
            (
                "put_off_pulls",
                "Pulls without room to wait that are answered soon",
                parts.held.deferred,
            ),
            ("dedup_ids", "Ids of messages that are remembered", parts.dedup.remembered),
            ("timer_messages", "Timer messages that are not due yet", parts.timers.pending),
            ("name_servers_unreachable", "Name servers that did not answer", unreachable),
            ("store_writable", "Whether messages can be stored", int(not state.refusal)),
            ("connections", "Connections that are open", parts.listeners.capacity.connections),
            ("frames_waiting", "Long frames that wait for memory", frames.waiting),
            ("frames_bytes", "Memory set aside for frames that arrive", frames.used),
        ):
            page.gauge(f"orbitmq_{name}", text).add(plain, value)
        self._findings(page)

    def _findings(self, page: Exposition) -> None:
        """Findings about groups; the members concerned are in the log."""
        open_findings = self._parts.disagreements.open_findings()
        counts = Counter(
            (finding.group, "different_subscriptions", finding.topic or "")
            if finding.kind == DIFFERENT_SUBSCRIPTIONS
            else (finding.group, "duplicate_client", "")
            for finding in open_findings
        )
        page.gauge("orbitmq_group_findings_number", "Groups' findings that are open").add(
            page.labels(), len(open_findings)
        )
        family = page.gauge(
            "orbitmq_group_findings",
            "Members of a group that subscribe differently, or share a client id",
        )
        for (group, kind, topic), count in counts.most_common(MOST_FINDINGS):
            family.add(page.labels(consumer_group=group, kind=kind, topic=topic), count)

    def _now_ms(self) -> int:
        return milliseconds(self._parts.clock.now())


def _left_out(page: Exposition, what: str, count: int) -> None:
    page.gauge(
        "orbitmq_metrics_left_out", "Topics, or groups in topics, without metrics of their own"
    ).add(page.labels(what=what), count)


def _word(codes: type[RequestCode | ResponseCode], code: int) -> str:
    try:
        return codes(code).name.lower()
    except ValueError:
        return "unknown"


def _speaks(page: Exposition, language: str, version: int, **labels: str | bool) -> str:
    release = release_of(version)
    shown = "higher_version" if release is None else f"v{release}".replace(".", "_").lower()
    return page.labels(**labels, language=language, version=shown, protocol_type="remoting")


def _is_system_group(group: str) -> bool:
    return group.lower().startswith(names.SYSTEM_GROUP_PREFIX.lower())


# Metrics of messages that are not delivered yet: half messages and timer messages.
#
# Under RocketMQ 5's names. The number of waiting messages per topic is read from the system topic
# at a scrape, up to a limit; messages beyond it are counted without their topic.


#: Half messages that are read for their topic.
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


# Prometheus' text format, as far as a broker needs it: counters, gauges and histograms.
#
# All samples of a metric have to stand together, below its help and type, so they are collected by
# metric and written at the end. Labels are made into text once and used for all metrics of a thing.


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

_TOGETHER = 256
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Family:
    """One metric and its samples."""

    __slots__ = ("_full", "_name", "_samples")

    def __init__(self, name: str, kind: Kind, text: str) -> None:
        self._name = name
        self._samples = [f"# HELP {name} {text}\n", f"# TYPE {name} {kind}\n"]
        #: Samples that are bytes already: freeing a hundred thousand strings takes long.
        self._full: list[bytes] = []

    def add(self, labels: str, value: float) -> None:
        """Add a sample; `labels` as `Exposition.labels` gives them."""
        self._samples.append(f"{self._name}{{{labels}}} {value!r}\n")
        if len(self._samples) >= _TOGETHER:
            self._full.append(self._encoded())
            self._samples.clear()

    def add_histogram(self, labels: str, histogram: Histogram) -> None:
        """Add all samples of a histogram."""
        name = self._name
        for bound, count in histogram.cumulative():
            shown = "+Inf" if bound == float("inf") else repr(bound)
            self._samples.append(f'{name}_bucket{{{labels},le="{shown}"}} {count}\n')
        self._samples.append(f"{name}_count{{{labels}}} {len(histogram)}\n")
        self._samples.append(f"{name}_sum{{{labels}}} {histogram.total!r}\n")
        if len(self._samples) >= _TOGETHER:
            self._full.append(self._encoded())
            self._samples.clear()

    def pieces(self) -> Iterator[bytes]:
        """The lines of the metric; none when it has no samples."""
        if self._full or len(self._samples) > 2:
            yield from self._full
            yield self._encoded()

    def _encoded(self) -> bytes:
        return "".join(self._samples).encode("utf-8", "replace")


class Exposition:
    """All metrics of one answer."""

    def __init__(self, common: Mapping[str, str]) -> None:
        """`common` are the labels that every sample has."""
        self._common = _labels(common)
        self._families: dict[str, Family] = {}

    def labels(self, **labels: str | bool) -> str:
        """Labels as text, with the common ones."""
        if not labels:
            return self._common
        return f"{self._common},{_labels(labels)}"

    def counter(self, name: str, text: str) -> Family:
        return self._family(name, "counter", text)

    def gauge(self, name: str, text: str) -> Family:
        return self._family(name, "gauge", text)

    def histogram(self, name: str, text: str) -> Family:
        return self._family(name, "histogram", text)

    def _family(self, name: str, kind: Kind, text: str) -> Family:
        return self._families.setdefault(name, Family(name, kind, text))

    def pieces(self) -> tuple[bytes, ...]:
        """Everything, metric by metric."""
        return tuple(piece for family in self._families.values() for piece in family.pieces())


def _labels(labels: Mapping[str, str | bool]) -> str:
    return ",".join(f'{name}="{_value(value)}"' for name, value in labels.items())


def _value(value: str | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.translate(_ESCAPES)


# What a broker says about itself as a whole (GET_BROKER_RUNTIME_INFO).
#
# All keys of RocketMQ's 5.x are there, and those that tools of 4.9 read under other names, because
# tools parse values without looking whether they are present. Some describe thread pools, which
# this broker does not have: their capacities are the limits that stand in their place, and their
# sizes are what waits there. Requests wait nowhere else, so waiting times are 0. Keys of our own
# come last.


_WINDOWS = (10, 60, 600)
#: What Apache shows when there is no pool of buffers outside the heap.
_NO_LIMIT = 2**31 - 1
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def runtime_info(parts: Parts, rates: Rates) -> dict[str, str]:
    """Every key and its value, as text."""
    state = parts.store.statistics()
    return {
        **_puts_and_gets(parts, rates),
        **_store(parts, state),
        **_delays(parts),
        **_waiting(parts),
        **_ours(parts, state),
    }


def _puts_and_gets(parts: Parts, rates: Rates) -> dict[str, str]:
    yesterday, today, now = rates.mornings()
    speeds = rates.per_second(*_WINDOWS)

    def shown(name: str) -> str:
        return " ".join(str(speed[name]) for speed in speeds)

    misses = " ".join(str(speed["pulls"] - speed["hits"]) for speed in speeds)
    puts = parts.latencies.puts
    running = max(0, int(parts.clock.now() - parts.started_at))
    release = release_of(OUR_VERSION)
    return {
        "bootTimestamp": str(milliseconds(parts.started_at)),
        "runtime": _duration(running),
        "brokerActive": "true",
        "brokerVersion": str(OUR_VERSION),
        "brokerVersionDesc": f"V{release}".replace(".", "_"),
        "startAcceptSendRequestTimeStamp": str(milliseconds(parts.settings.send.accept_from)),
        "putMessageTimesTotal": str(now.puts),
        "putMessageFailedTimes": str(parts.counters.failed_puts),
        "putMessageSizeTotal": str(now.put_bytes),
        "putMessageAverageSize": str(now.put_bytes / max(1, now.puts)),
        "putTps": shown("puts"),
        "getFoundTps": shown("hits"),
        "getMissTps": misses,
        "getTotalTps": shown("pulls"),
        "getTransferredTps": shown("gets"),
        # The spelling of 4.x.
        "getTransferedTps": shown("gets"),
        "msgPutTotalYesterdayMorning": str(yesterday.puts),
        "msgPutTotalTodayMorning": str(today.puts),
        "msgPutTotalTodayNow": str(now.puts),
        "msgGetTotalYesterdayMorning": str(yesterday.gets),
        "msgGetTotalTodayMorning": str(today.gets),
        "msgGetTotalTodayNow": str(now.gets),
        # Of the turns in which messages were written, see `latencies`.
        "putMessageEntireTimeMax": str(round(puts.longest)),
        "putMessageDistributeTime": puts.shares(),
        "putLatency99": f"{puts.percentile(0.99):.2f}",
        "putLatency999": f"{puts.percentile(0.999):.2f}",
        "getMessageEntireTimeMax": str(round(parts.latencies.longest_pull)),
    }


def _store(parts: Parts, state: StoreStatistics) -> dict[str, str]:
    root = parts.settings.root
    disk = shutil.disk_usage(root)
    # As `df` does: what only the system may use is not counted.
    used = str(round(disk.used / (disk.used + disk.free), 4))
    return {
        "commitLogDiskRatio": used,
        f"commitLogDiskRatio_{root / 'commitlog'}": used,
        "consumeQueueDiskRatio": used,
        "commitLogMinOffset": str(state.log_start),
        "commitLogMaxOffset": str(state.log_end),
        "commitLogDirCapacity": (f"Total : {_size(disk.total)}, Free : {_size(disk.free)}."),
        "dispatchBehindBytes": str(state.log_end - state.dispatched),
        "dispatchMaxBuffer": "0",
        "earliestMessageTimeStamp": str(_earliest(parts, state)),
        "remainHowManyDataToFlush": _size(state.log_end - state.flushed),
        "remainTransientStoreBufferNumbs": str(_NO_LIMIT),
        "pageCacheLockTimeMills": "0",
    }


def _earliest(parts: Parts, state: StoreStatistics) -> int:
    """When the first message of the log was stored; -1 when there is none."""
    try:
        return store_time(parts.store.message_at(state.log_start))
    except StoreError:
        return -1


def _delays(parts: Parts) -> dict[str, str]:
    """For every delay level the first message that is not delivered yet, and the next to come."""
    table = {
        "timerReadBehind": "0",
        "timerOffsetBehind": "0",
        "timerCongestNum": str(parts.timers.pending),
        "timerEnqueueTps": "0.0",
        "timerDequeueTps": "0.0",
    }
    for level, offset in parts.delays.offsets().offset_table.items():
        end = parts.store.max_offset(SCHEDULE_TOPIC, level - 1)
        if end:
            table[f"scheduleMessageOffset_{level}"] = f"{offset},{end}"
    return table


def _waiting(parts: Parts) -> dict[str, str]:
    send, pull = parts.settings.send, parts.settings.pull
    sizes = {
        "sendThreadPoolQueue": (parts.writes.waiting, send.waiting_messages),
        "pullThreadPoolQueue": (len(parts.pacing), pull.held_requests),
        "litePullThreadPoolQueue": (0, pull.held_requests),
        "queryThreadPoolQueue": (0, 20_000),
        "ackThreadPoolQueue": (0, 100_000),
    }
    table = {"EndTransactionQueueSize": "0", "EndTransactionThreadPoolQueueCapacity": "100000"}
    for name, (size, capacity) in sizes.items():
        table[f"{name}Size"] = str(size)
        table[f"{name}Capacity"] = str(capacity)
        table[f"{name}HeadWaitTimeMills"] = "0"
    return table


def _ours(parts: Parts, state: StoreStatistics) -> dict[str, str]:
    return {
        "topics": str(len(parts.topics)),
        "groups": str(len(parts.groups)),
        "maxAutoTopics": str(parts.settings.max_auto_topics),
        "maxAutoGroups": str(parts.settings.max_auto_groups),
        "heldPulls": str(len(parts.held)),
        "refusedBySystemBusy": str(parts.counters.busy_puts),
        "refusedCommits": str(parts.progress.refused),
        "dedupIds": str(parts.dedup.remembered),
        "dedupDropped": str(parts.dedup.dropped.total()),
        "storeQueues": str(state.queues),
        "storeFlushes": str(state.flushes),
        "storeRefusal": state.refusal,
        "unreachableNameServers": ";".join(map(str, parts.registration.unreachable)),
        "nameConflicts": "; ".join(parts.registration.conflicts),
        **findings_table(parts.disagreements.open_findings()),
    }


def _duration(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def _size(count: int) -> str:
    """Bytes for people."""
    if count < 1024:
        return f"{count} B"
    amount, power = float(count), 0
    while amount >= 1024:
        amount /= 1024
        power += 1
    return f"{amount:.1f} {_UNITS[power - 1]}"
