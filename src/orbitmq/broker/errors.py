"""The broker's errors, with the codes that clients get."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from orbitmq.errors import OrbitError
from orbitmq.message.record import MessageError
from orbitmq.names import group_problem, topic_problem
from orbitmq.remoting import settings as remoting
from orbitmq.store.settings import MessageTooLarge, StoreError, TopicRefused
from orbitmq.wire.codes import ResponseCode

if TYPE_CHECKING:
    from pathlib import Path


class BrokerError(OrbitError):
    """Something in or about a broker that its owner or its client can act on."""


class Refused(remoting.Refused, BrokerError):
    """A request that is answered with `code` and, as the remark, this text."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(code, remark)
        self.args = (remark,)


def check_topic(topic: str) -> None:
    """Refuse a name that is not allowed for a topic."""
    if problem := topic_problem(topic):
        raise Refused(ResponseCode.INVALID_PARAMETER, problem)


def check_group(group: str) -> None:
    """Refuse a name that is not allowed for a group."""
    if problem := group_problem(group):
        raise Refused(ResponseCode.INVALID_PARAMETER, problem)


class SystemBusy(Refused):
    """The broker cannot do this now; Apache's clients know the text, and try again."""

    retriable: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(
            ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while"
        )


class ConfigNotSaved(BrokerError):
    """A configuration file could not be written; the one before it is still there."""

    retriable: ClassVar[bool] = True

    def __init__(self, path: Path, reason: OSError) -> None:
        self.path = path
        super().__init__(f"{path} was not saved, the state before it is kept: {reason}")


class ConfigUnreadable(BrokerError):
    """A configuration file exists but cannot be read; nothing was changed.

    Using the backup, or nothing, could undo what the file says; its owner decides.
    """

    def __init__(self, path: Path, reason: OSError) -> None:
        self.path = path
        super().__init__(
            f"{path} cannot be read; repair or move it away, then start again: {reason}"
        )


# Results of puts.


class PutStatus(enum.Enum):
    """The result of a put; the names are Apache's."""

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
    """The code of a failed put."""
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, MessageTooLarge | MessageError | TopicRefused):
        return ResponseCode.MESSAGE_ILLEGAL
    if isinstance(error, StoreError):
        return ResponseCode.SERVICE_NOT_AVAILABLE
    return ResponseCode.SYSTEM_ERROR


def failed(error: OrbitError) -> PutResult:
    """The result of a put that failed with this error."""
    code = refusal_code(error)
    try:
        status = PutStatus(code)
    except ValueError:
        status = PutStatus.REFUSED
    return PutResult(status, error=error)
