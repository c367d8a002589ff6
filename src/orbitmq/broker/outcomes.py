"""What became of a message that was put into the store, and the code that says so."""

from __future__ import annotations

import enum
from typing import NamedTuple

from orbitmq.broker.errors import Refused
from orbitmq.errors import OrbitError
from orbitmq.message.errors import MessageError
from orbitmq.store.errors import MessageTooLarge, StoreError, TopicRefused
from orbitmq.wire.codes import ResponseCode


class PutStatus(enum.Enum):
    """What became of a message that was put; the names are Apache's."""

    PUT_OK = ResponseCode.SUCCESS
    FLUSH_DISK_TIMEOUT = ResponseCode.FLUSH_DISK_TIMEOUT
    FLUSH_SLAVE_TIMEOUT = ResponseCode.FLUSH_SLAVE_TIMEOUT
    SLAVE_NOT_AVAILABLE = ResponseCode.SLAVE_NOT_AVAILABLE
    MESSAGE_ILLEGAL = ResponseCode.MESSAGE_ILLEGAL
    SERVICE_NOT_AVAILABLE = ResponseCode.SERVICE_NOT_AVAILABLE
    REFUSED = ResponseCode.SYSTEM_ERROR

    @property
    def is_stored(self) -> bool:
        """Whether the message is in the log, whatever else went wrong."""
        return self in _STORED


_STORED = frozenset(
    {
        PutStatus.PUT_OK,
        PutStatus.FLUSH_DISK_TIMEOUT,
        PutStatus.FLUSH_SLAVE_TIMEOUT,
        PutStatus.SLAVE_NOT_AVAILABLE,
    }
)


class PutResult(NamedTuple):
    """The outcome of `put`."""

    status: PutStatus
    physical_offset: int = -1
    queue_offset: int = -1
    error: OrbitError | None = None


def refusal_code(error: OrbitError) -> int:
    """The code that tells a client what a failed put means for it."""
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, MessageTooLarge | MessageError | TopicRefused):
        return ResponseCode.MESSAGE_ILLEGAL
    if isinstance(error, StoreError):
        return ResponseCode.SERVICE_NOT_AVAILABLE
    return ResponseCode.SYSTEM_ERROR


def failed(error: OrbitError) -> PutResult:
    """The outcome of a put that this error ended."""
    code = refusal_code(error)
    try:
        status = PutStatus(code)
    except ValueError:
        status = PutStatus.REFUSED
    return PutResult(status, error=error)
