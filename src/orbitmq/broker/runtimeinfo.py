"""What a broker says about itself as a whole (GET_BROKER_RUNTIME_INFO).

All keys of RocketMQ's 5.x are there, and those that tools of 4.9 read under other names, because
tools parse values without looking whether they are present. Some describe thread pools, which this
broker does not have: their capacities are the limits that stand in their place, and their sizes are
what waits there. Requests wait nowhere else, so waiting times are 0. Keys of our own come last.
"""

from __future__ import annotations

import shutil

from orbitmq.broker.findings import findings_table
from orbitmq.broker.names import SCHEDULE_TOPIC
from orbitmq.broker.parts import Parts
from orbitmq.broker.rates import Rates
from orbitmq.clock import milliseconds
from orbitmq.store.errors import StoreError
from orbitmq.store.scanning import store_time
from orbitmq.store.statistics import StoreStatistics
from orbitmq.wire.versions import OUR_VERSION, release_of

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
        "sendThreadPoolQueue": (parts.turns.waiting, send.waiting_messages),
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
