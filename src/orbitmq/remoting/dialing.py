"""Reaches out to a peer."""

from __future__ import annotations

import asyncio
import os
import re
import ssl

from orbitmq.clock import Clock
from orbitmq.remoting.address import Address, parse_address
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.errors import ConnectFailed
from orbitmq.remoting.occurrences import Occurrences
from orbitmq.remoting.owner import Owner, Prepare
from orbitmq.remoting.settings import ConnectionSettings

_CODE = re.compile(r"\[Errno (\d+)\]")


async def connect(
    address: Address | str,
    *,
    owner: Owner | None = None,
    tls: ssl.SSLContext | None = None,
    timeout: float = 3.0,  # noqa: ASYNC109  # part of the error that it leads to
    settings: ConnectionSettings | None = None,
    clock: Clock | None = None,
    prepare: Prepare | None = None,
    faults: Occurrences | None = None,
    silence: float | None = None,
) -> Connection:
    """Open a connection. Raises `ConnectFailed`, also for a failed handshake.

    Without an owner every request of the peer is answered as not supported. `faults` counts what
    the peer does wrong, over all connections to it that share it.
    """
    if isinstance(address, str):
        address = parse_address(address)
    connection = Connection(
        owner or Dispatcher({}),
        settings=settings,
        clock=clock,
        prepare=prepare,
        faults=faults,
        silence=silence,
    )
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            await loop.create_connection(
                lambda: connection,
                address.host,
                address.port,
                ssl=tls,
                server_hostname=address.host if tls is not None else None,
            )
    except TimeoutError as error:
        raise ConnectFailed(address, f"no connection within {timeout:g} s") from error
    except (OSError, ssl.SSLError) as error:
        raise ConnectFailed(address, _reason(error)) from error
    return connection


def _reason(error: OSError) -> str:
    """What the system said.

    asyncio puts words and tuples of its own in place of that, and all of them in a row for a name
    with several addresses.
    """
    text = str(error)
    codes = set(_CODE.findall(text))
    if "Connect call failed" in text and len(codes) == 1:
        return os.strerror(int(codes.pop()))
    return error.strerror or text
