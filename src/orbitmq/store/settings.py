"""Every setting of the store with its default and its unit."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Final

from orbitmq.errors import OrbitError, SettingError

if TYPE_CHECKING:
    from pathlib import Path


# What the store refuses, by what its owner can do about it.


class StoreError(OrbitError):
    """Something in or about a store that its owner can act on."""


class StoreLocked(StoreError):
    """Another process has the folder open."""

    retriable: ClassVar[bool] = True

    def __init__(self, root: Path, pid: int | None) -> None:
        self.root = root
        self.pid = pid
        who = f"process {pid}" if pid is not None else "another process"
        super().__init__(
            f"the store in {root} is already open in {who}; stop that one or use another folder"
        )


class StoreDamaged(StoreError):
    """The files of a store contradict each other so that opening it could lose data."""


class ReadFailed(StoreError):
    """The operating system refused a read; what was to be read is still there."""

    retriable: ClassVar[bool] = True


class WriteRefused(StoreError):
    """Nothing of this turn was stored; reading goes on."""


class StoreClosed(WriteRefused):
    """The store was closed; open it again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        super().__init__(f"the store in {root} is closed; open it again")


class DiskFull(WriteRefused):
    """There is no room for what was to be written; accepted again when there is."""

    retriable: ClassVar[bool] = True


class WriteFailed(WriteRefused):
    """The operating system refused a write; the log is as it was before."""

    retriable: ClassVar[bool] = True


class StoreFailed(WriteRefused):
    """The disk no longer keeps what it was given: writes are refused until the store is reopened.

    After a failed fsync the kernel may have dropped the pages, so trying again would succeed
    without the data being there. Only reading the files at the next start shows what is there.
    """


class MessageTooLarge(WriteRefused):
    """A record, or a batch, does not fit."""

    def __init__(self, size: int, allowed: int, what: str = "a record") -> None:
        self.size = size
        self.allowed = allowed
        super().__init__(f"{what} of {size} bytes does not fit; {allowed} bytes are allowed")


class BatchRefused(WriteRefused):
    """Messages that cannot be stored as a batch."""


class TopicRefused(WriteRefused):
    """A topic or queue number that cannot have files."""

    def __init__(self, topic: str, queue_id: int | None = None) -> None:
        self.topic = topic
        if queue_id is not None:
            text = f"queue {queue_id} of topic {topic!r} is not within 0 and 2147483647"
        else:
            text = f"topic {topic[:64]!r} cannot name a folder: 1 to 255 bytes without / or NUL"
        super().__init__(text)


class DamagedRecord(StoreError):
    """The bytes of a message are not what was stored; every other message is still served."""

    def __init__(self, physical_offset: int, reason: str) -> None:
        self.physical_offset = physical_offset
        self.reason = reason
        super().__init__(f"the record at {physical_offset} of the commit log is damaged: {reason}")


class NoSuchRecord(StoreError):
    """No record begins at this offset of the commit log."""

    def __init__(self, physical_offset: int, lowest: int, end: int) -> None:
        self.physical_offset = physical_offset
        super().__init__(
            f"no record begins at {physical_offset}; the commit log holds {lowest} to {end}"
        )


HEADER_SIZE: Final = 40
SLOT_SIZE: Final = 4
ENTRY_SIZE: Final = 20
_MAX_INT: Final = 0x7FFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """The shape of every index file; all files of a folder have the same."""

    slots: int = 5_000_000  #: of the hash table in a file
    entries: int = 20_000_000  #: places; the first one is never used

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise SettingError(f"index.slots must be positive, got {self.slots}")
        if self.entries < 2:
            raise SettingError(f"index.entries must be 2 or more, got {self.entries}")
        if self.file_size > _MAX_INT:
            raise SettingError(
                f"index.slots and index.entries make a file of {self.file_size} bytes; "
                f"{_MAX_INT} are allowed"
            )

    @property
    def entries_at(self) -> int:
        return HEADER_SIZE + self.slots * SLOT_SIZE

    @property
    def file_size(self) -> int:
        return self.entries_at + self.entries * ENTRY_SIZE


KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

#: Delays of levels 1 to 18 in seconds.
DELAY_LEVELS = (
    *(1.0, 5.0, 10.0, 30.0),
    *(60.0 * minutes for minutes in range(1, 11)),
    *(1200.0, 1800.0, 3600.0, 7200.0),
)


