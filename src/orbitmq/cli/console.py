"""`orbitmq console`: starts the web console."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from orbitmq.cli import settings as options
from orbitmq.cli.application import plain_command, section
from orbitmq.cli.command import Connections, check_positive
from orbitmq.cli.main import CommandError, Misused, PortTaken, SettingRefused
from orbitmq.cli.servers import Listening, Service, announcing, serve
from orbitmq.cli.settings import set_up_logging
from orbitmq.console.app import Console
from orbitmq.console.roles import Role
from orbitmq.console.settings import (
    CannotListen,
    ConsoleError,
    ConsoleSettings,
    HistoryUnusable,
    OidcSettings,
    is_loopback,
)
from orbitmq.console.webhooks import AlertSettings
from orbitmq.errors import SettingError
from orbitmq.spark.consolelink import TOKEN_VARIABLE

log = logging.getLogger(__name__)

app = section()

PASSWORD_VARIABLE = "ORBITMQ_CONSOLE_PASSWORD"  # noqa: S105  # a name, not a password

OIDC_VARIABLE = "ORBITMQ_CONSOLE_OIDC_SECRET"

_OIDC = "OpenID Connect"


@plain_command(
    app,
    "console",
    examples=(
        "orbitmq console --name-server 127.0.0.1:9876",
        "orbitmq console -n ns1:9876 -n ns2:9876 --write --history console.sqlite",
        "orbitmq console --users users.json --write",
        "orbitmq console --context staging --context production",
        "orbitmq console --all-contexts --history console.sqlite",
        "ORBITMQ_CONSOLE_PASSWORD=... orbitmq console --host 0.0.0.0 --allow-host mq.example.org",
    ),
)
def console(
    connection: Connections,
    flags: options.RunFlags,
    host: options.Host = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=options.LAST_PORT, help="0: any free one.")
    ] = 8090,
    write: Annotated[
        bool, typer.Option("--write", help="Allow to change things; else it only shows.")
    ] = False,
    password_file: Annotated[
        Path | None,
        typer.Option(
            "--password-file",
            metavar="FILE",
            help=f"The password of the login; needed beyond loopback. [env: {PASSWORD_VARIABLE}]",
        ),
    ] = None,
    users: options.Users = None,
    oidc_issuer: Annotated[
        str | None,
        typer.Option(
            "--oidc-issuer",
            metavar="URL",
            help="A provider of OpenID Connect that vouches for users.",
            rich_help_panel=_OIDC,
        ),
    ] = None,
    oidc_client: Annotated[
        str | None,
        typer.Option(
            "--oidc-client",
            metavar="ID",
            help="The provider's id of this console.",
            rich_help_panel=_OIDC,
        ),
    ] = None,
    oidc_secret_file: Annotated[
        Path | None,
        typer.Option(
            "--oidc-secret-file",
            metavar="FILE",
            help=f"The secret that goes with it, if there is one. [env: {OIDC_VARIABLE}]",
            rich_help_panel=_OIDC,
        ),
    ] = None,
    oidc_role: Annotated[
        list[str] | None,
        typer.Option(
            "--oidc-role",
            metavar="VALUE=ROLE",
            help="The role of users whose claim has a value; * is everybody; may be repeated.",
            rich_help_panel=_OIDC,
        ),
    ] = None,
    oidc_claim: Annotated[
        str,
        typer.Option(
            "--oidc-claim",
            metavar="NAME",
            help="The claim of the ID token with groups or roles, like realm_access.roles.",
            rich_help_panel=_OIDC,
        ),
    ] = "groups",
    oidc_name: Annotated[
        str,
        typer.Option(
            "--oidc-name",
            metavar="NAME",
            help="The claim with the name that the audit shows.",
            rich_help_panel=_OIDC,
        ),
    ] = "preferred_username",
    oidc_scope: Annotated[
        list[str] | None,
        typer.Option(
            "--oidc-scope",
            metavar="SCOPE",
            help="A scope to ask for besides openid, profile and email; may be repeated.",
            rich_help_panel=_OIDC,
        ),
    ] = None,
    oidc_redirect: Annotated[
        str | None,
        typer.Option(
            "--oidc-redirect",
            metavar="URL",
            help="Where browsers come back to, if it is not the address that they ask for: "
            "https://NAME/login/oidc/callback.",
            rich_help_panel=_OIDC,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help=f"The token that pipelines report with. [env: {TOKEN_VARIABLE}]",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A name under which browsers ask for it; may be repeated.",
        ),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            "--history",
            metavar="FILE",
            help="Keep seven days there; else in memory. Of several clusters each has its own.",
        ),
    ] = None,
    every: Annotated[
        float, typer.Option("--every", help="Seconds between two looks at the cluster.")
    ] = 5.0,
    mask: options.Mask = None,
    alerts: options.AlertsFile = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="PEM, for HTTPS.")
    ] = None,
    private_key: Annotated[
        Path | None, typer.Option("--private-key", metavar="FILE", help="PEM, for HTTPS.")
    ] = None,
) -> None:
    """Start the web console of one cluster or several, OrbitMQ's or Apache RocketMQ's."""
    configuration = flags.configuration({})
    check_positive(every, "--every")
    clients = connection.clients()
    settings = console_settings(
        client=next(iter(clients.values())),
        clusters={} if "" in clients else clients,
        host=host or "127.0.0.1",
        port=port,
        write=write,
        password=_secret(password_file, PASSWORD_VARIABLE),
        users=users,
        oidc=_oidc(
            issuer=oidc_issuer,
            client_id=oidc_client,
            client_secret=None if oidc_issuer is None else _secret(oidc_secret_file, OIDC_VARIABLE),
            roles=oidc_role,
            claim=oidc_claim,
            name_claim=oidc_name,
            scopes=("openid", "profile", "email", *(oidc_scope or ())),
            redirect=oidc_redirect,
        ),
        token=_secret(token_file, TOKEN_VARIABLE),
        allowed_hosts=tuple(allow_host or ()),
        history=history,
        every=every,
        masked=tuple(mask or ()),
        alerts=alerts_of(alerts),
        certificate=certificate,
        private_key=private_key,
    )
    set_up_logging(configuration.log)
    if not is_loopback(settings.host) and not settings.is_encrypted:
        typer.echo(
            "warning: the password travels readable; give --certificate and --private-key, or put "
            "the console behind something that speaks HTTPS",
            err=True,
        )
    if settings.alerts.webhooks and history is None:
        typer.echo(
            "warning: after a restart findings that last are posted again; give --history to "
            "remember what was posted",
            err=True,
        )
    serve(
        ConsoleService(settings),
        configuration.run.loop,
        announcing(as_json=flags.as_json),
        limit=connection.limit,
    )


class ConsoleService(Service):
    """A console in this process."""

    def __init__(
        self,
        settings: ConsoleSettings,
        port_option: str = "--port",
        *,
        needs_history: bool = True,
    ) -> None:
        """`port_option` is the flag for its port.

        Unless it `needs_history`, a history file that cannot be opened is a warning.
        """
        self._console = Console(settings)
        self._port_option = port_option
        self._needs_history = needs_history

    async def start(self) -> None:
        try:
            try:
                await self._console.start()
            except HistoryUnusable as error:
                if self._needs_history:
                    raise
                log.warning("the console keeps its history in memory only: %s", error)
                self._console = Console(replace(self._console.settings, history=None))
                await self._console.start()
        except CannotListen as error:
            raise PortTaken(error, self._port_option) from error
        except ConsoleError as error:
            raise CommandError(str(error)) from error

    async def stop(self) -> None:
        await self._console.stop()

    def listening(self) -> Sequence[Listening]:
        return (Listening("console", "console", self._console.url),)

    async def until_failed(self) -> CommandError:
        return CommandError(await self._console.until_ended())


def console_settings(**fields: object) -> ConsoleSettings:
    """Raises `SettingRefused`."""
    try:
        return ConsoleSettings(**fields)  # type: ignore[arg-type]  # checked by the class
    except SettingError as error:
        raise SettingRefused(str(error)) from error


def alerts_of(file: Path | None) -> AlertSettings:
    """The content of a file of webhooks. Raises `SettingRefused`."""
    if file is None:
        return AlertSettings()
    try:
        return AlertSettings.load(file)
    except SettingError as error:
        raise SettingRefused(str(error)) from error


def _oidc(
    *, issuer: str | None, client_id: str | None, roles: list[str] | None, **fields: Any
) -> OidcSettings | None:
    if issuer is None:
        if client_id is not None or roles:
            raise Misused("--oidc-client and --oidc-role need --oidc-issuer URL")
        return None
    mapped: dict[str, Role] = {}
    for each in roles or ():
        value, _, role = each.rpartition("=")
        if not value or role not in tuple(Role):
            raise Misused(
                f"--oidc-role is VALUE=ROLE with {', '.join(Role)} as the role, got {each!r}"
            )
        mapped[value] = Role(role)
    try:
        return OidcSettings(issuer=issuer, client_id=client_id or "", roles=mapped, **fields)
    except SettingError as error:
        raise SettingRefused(str(error)) from error


def _secret(file: Path | None, variable: str) -> str | None:
    """A secret from a file or from the environment; a flag would be visible to other users."""
    if file is None:
        return os.environ.get(variable) or None
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingRefused(f"{file} cannot be read: {error}") from error
    if not text:
        raise SettingRefused(f"{file} is empty")
    return text
