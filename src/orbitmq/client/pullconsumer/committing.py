"""What counts as done: in a commit, and at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from orbitmq.client.errors import SettingError
from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage

#: What may be committed: positions, or the last message that is done.
Commits: TypeAlias = Mapping[Queue, int] | ReceivedMessage | Iterable[ReceivedMessage]


def positions_of(done: Commits) -> Mapping[Queue, int]:
    """The offset of the next message to consume, of each queue. Raises `SettingError`."""
    if isinstance(done, Mapping):
        return done
    messages = [done] if isinstance(done, ReceivedMessage) else list(done)
    positions: dict[Queue, int] = {}
    for message in messages:
        if not isinstance(message, ReceivedMessage):
            raise SettingError(f"commit takes offsets by queue, or messages, got {message!r}")
        queue = message.queue
        positions[queue] = max(positions.get(queue, 0), message.queue_offset + 1)
    return positions


def is_untroubled() -> bool:
    """Whether the caller handles no error, as it does in `except` and, on its way, in `finally`."""
    return sys.exc_info()[1] is None
