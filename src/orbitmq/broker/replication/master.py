"""Where the master of a slave is, as far as the slave knows."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from orbitmq.broker.settings import DEFAULT_PORT, HA_DISTANCE, ReplicationSettings
from orbitmq.remoting.address import Address, parse_address
from orbitmq.remoting.errors import AddressError

log = logging.getLogger(__name__)


class MasterPlace:
    """Two addresses: for requests, and for its log.

    They come from the settings, or from a name server with every registration. A master that the
    name server no longer knows is still looked for where it was.
    """

    def __init__(self, settings: ReplicationSettings) -> None:
        self.address: Address | None = None
        self.log_address: Address | None = None
        self._known = asyncio.Event()
        self._is_fixed = settings.master is not None
        #: Whether anybody has said where it is, or that there is none.
        self.is_told = self._is_fixed
        if settings.master is not None:
            address = parse_address(settings.master, default_port=DEFAULT_PORT)
            log_port = address.port + HA_DISTANCE
            if settings.master_ha is None:
                self._become(address, Address(address.host, log_port))
            else:
                self._become(address, parse_address(settings.master_ha, default_port=log_port))

    def learn(self, address: str | None, log_address: str | None) -> None:
        """Take what a name server says."""
        self.is_told = True
        if self._is_fixed or not address or not log_address:
            return
        try:
            self._become(parse_address(address), parse_address(log_address))
        except AddressError as error:
            log.warning("the name server tells a wrong address of the master: %s", error)

    def _become(self, address: Address, log_address: Address) -> None:
        if (address, log_address) != (self.address, self.log_address):
            self.address, self.log_address = address, log_address
            log.info("master known", extra={"master": str(address), "log": str(log_address)})
            self._known.set()

    async def known(self) -> tuple[Address, Address]:
        """Both addresses, as soon as they are known."""
        while self.address is None or self.log_address is None:
            await self._known.wait()
        return self.address, self.log_address

    async def moved(self, *, within: float) -> None:
        """Return when it is known to be elsewhere, or when the time has passed."""
        self._known.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._known.wait()
