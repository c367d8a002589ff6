"""Who sent which request that is answered by message.

A reply names the client that asked, by an id that the client has made up, and the request, by a
number that nobody can guess. An id may be another account's by the time the reply comes; the number
is not. So the account is noted with both when the request passes, and the reply is for that account
alone.

Each account has room for so many of its own and displaces nobody else's. A request that did not
pass here (replies may come to any broker of the cluster), or that was displaced, is not known;
`Access.requester` says what becomes of its reply.
"""

from __future__ import annotations

from collections import deque

from orbitmq.message.properties import property_value
from orbitmq.message.wellknown import CORRELATION_ID, REPLY_TO_CLIENT

#: Requests that are remembered of one account.
MOST_OF_ONE = 4096
#: Characters of an id and a number together; nobody's are so long.
_LONGEST = 512

_MARK = REPLY_TO_CLIENT + "\x01"


class Requesters:
    """The accounts of requests whose replies may still come."""

    def __init__(self) -> None:
        #: By client id and number of the request.
        self._accounts: dict[tuple[str, str], str] = {}
        #: Of each account, the oldest first.
        self._of: dict[str, deque[tuple[str, str]]] = {}

    def note(self, account: str, properties: str) -> None:
        """A message passes; remember whose it is if it asks for a reply."""
        if _MARK not in properties:
            return
        asked = _asked(properties)
        # Whoever repeats another's number does not become the one who asked.
        if asked is None or asked in self._accounts or sum(map(len, asked)) > _LONGEST:
            return
        self._accounts[asked] = account
        own = self._of.setdefault(account, deque())
        own.append(asked)
        if len(own) > MOST_OF_ONE:
            del self._accounts[own.popleft()]

    def account_of(self, properties: str) -> str | None:
        """Whose request a reply with these properties is for; None: not known."""
        asked = _asked(properties)
        return None if asked is None else self._accounts.get(asked)


def _asked(properties: str) -> tuple[str, str] | None:
    client_id = property_value(properties, REPLY_TO_CLIENT)
    number = property_value(properties, CORRELATION_ID)
    return None if not client_id or not number else (client_id, number)
