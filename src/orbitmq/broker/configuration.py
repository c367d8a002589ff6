"""The settings of a broker under RocketMQ's names: shown as text, and changed while it runs.

One table (`SETTINGS`) says how each setting is called, where it is, how its text is read and
written, and whether it can be changed while the broker runs; if not, why. A setting that RocketMQ
does not have, or has with another meaning, is called here as it is in `BrokerSettings`.

A change lasts until the broker stops: settings come from whoever starts it, and there is one place
to look them up. (Apache's broker writes the change into its configuration file.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orbitmq.broker.errors import SettingError
from orbitmq.broker.settings import BrokerSettings, Transfer
from orbitmq.errors import OrbitError
from orbitmq.remoting.address import Address
from orbitmq.store.consumequeue import ENTRY_SIZE
from orbitmq.store.settings import FlushPolicy

#: Never changed by a request; Apache's own list.
BLACK_LIST = frozenset({"brokerConfigPath", "configBlackList", "rocketmqHome"})


class BlackListed(SettingError):
    """A setting that requests must not change."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value becomes text and back."""

    text: Callable[[Any], str]
    value: Callable[[str], Any]
    allowed: str


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.strip().lower()]


def _level(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"


BOOLEAN = Kind(lambda value: "true" if value else "false", _boolean, "true or false")
NUMBER = Kind(str, int, "a whole number")
TEXT = Kind(str, str, "a text")
MILLIS = Kind(
    lambda value: str(round(value * 1000)), lambda text: int(text) / 1000, "whole milliseconds"
)
SECONDS = Kind(lambda value: str(round(value)), lambda text: float(int(text)), "whole seconds")
HOURS = Kind(lambda value: f"{value / 3600:g}", lambda text: float(text) * 3600, "hours")
PERCENT = Kind(lambda value: f"{value * 100:g}", lambda text: float(text) / 100, "percent")
LIST = Kind(";".join, lambda text: tuple(filter(None, text.split(";"))), "texts with ; between")
CLOCK_HOURS = Kind(
    lambda value: ";".join(f"{hour:02d}" for hour in value),
    lambda text: tuple(int(hour) for hour in text.split(";")),
    "hours of the day with ; between",
)
FLUSH = Kind(
    lambda value: f"{value.name}_FLUSH",
    lambda text: FlushPolicy[text.removesuffix("_FLUSH")],
    "ASYNC_FLUSH or SYNC_FLUSH",
)
BY_HEAP = Kind(
    lambda value: "true" if value is Transfer.HEAP else "false",
    lambda text: Transfer.HEAP if _boolean(text) else Transfer.FILE,
    "true or false",
)
ENTRIES = Kind(lambda value: str(value * ENTRY_SIZE), lambda text: int(text) // ENTRY_SIZE, "bytes")
LEVELS = Kind(
    lambda value: " ".join(map(_level, value)), lambda text: tuple(text.split()), "delays"
)

#: Why a setting cannot be changed while the broker runs.
IDENTITY = "it says who the broker is and where; stop it and start it with another value"
STORE = "the store was opened with it; stop the broker and start it with another value"
START = "it is read when the broker starts; stop it and start it with another value"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: `path` leads to it from `BrokerSettings`; `fixed` says why it does not change."""

    path: str
    kind: Kind
    fixed: str | None = None


SETTINGS: Mapping[str, Setting] = {
    # The broker.
    "brokerName": Setting("name", TEXT, IDENTITY),
    "brokerClusterName": Setting("cluster", TEXT, IDENTITY),
    "brokerId": Setting("broker_id", NUMBER, IDENTITY),
    "namesrvAddr": Setting("name_servers", LIST, IDENTITY),
    "storePathRootDir": Setting("root", TEXT, IDENTITY),
    "brokerPermission": Setting("permission", NUMBER),
    "autoCreateTopicEnable": Setting("auto_create_topic", BOOLEAN, START),
    "autoCreateSubscriptionGroup": Setting("auto_create_group", BOOLEAN, START),
    "defaultTopicQueueNums": Setting("default_topic_queues", NUMBER, START),
    "clusterTopicEnable": Setting("cluster_topic", BOOLEAN, START),
    "brokerTopicEnable": Setting("broker_topic", BOOLEAN, START),
    "traceTopicEnable": Setting("trace_topic", BOOLEAN, START),
    "timerWheelEnable": Setting("timer", BOOLEAN, START),
    "channelExpiredTimeout": Setting("client_life", MILLIS, START),
    "notifyConsumerIdsChangedEnable": Setting("notify_consumers", BOOLEAN),
    "cleanResourceInterval": Setting("clean_interval", MILLIS, START),
    "scanInterval": Setting("scan_interval", MILLIS, START),
    # Sending.
    "maxMessageSize": Setting("send.max_message_size", NUMBER),
    "regionId": Setting("send.region", TEXT),
    "traceOn": Setting("send.trace_on", BOOLEAN),
    "startAcceptSendRequestTimeStamp": Setting("send.accept_from", MILLIS),
    "rejectTransactionMessage": Setting("send.reject_transactions", BOOLEAN),
    "syncFlushTimeout": Setting("send.flush_timeout", MILLIS),
    "sendThreadPoolQueueCapacity": Setting("send.waiting_messages", NUMBER),
    "sendWaitingBytes": Setting("send.waiting_bytes", NUMBER),
    # Pulling.
    "longPollingEnable": Setting("pull.long_polling", BOOLEAN),
    "shortPollingTimeMills": Setting("pull.short_hold", MILLIS),
    "longestHoldMills": Setting("pull.longest_hold", MILLIS),
    "pullThreadPoolQueueCapacity": Setting("pull.held_requests", NUMBER),
    "heldPerConnection": Setting("pull.held_per_connection", NUMBER),
    "putOffRequests": Setting("pull.put_off_requests", NUMBER),
    "putOffPerConnection": Setting("pull.put_off_per_connection", NUMBER),
    "transferMsgByHeap": Setting("pull.transfer", BY_HEAP),
    "litePullMessageEnable": Setting("pull.lite_pull", BOOLEAN),
    "slaveReadEnable": Setting("pull.slave_read_enable", BOOLEAN),
    "rejectPullConsumerEnable": Setting("pull.reject_pull_consumer", BOOLEAN),
    "enablePropertyFilter": Setting("pull.enable_property_filter", BOOLEAN),
    "pullStepBytes": Setting("pull.step_bytes", NUMBER),
    # Progress.
    "flushConsumerOffsetInterval": Setting("progress.save_interval", MILLIS, START),
    "strictLastOffset": Setting("progress.strict_last", BOOLEAN),
    "zeroForEmptyQueue": Setting("progress.zero_for_empty", BOOLEAN),
    # Delays, transactions, replies.
    "flushDelayOffsetInterval": Setting("delays.save_interval", MILLIS, START),
    "timerMaxDelaySec": Setting("delays.timer_max_delay", SECONDS),
    "timerMaxPending": Setting("delays.timer_max_pending", NUMBER),
    "recallMessageEnable": Setting("delays.recall", BOOLEAN),
    "transactionCheckInterval": Setting("transactions.check_interval", MILLIS),
    "transactionTimeOut": Setting("transactions.timeout", MILLIS),
    "transactionCheckMax": Setting("transactions.check_max", NUMBER),
    "storeReplyMessageEnable": Setting("replies.store", BOOLEAN),
    # Registration.
    "registerNameServerPeriod": Setting("registration.interval", MILLIS, START),
    "registerBrokerTimeoutMills": Setting("registration.timeout", MILLIS),
    # The store.
    "mappedFileSizeCommitLog": Setting("store.file_size", NUMBER, STORE),
    "mappedFileSizeConsumeQueue": Setting("store.queue_file_entries", ENTRIES, STORE),
    "messageIndexEnable": Setting("store.index", BOOLEAN, STORE),
    "maxHashSlotNum": Setting("store.index_file.slots", NUMBER, STORE),
    "maxIndexNum": Setting("store.index_file.entries", NUMBER, STORE),
    "messageDelayLevel": Setting("store.delay_levels", LEVELS, STORE),
    "flushDiskType": Setting("store.flush.policy", FLUSH, STORE),
    "flushIntervalCommitLog": Setting("store.flush.interval", MILLIS, STORE),
    "flushCommitLogThoroughInterval": Setting("store.flush.thorough_interval", MILLIS, STORE),
    "maxTransferCountOnMessageInMemory": Setting("store.read.memory_count", NUMBER, STORE),
    "maxTransferBytesOnMessageInMemory": Setting("store.read.memory_bytes", NUMBER, STORE),
    "maxTransferCountOnMessageInDisk": Setting("store.read.disk_count", NUMBER, STORE),
    "maxTransferBytesOnMessageInDisk": Setting("store.read.disk_bytes", NUMBER, STORE),
    "maxFilterMessageSize": Setting("store.read.scan_bytes", NUMBER, STORE),
    "fileReservedTime": Setting("store.retention.keep", HOURS, STORE),
    "deleteWhen": Setting("store.retention.delete_hours", CLOCK_HOURS, STORE),
    "diskMaxUsedSpaceRatio": Setting("store.retention.expired_ratio", PERCENT, STORE),
    "diskSpaceCleanForciblyRatio": Setting("store.retention.forced_ratio", PERCENT, STORE),
    "diskSpaceWarningLevelRatio": Setting("store.retention.full_ratio", PERCENT, STORE),
    "deleteFileBatchMax": Setting("store.retention.files_per_run", NUMBER, STORE),
}


def shown(settings: BrokerSettings, address: Address) -> dict[str, str]:
    """All settings as text. `address` is where clients reach the broker."""
    table = {
        name: setting.kind.text(_at(settings, setting.path)) for name, setting in SETTINGS.items()
    }
    return table | _derived(settings, address)


def changed(
    settings: BrokerSettings, address: Address, wanted: Mapping[str, str]
) -> BrokerSettings:
    """The settings with what is wanted, all of it.

    A value that is in force already is taken for every setting. Raises `BlackListed` or
    `SettingError`, which names the setting and what is allowed.
    """
    if not BLACK_LIST.isdisjoint(wanted):
        raise BlackListed("Can not update config in black list.")
    current = shown(settings, address)
    for name, text in wanted.items():
        if name not in current:
            raise SettingError(f"this broker has no setting {name!r}")
        if text.strip() == current[name]:
            continue
        setting = SETTINGS.get(name)
        if setting is None or setting.fixed is not None:
            reason = IDENTITY if setting is None else setting.fixed
            raise SettingError(f"{name} cannot be changed while the broker runs: {reason}")
        settings = _with(settings, setting.path, _value(name, setting.kind, text))
    if settings.send.max_message_size > settings.store.max_record:
        raise SettingError(
            f"maxMessageSize must be at most {settings.store.max_record}, which is what the store "
            f"takes, got {settings.send.max_message_size}"
        )
    return settings


def _value(name: str, kind: Kind, text: str) -> Any:
    try:
        return kind.value(text.strip())
    except (ValueError, KeyError) as error:
        raise SettingError(f"{name} must be {kind.allowed}, got {text!r}") from error


def _derived(settings: BrokerSettings, address: Address) -> dict[str, str]:
    """What follows from other settings."""
    return {
        "brokerIP1": address.host,
        "listenPort": str(address.port),
        "bindAddress": settings.server.host,
        "storePathCommitLog": str(settings.root / "commitlog"),
        "brokerRole": _role(settings),
        "backwardRule": settings.progress.rule.backward.value,
        # There is no other way here; tools of ours and Apache's look whether there is this one.
        "useServerSideResetOffset": "true",
    }


def _role(settings: BrokerSettings) -> str:
    if settings.is_slave:
        return "SLAVE"
    return "SYNC_MASTER" if settings.replication.in_sync_replicas > 1 else "ASYNC_MASTER"


def _at(settings: object, path: str) -> Any:
    for step in path.split("."):
        settings = getattr(settings, step)
    return settings


def _with(settings: BrokerSettings, path: str, value: Any) -> BrokerSettings:
    """Settings that differ in one place."""
    role, _, name = path.rpartition(".")
    try:
        if role:
            role_settings: Any = getattr(settings, role)
            name, value = role, replace(role_settings, **{name: value})
        return replace(settings, **{name: value})
    except SettingError:
        raise
    except OrbitError as error:
        raise SettingError(str(error)) from error
