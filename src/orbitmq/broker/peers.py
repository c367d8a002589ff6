"""What a broker remembers about the other end of a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbitmq.message.errors import RecordRefused
from orbitmq.message.hosts import pack_host
from orbitmq.remoting.connection import Connection

if TYPE_CHECKING:
    from orbitmq.broker.heldpull import HeldPull

_UNKNOWN_HOST = pack_host("0.0.0.0", 0)  # noqa: S104  # says "not known", nobody binds it


class Peer:
    """One connection's share of the broker's memory; `Connection.context` of every connection."""

    __slots__ = ("account", "born_host", "client_id", "held", "held_weight", "name")

    def __init__(self, name: str, born_host: bytes) -> None:
        #: `host:port`, for logs and to tell who reported progress.
        self.name = name
        #: The peer's address as its messages carry it.
        self.born_host = born_host
        #: Its pulls that wait for messages, those first that were held first, and what they weigh.
        self.held: dict[HeldPull, None] = {}
        self.held_weight = 0
        #: Whose last heartbeat came over it, and as which client; None before, and without access
        #: rules.
        self.account: str | None = None
        self.client_id: str | None = None


def meet(connection: Connection) -> None:
    """Give a new connection its memory."""
    try:
        born_host = pack_host(connection.remote.host.partition("%")[0], connection.remote.port)
    except RecordRefused:
        born_host = _UNKNOWN_HOST
    connection.context = Peer(str(connection.remote), born_host)


def peer_of(connection: Connection) -> Peer:
    """What is remembered about a connection."""
    peer: Peer = connection.context
    return peer
