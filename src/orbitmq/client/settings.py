"""How a client reaches its cluster, and how it identifies itself."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from orbitmq.arguments import explained
from orbitmq.errors import SettingError
from orbitmq.parsing import Fields, instance
from orbitmq.remoting.settings import Address, AddressError, ChannelSettings, parse_address
from orbitmq.wire.command import Credentials

#: The environment variables with name servers, in this order.
NAME_SERVER_VARIABLES = ("ORBITMQ_NAME_SERVER", "NAMESRV_ADDR")
#: The name server of `orbitmq up`.
DEFAULT_NAME_SERVER = "127.0.0.1:9876"


@explained()
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """One client: a set of connections that producers, consumers and admins may share.

    Durations are seconds; a `timedelta` is taken as well.
    """

    name_servers: tuple[str, ...] = ()  #: `host:port` each; any one of them is enough
    credentials: Credentials | None = field(default=None, repr=False)  #: signs every request
    tls: ssl.SSLContext | None = None  #: `remoting.tls.ClientTls(...).context()` makes one
    instance: str | None = None  #: second part of the client id; None: a unique one
    unit: str | None = None  #: third part of the client id
    client_ip: str | None = None  #: first part of the client id; None: this machine's address
    namespace: str | None = None  #: `orders` becomes the topic `namespace%orders`
    request_timeout: float = 3.0  #: for requests without a timeout of their own
    route_refresh: float = 30.0  #: how often routes are refreshed
    heartbeat: float = 30.0  #: how often heartbeats are sent
    stop_timeout: float = 3.0  #: how long a stop waits for the brokers' answers
    #: A broker that listens again is found within `longest_pause`.
    channel: ChannelSettings = field(default_factory=lambda: ChannelSettings(longest_pause=0.8))

    def __post_init__(self) -> None:
        fields = Fields(self, "client")
        fields.durations("request_timeout", "route_refresh", "heartbeat", "stop_timeout")
        # Converts accepted forms to the usual one.
        object.__setattr__(self, "name_servers", split_name_servers(self.name_servers))
        fields.kinds(channel=ChannelSettings)
        if self.credentials is not None:
            fields.kinds(credentials=Credentials)
        if self.tls is not None:
            fields.kinds(tls=ssl.SSLContext)
        for name in ("instance", "unit", "client_ip"):
            _check_id_part(name, getattr(self, name))
        _check_namespace(self.namespace)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The name servers."""
        return tuple(_address(text) for text in self.name_servers)


def resolve(
    name_server: str | Iterable[str] | None = None,
    client: ClientSettings | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> ClientSettings:
    """Settings with name servers: those given, or of `client`, of the environment, or the default.

    The default is the one that `orbitmq up` starts. Several name servers are a sequence, or one
    text with `;` or `,` between them. The environment is read at each call.
    """
    settings = ClientSettings() if client is None else instance(client, "client", ClientSettings)
    if name_server is not None:
        found = split_name_servers(name_server)
        if not found:
            raise SettingError(f"name_server must name at least one host:port, got {name_server!r}")
        return replace(settings, name_servers=found)
    if settings.name_servers:
        return settings
    variables = os.environ if environment is None else environment
    for name in NAME_SERVER_VARIABLES:
        if found := split_name_servers(variables.get(name, "")):
            return replace(settings, name_servers=found)
    return replace(settings, name_servers=(DEFAULT_NAME_SERVER,))


def split_name_servers(given: str | Iterable[str]) -> tuple[str, ...]:
    """One text or several as single addresses, without duplicates, in the order given."""
    try:
        texts = [given] if isinstance(given, str) else list(given)
    except TypeError as error:
        raise SettingError(f"name servers must be texts like host:9876, got {given!r}") from error
    for text in texts:
        if not isinstance(text, str):
            raise SettingError(f"a name server must be a text like host:9876, got {text!r}")
    parts = [part.strip() for text in texts for part in re.split("[;,]", text)]
    return tuple(dict.fromkeys(str(_address(part)) for part in parts if part))


def _address(text: str) -> Address:
    try:
        return parse_address(text, default_port=9876)
    except (AddressError, AttributeError) as error:
        raise SettingError(f"client.name_servers: {error}") from error


def _check_id_part(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value or "@" in value or not value.isprintable():
        raise SettingError(
            f"client.{name} is a part of the client id and must be a text without @, got {value!r}"
        )


def _check_namespace(namespace: object) -> None:
    if namespace is None:
        return
    if not isinstance(namespace, str) or not re.fullmatch(r"[a-zA-Z0-9_-]+", namespace):
        raise SettingError(
            f"client.namespace may consist of letters, digits, _ and -, got {namespace!r}"
        )
