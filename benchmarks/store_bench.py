"""The store: appending, flushing, reading, recovering; against the bare file system and memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

from benchmarks.runner import Bench, Clock, Prepare, Scale, Work
from benchmarks.workload import BORN_HOST, START_MS, TAGS, Message, messages, records
from orbitmq.filter.tags import parse_tags
from orbitmq.message.record import crc32
from orbitmq.store.settings import FlushPolicy, FlushSettings, ReadSettings, StoreSettings
from orbitmq.store.store import Store

_MANY = 1 << 20
_PLAIN_FILE = 128 << 20
#: Answers as large as a reader asks for; otherwise 32 messages are the most.
_GENEROUS = ReadSettings(memory_count=_MANY, memory_bytes=1 << 30)


@contextmanager
def _store(*, policy: FlushPolicy = FlushPolicy.ASYNC, background: bool = False) -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder:
        settings = StoreSettings(flush=FlushSettings(policy=policy), read=_GENEROUS)
        store = Store(folder, settings, background=background)
        try:
            yield store
        finally:
            store.abandon()


@contextmanager
def _plain_file() -> Iterator[int]:
    """A file that has its disk space already, as the store's log has: that makes a flush cheap."""
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, _PLAIN_FILE)
        yield file.fileno()


def _put(store: Store, message: Message) -> None:
    store.append(
        message.topic, message.queue_id, message.body, message.properties, START_MS, BORN_HOST
    )


def _turns(count: int, body_size: int) -> list[list[Message]]:
    """Messages as they come in one turn of the owner, enough of them to differ."""
    made = messages(512, body_size)
    return [made[first : first + count] for first in range(0, len(made), count)]


def _plain_writer(fd: int, count: int, body_size: int) -> Work:
    """Writes the bytes of as many records to a file, with one call for each turn."""
    rows = records(512, body_size)
    turns = cycle([b"".join(rows[first : first + count]) for first in range(0, 512, count)])
    at = 0

    def write() -> int:
        nonlocal at
        if at > _PLAIN_FILE:
            # Gigabytes that wait for the disk would make the kernel slow the writer down. The
            # pages are given back, so that each write needs new ones, as a write to a log does.
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, _PLAIN_FILE)
            at = 0
        at += os.pwrite(fd, next(turns), at)
        return count

    return write


# ---- appending


def _append(count: int, body_size: int) -> Prepare:
    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        turns = cycle(_turns(count, body_size))
        with _store() as store, _plain_file() as fd:

            def candidate() -> int:
                for message in next(turns):
                    _put(store, message)
                store.write()
                return count

            yield candidate, _plain_writer(fd, count, body_size)

    return prepare


def _append_batch(body_size: int) -> Prepare:
    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        batches = cycle(
            [
                [(message.body, 0, message.properties) for message in turn]
                for turn in _turns(32, body_size)
            ]
        )
        with _store() as store, _plain_file() as fd:

            def candidate() -> int:
                store.append_batch("orders", 0, next(batches), START_MS, BORN_HOST)
                store.write()
                return 32

            yield candidate, _plain_writer(fd, 32, body_size)

    return prepare


@contextmanager
def _append_with_everything(_: Scale) -> Iterator[tuple[Work, Work]]:
    turns = cycle(_turns(32, 1024))
    with _store(background=True) as store, _plain_file() as fd:

        def candidate() -> int:
            for _ in range(100):
                for message in next(turns):
                    _put(store, message)
                store.write()
            store.tick()
            return 3200

        yield candidate, _plain_writer(fd, 32, 1024)


# ---- flushing


def _group_commit(*, against_async: bool) -> Prepare:
    in_flight = 128

    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        turns = cycle(_turns(in_flight, 1024))
        with (
            _store(policy=FlushPolicy.SYNC, background=True) as sync_store,
            _store(background=True) as async_store,
            _plain_file() as fd,
        ):
            write = _plain_writer(fd, in_flight, 1024)

            def synchronous() -> int:
                for message in next(turns):
                    _put(sync_store, message)
                sync_store.wait_flushed(sync_store.write())
                return in_flight

            def asynchronous() -> int:
                for message in next(turns):
                    _put(async_store, message)
                async_store.write()
                return in_flight

            def plain() -> int:
                write()
                os.fdatasync(fd)
                return in_flight

            yield synchronous, asynchronous if against_async else plain

    return prepare


# ---- reading


