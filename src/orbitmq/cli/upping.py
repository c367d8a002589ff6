"""What `orbitmq up` starts: which brokers, where, and with which ports and folders."""

from __future__ import annotations

import string
from dataclasses import replace

from orbitmq.broker.settings import BrokerSettings
from orbitmq.cli.configuration import FILE_VARIABLE, Configuration
from orbitmq.cli.errors import SettingRefused
from orbitmq.cli.schema import LogLevel
from orbitmq.cli.services import ClusterService, ProcessesService
from orbitmq.cli.serving import Service
from orbitmq.namesrv.settings import NameServerSettings

#: From the port of one broker to that of the next; Apache's brokers use the two beside theirs.
PORT_STEP = 10


def cluster_service(configuration: Configuration) -> Service:
    """One process for everything, or one for each broker when there are several."""
    name_server = _name_server(configuration)
    count = configuration.up.brokers
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


def _names(count: int) -> list[tuple[int, str]]:
    return [(place, f"broker-{string.ascii_lowercase[place]}") for place in range(count)]


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
