"""How a console listens, what it may do, and how often it looks at the cluster."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from orbitmq.client.settings import ClientSettings
from orbitmq.errors import SettingError

#: Shorter passwords are guessed, whatever the limit on attempts.
SHORTEST_PASSWORD = 8
#: The fields of a budget that are numbers.
_COUNTS = ("ages", "topics", "members", "dead_letters", "resent", "letters", "handlers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many groups and topics one look polls one by one; the others have their turn later."""

    ages: int = 40  #: topics of groups: the age of the oldest waiting message
    topics: int = 40  #: topics: their content
    members: int = 30  #: groups: their members
    dead_letters: int = 30  #: groups: the number of dead letters
    resent: int = 3  #: groups: which dead letters were sent again
    letters: int = 20  #: dead letters of these groups together, the newest first
    older_letters: bool = True  #: also those that died more than an hour ago
    handlers: int = 10  #: groups: the times of their handlers

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise SettingError(f"console.budget.{name} must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    """One console."""

    client: ClientSettings  #: how it reaches the cluster
    host: str = "127.0.0.1"  #: the address to listen on
    port: int = 8090  #: 0: any free one
    write: bool = False  #: whether it may change things
    password: str | None = field(default=None, repr=False)  #: required beyond loopback
    token: str | None = field(default=None, repr=False)  #: for pipelines that report progress
    allowed_hosts: tuple[str, ...] = ()  #: names by which browsers may address it
    history: Path | None = None  #: the file that keeps seven days; None: memory only
    every: float = 5.0  #: seconds between two looks at the cluster
    budget: Budget = field(default_factory=Budget)
    certificate: Path | None = None  #: PEM files; with them it speaks HTTPS
    private_key: Path | None = None
    session: float = 12 * 3600.0  #: seconds that a login lasts
    attempts: int = 5  #: wrong passwords from one address within a minute

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise SettingError(f"console.port must be from 0 to 65535, got {self.port}")
        for name in ("every", "session"):
            if getattr(self, name) <= 0:
                raise SettingError(f"console.{name} must be above 0, got {getattr(self, name)}")
        if self.attempts < 1:
            raise SettingError(f"console.attempts must be 1 or more, got {self.attempts}")
        if self.password is not None and len(self.password) < SHORTEST_PASSWORD:
            raise SettingError(f"console.password must have {SHORTEST_PASSWORD} characters or more")
        if self.password is None and not is_loopback(self.host):
            raise SettingError(
                f"console.host is {self.host!r}, which other machines reach: set console.password "
                "(ORBITMQ_CONSOLE_PASSWORD or --password-file), or listen on 127.0.0.1"
            )
        if (self.certificate is None) != (self.private_key is None):
            raise SettingError("console.certificate and console.private_key belong together")

    @property
    def is_encrypted(self) -> bool:
        return self.certificate is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


TIMEOUT = 5.0
