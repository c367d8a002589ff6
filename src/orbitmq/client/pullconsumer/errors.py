"""What can go wrong with a consumer that is polled."""

from __future__ import annotations

from orbitmq.client.errors import ClientError
from orbitmq.client.queue import Queue


class QueueNotAssigned(ClientError):
    """A queue that is not, or no longer, this consumer's."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        super().__init__(
            f"{queue} is not assigned to this consumer; another member may have it by now: "
            "see assignment()"
        )


class OffsetOutOfRange(ClientError):
    """A position that a queue does not have."""

    def __init__(self, queue: Queue, offset: int, first: int, end: int) -> None:
        self.queue = queue
        self.offset = offset
        self.first = first
        self.end = end
        super().__init__(f"{queue} has the offsets {first} to {end}, got {offset}")


class ArrowMissing(ClientError):
    """Record batches need libraries that are not installed."""

    def __init__(self) -> None:
        super().__init__("poll_arrow needs pyarrow and numpy: pip install 'orbitmq[arrow]'")
