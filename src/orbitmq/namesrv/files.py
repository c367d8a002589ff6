"""Small files that are there either as they were or as they should be, never in between."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from orbitmq.namesrv.errors import FileUnusable


def read_file(path: Path) -> bytes | None:
    """What the file holds; None when there is none. Raises `FileUnusable`."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileUnusable(path, f"cannot be read: {error.strerror}") from error


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` in the place of the file, and have the disk confirm. Raises `FileUnusable`."""
    beside = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise FileUnusable(path, f"cannot be written: {error.strerror}") from error


def _sync_folder(folder: Path) -> None:
    """A rename survives a power failure once its folder is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
