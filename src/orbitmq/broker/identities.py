"""Which account stands behind a connection, and whose a client id is.

Requests carry their credentials one by one, but what the broker says to a client on its own - asks
it about a transaction, gives it a reply, passes a question on - goes to a connection, because a
heartbeat came over it. So the account of the last heartbeat is remembered with the connection, and
what that account may do is looked up when there is something to say: rights that were taken away
are gone at once.

Replies and questions name a client id, which its client has made up; and locks of a group belong to
one. So while a connection of one account uses an id in a group, no other account may do so in the
same group. In other groups it may: many clients are called after their address alone
(`10.0.0.7@DEFAULT`), and containers share addresses. What is meant for a client id then goes to the
account that it is meant for (`Access.nearest`, `Access.requester`). For that it also matters who
used an id a while ago: a reply may be for a client that is gone, and not for its successor.

An id is in use for as long as its last heartbeat is not older than `SILENCE` and its account still
exists: somebody who comes back with another key, and whose former connection nobody has closed,
need not wait until the broker does. Only the id of the last heartbeat counts, so a connection
cannot keep more than one from others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from orbitmq.broker.needs import Claim
from orbitmq.broker.peers import peer_of
from orbitmq.remoting.connection import Connection

#: Stands for whoever comes from a host that needs no account.
TRUSTED = ""
#: Clients send heartbeats every 30 s.
SILENCE = 45.0
#: How long it is remembered that an account has used an id, and how many ids of one account.
REMEMBERED = 600.0
_MOST_FORMER = 1024


class Identities:
    """The accounts and client ids of all connections."""

    def __init__(self, monotonic: Callable[[], float], is_account: Callable[[str], bool]) -> None:
        """`is_account` tells whether there is such an account now."""
        self._monotonic = monotonic
        self._is_account = is_account
        #: By client id and connection: the last heartbeat, and when it came.
        self._noted: dict[str, dict[Connection, tuple[Claim, float]]] = {}
        #: Of each account: the ids that it has used, and until when. Nobody displaces another's.
        self._former: dict[str, OrderedDict[str, float]] = {}

    def is_taken(
        self, claim: Claim, account: str, by: Connection, is_known: Callable[[Connection], bool]
    ) -> bool:
        """Whether a client id is in use in the same group by another account.

        `is_known` tells whether the account behind a connection still exists.
        """
        noted = self._noted.get(claim.client_id)
        if account == TRUSTED or not noted:
            return False
        fresh = self._monotonic() - SILENCE
        return any(
            each is not by
            and each.is_open
            and peer_of(each).account != account
            and heard_at >= fresh
            and claim.meets(theirs)
            and is_known(each)
            for each, (theirs, heard_at) in noted.items()
        )

    def note(self, connection: Connection, account: str, claim: Claim) -> None:
        """Remember whose heartbeat came over a connection."""
        peer = peer_of(connection)
        if (peer.client_id, peer.account) != (claim.client_id, account):
            self.forget(connection)
        self._noted.setdefault(claim.client_id, {})[connection] = (claim, self._monotonic())
        peer.account = account
        peer.client_id = claim.client_id

    def forget(self, connection: Connection) -> None:
        """Nobody is there any more, or under another client id."""
        peer = peer_of(connection)
        client_id, account, peer.account, peer.client_id = peer.client_id, peer.account, None, None
        if client_id is None or account is None:
            return
        noted = self._noted[client_id]
        del noted[connection]
        if not noted:
            del self._noted[client_id]
        if self._is_account(account):
            self._remember(account, client_id)

    def _remember(self, account: str, client_id: str) -> None:
        now = self._monotonic()
        former = self._former.setdefault(account, OrderedDict())
        former.pop(client_id, None)
        while former and (
            len(former) >= _MOST_FORMER or next(iter(former.values())) <= now - REMEMBERED
        ):
            former.popitem(last=False)
        former[client_id] = now

    def uses(self, account: str, client_id: str) -> bool:
        """Whether a connection of an account has this client id now."""
        noted = self._noted.get(client_id, ())
        return any(each.is_open and peer_of(each).account == account for each in noted)

    def former(self, client_id: str) -> frozenset[str]:
        """The accounts that used a client id of late and have left, or may have come back."""
        since = self._monotonic() - REMEMBERED
        return frozenset(
            account for account, ids in self._former.items() if ids.get(client_id, since) > since
        )

    def keep(self) -> None:
        """Forget which ids were used by accounts that are gone."""
        for account in [each for each in self._former if not self._is_account(each)]:
            del self._former[account]
