"""What can go wrong between bytes and commands, named by what the caller does about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orbitmq.wire.frame import Frame


class WireError(OrbitError):
    """Bytes or values that the protocol does not allow."""


class FrameError(WireError):
    """The byte stream cannot be trusted any longer: log the peer and close the connection."""

    #: What was complete before the bad frame; filled in by `FrameReader.feed`.
    frames: Sequence[Frame] = ()


class OtherProtocol(FrameError):
    """The peer speaks something else, which its first bytes tell."""


class HeaderError(WireError):
    """A request or answer lacks a field or has a wrong one: answer with an error, go on reading."""

    def __init__(self, header: str, field: str, allowed: str, got: str) -> None:
        self.header = header
        self.field = field
        self.allowed = allowed
        self.got = got
        super().__init__(f"{header}: field {field!r} must be {allowed}, got {got}")


class BodyError(WireError):
    """A body is not what its request code promises: answer with an error, go on reading."""

    def __init__(self, body: str, problem: str) -> None:
        self.body = body
        self.problem = problem
        super().__init__(f"{body} body: {problem}")


class EncodeError(WireError):
    """A value of ours that does not fit the wire: nothing was sent, correct the value."""


class LimitError(WireError):
    """A setting of `WireLimits` that makes no sense."""
