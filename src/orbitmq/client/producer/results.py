"""What became of a message that was sent."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from orbitmq.client.queue import Queue
from orbitmq.wire.codes import ResponseCode


class SendStatus(enum.Enum):
    """How safe a stored message is. All of these are stored at the broker that took it.

    Whatever is not `OK` can be lost if that broker's machine fails now, before it has caught up;
    the broker promised more than it could keep in time. The application decides whether to send
    again (and then maybe has the message twice), or `SendSettings.retry_not_stored_ok` does.
    """

    OK = "ok"
    #: The broker flushes before it answers, and the disk did not follow in time.
    FLUSH_DISK_TIMEOUT = "flush-disk-timeout"
    #: The broker waits for its slaves, and none of them confirmed in time.
    FLUSH_SLAVE_TIMEOUT = "flush-slave-timeout"
    #: The broker waits for its slaves, and none was there.
    SLAVE_NOT_AVAILABLE = "slave-not-available"


#: The answers that say where a message was stored.
STORED: Final = {
    int(ResponseCode.SUCCESS): SendStatus.OK,
    int(ResponseCode.FLUSH_DISK_TIMEOUT): SendStatus.FLUSH_DISK_TIMEOUT,
    int(ResponseCode.FLUSH_SLAVE_TIMEOUT): SendStatus.FLUSH_SLAVE_TIMEOUT,
    int(ResponseCode.SLAVE_NOT_AVAILABLE): SendStatus.SLAVE_NOT_AVAILABLE,
}


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """Where a message was stored, and how safely."""

    status: SendStatus
    #: The unique id that the producer gave it; consumers see the same.
    msg_id: str
    #: The id that the broker gave it: its place.
    offset_id: str
    queue: Queue
    queue_offset: int
    #: Of a half message: the id under which its transaction is known.
    transaction_id: str | None = None
    #: Takes a message back that is delivered later: see `recall`.
    recall_handle: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether it is as safe as the broker promises."""
        return self.status is SendStatus.OK
