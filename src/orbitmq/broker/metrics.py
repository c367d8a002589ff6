"""What a broker counts and measures, for Prometheus, under the names of RocketMQ 5.

Nothing is done for it while messages pass: everything comes from counters that are there anyway and
from tables, when somebody asks. Looking at all groups is done in steps, and others are served in
between. Prometheus may ask less often than things change, so what was counted for topics and groups
that were deleted is gone from here; `rate()` takes that for a restart.

Differences to Apache: a topic's messages have the type that the topic declares (`message.type`), as
that of each message is not looked at; bytes in are those of bodies, bytes out those of whole
records; lag see `lag`, latencies see `latencies`. What RocketMQ has no name for begins with
`orbitmq_`.

Recent releases append the unit to some names (`rocketmq_consumer_lag_latency_milliseconds` in 5.5),
older ones do not. Boards exist for both, so these metrics are there under both names.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import TypeVar

from orbitmq.broker import names
from orbitmq.broker.attributes import MESSAGE_TYPE
from orbitmq.broker.clients import Client
from orbitmq.broker.deliverymetrics import add_timers, add_transactions
from orbitmq.broker.disagreements import DifferentSubscriptions
from orbitmq.broker.exposition import CONTENT_TYPE, Exposition
from orbitmq.broker.handlers.apart import Steps
from orbitmq.broker.lag import consumed_topics, lag_of
from orbitmq.broker.latencies import CREATING
from orbitmq.broker.parts import Parts
from orbitmq.clock import milliseconds
from orbitmq.store.errors import StoreError
from orbitmq.store.scanning import store_time
from orbitmq.wire.bodies.membership import ConsumeType
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.versions import release_of

__all__ = ["CONTENT_TYPE", "MOST_PAIRS", "Metrics"]

K = TypeVar("K")
V = TypeVar("V")

#: Topics, and groups in a topic, that are shown one by one. Lag takes about 1 KB for each.
MOST_PAIRS = 20_000
#: Findings about groups that are shown one by one.
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
#: RocketMQ's pools of threads. Requests wait here in two places only; there are none elsewhere.
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
        """Everything, as of now, in pieces: the whole may be many megabytes.

        Those who ask while it is being made share the next one.
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
        waiting = {"send": parts.turns.waiting, "pull": len(parts.pacing)}
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
        """As much of a table as is shown; others may change it meanwhile."""
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
        frames = parts.capacity.frames
        refused = page.counter("orbitmq_access_refused_total", "Requests refused by access rules")
        for reason, count in parts.access.refused.items():
            refused.add(page.labels(reason=reason.value), count)
        for name, text, value in (
            ("log_flushes", "Times the log was brought to the disk", self._flushes()),
            ("sends_failed", "Sends answered with an error", parts.counters.failed_puts),
            ("sends_busy", "Sends refused by flow control", parts.counters.busy_puts),
            (
                "parked_dropped",
                "Delayed and timer messages that could not go where they belong, and half messages",
                parts.destinations.dropped,
            ),
            ("pulls_crowded_out", "Pulls that found no room to wait", parts.held.crowded_out),
            ("pulls_displaced", "Held pulls that gave way to others", parts.held.displaced),
            ("pulls_refused", "Pulls told that the broker is busy", parts.held.refused),
            ("commits_refused", "Commits of lower offsets refused", parts.progress.refused),
            ("connections_refused", "Connections that were not let in", parts.capacity.refused),
            ("frames_waited", "Long frames that had to wait for memory", frames.waited),
            ("frames_evicted", "Long frames given up because others waited", frames.evicted),
            ("frames_too_slow", "Frames given up because they did not go on", frames.too_slow),
        ):
            page.counter(f"orbitmq_{name}_total", text).add(plain, value)
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
                parts.held.put_off,
            ),
            ("timer_messages", "Timer messages that are not due yet", parts.timers.pending),
            ("name_servers_unreachable", "Name servers that did not answer", unreachable),
            ("store_writable", "Whether messages can be stored", self._is_writable()),
            ("connections", "Connections that are open", parts.capacity.connections),
            ("frames_waiting", "Long frames that wait for memory", frames.waiting),
            ("frames_bytes", "Memory set aside for frames that arrive", frames.used),
        ):
            page.gauge(f"orbitmq_{name}", text).add(plain, value)
        self._findings(page)

    def _findings(self, page: Exposition) -> None:
        """What is wrong in groups: who has to look is told by the broker's log and tools."""
        open_findings = self._parts.disagreements.open_findings()
        counts = Counter(
            (finding.group, "different_subscriptions", finding.topic)
            if isinstance(finding, DifferentSubscriptions)
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

    def _flushes(self) -> int:
        return self._parts.store.statistics().flushes

    def _is_writable(self) -> int:
        return int(not self._parts.store.statistics().refusal)

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
