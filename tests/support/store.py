"""What tests of the store share: small settings, a clock by hand, a disk that fails on order."""

from __future__ import annotations

import errno
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from orbitmq.message.properties import encode_properties
from orbitmq.message.record import pack_host
from orbitmq.message.stored import StoredMessage, decode_messages
from orbitmq.store.files import DiskFiles
from orbitmq.store.settings import (
    FlushPolicy,
    FlushSettings,
    IndexSettings,
    ReadSettings,
    RetentionSettings,
    StoreSettings,
)
from orbitmq.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orbitmq.store.read import ReadResult

BORN_HOST = pack_host("10.0.0.7", 50123)
NOW = 1_700_000_000.0

SMALL = StoreSettings(
    file_size=8192,
    queue_file_entries=32,
    preallocate_step=2048,
    index_file=IndexSettings(slots=64, entries=512),
    read=ReadSettings(memory_distance=1 << 30),
    flush=FlushSettings(queue_tail_bytes=200),
)


class HandClock:
    """A clock that moves when it is told to."""

    def __init__(self, now: float = NOW) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


class QuickFiles(DiskFiles):
    """A disk that does not wait: for tests that are not about losing power."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class FailingFiles(DiskFiles):
    """A disk whose calls can be made to fail or to stop half-way."""

    def __init__(self) -> None:
        #: Called before a write or a flush, with the name of the call and the size.
        self.before: Callable[[str, int], int | None] = lambda call, size: None
        self.ratio: float | None = None

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        allowed = self.before("pwrite", len(data))
        if allowed is not None:
            return super().pwrite(fd, memoryview(data)[:allowed], at) if allowed else 0
        return super().pwrite(fd, data, at)

    def sync(self, fd: int) -> None:
        self.before("sync", 0)
        super().sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        self.before("truncate", size)
        super().truncate(fd, size)

    def allocate(self, fd: int, at: int, size: int) -> None:
        self.before("allocate", size)
        super().allocate(fd, at, size)

    def used_ratio(self, folder: Path) -> float:
        return super().used_ratio(folder) if self.ratio is None else self.ratio

    def fail(self, call: str, code: int = errno.EIO) -> None:
        """Let every call of this name fail from now on."""

        def refuse(name: str, size: int) -> int | None:
            if name == call:
                raise OSError(code, f"injected into {call}")
            return None

        self.before = refuse

    def heal(self) -> None:
        self.before = lambda call, size: None


def with_policy(settings: StoreSettings, policy: FlushPolicy) -> StoreSettings:
    return replace(settings, flush=replace(settings.flush, policy=policy))


def with_retention(settings: StoreSettings, retention: RetentionSettings) -> StoreSettings:
    return replace(settings, retention=retention)


def put(
    store: Store,
    topic: str,
    queue_id: int,
    body: bytes,
    properties: dict[str, str | None] | None = None,
    sys_flag: int = 0,
) -> tuple[int, int]:
    """Append a message without writing it."""
    raw = encode_properties(properties or {})
    return store.append(topic, queue_id, body, raw, 1_699_999_999_000, BORN_HOST, sys_flag)


def write_log(root: Path, messages: int = 200) -> None:
    """A store of small files, as a broker leaves it."""
    with Store(root, SMALL, background=False) as store:
        for number in range(messages):
            put(store, "orders", number % 2, b"%d" % number + bytes(100), {"KEYS": f"k{number}"})
        store.write()


def lookup(
    store: Store, topic: str, key: str, most: int = 64, begin_ms: int = 0, end_ms: int = 1 << 62
) -> list[memoryview]:
    """The newest messages with a key, all rounds at once."""
    rounds = store.looking_up(topic, key, begin_ms, end_ms)
    return list(islice((record for record in rounds if record is not None), most))


def messages_of(result: ReadResult) -> list[StoredMessage]:
    """What a read returned, as objects."""
    return decode_messages(b"".join(result.pieces))


def bodies(store: Store, topic: str, queue_id: int, first: int | None = None) -> list[bytes]:
    """All messages of a queue, read as a consumer would."""
    offset = store.min_offset(topic, queue_id) if first is None else first
    found: list[bytes] = []
    while offset < store.max_offset(topic, queue_id):
        result = store.read(topic, queue_id, offset)
        found += [message.body for message in messages_of(result)]
        assert result.next_offset > offset
        offset = result.next_offset
    return found
