"""The version of a table: what name servers, slaves and tools compare to see whether it changed."""

from __future__ import annotations

import msgspec

from orbitmq.clock import milliseconds
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.topics import DataVersion
from orbitmq.wire.errors import BodyError


def first_version(now: float) -> DataVersion:
    """The version of a table that has never changed."""
    return DataVersion(timestamp=milliseconds(now))


def next_version(version: DataVersion, now: float, state_version: int = 0) -> DataVersion:
    """The version after one change."""
    return DataVersion(
        counter=version.counter + 1, state_version=state_version, timestamp=milliseconds(now)
    )


def is_version_text(text: str | None, version: DataVersion) -> bool:
    """Whether a version that a tool quotes as JSON text is this one."""
    if not text or text.isspace():
        return False
    try:
        return decode_body(DataVersion, text.encode()) == version
    except (BodyError, UnicodeEncodeError):
        return False


def version_text(version: DataVersion) -> str:
    """A version as tools quote it."""
    return msgspec.json.encode(version).decode()
