"""What the console refuses, and the HTTP status that says so."""

from __future__ import annotations

from typing import ClassVar

from orbitmq.errors import OrbitError


class ConsoleError(OrbitError):
    """Something that the page shows as a sentence."""

    status: ClassVar[int] = 400


class CannotListen(ConsoleError):
    """Its address is taken, or none of this machine's."""


class HistoryUnusable(ConsoleError):
    """The file that keeps the history cannot be opened."""


class BadInput(ConsoleError):
    """A request that cannot be meant."""


class NotLoggedIn(ConsoleError):
    """Nobody is shown anything before the password."""

    status: ClassVar[int] = 401

    def __init__(self) -> None:
        super().__init__("log in first")


class Forbidden(ConsoleError):
    """A request from elsewhere, or for what this console does not do."""

    status: ClassVar[int] = 403


class ReadOnly(Forbidden):
    """The console was started without write rights."""

    def __init__(self, command: str | None = None) -> None:
        remedy = f"; the command does the same: {command}" if command else ""
        super().__init__(f"this console only shows; start it with --write to change things{remedy}")


class NotThere(ConsoleError):
    """Nothing is known under this name."""

    status: ClassVar[int] = 404


class TooManyAttempts(ConsoleError):
    """Wrong passwords, too many of them."""

    status: ClassVar[int] = 429

    def __init__(self, wait: float) -> None:
        self.wait = wait
        super().__init__(f"too many wrong passwords; try again in {wait:.0f} s")


class NotYet(ConsoleError):
    """The cluster has not been seen yet."""

    status: ClassVar[int] = 503
    retriable: ClassVar[bool] = True
