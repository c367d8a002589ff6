"""Which account stands behind a connection, and whose a client id is.

Requests carry their credentials one by one, but what the broker says to a client on its own - asks
it about a transaction, gives it a reply, passes a question on - goes to a connection, because a
heartbeat came over it. So the account of the last heartbeat is remembered with the connection, and
what that account may do is looked up when there is something to say: rights that were taken away
are gone at once.

Replies and questions name a client id, which its client has made up. As long as a connection of
one account uses an id, no other account may: it would get what is meant for the first. Only the id
of the last heartbeat counts, so a connection cannot keep more than one from others.
"""

from __future__ import annotations

from orbitmq.broker.peers import peer_of
from orbitmq.remoting.connection import Connection

#: Stands for whoever comes from a host that needs no account.
TRUSTED = ""


class Identities:
    """The accounts and client ids of all connections."""

    def __init__(self) -> None:
        self._connections: dict[str, set[Connection]] = {}

    def is_taken(self, client_id: str, account: str, by: Connection) -> bool:
        """Whether a client id is in use over a connection of another account."""
        return account != TRUSTED and any(
            each is not by and each.is_open and peer_of(each).account != account
            for each in self._connections.get(client_id, ())
        )

    def note(self, connection: Connection, account: str, client_id: str) -> None:
        """Remember whose heartbeat came over a connection."""
        peer = peer_of(connection)
        if peer.client_id != client_id:
            self.forget(connection)
            self._connections.setdefault(client_id, set()).add(connection)
        peer.account = account
        peer.client_id = client_id

    def forget(self, connection: Connection) -> None:
        """Nobody is there any more, or under another client id."""
        peer = peer_of(connection)
        client_id, peer.account, peer.client_id = peer.client_id, None, None
        if client_id is None:
            return
        connections = self._connections[client_id]
        connections.discard(connection)
        if not connections:
            del self._connections[client_id]
