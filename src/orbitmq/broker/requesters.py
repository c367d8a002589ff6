"""Who sent which request that is answered by message.

A reply names the client that asked, by an id that the client has made up, and the request, by a
number that nobody can guess. An id may be another account's by the time the reply comes; the number
is not. So the account is noted with both when the request was taken, and other accounts do not get
the reply.

More is not to be made of a note. Whoever reads a request knows both, and can repeat them in a
message to another broker, which the request itself has never passed. So a note keeps a reply from
somebody and never gets it to him (`Access.requester`), and only what comes from an account that
uses the client id here is noted: whoever passes somebody's request on, such as a consumer that has
it delivered again, did not ask.

Each account has room for so many of its own and displaces nobody else's. A note lasts for as long
as the asker waits, and then for as long as it is known who else used its id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from orbitmq.broker.identities import REMEMBERED
from orbitmq.message.properties import property_value
from orbitmq.message.wellknown import CORRELATION_ID, MESSAGE_TTL, REPLY_TO_CLIENT

#: Requests that are remembered of one account.
MOST_OF_ONE = 4096
#: Seconds for which an asker may wait; who waits for longer is remembered for so long only.
LONGEST_WAIT = 86400.0
#: Characters of an id and a number together; nobody's are so long.
_LONGEST = 512
#: Digits of the milliseconds for which an asker waits; nobody waits for so long.
_MOST_DIGITS = 15

_MARK = REPLY_TO_CLIENT + "\x01"


class Requesters:
    """The accounts of requests whose replies may still come."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        #: By client id and number of the request.
        self._accounts: dict[tuple[str, str], str] = {}
        #: Of each account, until when each is remembered, in the order in which they came.
        self._of: dict[str, OrderedDict[tuple[str, str], float]] = {}

    def note(self, account: str, properties: str, uses: Callable[[str, str], bool]) -> None:
        """A message was taken; remember whose it is if it asks for a reply.

        `uses` tells whether an account uses a client id at present.
        """
        asked = _asked(properties)
        if asked is None or sum(map(len, asked)) > _LONGEST or not uses(account, asked[0]):
            return
        # Whoever repeats another's number does not become the one who asked.
        if self._noted(asked) is not None:
            return
        now = self._monotonic()
        own = self._of.setdefault(account, OrderedDict())
        while own and (len(own) >= MOST_OF_ONE or next(iter(own.values())) <= now):
            oldest, _ = own.popitem(last=False)
            del self._accounts[oldest]
        self._accounts[asked] = account
        own[asked] = now + _wait(properties) + REMEMBERED

    def account_of(self, properties: str) -> str | None:
        """Whose request a reply with these properties is for; None: not known."""
        asked = _asked(properties)
        return None if asked is None else self._noted(asked)

    def keep(self, is_account: Callable[[str], bool]) -> None:
        """Forget the requests of accounts that are gone."""
        for account in [each for each in self._of if not is_account(each)]:
            for asked in self._of.pop(account):
                del self._accounts[asked]

    def _noted(self, asked: tuple[str, str]) -> str | None:
        account = self._accounts.get(asked)
        if account is not None and self._of[account][asked] <= self._monotonic():
            del self._accounts[asked], self._of[account][asked]
            return None
        return account


def asks(properties: str) -> bool:
    """Whether a message may be one that asks for a reply; to be called for every message."""
    return _MARK in properties


def _asked(properties: str) -> tuple[str, str] | None:
    client_id = property_value(properties, REPLY_TO_CLIENT)
    number = property_value(properties, CORRELATION_ID)
    return None if not client_id or not number else (client_id, number)


def _wait(properties: str) -> float:
    """For how long the asker waits; 0.0 if it does not say so."""
    text = property_value(properties, MESSAGE_TTL) or ""
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        return 0.0
    return min(int(text) / 1000, LONGEST_WAIT)
