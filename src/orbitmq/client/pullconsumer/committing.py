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


class Trouble:
    """Whether an error came between taking messages and the end, by what the caller handles.

    A caller handles an error in `except`, and while it is on its way, in `finally`. One that it
    handled already when it took the messages, or that somebody does who called it, says nothing
    about them.
    """

    __slots__ = ("_earlier",)

    def __init__(self) -> None:
        self._earlier: BaseException | None = None

    def note(self) -> None:
        """Messages are about to be taken: what is handled now is not their fault."""
        self._earlier = sys.exc_info()[1]

    @property
    def is_there(self) -> bool:
        """Whether an error is handled now that was not then."""
        error = sys.exc_info()[1]
        return error is not None and error is not self._earlier
