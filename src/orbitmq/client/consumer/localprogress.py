"""Progress in a file: of a broadcasting consumer, which shares it with nobody.

The file is the one that Apache's Java client keeps, in the same place, and either reads what the
other wrote. It is replaced as a whole, by a rename after its bytes are on the disk, and the one
before stays beside it as ``.bak``: whenever the process or the machine ends, a whole file is there.

Two consumers must not have one file: each would take the progress of the other for its own, and
skip after a restart what it has never seen. Whoever comes second is refused (Apache's client lets
both write). An application that wants several on one machine gives each an instance of its own.

A file that is there and cannot be read, with no readable backup, is an error. Taking it for "no
progress yet" would skip or repeat everything (Apache's client does that when there is no backup).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Hashable, Mapping
from pathlib import Path

from msgspec import field

from orbitmq.client.consumer.folderlock import FolderLock
from orbitmq.client.consumer.progress import TrackedProgress
from orbitmq.client.errors import ClientError, SettingError
from orbitmq.client.queue import Queue
from orbitmq.wire.bodies.base import Body, Int64, decode_body
from orbitmq.wire.bodies.route import MessageQueue
from orbitmq.wire.errors import BodyError
from orbitmq.wire.jsontext import quoted

log = logging.getLogger(__name__)

#: Below the home directory, as Apache's.
FOLDER = ".rocketmq_offsets"
FILE = "offsets.json"


class ProgressFileError(ClientError):
    """A file of progress that cannot be read or written."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(
            f"progress file {path}: {problem}; mend it, or delete it and its .bak to begin where "
            "consume_from says"
        )


def progress_path(group: str, client_id: str, folder: Path | str | None = None) -> Path:
    """Where a group's file is; `folder` is for the files of all groups."""
    root = Path.home() / FOLDER if folder is None else Path(folder)
    return root / client_id / group / FILE


class LocalFileProgress(TrackedProgress):
    """Positions in one file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._lock = FolderLock(path.parent)

    @property
    def path(self) -> Path:
        return self._path

    async def load(self) -> None:
        """Take the file for this consumer, and read it. Raises `SettingError` if it is taken."""
        await asyncio.to_thread(self._take)
        for queue, offset in (await asyncio.to_thread(read_positions, self._path)).items():
            self.update(queue, offset, increase_only=False)
            self._stored[queue] = offset

    def close(self) -> None:
        """Let another consumer have the file. May be repeated."""
        self._lock.release()

    def _take(self) -> None:
        try:
            is_taken = self._lock.take()
        except OSError as error:
            problem = f"its folder cannot be used: {error.strerror or error}"
            raise ProgressFileError(self._path, problem) from error
        if not is_taken:
            raise SettingError(
                f"another consumer on this machine has its progress in {self._path}; to have "
                "several, give each an instance of its own, the same at every start: "
                "client=ClientSettings(instance='cache-1', ...)"
            )

    async def stored(self, queue: Queue) -> int | None:
        return (await asyncio.to_thread(read_positions, self._path)).get(queue)

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        await asyncio.to_thread(merge_positions, self._path, dict(changed))
        return {}

    def turn_of(self, queue: Queue) -> Hashable:
        """One file, one writer at a time."""
        return self._path


class _Offsets(Body, frozen=True, kw_only=True):
    offset_table: dict[MessageQueue, Int64] = field(default_factory=dict)


def read_positions(path: Path) -> dict[Queue, int]:
    """What a file, or else its backup, says; nothing if neither is there."""
    damage: ProgressFileError | None = None
    for each in (path, _backup(path)):
        try:
            found = _read(each)
        except ProgressFileError as error:
            damage = damage or error
            continue
        if found is not None:
            if damage is not None:
                log.warning("a backup of progress is used: %s", damage)
            return found
    if damage is not None:
        raise damage
    return {}


def merge_positions(path: Path, changed: Mapping[Queue, int]) -> None:
    """Put positions into a file, beside those that it has of other queues."""
    known = read_positions(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if known:
            _replace(_backup(path), _text(known))
        _replace(path, _text({**known, **changed}))
    except OSError as error:
        raise ProgressFileError(path, f"cannot be written: {error.strerror or error}") from error


def _backup(path: Path) -> Path:
    return path.with_name(path.name + ".bak")


def _read(path: Path) -> dict[Queue, int] | None:
    """The positions in one file; None when there is no such file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProgressFileError(path, f"cannot be read: {error.strerror or error}") from error
    try:
        table = decode_body(_Offsets, data).offset_table
    except BodyError as error:
        raise ProgressFileError(path, f"is damaged: {error}") from error
    return {
        Queue(queue.topic, queue.broker_name, queue.queue_id): offset
        for queue, offset in table.items()
    }


def _text(positions: Mapping[Queue, int]) -> bytes:
    """In the layout of Java's: maps keyed by objects are not JSON, and its readers expect them."""
    entries = b",\n".join(
        b'\t\t{\n\t\t\t"brokerName":%b,\n\t\t\t"queueId":%d,\n\t\t\t"topic":%b\n\t\t}:%d'
        % (quoted(queue.broker), queue.id, quoted(queue.topic), offset)
        for queue, offset in sorted(positions.items())
    )
    return b'{\n\t"offsetTable":{\n%b\n\t}\n}' % entries


def _replace(path: Path, data: bytes) -> None:
    """Put `data` in the place of a file, whole or not at all."""
    # One name for all attempts: what a killed process leaves behind is overwritten, not collected.
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
