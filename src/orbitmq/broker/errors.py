"""What a broker refuses, with the code that a client is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from orbitmq.errors import OrbitError
from orbitmq.errors import SettingError as SettingError  # noqa: PLC0414  # has its name here, too
from orbitmq.wire.codes import ResponseCode

if TYPE_CHECKING:
    from pathlib import Path


class BrokerError(OrbitError):
    """Something in or about a broker that its owner or its client can act on."""


class Refused(BrokerError):
    """A request that is answered with `code` and, as the remark, this text."""

    def __init__(self, code: int, remark: str) -> None:
        self.code = code
        super().__init__(remark)


class SystemBusy(Refused):
    """The broker cannot do this now; Apache's clients know these words, and come again."""

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
    """A configuration file is there but the disk does not give it out; nothing was changed.

    Going on with the backup, or with nothing, could undo what the file says. Its owner decides.
    """

    def __init__(self, path: Path, reason: OSError) -> None:
        self.path = path
        super().__init__(
            f"{path} cannot be read; repair or move it away, then start again: {reason}"
        )
