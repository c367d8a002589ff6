"""How a console listens, what it may do, and the errors that it answers with.

Needs no web framework.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote, urlsplit

from orbitmq.client.settings import ClientSettings
from orbitmq.console.roles import RULES, Right, Role
from orbitmq.console.webhooks import AlertSettings
from orbitmq.errors import OrbitError, SettingError, install_command

#: Seconds for the answer of a broker.
TIMEOUT = 5.0
#: Shorter passwords are guessed, whatever the limit on attempts.
SHORTEST_PASSWORD = 8
#: The address of the list of clusters; `/NAME` after it leads into one of several.
CLUSTERS = "/clusters"
#: Seconds that a user may take at the identity provider.
OIDC_PATIENCE = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcSettings:
    """A provider of OpenID Connect that vouches for users, and the roles of these."""

    issuer: str  #: its address, without `/.well-known/openid-configuration`
    client_id: str  #: under which it knows this console
    client_secret: str | None = field(default=None, repr=False)  #: None: a public client
    #: Roles by a value of the claim; `*` is everybody.
    roles: Mapping[str, Role] = field(default_factory=dict)
    claim: str = "groups"  #: the claim of the ID token with groups or roles
    name_claim: str = "preferred_username"  #: the claim with the name that the audit shows
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    #: The address that browsers come back to; None: this console's, as the browser has it.
    redirect: str | None = None

    def __post_init__(self) -> None:
        for name in ("issuer", "redirect"):
            if (address := getattr(self, name)) is not None:
                try:
                    check_provider_address(address)
                except SettingError as error:
                    raise SettingError(f"console.oidc.{name}: {error}") from error
        if not self.client_id:
            raise SettingError("console.oidc.client_id must be given: --oidc-client ID")
        if not self.roles:
            raise SettingError(
                "console.oidc.roles must be given, or nobody could log in: --oidc-role VALUE=ROLE, "
                "such as sre=admin, or '*=reader' for everybody"
            )
        if "openid" not in self.scopes:
            raise SettingError("console.oidc.scopes must have openid among them")
        if find_spec("jwt") is None or find_spec("cryptography") is None:
            raise SettingError(
                f"console.oidc needs PyJWT and cryptography; {install_command('oidc')}"
            )


def check_provider_address(address: str) -> None:
    """Raise `SettingError` for an address that others on the way could read or change."""
    parts = urlsplit(address)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme != "http" or not parts.hostname or not is_loopback(parts.hostname):
        raise SettingError(
            f"must begin with https:// (http:// on this machine only), got {address[:200]!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    """One console."""

    client: ClientSettings  #: how it reaches the cluster, the first one of several
    clusters: Mapping[str, ClientSettings] = field(default_factory=dict)  #: several, by name
    name: str = ""  #: of this cluster among several
    host: str = "127.0.0.1"  #: the address to listen on
    port: int = 8090  #: 0: any free one
    write: bool = False  #: whether it may change things
    #: The password of everybody; this, `users` or `oidc` is required beyond loopback.
    password: str | None = field(default=None, repr=False)
    users: Path | None = None  #: the file of users, who log in by name
    oidc: OidcSettings | None = None  #: who else vouches for users
    token: str | None = field(default=None, repr=False)  #: for pipelines that report progress
    allowed_hosts: tuple[str, ...] = ()  #: names by which browsers may address it
    history: Path | None = None  #: the file that keeps seven days; None: memory only
    every: float = 5.0  #: seconds between two looks at the cluster
    certificate: Path | None = None  #: PEM files; with them it speaks HTTPS
    private_key: Path | None = None
    masked: tuple[
        str, ...
    ] = ()  #: fields of bodies that are shown as ***: `card`, `customer.email`, `CLUSTER:card`
    alerts: AlertSettings = field(default_factory=AlertSettings)  #: who is told what it finds
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
        if self.password is not None and (self.users is not None or self.oidc is not None):
            raise SettingError(
                "console.password cannot go together with console.users or console.oidc: with them "
                "everybody logs in by name (ORBITMQ_CONSOLE_PASSWORD and --password-file set it)"
            )
        if not self.needs_login and not is_loopback(self.host):
            raise SettingError(
                f"console.host is {self.host!r}, which other machines reach: set console.password "
                "(ORBITMQ_CONSOLE_PASSWORD or --password-file) console.users (--users) "
                "or console.oidc (--oidc-issuer), or listen on 127.0.0.1"
            )
        if any(not name.strip() for name in self.clusters):
            raise SettingError("console.clusters must have names")
        for name in self.masked:
            if not all(name.split(".")):
                raise SettingError(
                    f"console.masked names fields, like card or customer.email; got {name!r}"
                )
        if (self.certificate is None) != (self.private_key is None):
            raise SettingError("console.certificate and console.private_key belong together")

    @property
    def needs_login(self) -> bool:
        return any(each is not None for each in (self.password, self.users, self.oidc))

    @property
    def is_encrypted(self) -> bool:
        return self.certificate is not None

    @property
    def prefix(self) -> str:
        """What stands before the addresses of this cluster among several."""
        return f"{CLUSTERS}/{quote(self.name, safe='')}" if self.name else ""

    def each(self) -> Mapping[str, ConsoleSettings]:
        """The settings of each cluster by its name; a single one has none."""
        if not self.clusters:
            return {"": self}
        return {name: self._of(name, client) for name, client in self.clusters.items()}

    def _of(self, name: str, client: ClientSettings) -> ConsoleSettings:
        file = self.history
        if file is not None:
            # Never the file itself: the order of clusters may change.
            file = file.with_name(f"{file.stem}-{quote(name, safe='')}{file.suffix}")
        masked = []
        for each in self.masked:
            cluster, _, path = each.partition(":")
            if path and cluster in self.clusters:
                masked += [path] if cluster == name else []
            else:
                masked.append(each)
        found = replace(
            self, client=client, clusters={}, name=name, history=file, masked=tuple(masked)
        )
        return replace(found, alerts=self.alerts.of_cluster(name, found.prefix))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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


class NotPermitted(Forbidden):
    """The role of the user does not have the right."""

    def __init__(self, role: Role | None, right: Right, command: str | None = None) -> None:
        rule = RULES[right]
        who = "a session without a user" if role is None else f"the role {role}"
        remedy = f"; the command does the same: {command}" if command else ""
        super().__init__(f"{who} may not {rule.about}; {_A[rule.least]} may{remedy}")


_A = {Role.READER: "a reader", Role.OPERATOR: "an operator", Role.ADMIN: "an admin"}


class UsersUnusable(ConsoleError):
    """The file of users cannot be read or written: nobody can log in."""

    status: ClassVar[int] = 503

    def __init__(self, file: Path | None, reason: object) -> None:
        if isinstance(reason, FileNotFoundError):
            reason = f"it is not there; make it with: orbitmq user add NAME --users {file}"
        name = "" if file is None else f" {file}"
        super().__init__(f"the file of users{name} cannot be used: {reason}")


class ProviderAway(ConsoleError):
    """The identity provider does not answer, or not as one does."""

    status: ClassVar[int] = 502
    retriable: ClassVar[bool] = True


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
