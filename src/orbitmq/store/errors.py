"""What the store refuses, by what its owner can do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from orbitmq.errors import OrbitError
from orbitmq.errors import SettingError as SettingError  # noqa: PLC0414  # has its name here, too

if TYPE_CHECKING:
    from pathlib import Path


class StoreError(OrbitError):
    """Something in or about a store that its owner can act on."""


class StoreLocked(StoreError):
    """Somebody else has the folder open."""

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
    without the data being there. Only reading the files anew, at the next start, tells what is.
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