class FlushPolicy(enum.Enum):
    """When a message counts as stored."""

    #: When the operating system has it: survives the death of the process, not of the machine.
    ASYNC = "async"
    #: When the disk has it. Nothing is visible to readers before.
    SYNC = "sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushSettings:
    """When what was written goes to the disk."""

    #: Whether a message counts as stored when the operating system has it, or the disk.
    policy: FlushPolicy = FlushPolicy.ASYNC
    interval: float = 0.5  #: how often an asynchronous store looks
    least_bytes: int = 16 * KIB  #: below this much it waits for `thorough_interval`
    thorough_interval: float = 10.0  #: everything is flushed at least this often
    checkpoint_interval: float = 1.0  #: how often the checkpoint is written when it changed
    #: How often the queues and the key index are flushed to advance recovery's start.
    durable_interval: float = 10.0
    #: The queues also after this much new log, the index after four times as much; after more where
    #: there are many queues to flush: twice as much with 512.
    durable_bytes: int = 64 * MIB
    queue_tail_bytes: int = 64 * KIB  #: unwritten entries a queue may hold in memory
    tail_memory: int = 64 * MIB  #: entries of all queues kept in memory for readers
    queues_per_step: int = 256  #: queue files written in one step of the owner, at most

    def __post_init__(self) -> None:
        _positive("flush", self, "interval", "thorough_interval", "checkpoint_interval")
        _positive("flush", self, "durable_interval", "durable_bytes", "queue_tail_bytes")
        _positive("flush", self, "queues_per_step")
        _at_least_zero("flush", self, "least_bytes", "tail_memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """How much one read may look at and return."""

    scan_bytes: int = 16_000  #: queue entries looked at per read, in bytes (800 entries)
    max_bytes: int = 128 * MIB  #: ceiling of one answer, whatever is asked
    memory_count: int = 32  #: messages per answer while they are in the page cache
    memory_bytes: int = 256 * KIB  #: of one answer then; the first message always passes
    disk_count: int = 8  #: messages per answer when they come from the disk
    disk_bytes: int = 64 * KIB  #: of one answer then; the first message always passes
    bulk_count: int = 2048  #: messages per answer to requests for over 256 KiB, as Spark sends
    bulk_bytes: int = 1 * MIB  #: of one answer then; from the disk a quarter of both
    #: What lies this close to the end of the log counts as "in memory": 40 % of the machine's.
    memory_distance: int = field(default_factory=lambda: _physical_memory() * 40 // 100)
    check_crc: bool = True  #: check what comes from the disk before it is served

    def __post_init__(self) -> None:
        _positive("read", self, "scan_bytes", "max_bytes", "memory_count", "memory_bytes")
        _positive("read", self, "disk_count", "disk_bytes", "bulk_count", "bulk_bytes")
        _at_least_zero("read", self, "memory_distance")

    def in_bulk(self) -> ReadSettings:
        """The limits of answers to readers of long stretches.

        From the disk they get a quarter, because a broker does nothing else while it waits for it.
        """
        return replace(
            self,
            memory_count=max(self.memory_count, self.bulk_count),
            memory_bytes=max(self.memory_bytes, self.bulk_bytes),
            disk_count=max(self.disk_count, self.bulk_count // 4),
            disk_bytes=max(self.disk_bytes, self.bulk_bytes // 4),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """What is deleted and when. Ratios are of the disk's space in use."""

    keep: float = 72 * 3600.0  #: seconds since a log file was last written
    delete_hours: tuple[int, ...] = (4,)  #: local hours in which expired files are deleted
    max_bytes: int | None = None  #: size of the log; the oldest files go when it is above
    expired_ratio: float = 0.75  #: above: expired files go at any hour
    forced_ratio: float = 0.85  #: above: the oldest files go though not expired
    full_ratio: float = 0.90  #: above: writes are refused as well
    files_per_run: int = 10  #: log files deleted in one run
    manual_runs: int = 20  #: runs that delete at any hour after being asked to

    def __post_init__(self) -> None:
        _positive("retention", self, "files_per_run", "manual_runs")
        _at_least_zero("retention", self, "keep")
        if not 0 < self.expired_ratio <= self.forced_ratio <= self.full_ratio <= 1:
            raise SettingError(
                "retention ratios must rise from expired_ratio over forced_ratio to full_ratio "
                f"within 0 and 1, got {self.expired_ratio}, {self.forced_ratio}, {self.full_ratio}"
            )
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise SettingError(f"retention.max_bytes must be positive, got {self.max_bytes}")
        for hour in self.delete_hours:
            if not 0 <= hour <= 23:
                raise SettingError(f"retention.delete_hours must be within 0 and 23, got {hour}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How a store keeps its messages."""

    file_size: int = GIB  #: bytes of a commit-log file; cannot change in a store's life
    queue_file_entries: int = 300_000  #: entries of a consume-queue file; likewise
    max_record: int = 4 * MIB + 64 * KIB  #: a message as stored
    preallocate_step: int = 16 * MIB  #: disk space taken ahead of the log; 0 takes none
    #: Descriptors kept for reading queue files. By default a quarter of what the process may have
    #: open, but 256 at least and 4,096 at most; the rest is for connections, log and index.
    open_queue_files: int | None = None
    recovery_chunk: int = 32 * MIB  #: bytes of the log checked at once
    index: bool = True  #: whether messages can be found by key
    index_file: IndexSettings = field(default_factory=IndexSettings)
    index_step: int = 2 * MIB  #: bytes of the log indexed in a tick; four times that if far behind
    index_catch_up: int = 16 * MIB  #: bytes of the log that a look-up indexes first, at most
    delay_levels: tuple[float, ...] = DELAY_LEVELS  #: delay of each level, from the first on
    flush: FlushSettings = field(default_factory=FlushSettings)
    read: ReadSettings = field(default_factory=ReadSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)

    def __post_init__(self) -> None:
        _positive("store", self, "queue_file_entries", "max_record")
        if self.open_queue_files is not None:
            _positive("store", self, "open_queue_files")
        _positive("store", self, "recovery_chunk", "index_step", "index_catch_up")
        _at_least_zero("store", self, "preallocate_step")
        if not 4 * KIB <= self.file_size <= 0x7FFFFFFF:
            raise SettingError(
                f"store.file_size must be within 4096 and 2147483647, got {self.file_size}"
            )


def _positive(role: str, settings: object, *names: str) -> None:
    for name in names:
        if (value := getattr(settings, name)) <= 0:
            raise SettingError(f"{role}.{name} must be positive, got {value}")


def _at_least_zero(role: str, settings: object, *names: str) -> None:
    for name in names:
        if (value := getattr(settings, name)) < 0:
            raise SettingError(f"{role}.{name} must not be negative, got {value}")


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 * GIB
