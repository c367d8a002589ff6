"""What `orbitmq up` starts: which brokers, where, and with which ports and folders."""

from __future__ import annotations

import ssl
import string
from dataclasses import replace

from orbitmq.broker.settings import BrokerSettings
from orbitmq.cli.configuration import FILE_VARIABLE, Configuration
from orbitmq.cli.errors import SettingRefused
from orbitmq.cli.schema import LogLevel
from orbitmq.cli.services import ClusterService, ProcessesService
from orbitmq.cli.serving import Service
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.tls import ServerTls, TlsMode

#: From the port of one broker to that of the next; Apache's brokers use the two beside theirs.
PORT_STEP = 10


def cluster_service(configuration: Configuration) -> Service:
    """One process for everything, or one for each broker when there are several."""
    configuration = _with_outward_tls(configuration)
    name_server = _name_server(configuration)
    count = configuration.up.brokers
    _check_ports(configuration, count)
    if count == 1:
        return ClusterService(name_server, _only_broker(configuration))
    for path in ("broker.root", "broker.name", "broker.broker_id"):
        if configuration.is_given(path):
            raise SettingRefused(
                f"{path} is for one broker, but up.brokers is {count}; names and folders are made "
                "from up.data then"
            )
    return ProcessesService(
        name_server,
        {name: _environment(configuration, name, place) for place, name in _names(count)},
        configuration.broker.name_servers,
    )


def client_tls(configuration: Configuration) -> ssl.SSLContext | None:
    """How whoever is in the same process reaches what is started; None: without TLS."""
    outward = _with_outward_tls(configuration).broker.outward.tls
    if not _enforces(configuration.name_server.server.tls) or outward is None:
        return None
    context = outward.context()
    own = configuration.broker.server.tls
    if own is not None and outward.verify:
        context.load_verify_locations(own.certificate)
    return context


def _with_outward_tls(configuration: Configuration) -> Configuration:
    """Have brokers speak TLS to the name server beside them if it takes nothing else.

    They trust its certificate and no other, whatever name it is for: it is known which one it is.
    """
    tls = configuration.name_server.server.tls
    if tls is None or not _enforces(tls) or configuration.broker.outward.tls is not None:
        return configuration
    wanted = "set broker.outward.tls.authority to the certificates that brokers are to trust"
    if tls.client_authority is not None:
        raise SettingRefused(
            "namesrv.tls.mode is enforcing and namesrv.tls.client_authority asks brokers for a "
            f"certificate as well; {wanted}, and broker.outward.tls.certificate and "
            "broker.outward.tls.key to their own"
        )
    if configuration.broker.name_servers:
        raise SettingRefused(
            "namesrv.tls.mode is enforcing, and broker.name_servers names others that brokers "
            f"speak to in the same way; {wanted}"
        )
    return configuration.with_values(
        {
            "broker.outward.tls.authority": tls.certificate,
            "broker.outward.tls.verify_host": False,
        }
    )


def _enforces(tls: ServerTls | None) -> bool:
    return tls is not None and tls.mode is TlsMode.ENFORCING


def _names(count: int) -> list[tuple[int, str]]:
    return [(place, f"broker-{string.ascii_lowercase[place]}") for place in range(count)]


def _check_ports(configuration: Configuration, count: int) -> None:
    """No broker may be told to listen where the name server does."""
    names = configuration.name_server.server
    brokers = configuration.broker.server
    ports = {_port(brokers.port, place) for place in range(count)}
    if names.port and names.port in ports:
        raise SettingRefused(
            f"namesrv.port and broker.port lead to the same port, {names.port}: the name server "
            f"takes one port, each broker the next {PORT_STEP} from its own on"
            if count > 1
            else f"namesrv.port and broker.port are both {names.port}; each needs its own"
        )


def _name_server(configuration: Configuration) -> NameServerSettings:
    settings = configuration.name_server
    if configuration.is_given("namesrv.home"):
        return settings
    return replace(settings, home=configuration.up.data / "namesrv")


def _only_broker(configuration: Configuration) -> BrokerSettings:
    settings = configuration.broker
    if configuration.is_given("broker.root"):
        return settings
    return replace(settings, root=configuration.up.data / settings.name)


def _environment(configuration: Configuration, name: str, place: int) -> dict[str, str]:
    broker = configuration.broker
    advertised = broker.advertised
    if advertised is not None and advertised.rpartition("]")[2].count(":"):
        raise SettingRefused(
            f"broker.advertised is {advertised!r}, but every broker has its own port; leave it out"
        )
    own = configuration.with_values(
        {
            "broker.name": name,
            "broker.root": configuration.up.data / name,
            "broker.port": _port(broker.server.port, place),
            "broker.http.port": _port(broker.http.port, place),
            "log.level": configuration.log.level or LogLevel.WARNING,
        }
    )
    # What the file said is in here already.
    return {**own.as_environment(), FILE_VARIABLE: ""}


def _port(first: int | None, place: int) -> int | None:
    """The port of the broker at a place; none, or any free one, remains that."""
    return first + PORT_STEP * place if first else first
