"""What a name server refuses, by what the caller can do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbitmq.errors import OrbitError
from orbitmq.errors import SettingError as SettingError  # noqa: PLC0414  # has its name here, too

if TYPE_CHECKING:
    from pathlib import Path


class NameServerError(OrbitError):
    """Something about a name server that its user can act on."""


class RegisterAllFirst(NameServerError):
    """A broker named a single topic before it ever registered all of them."""

    def __init__(self, broker: str, address: str) -> None:
        self.broker = broker
        self.address = address
        super().__init__(
            f"broker {broker!r} at {address} must register all its topics before a single one"
        )


class FileUnusable(NameServerError):
    """A file of the name server cannot be read or written."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")
