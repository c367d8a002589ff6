"""Whether a request may be carried out: who sent it, and what that account is allowed.

Off unless there is a file of accounts: then every request is let through and the fields with
credentials are ignored. With one, a request passes if

1. it comes from a host in the global white list; or else
2. it names an account, and comes from a host in the white list of that account; or else
3. it is signed with the secret of the account that it names, and that account has every permission
   that `needs` lists for its code. A code that is not listed is administration.

The permissions are worked out from the same typed headers and bodies that the handlers read, so
that nobody can show one topic here and another one there. We ask for more than Apache does in four
places, each of which lets somebody read or write what is denied to him there: a retry topic belongs
to the group in its name, not to the one that the request claims; a message that is named by its
place in the log (looked at, sent back, ended as a transaction) counts with the topic that it is
really in; the broker's own topics are not covered by defaults (see `accounts`); and a request
without any field is checked like any other.

What the broker says to clients on its own is for those only whose account may have it
(`may_publish`, `may_consume`; see `identities`), and a client id that another account uses in the
same group is refused.

A request that is not answered at once is checked again before it is, if the accounts have changed
since (`check_again`).

A refusal says what is missing, but not whether an access key exists: an unknown key and a wrong
signature are answered alike, and take the same time.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from orbitmq.broker.accounts import Account, Accounts, AccountsFile, Grant, is_internal
from orbitmq.broker.clients import Channel
from orbitmq.broker.identities import TRUSTED, Identities
from orbitmq.broker.needs import CLAIMS, NEEDS, Claim, Need, group_need, topic_need
from orbitmq.broker.parts import Parts
from orbitmq.broker.peers import peer_of
from orbitmq.broker.requesters import Requesters, asks
from orbitmq.message.errors import MessageError
from orbitmq.message.stored import decode_message
from orbitmq.message.wellknown import REAL_TOPIC
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.errors import Refused
from orbitmq.remoting.occurrences import Occurrences
from orbitmq.store.errors import StoreError
from orbitmq.store.store import Store
from orbitmq.wire.acl import access_key_of, is_signed_by
from orbitmq.wire.codes import RequestCode as Code
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command

log = logging.getLogger(__name__)

#: What an unknown key is checked against, so that it takes as long as a known one.
_NOBODYS_SECRET = "nobody signs with this"  # noqa: S105  # it opens nothing
#: Of a key that somebody claims, this much is shown.
_SHOWN = 64


class Reason(enum.StrEnum):
    """Why requests are refused; also a label of the metric."""

    NO_CREDENTIALS = "no_credentials"
    UNKNOWN_KEY = "unknown_access_key"
    WRONG_SIGNATURE = "wrong_signature"
    NOT_PERMITTED = "not_permitted"
    NOT_ADMIN = "not_admin"
    CLIENT_TAKEN = "client_id_taken"


def open_access(parts: Parts) -> Access:
    """The access rules of a broker, kept up to date. Raises `AccountsUnreadable`."""
    settings = parts.settings.access
    access = Access(settings.accounts, parts.store, parts.clock.monotonic)
    if access.is_on:
        parts.background.every(settings.check_interval, access.refresh)
        parts.on_connection_closed(access.forget)
    return access


class Access:
    """Lets requests pass or refuses them."""

    def __init__(
        self,
        accounts: Path | None,
        store: Store,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = AccountsFile(accounts) if accounts is not None else None
        self._store = store
        self._noted = Occurrences()
        self._identities = Identities(monotonic, self._is_account)
        self._requesters = Requesters(monotonic)
        self._on_change: list[Callable[[], None]] = []
        #: Counts how often the accounts have changed.
        self.version = 0
        #: How many requests were refused, by reason.
        self.refused = dict.fromkeys(Reason, 0)

    @property
    def is_on(self) -> bool:
        return self._file is not None

    @property
    def hook(self) -> Callable[[Connection, Command], None] | None:
        """What a dispatcher calls before it carries a request out."""
        return self.check if self.is_on else None

    def refresh(self) -> None:
        """Take over what the file of accounts says by now."""
        if self._file is not None and self._file.refresh():
            self.version += 1
            self._identities.keep()
            self._requesters.keep(self._is_account)
            for call in self._on_change:
                call()

    def on_change(self, call: Callable[[], None]) -> None:
        """Have `call` called after the accounts have changed."""
        self._on_change.append(call)

    def check(self, connection: Connection, request: Command) -> None:
        """Raise `Refused` unless the request may be carried out."""
        if self._file is None:
            return
        account = self._sender(self._file.accounts, connection.remote.host, request)
        claim = CLAIMS.get(request.code)
        if claim is not None:
            self._check_client(connection, request, account, claim(request))

    def check_again(self, connection: Connection, request: Command, *, since: int) -> None:
        """Raise `Refused` if a request that passed at version `since` does not pass any more."""
        if since != self.version:
            self.check(connection, request)

    def _sender(self, accounts: Accounts, host: str, request: Command) -> str:
        """The account that sent a request which may be carried out. Raises `Refused`."""
        if host in accounts.white_hosts:
            return self._claimed(request)
        key = access_key_of(request)
        if key is None:
            raise self._refusal(Reason.NO_CREDENTIALS, None, host, _ASKS_FOR_CREDENTIALS)
        account = accounts.by_key.get(key)
        if account is not None and host in account.white_hosts:
            return account.access_key
        is_signed = is_signed_by(request, account.secret_key if account else _NOBODYS_SECRET)
        if account is None:
            raise self._refusal(Reason.UNKNOWN_KEY, key, host, _NOT_RECOGNISED)
        if not is_signed:
            raise self._refusal(Reason.WRONG_SIGNATURE, key, host, _NOT_RECOGNISED)
        if not account.is_admin:
            self._check_permissions(account, request, host)
        return account.access_key

    def _check_permissions(self, account: Account, request: Command, host: str) -> None:
        needs = NEEDS.get(request.code)
        if needs is None:
            raise self._refusal(
                Reason.NOT_ADMIN,
                account.access_key,
                host,
                f"request {request.code} needs an account with admin = true",
            )
        for need in needs(request, self._topic_at):
            if not account.may(*need):
                raise self._refusal(
                    Reason.NOT_PERMITTED,
                    account.access_key,
                    host,
                    f"no {need.grant.words} permission on {need.kind} {need.name!r}",
                )

    def _check_client(
        self, connection: Connection, request: Command, account: str, claim: Claim
    ) -> None:
        if self._identities.is_taken(claim, account, connection, self._is_known):
            raise self._refusal(
                Reason.CLIENT_TAKEN,
                account,
                connection.remote.host,
                f"client id {claim.client_id[:_SHOWN]!r} is in use by another account in the same "
                "group; set another instance name",
            )
        if request.code == Code.HEART_BEAT:
            self._identities.note(connection, account, claim)

    def _claimed(self, request: Command) -> str:
        """The account of a request that has passed.

        Hosts that need no account may name one nevertheless. A name that nobody has is nobody's:
        else they could make up accounts without end.
        """
        key = access_key_of(request)
        return key if key is not None and self._is_account(key) else TRUSTED

    def _is_account(self, key: str) -> bool:
        return key == TRUSTED or (self._file is not None and key in self._file.accounts.by_key)

    def _is_known(self, connection: Connection) -> bool:
        """Whether the account behind a connection still exists."""
        assert self._file is not None  # noqa: S101  # nobody is noted without accounts
        accounts = self._file.accounts
        return (
            connection.remote.host in accounts.white_hosts
            or peer_of(connection).account in accounts.by_key
        )

    def forget(self, connection: Connection) -> None:
        """A connection was closed."""
        self._identities.forget(connection)

    # What the broker says on its own.

    def may_publish(self, channel: Channel, topic: str) -> bool:
        """Whether the client of a connection may know what is being sent to a topic."""
        return self._may(channel, topic_need(topic, Grant.PUB))

    def may_consume(self, channel: Channel, group: str, topic: str | None = None) -> bool:
        """Whether the client of a connection may know of a group, and what a topic has for it."""
        needs = [group_need(group)]
        if topic is not None:
            needs.append(topic_need(topic, Grant.SUB))
        return self._may(channel, *needs)

    def nearest(self, channels: Sequence[Connection], request: Command) -> Connection | None:
        """Which of the connections that use one client id is meant by whoever sent a request.

        The last one of the sender's own account; else the last one, if they are all of one
        account. Else nobody can tell, and None is better than to tell somebody what is meant for
        another.
        """
        if self._file is None:
            return channels[-1] if channels else None
        by_account = {peer_of(each).account: each for each in channels if self._is_known(each)}
        own = by_account.get(self._claimed(request))
        if own is not None:
            return own
        return next(iter(by_account.values())) if len(by_account) == 1 else None

    def note_sent(self, request: Command, properties: str) -> None:
        """A message was taken: if it asks for a reply, that is for the account which sent it."""
        if asks(properties):
            self._requesters.note(self._claimed(request), properties, self._identities.uses)

    def requester(
        self, channels: Sequence[Connection], request: Command, client_id: str, properties: str
    ) -> Connection | None:
        """Which of the connections that use a client id gets a reply.

        The nearest one. If that is another account's than the replier's own, only while nothing
        speaks against it: no other account has used the id of late (it may be for somebody who is
        gone), and the request, if it passed here, came from the same account. Nothing else makes
        up for either, as whoever could read the request can have sent a copy of it.
        """
        nearest = self.nearest(channels, request)
        if self._file is None or nearest is None:
            return nearest
        account = peer_of(nearest).account
        if account == self._claimed(request):
            return nearest
        if self._requesters.account_of(properties) not in (None, account):
            return None
        return nearest if self._identities.former(client_id) <= {account} else None

    def _may(self, channel: Channel, *needs: Need) -> bool:
        if self._file is None:
            return True
        if not isinstance(channel, Connection):
            return False
        accounts, host = self._file.accounts, channel.remote.host
        if host in accounts.white_hosts:
            return True
        account = accounts.by_key.get(peer_of(channel).account or "")
        if account is None:
            return False
        return host in account.white_hosts or all(account.may(*need) for need in needs)

    def _topic_at(self, offset: int) -> str | None:
        """The topic that the message at a place of the log belongs to, wherever it waits.

        Also before the disk has it: a transaction may be ended by then.
        """
        try:
            message = decode_message(self._store.written_at(offset))
        except (StoreError, MessageError):
            # The handler says so, in its own words.
            return None
        if is_internal(message.topic):
            return message.get_property(REAL_TOPIC) or message.topic
        # Elsewhere the property says where it once waited, or what its sender made up.
        return message.topic

    def _refusal(self, reason: Reason, key: str | None, host: str, remark: str) -> Refused:
        self.refused[reason] += 1
        shown = "" if key is None else f" of access key {key[:_SHOWN]!r}"
        # Keys that nobody has do not count: whoever makes them up could fill the log.
        who = key if key is not None and reason is not Reason.UNKNOWN_KEY else ""
        count = self._noted.note(f"{reason}\n{who}\n{remark}\n{host}")
        if count:
            log.warning(
                "request%s refused (time %d): %s",
                shown,
                count,
                remark,
                extra={"client": host, "reason": reason.value},
            )
        return Refused(ResponseCode.NO_PERMISSION, f"request{shown} refused: {remark}")


_ASKS_FOR_CREDENTIALS = (
    "it has no credentials, and this broker asks for them; set an access key and a secret key"
)
_NOT_RECOGNISED = (
    "the access key is unknown or the signature is wrong; check the access key and the secret key"
)
