"""Whether an address that is to be listened on can be reached from other machines."""

from __future__ import annotations

import ipaddress
import socket

from orbitmq.broker.settings import WILDCARDS, BrokerSettings
from orbitmq.cli.errors import Exposed


def check_broker(settings: BrokerSettings, *, is_accepted: bool) -> None:
    """Refuse every address of a broker that others reach, unless that is accepted."""
    check_exposure("broker.host", settings.server.host, is_accepted=is_accepted)
    if settings.http.port is not None:
        check_exposure("broker.http.host", settings.http.host, is_accepted=is_accepted)


def check_exposure(setting: str, host: str, *, is_accepted: bool) -> None:
    """Refuse an address that others reach, unless that is accepted.

    Until requests can be authenticated, every other address than the loopback is open to all.
    """
    if not is_accepted and not _is_loopback(host):
        raise Exposed(setting, host)


def _is_loopback(host: str) -> bool:
    if host in WILDCARDS:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        # Nobody can listen there; whoever tries says so.
        return True
    return all(
        ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found
    )
