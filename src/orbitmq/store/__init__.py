"""Commit log, consume queues, key index: messages in files, in Apache RocketMQ's formats."""

from orbitmq.errors import SettingError
from orbitmq.store.read import Boundary, ReadResult, ReadStatus
from orbitmq.store.recovery import Damage, RecoveryReport
from orbitmq.store.settings import (
    DamagedRecord,
    DiskFull,
    FlushPolicy,
    FlushSettings,
    IndexSettings,
    MessageTooLarge,
    NoSuchRecord,
    ReadFailed,
    ReadSettings,
    RetentionSettings,
    StoreClosed,
    StoreDamaged,
    StoreError,
    StoreFailed,
    StoreLocked,
    StoreSettings,
    TopicRefused,
    WriteFailed,
    WriteRefused,
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
