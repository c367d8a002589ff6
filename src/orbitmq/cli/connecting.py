"""How commands that ask a cluster reach it: the flags, and the client that comes out of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from orbitmq.cli.errors import Misused
from orbitmq.client.settings import ClientSettings, split_name_servers
from orbitmq.errors import SettingError
from orbitmq.wire.acl import Credentials

DEFAULT_NAME_SERVER = "127.0.0.1:9876"
_PANEL = "Connection"

NameServer: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--name-server",
        "-n",
        metavar="HOST[:PORT]",
        envvar=["ORBITMQ_NAME_SERVER", "NAMESRV_ADDR"],
        help=f"Where the cluster is; may be repeated. {DEFAULT_NAME_SERVER} by default.",
        rich_help_panel=_PANEL,
    ),
]
AccessKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--access-key",
        metavar="KEY",
        envvar="ORBITMQ_ACCESS_KEY",
        help="The account that requests are signed for.",
        rich_help_panel=_PANEL,
    ),
]
SecretKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--secret-key",
        metavar="KEY",
        envvar="ORBITMQ_SECRET_KEY",
        help="Its secret; as a flag it is seen by everybody who lists processes.",
        rich_help_panel=_PANEL,
    ),
]
Tls: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--tls", envvar="ORBITMQ_TLS", help="Speak TLS to all servers.", rich_help_panel=_PANEL
    ),
]
TlsAuthority: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        envvar="ORBITMQ_TLS_CA",
        help="Certificates to trust, in PEM; the machine's by default. Implies --tls.",
        rich_help_panel=_PANEL,
    ),
]
TlsUnverified: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--tls-unverified",
        help="Speak TLS and believe any certificate, as Apache's tools do.",
        rich_help_panel=_PANEL,
    ),
]
Timeout: TypeAlias = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        help="How long a server may take for an answer.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The flags of a command, as given. Every field is a parameter of every command."""

    name_server: NameServer = None
    access_key: AccessKey = None
    secret_key: SecretKey = None
    tls: Tls = False
    tls_ca: TlsAuthority = None
    tls_unverified: TlsUnverified = False
    timeout: Timeout = 5.0

    def client(self, counting: str | None = None) -> ClientSettings:
        """Raises `Misused` for flags that do not go together.

        `counting` is the flag of the command that takes a number of something, which in many other
        commands is -n.
        """
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise Misused(f"--timeout must be a number of seconds above 0, got {self.timeout!r}")
        if (self.access_key is None) != (self.secret_key is None):
            missing = "--secret-key" if self.secret_key is None else "--access-key"
            raise Misused(f"--access-key and --secret-key go together; {missing} is missing")
        credentials = None
        if self.access_key is not None and self.secret_key is not None:
            credentials = Credentials(access_key=self.access_key, secret_key=self.secret_key)
        context = None
        if self.tls or self.tls_ca is not None or self.tls_unverified:
            from orbitmq.remoting.tls import ClientTls  # noqa: PLC0415  # few speak it

            context = ClientTls(authority=self.tls_ca, verify=not self.tls_unverified).context()
        servers = _servers(self.name_server or [DEFAULT_NAME_SERVER], counting)
        return ClientSettings(
            name_servers=servers or (DEFAULT_NAME_SERVER,),
            credentials=credentials,
            tls=context,
            request_timeout=self.timeout,
            stop_timeout=min(self.timeout, 3.0),
        )


def _servers(given: Sequence[str], counting: str | None) -> tuple[str, ...]:
    for text in given:
        if text.strip().isdecimal():
            meant = f"; to say how many: {counting} {text}" if counting else ""
            raise Misused(
                f"--name-server (-n) takes an address such as {DEFAULT_NAME_SERVER}, got "
                f"{text!r}{meant}"
            )
    try:
        return split_name_servers(given)
    except SettingError as error:
        said = str(error).removeprefix("client.name_servers: ")
        raise Misused(f"--name-server (-n): {said}") from error
