"""What counts as done: in a commit, and at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from orbitmq.client.checks import whole
from orbitmq.client.consumer.starting import end_offset, first_offset
from orbitmq.client.errors import SettingError
from orbitmq.client.pullconsumer.errors import OffsetOutOfRange
from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage

if TYPE_CHECKING:
    from orbitmq.client.pullconsumer.core import PullCore

#: What may be committed: positions, or the last message that is done.
Commits: TypeAlias = Mapping[Queue, int] | ReceivedMessage | Iterable[ReceivedMessage]


def positions_of(done: Commits) -> Mapping[Queue, int]:
    """The offset of the next message to consume, of each queue. Raises `SettingError`."""
    if isinstance(done, Mapping):
        return done
    if not isinstance(done, ReceivedMessage | Iterable):
        raise SettingError(f"commit takes offsets by queue, or messages, got {done!r}")
    messages = [done] if isinstance(done, ReceivedMessage) else list(done)
    positions: dict[Queue, int] = {}
    for message in messages:
        if not isinstance(message, ReceivedMessage):
            raise SettingError(f"commit takes offsets by queue, or messages, got {message!r}")
        queue = message.queue
        positions[queue] = max(positions.get(queue, 0), message.queue_offset + 1)
    return positions


async def check_positions(core: PullCore, positions: Mapping[Queue, int]) -> None:
    """Refuse what is no position, or beyond the end: whatever comes up to it would be lost.

    Brokers are asked only for what the pulls do not know to be there.
    """
    unknown: dict[Queue, int] = {}
    for queue, offset in positions.items():
        whole(offset, "an offset to commit", least=0)
        owned = core.assigned(queue)
        if offset > max(core.cache.of(owned).returned, owned.max_offset or 0):
            unknown[queue] = offset
    for queue, offset in unknown.items():
        end = await end_offset(core.engine, queue)
        if offset > end:
            raise OffsetOutOfRange(queue, offset, await first_offset(core.engine, queue), end)


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
