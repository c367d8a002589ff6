"""Errors of the console, by the answer that they become. Needs no web framework."""

from __future__ import annotations

from typing import ClassVar

from orbitmq.errors import OrbitError


class ConsoleError(OrbitError):
    """An error that the page shows; `status` is that of its answer."""

    status: ClassVar[int] = 400


class CannotListen(ConsoleError):
    """The address to listen on is in use, or not one of this machine."""


class HistoryUnusable(ConsoleError):
    """The file that keeps the history cannot be opened."""


class BadInput(ConsoleError):
    """A request with a wrong body or parameter."""


class NotLoggedIn(ConsoleError):
    """A request without a session."""

    status: ClassVar[int] = 401

    def __init__(self) -> None:
        super().__init__("log in first")


class Forbidden(ConsoleError):
    """A request from another site, or for what this console does not do."""

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
    """Too many wrong passwords."""

    status: ClassVar[int] = 429

    def __init__(self, wait: float) -> None:
        self.wait = wait
        super().__init__(f"too many wrong passwords; try again in {wait:.0f} s")


class NotYet(ConsoleError):
    """The first look at the cluster has not ended."""

    status: ClassVar[int] = 503
    retriable: ClassVar[bool] = True
