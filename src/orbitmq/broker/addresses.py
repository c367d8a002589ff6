"""Where clients reach a broker: a number, because messages carry it, and one that is theirs."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket

from orbitmq.broker.errors import SettingError
from orbitmq.broker.settings import WILDCARDS, BrokerSettings
from orbitmq.remoting.address import parse_address

log = logging.getLogger(__name__)

#: An address reserved for documentation. Nothing is sent there: it only makes the system choose
#: the interface that leads out of the machine.
_ELSEWHERE = ("198.51.100.1", 9)

_EVERYBODY = ipaddress.ip_address("255.255.255.255")


async def advertised_host(settings: BrokerSettings) -> tuple[str, int | None]:
    """The number, and the port if one was set, that clients are to be given.

    Raises `SettingError` when the name cannot be resolved, or is nobody's own.
    """
    if settings.advertised is not None:
        address = parse_address(settings.advertised, default_port=0)
        return await _number(address.host), address.port or None
    host = settings.server.host
    if host not in WILDCARDS:
        return await _number(host), None
    return _own_address(), None


async def _number(host: str) -> str:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SettingError(
            f"broker.advertised: {host!r} cannot be resolved ({error.strerror or error}); "
            "set it to an address that clients can reach"
        ) from error
    # Records and old clients know IPv4 best.
    number = str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0]).partition("%")[0]
    if (meaning := _nobodys(ipaddress.ip_address(number))) is not None:
        raise SettingError(
            f"broker.advertised: {host!r} {meaning}; set it to an address that clients can reach"
        )
    return number


def _nobodys(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """What an address means that no connection can be made to."""
    if address.is_unspecified:
        return "means every interface"
    if address.is_multicast or address == _EVERYBODY:
        return "means many machines at once"
    return None


def _own_address() -> str:
    """The address of the interface that leads out of this machine, else the loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
    except OSError:
        log.warning("this machine has no address that others could reach; clients must be local")
        return "127.0.0.1"