def _read(
    per_read: int, body_size: int, *, topics: int = 1, queues: int = 1, tag: str | None = None
) -> Prepare:
    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        wanted = parse_tags(tag)
        with _store() as store:
            for number, message in enumerate(messages(16_384, body_size, topics=topics)):
                store.append(
                    message.topic,
                    number // topics % queues,
                    message.body,
                    message.properties,
                    START_MS,
                    BORN_HOST,
                )
                if number % 64 == 63:
                    store.write()
            offsets: list[int] = []
            pieces: list[list[memoryview]] = []
            offset, end = 0, store.max_offset("orders", 0)
            while offset < end:
                found = store.read("orders", 0, offset, per_read, wanted)
                offsets.append(offset)
                pieces.append(list(found.pieces))
                offset = found.next_offset
            next_offset, next_pieces = cycle(offsets), cycle(pieces)
            total = sum(len(piece) for answer in pieces for piece in answer)
            per_answer = max(1, end // len(offsets)) if tag is None else per_read

            def candidate() -> int:
                return store.read("orders", 0, next(next_offset), per_read, wanted).count

            def floor() -> int:
                b"".join(next(next_pieces))
                return per_answer

            assert total
            yield candidate, floor
            for answer in pieces:
                for piece in answer:
                    piece.release()

    return prepare


# ---- recovering


@contextmanager
def _recovery(scale: Scale) -> Iterator[tuple[Work, Work]]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        settings = StoreSettings(file_size=1 << 28)
        store = Store(root, settings, background=False)
        made = cycle(_turns(64, 1024))
        end = 0
        while end < scale.megabytes << 20:
            for message in next(made):
                _put(store, message)
            end = store.write()
        store.abandon()
        logs = sorted((root / "commitlog").iterdir())

        def candidate() -> int:
            shutil.rmtree(root / "consumequeue", ignore_errors=True)
            (root / "checkpoint").unlink(missing_ok=True)
            opened = Store(root, settings, background=False)
            assert opened.recovery.end == end
            opened.abandon()
            return end

        def floor() -> int:
            left = end
            for path in logs:
                with path.open("rb", buffering=0) as file:
                    while left and (block := file.read(min(left, 1 << 20))):
                        crc32(block)
                        left -= len(block)
            return end

        yield candidate, floor


_SAME_WRITE = "a plain write of the same bytes"
_SAME_COPY = "copying the same bytes"

BENCHES = (
    Bench(
        name="append one message of 100 B",
        room="store",
        unit="messages/s",
        compared_with=_SAME_WRITE,
        prepare=_append(1, 100),
    ),
    Bench(
        name="append one message of 1 KiB",
        room="store",
        unit="messages/s",
        compared_with=_SAME_WRITE,
        prepare=_append(1, 1024),
    ),
    Bench(
        name="append 32 messages of 100 B in one turn",
        room="store",
        unit="messages/s",
        compared_with=_SAME_WRITE,
        prepare=_append(32, 100),
    ),
    Bench(
        name="append 32 messages of 1 KiB in one turn",
        room="store",
        unit="messages/s",
        compared_with=_SAME_WRITE,
        prepare=_append(32, 1024),
    ),
    Bench(
        name="append a batch of 32 messages of 1 KiB",
        room="store",
        unit="messages/s",
        compared_with=_SAME_WRITE,
        prepare=_append_batch(1024),
    ),
    Bench(
        name="the same turns with flushing, queues and index",
        room="store",
        unit="messages/s",
        compared_with=_SAME_WRITE,
        prepare=_append_with_everything,
    ),
    Bench(
        name="group commit, 128 messages of 1 KiB in flight",
        room="store",
        unit="messages/s",
        compared_with="the same without waiting for the disk",
        prepare=_group_commit(against_async=True),
        clock=Clock.WALL,
        # Otherwise a flush waits for what the asynchronous side wrote before.
        between=os.sync,
        target=0.3,
        note="the target is set for sends through a broker, which cost more than a bare append; "
        "depends on the disk",
    ),
    Bench(
        name="group commit, the same",
        room="store",
        unit="messages/s",
        compared_with="a plain write of the same bytes and fdatasync",
        prepare=_group_commit(against_async=False),
        clock=Clock.WALL,
        between=os.sync,
    ),
    Bench(
        name="read 32 side by side, 1 KiB",
        room="store",
        unit="messages/s",
        compared_with=_SAME_COPY,
        prepare=_read(32, 1024),
    ),
    Bench(
        name="read 256 side by side, 1 KiB",
        room="store",
        unit="messages/s",
        compared_with=_SAME_COPY,
        prepare=_read(256, 1024),
    ),
    Bench(
        name="read 32 from one of 16 interleaved queues, 1 KiB",
        room="store",
        unit="messages/s",
        compared_with=_SAME_COPY,
        prepare=_read(32, 1024, topics=4, queues=4),
    ),
    Bench(
        name="read 32 by tag, one in four matches, 1 KiB",
        room="store",
        unit="messages/s",
        compared_with=_SAME_COPY,
        prepare=_read(32, 1024, tag=TAGS[0]),
    ),
    Bench(
        name="read 32 by tag, interleaved queues, 1 KiB",
        room="store",
        unit="messages/s",
        compared_with=_SAME_COPY,
        prepare=_read(32, 1024, topics=4, queues=4, tag=TAGS[0]),
    ),
    Bench(
        name="recovery of a log whose queues are lost",
        room="store",
        unit="s for 1 GiB",
        compared_with="reading the log and its checksum",
        prepare=_recovery,
        time_for=float(1 << 30),
        rounds=5,
        once_per_round=True,
    ),
)
