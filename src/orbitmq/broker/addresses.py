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


async def advertised_host(settings: BrokerSettings) -> tuple[str, int | None]:
    """The number, and the port if one was set, that clients are to be given.

    Raises `SettingError` when the name cannot be resolved, or means every interface.
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
    if ipaddress.ip_address(number).is_unspecified:
        raise SettingError(
            f"broker.advertised: {host!r} means every interface; set it to an address that "
            "clients can reach"
        )
    return number


def _own_address() -> str:
    """The address of the interface that leads out of this machine, else the loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
    except OSError:
        log.warning("this machine has no address that others could reach; clients must be local")
        return "127.0.0.1"
