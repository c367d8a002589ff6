"""What can go wrong between two peers, named by what the caller does about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from orbitmq.errors import OrbitError
from orbitmq.errors import SettingError as SettingError  # noqa: PLC0414  # has its name here, too

if TYPE_CHECKING:
    from orbitmq.remoting.address import Address


class RemotingError(OrbitError):
    """Something about talking to a peer that the caller can act on."""


class AddressError(RemotingError):
    """A text that names no address."""


class ListenFailed(RemotingError):
    """The address cannot be listened on."""

    def __init__(self, address: Address, reason: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(
            f"cannot listen on {address}: {reason}; choose another address, or port 0 for any"
        )


class ConnectFailed(RemotingError):
    """Nobody could be reached at the address."""

    retriable: ClassVar[bool] = True

    def __init__(self, address: Address, reason: str, *, retry_in: float = 0.0) -> None:
        self.address = address
        self.reason = reason
        #: Seconds until a channel would try again. Not in the text: a command that ends
        #: with it tries nothing any more.
        self.retry_in = retry_in
        super().__init__(f"cannot connect to {address}: {reason}")


class ConnectionLost(RemotingError):
    """The connection ended before the answer: whether the request was carried out is unknown."""

    retriable: ClassVar[bool] = True

    def __init__(self, remote: Address, reason: str) -> None:
        self.remote = remote
        self.reason = reason
        super().__init__(f"the connection to {remote} ended: {reason}")


class RequestTimedOut(RemotingError):
    """No answer came in time: whether the request was carried out is unknown."""

    retriable: ClassVar[bool] = True

    def __init__(self, remote: Address, code: int, timeout: float) -> None:
        self.remote = remote
        self.code = code
        self.timeout = timeout
        super().__init__(f"{remote} did not answer request {code} within {timeout:g} s")


class TooManyRequests(RemotingError):
    """So many requests wait for the peer that another one was not sent."""

    retriable: ClassVar[bool] = True

    def __init__(self, remote: Address, limit: int) -> None:
        self.remote = remote
        self.limit = limit
        super().__init__(
            f"{limit} requests already wait for answers of {remote}; send fewer at once"
        )


class Refused(RemotingError):
    """Raised by a handler: the request is answered with this code and remark."""

    def __init__(self, code: int, remark: str) -> None:
        self.code = int(code)
        self.remark = remark
        super().__init__(f"refused with code {self.code}: {remark}")
