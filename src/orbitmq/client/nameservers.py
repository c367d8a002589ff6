"""Asks the name servers: any of them knows everything, so that one after the other is tried.

The one that answered last is asked first. The order is drawn once for each client, or all clients
would sit on the first of the list.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from orbitmq.client.errors import BrokerRefused, NoNameServer, NotANameServer
from orbitmq.remoting.address import Address
from orbitmq.remoting.errors import RemotingError
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command

log = logging.getLogger(__name__)

#: Refusals that speak of the state of one name server, not of what was asked: one that has just
#: started, for instance, does not answer before brokers had the time to register.
NOT_NOW: Final = frozenset(
    {
        int(ResponseCode.SYSTEM_ERROR),
        int(ResponseCode.SYSTEM_BUSY),
        int(ResponseCode.SERVICE_NOT_AVAILABLE),
        int(ResponseCode.GO_AWAY),
    }
)

#: What every name server answers, however old.
_BASIC: Final = frozenset(
    {int(RequestCode.GET_ROUTEINFO_BY_TOPIC), int(RequestCode.GET_BROKER_CLUSTER_INFO)}
)

#: Asks one name server.
Ask: TypeAlias = Callable[[Address], Awaitable[Command]]


class NameServers:
    """The name servers of a cluster, and which of them to ask."""

    def __init__(self, addresses: Sequence[Address], chance: random.Random) -> None:
        self._order = list(addresses)
        chance.shuffle(self._order)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All of them, the one to be asked next first."""
        return tuple(self._order)

    async def ask(self, ask: Ask) -> Command:
        """The answer of the first one that gives any. Raises `NoNameServer`, or its refusal."""
        tried: list[tuple[Address, str]] = []
        refusal: BrokerRefused | None = None
        for address in self.addresses:
            try:
                answer = await ask(address)
            except (RemotingError, BrokerRefused) as error:
                if isinstance(error, BrokerRefused):
                    if _shows_no_name_server(error):
                        raise NotANameServer(error) from error
                    if error.code not in NOT_NOW:
                        raise
                    refusal = error
                tried.append((address, str(error)))
                self._put_last(address)
                continue
            if tried:
                log.warning("name server %s is used: %s", address, _reasons(tried))
            return answer
        raise refusal or NoNameServer(tried)

    def _put_last(self, address: Address) -> None:
        # Two callers may find the same one dead: whoever comes second changes nothing.
        if self._order[0] == address:
            self._order.append(self._order.pop(0))


def _shows_no_name_server(refused: BrokerRefused) -> bool:
    return refused.request_code in _BASIC and refused.code in (
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        # Name servers let everybody ask; a broker with accounts does not say what it knows.
        ResponseCode.NO_PERMISSION,
    )


def _reasons(tried: list[tuple[Address, str]]) -> str:
    return "; ".join(reason for _, reason in tried)
