"""Commit log, consume queues, key index: messages in files, in Apache RocketMQ's formats."""

from orbitmq.store.damage import Damage
from orbitmq.store.errors import (
    DamagedRecord,
    DiskFull,
    MessageTooLarge,
    NoSuchRecord,
    ReadFailed,
    SettingError,
    StoreClosed,
    StoreDamaged,
    StoreError,
    StoreFailed,
    StoreLocked,
    TopicRefused,
    WriteFailed,
    WriteRefused,
)
from orbitmq.store.indexfile import IndexSettings
from orbitmq.store.reading import ReadResult, ReadStatus
from orbitmq.store.recovery import RecoveryReport
from orbitmq.store.searching import Boundary
from orbitmq.store.settings import (
    FlushPolicy,
    FlushSettings,
    ReadSettings,
    RetentionSettings,
    StoreSettings,
)
from orbitmq.store.store import Store

__all__ = [  # noqa: RUF022  grouped by subject
    # The store and what it gives back
    "Store",
    "ReadResult",
    "ReadStatus",
    "Boundary",
    "RecoveryReport",
    "Damage",
    # Settings
    "StoreSettings",
    "FlushSettings",
    "FlushPolicy",
    "ReadSettings",
    "RetentionSettings",
    "IndexSettings",
    # Errors
    "StoreError",
    "SettingError",
    "StoreLocked",
    "StoreDamaged",
    "ReadFailed",
    "NoSuchRecord",
    "DamagedRecord",
    "WriteRefused",
    "WriteFailed",
    "DiskFull",
    "StoreClosed",
    "StoreFailed",
    "MessageTooLarge",
    "TopicRefused",
]
