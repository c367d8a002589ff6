"""Access rules: which account sent a request, and whether that account may send it.

Without a file of accounts every request passes. With one, a request passes if its host is in the
global white list; or it names an account and its host is in that account's white list; or it is
signed by an account that has every permission that `needs` lists for its code. A code that is not
listed needs an administrator. Permissions are derived from the typed headers and bodies that the
handlers read. A request that is answered later is checked again if the accounts have changed.

Trap: a refusal must not show whether an access key exists. An unknown key and a wrong signature get
the same answer in the same time. For the stricter rules than Apache's see docs/differences.md.
"""

from __future__ import annotations

import enum
import ipaddress
import logging
import re
import time
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

from orbitmq import names
from orbitmq.broker.errors import BrokerError, Refused
from orbitmq.broker.groups import Channel, peer_of
from orbitmq.logonce import LogEveryNth
from orbitmq.message.properties import REAL_TOPIC
from orbitmq.message.record import MessageError
from orbitmq.message.stored import decode_message
from orbitmq.remoting.connection import Connection
from orbitmq.store.settings import StoreError
from orbitmq.store.store import Store
from orbitmq.wire.bodies import CheckClientRequest, HeartbeatData, LockBatch, QueryAssignment
from orbitmq.wire.codes import RequestCode as Code
from orbitmq.wire.codes import ResponseCode, named
from orbitmq.wire.command import Command, access_key_of, is_signed_by
from orbitmq.wire.headers import (
    ConsumerSendBackRequest,
    EndTransactionRequest,
    GetConsumerListRequest,
    GetConsumerRunningInfoRequest,
    GetEarliestStoreTimeRequest,
    GetMaxOffsetRequest,
    GetMinOffsetRequest,
    Header,
    PullMessageRequest,
    QueryConsumerOffsetRequest,
    QueryMessageRequest,
    RecallMessageRequest,
    SearchOffsetRequest,
    SendMessageRequest,
    UnregisterClientRequest,
    UpdateConsumerOffsetRequest,
    ViewMessageRequest,
)
from orbitmq.wire.javajson import decode_body

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts


log = logging.getLogger(__name__)

#: The secret that an unknown key is checked with, so that it takes as long as a known one.
_NO_SECRET = "no account signs with this"  # noqa: S105  # it grants nothing
#: Characters of a key from a request that texts show.
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
        parts.scheduler.every(settings.check_interval, access.refresh)
        parts.on_connection_closed(access.forget)
    return access


class Access:
    """Accepts or refuses requests."""

    def __init__(
        self,
        accounts: Path | None,
        store: Store,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = AccountsFile(accounts) if accounts is not None else None
        self._store = store
        self._noted = LogEveryNth()
        self._identities = Identities(monotonic, self._is_account)
        self._on_change: list[Callable[[], None]] = []
        #: Increases when the accounts change.
        self.version = 0
        #: The number of refused requests, by reason.
        self.refused = dict.fromkeys(Reason, 0)

    @property
    def is_on(self) -> bool:
        return self._file is not None

    @property
    def hook(self) -> Callable[[Connection, Command], None] | None:
        """The dispatcher calls this before it carries a request out."""
        return self.check if self.is_on else None

    def refresh(self) -> None:
        """Read the file of accounts again."""
        if self._file is not None and self._file.refresh():
            self.version += 1
            self._identities.keep()
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
        """Raise `Refused` if a request that passed at version `since` is no longer allowed."""
        if since != self.version:
            self.check(connection, request)

    def _sender(self, accounts: Accounts, host: str, request: Command) -> str:
        """The account of a request that may be carried out. Raises `Refused`."""
        if host in accounts.white_hosts:
            return self._claimed(request)
        key = access_key_of(request)
        if key is None:
            raise self._refusal(Reason.NO_CREDENTIALS, None, host, _ASKS_FOR_CREDENTIALS)
        account = accounts.by_key.get(key)
        if account is not None and host in account.white_hosts:
            return account.access_key
        is_signed = is_signed_by(request, account.secret_key if account else _NO_SECRET)
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
                f"request {named(Code, request.code)!r} needs an account with admin = true",
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

        A host that needs no account may still name one. A key without an account does not count:
        such keys could be invented without end.
        """
        key = access_key_of(request)
        return key if key is not None and self._is_account(key) else TRUSTED

    def _is_account(self, key: str) -> bool:
        return key == TRUSTED or (self._file is not None and key in self._file.accounts.by_key)

    def _is_known(self, connection: Connection) -> bool:
        """Whether the account behind a connection still exists."""
        assert self._file is not None  # noqa: S101  # accounts are remembered only with a file
        accounts = self._file.accounts
        return (
            connection.remote.host in accounts.white_hosts
            or peer_of(connection).account in accounts.by_key
        )

    def forget(self, connection: Connection) -> None:
        """A connection was closed."""
        self._identities.forget(connection)

    # What the broker sends on its own.

    def may_publish(self, channel: Channel, topic: str) -> bool:
        """Whether the client of a connection may see messages of a topic."""
        return self._may(channel, topic_need(topic, Grant.PUB))

    def may_consume(self, channel: Channel, group: str, topic: str | None = None) -> bool:
        """Whether the client of a connection may see a group, and its part of a topic."""
        needs = [group_need(group)]
        if topic is not None:
            needs.append(topic_need(topic, Grant.SUB))
        return self._may(channel, *needs)

    def nearest(self, channels: Sequence[Connection], request: Command) -> Connection | None:
        """The connection with a client id that a request from `asking` means.

        The last one of the sender's own account; else the last one, if all are of one account;
        else None, because the request could be meant for another account.
        """
        if self._file is None:
            return channels[-1] if channels else None
        by_account = {peer_of(each).account: each for each in channels if self._is_known(each)}
        own = by_account.get(self._claimed(request))
        if own is not None:
            return own
        return next(iter(by_account.values())) if len(by_account) == 1 else None

    def requester(
        self, channels: Sequence[Connection], request: Command, client_id: str
    ) -> Connection | None:
        """The connection with a client id that gets a reply.

        The nearest one. One of another account than the replier's only if no other account uses the
        id or has used it recently: the reply may be for a client that is no longer a producer.
        """
        nearest = self.nearest(channels, request)
        if self._file is None or nearest is None:
            return nearest
        account = peer_of(nearest).account
        if account == self._claimed(request):
            return nearest
        users = self._identities.users(client_id, self._is_known)
        return nearest if users <= {account} else None

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
        """The topic of the message at a position of the log, also while the message is parked.

        Also before it is on the disk: a transaction may end by then.
        """
        try:
            message = decode_message(self._store.written_at(offset))
        except (StoreError, MessageError):
            # The handler refuses it, with its own text.
            return None
        if is_internal(message.topic):
            return message.get_property(REAL_TOPIC) or message.topic
        # In other topics the property is a former parking place, or the sender's invention.
        return message.topic

    def _refusal(self, reason: Reason, key: str | None, host: str, remark: str) -> Refused:
        self.refused[reason] += 1
        shown = "" if key is None else f" of access key {key[:_SHOWN]!r}"
        # Keys without an account do not count: invented ones could fill the log.
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


# The permissions that each request of producers and consumers needs.


class Grant(enum.IntFlag):
    """What an account may do with a topic or a group."""

    DENY = 0
    PUB = 1
    SUB = 2

    @property
    def words(self) -> str:
        """The text in a file of accounts."""
        return "|".join(grant.name or "" for grant in self) or "DENY"


class Kind(enum.StrEnum):
    """The kind of resource that a permission is for."""

    TOPIC = "topic"
    GROUP = "group"


class Need(NamedTuple):
    """A permission that a request needs."""

    kind: Kind
    name: str
    grant: Grant


#: Finds the topic of the message at a position of the log.
TopicAt = Callable[[int], str | None]
Needs = Callable[[Command, TopicAt], Iterable[Need]]


def topic_need(topic: str, grant: Grant) -> Need:
    """A permission on a topic; for a retry topic it is one on its group."""
    group = names.group_of_retry_topic(topic)
    return Need(Kind.TOPIC, topic, grant) if group is None else group_need(group)


def group_need(group: str) -> Need:
    return Need(Kind.GROUP, group, Grant.SUB)


def _topic(header: type[Header], grant: Grant) -> Needs:
    """For requests about a topic."""

    def needs(request: Command, _: TopicAt) -> Iterable[Need]:
        yield topic_need(request.header(header).topic, grant)  # type: ignore[attr-defined]

    return needs


def _group(header: type[Header]) -> Needs:
    """For requests about a consumer group."""

    def needs(request: Command, _: TopicAt) -> Iterable[Need]:
        yield group_need(request.header(header).consumer_group)  # type: ignore[attr-defined]

    return needs


def _group_and_topic(header: type[Header]) -> Needs:
    """For requests of a consumer group about a topic."""
    topic, group = _topic(header, Grant.SUB), _group(header)
    return lambda request, topic_at: (*group(request, topic_at), *topic(request, topic_at))


def _end_transaction(request: Command, topic_at: TopicAt) -> Iterable[Need]:
    header = request.header(EndTransactionRequest)
    for topic in {header.topic, topic_at(header.commit_log_offset)}:
        if topic:
            yield topic_need(topic, Grant.PUB)


def _send_back(request: Command, topic_at: TopicAt) -> Iterable[Need]:
    header = request.header(ConsumerSendBackRequest)
    yield group_need(header.group)
    topic = topic_at(header.offset)
    if topic is not None:
        yield topic_need(topic, Grant.SUB)


def _view(request: Command, topic_at: TopicAt) -> Iterable[Need]:
    topic = topic_at(request.header(ViewMessageRequest).offset)
    if topic is not None:
        yield topic_need(topic, Grant.SUB)


def _heartbeat(request: Command, _: TopicAt) -> Iterable[Need]:
    """Producer groups are free; transaction checks look at the account when they are sent."""
    for consumer in decode_body(HeartbeatData, request.body).consumer_data_set:
        yield group_need(consumer.group_name)
        own = names.retry_topic(consumer.group_name)
        for subscription in consumer.subscription_data_set:
            # A Java client in server-side assignment also names the retry topics of POP. That gives
            # no messages: a pull of them needs the permission.
            if not subscription.topic.startswith((f"{own}_", f"{own}+")):
                yield topic_need(subscription.topic, Grant.SUB)


def _unregister(request: Command, _: TopicAt) -> Iterable[Need]:
    group = request.header(UnregisterClientRequest).consumer_group
    if group:
        yield group_need(group)


def _check_client(request: Command, _: TopicAt) -> Iterable[Need]:
    asked = decode_body(CheckClientRequest, request.body)
    if asked.group:
        yield group_need(asked.group)
    if asked.subscription_data is not None:
        yield topic_need(asked.subscription_data.topic, Grant.SUB)


def _lock(request: Command, _: TopicAt) -> Iterable[Need]:
    asked = decode_body(LockBatch, request.body)
    yield group_need(asked.consumer_group)
    for topic in {queue.topic for queue in asked.mq_set}:
        yield topic_need(topic, Grant.SUB)


def _assignment(request: Command, _: TopicAt) -> Iterable[Need]:
    asked = decode_body(QueryAssignment, request.body)
    yield group_need(asked.consumer_group)
    yield topic_need(asked.topic, Grant.SUB)


#: What the requests of producers and consumers need. Every other request needs an admin.
NEEDS: Mapping[int, Needs] = {
    **dict.fromkeys(
        (
            Code.SEND_MESSAGE,
            Code.SEND_MESSAGE_V2,
            Code.SEND_BATCH_MESSAGE,
            Code.SEND_REPLY_MESSAGE,
            Code.SEND_REPLY_MESSAGE_V2,
        ),
        _topic(SendMessageRequest, Grant.PUB),
    ),
    Code.RECALL_MESSAGE: _topic(RecallMessageRequest, Grant.PUB),
    Code.END_TRANSACTION: _end_transaction,
    Code.CONSUMER_SEND_MSG_BACK: _send_back,
    Code.PULL_MESSAGE: _group_and_topic(PullMessageRequest),
    Code.LITE_PULL_MESSAGE: _group_and_topic(PullMessageRequest),
    Code.QUERY_CONSUMER_OFFSET: _group_and_topic(QueryConsumerOffsetRequest),
    Code.UPDATE_CONSUMER_OFFSET: _group_and_topic(UpdateConsumerOffsetRequest),
    Code.LOCK_BATCH_MQ: _lock,
    Code.UNLOCK_BATCH_MQ: _lock,
    Code.SEARCH_OFFSET_BY_TIMESTAMP: _topic(SearchOffsetRequest, Grant.SUB),
    Code.GET_MAX_OFFSET: _topic(GetMaxOffsetRequest, Grant.SUB),
    Code.GET_MIN_OFFSET: _topic(GetMinOffsetRequest, Grant.SUB),
    Code.GET_EARLIEST_MSG_STORETIME: _topic(GetEarliestStoreTimeRequest, Grant.SUB),
    Code.QUERY_MESSAGE: _topic(QueryMessageRequest, Grant.SUB),
    Code.VIEW_MESSAGE_BY_ID: _view,
    Code.HEART_BEAT: _heartbeat,
    Code.UNREGISTER_CLIENT: _unregister,
    Code.GET_CONSUMER_LIST_BY_GROUP: _group(GetConsumerListRequest),
    # Members of a group ask each other for the queues that they hold.
    Code.GET_CONSUMER_RUNNING_INFO: _group(GetConsumerRunningInfoRequest),
    Code.CHECK_CLIENT_CONFIG: _check_client,
    Code.QUERY_ASSIGNMENT: _assignment,
}

#: Every Java client has this producer for itself, whatever else it does.
_INNER_PRODUCER = "CLIENT_INNER_PRODUCER"


class Claim(NamedTuple):
    """The client that a request speaks for, and as a member of which groups."""

    client_id: str
    consumer_groups: frozenset[str]
    producer_groups: frozenset[str] = frozenset()

    def meets(self, other: Claim) -> bool:
        """Whether both are in one group."""
        return not (
            self.consumer_groups.isdisjoint(other.consumer_groups)
            and self.producer_groups.isdisjoint(other.producer_groups)
        )


def _claim_of_heartbeat(request: Command) -> Claim:
    data = decode_body(HeartbeatData, request.body)
    return Claim(
        data.client_id,
        frozenset(each.group_name for each in data.consumer_data_set),
        frozenset(each.group_name for each in data.producer_data_set) - {_INNER_PRODUCER},
    )


def _claim_of_lock(request: Command) -> Claim:
    asked = decode_body(LockBatch, request.body)
    return Claim(asked.client_id or "", frozenset({asked.consumer_group}))


#: The requests that speak for a client, by their code.
CLAIMS: Mapping[int, Callable[[Command], Claim]] = {
    Code.HEART_BEAT: _claim_of_heartbeat,
    Code.LOCK_BATCH_MQ: _claim_of_lock,
    Code.UNLOCK_BATCH_MQ: _claim_of_lock,
}


# The account of a connection and of a client id.
#
# The broker also sends to clients on its own: transaction checks, replies, forwarded questions.
# Therefore the account of a connection's last heartbeat is remembered, and its permissions are
# looked up at the time of sending. A client id is invented by its client, and order locks belong to
# it. So while a connection of one account uses an id in a group, other accounts may not use it in
# that group; in other groups they may, because many clients are named by their address alone.
# An id is in use until `SILENCE` after its last heartbeat, and while its account exists. A
# connection has one id, that of its last heartbeat.


#: The account of hosts that need none.
TRUSTED = ""
#: Clients send heartbeats every 30 s.
SILENCE = 45.0
#: How long the use of an id by an account is remembered, and how many ids of an account.
REMEMBERED = 600.0
_MOST_FORMER = 1024


class Identities:
    """The accounts and client ids of all connections."""

    def __init__(self, monotonic: Callable[[], float], is_account: Callable[[str], bool]) -> None:
        """`is_account`: whether an account exists now."""
        self._monotonic = monotonic
        self._is_account = is_account
        #: By client id and connection: the last heartbeat, and its time.
        self._noted: dict[str, dict[Connection, tuple[Claim, float]]] = {}
        #: By account: the ids that it has used, and until when that is remembered.
        self._former: dict[str, OrderedDict[str, float]] = {}

    def is_taken(
        self, claim: Claim, account: str, by: Connection, is_known: Callable[[Connection], bool]
    ) -> bool:
        """Whether another account uses a client id in the same group.

        `is_known`: whether the account of a connection still exists.
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
        """Remember the account of a heartbeat's connection."""
        peer = peer_of(connection)
        if (peer.client_id, peer.account) != (claim.client_id, account):
            self.forget(connection)
        self._noted.setdefault(claim.client_id, {})[connection] = (claim, self._monotonic())
        peer.account = account
        peer.client_id = claim.client_id

    def forget(self, connection: Connection) -> None:
        """A connection was closed, or has another client id now."""
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

    def users(self, client_id: str, is_known: Callable[[Connection], bool]) -> set[str | None]:
        """The accounts that have an open connection with a client id, or had one recently.

        Also a connection that is in no group any more: its client may wait for a reply.
        """
        since = self._monotonic() - REMEMBERED
        former = {
            account for account, ids in self._former.items() if ids.get(client_id, since) > since
        }
        return former.union(
            peer_of(each).account
            for each in self._noted.get(client_id, ())
            if each.is_open and is_known(each)
        )

    def keep(self) -> None:
        """Forget the ids of accounts that were removed."""
        for account in [each for each in self._former if not self._is_account(each)]:
            del self._former[account]


# White lists, in the form of RocketMQ's plain ACL. Every part of an address is a number, `*` for
# any, or a range; the last part may be a choice; patterns are separated by commas:
#
#     *                     every host
#     192.168.0.1           one host
#     192.168.*.*           a network
#     192.168.1-20.*        several networks
#     192.168.0.{7,9}       two hosts
#     2001:db8::1-ff        IPv6: parts are hexadecimal, `::` stands for zeros


_ANY = "*"
#: Commas between patterns, not those inside braces.
_between_patterns = re.compile(r",(?![^{]*\})").split


class PatternError(BrokerError):
    """A pattern that is not valid."""


#: Bounds for every part of an address, several where the part is a choice; empty for every host.
_Pattern: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class HostPatterns:
    """The hosts of several patterns."""

    patterns: tuple[_Pattern, ...] = ()

    def __contains__(self, host: str) -> bool:
        """Whether an address is one of these hosts."""
        if not self.patterns:
            return False
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        parts = tuple(address.packed)
        if isinstance(address, ipaddress.IPv6Address):
            parts = tuple(int(part, 16) for part in address.exploded.split(":"))
        return any(_matches(pattern, parts) for pattern in self.patterns)


def _matches(pattern: _Pattern, parts: tuple[int, ...]) -> bool:
    if not pattern:
        return True
    return len(parts) == len(pattern) and all(
        any(low <= part <= high for low, high in bounds)
        for part, bounds in zip(parts, pattern, strict=True)
    )


NO_HOSTS: Final = HostPatterns()


def parse_patterns(text: str) -> HostPatterns:
    """All patterns of a text; none of an empty one. Raises `PatternError`."""
    return HostPatterns(
        tuple(_parse(word.strip()) for word in _between_patterns(text) if word.strip())
    )


def _parse(text: str) -> _Pattern:
    try:
        if text == _ANY:
            return ()
        if ":" in text:
            return _parsed(_expanded(text), base=16, count=8)
        return _parsed(text.split("."), base=10, count=4)
    except ValueError:
        raise PatternError(
            f"a white list takes addresses such as 192.168.0.1, 192.168.*.*, 192.168.1-20.*, "
            f"192.168.0.{{7,9}} and 2001:db8::*, got {text!r}"
        ) from None


def _expanded(text: str) -> list[str]:
    """The eight parts of an IPv6 address, with the zeros for which `::` stands."""
    before, zeros, after = text.partition("::")
    first = before.split(":") if before else []
    last = after.split(":") if after else []
    missing = 8 - len(first) - len(last)
    if zeros and missing < 1:
        raise ValueError
    return [*first, *(["0"] * missing if zeros else []), *last]


def _parsed(parts: list[str], *, base: int, count: int) -> _Pattern:
    if len(parts) != count:
        raise ValueError
    largest = 255 if base == 10 else 0xFFFF
    ranges = []
    for place, part in enumerate(parts, 1):
        choices = [part]
        if place == count and part.startswith("{") and part.endswith("}"):
            choices = part[1:-1].split(",")
        ranges.append(tuple(_range(choice.strip(), base, largest) for choice in choices))
    return tuple(ranges)


def _range(text: str, base: int, largest: int) -> tuple[int, int]:
    if text == _ANY:
        return 0, largest
    first, dash, last = text.partition("-")
    low = _number(first, base)
    high = _number(last, base) if dash else low
    if not low <= high <= largest:
        raise ValueError
    return low, high


def _number(text: str, base: int) -> int:
    # `int` takes signs, underscores and the digits of other scripts as well.
    if not text.isascii() or not text.isalnum():
        raise ValueError
    return int(text, base)


# The file of accounts is TOML, with the words of RocketMQ's `plain_acl.yml` and their meaning; see
# docs/operating.md for an example. A host in an account's `whiteRemoteAddress` that names its key
# needs no signature and may do everything. A topic or group that is not listed gets the account's
# default, except for topics in which the broker parks messages of other topics: they have to be
# listed by name.


#: RocketMQ wants keys that are longer than this.
TOO_SHORT = 6

_INTERNAL_TOPICS = frozenset(
    {
        names.SCHEDULE_TOPIC,
        names.HALF_TOPIC,
        names.OP_HALF_TOPIC,
        names.CHECK_MAX_TIME_TOPIC,
    }
)


class AccountsUnreadable(BrokerError):
    """A file of accounts that is missing or not valid."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"accounts in {path}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One account: its key and what it may do."""

    access_key: str
    secret_key: str = field(repr=False)
    white_hosts: HostPatterns = NO_HOSTS
    is_admin: bool = False
    #: Permissions by name, and by default.
    grants: Mapping[tuple[Kind, str], Grant] = field(default_factory=dict)
    defaults: Mapping[Kind, Grant] = field(default_factory=dict)

    def may(self, kind: Kind, name: str, wanted: Grant) -> bool:
        """Whether this account has a permission."""
        if self.is_admin:
            return True
        granted = self.grants.get((kind, name))
        if granted is None:
            if kind is Kind.TOPIC and is_internal(name):
                return False
            granted = self.defaults.get(kind, Grant.DENY)
        return granted & wanted == wanted


@dataclass(frozen=True, slots=True)
class Accounts:
    """All accounts of a broker."""

    by_key: Mapping[str, Account]
    white_hosts: HostPatterns = NO_HOSTS


class AccountsFile:
    """The accounts of a file, as of its last readable state."""

    def __init__(self, path: Path) -> None:
        """Raises `AccountsUnreadable`: a broker does not start without its accounts."""
        self._path = path
        self._seen = self._state()
        self.accounts = read_accounts(path)

    def refresh(self) -> bool:
        """Read the file again if it was changed; whether the accounts are different now.

        A file that cannot be read changes nothing, and is logged once.
        """
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state
        try:
            self.accounts = read_accounts(self._path)
        except AccountsUnreadable as error:
            log.error("%s; the previous accounts stay in force", error)  # noqa: TRY400  # no bug
            return False
        log.info(
            "accounts read",
            extra={"file": str(self._path), "accounts": len(self.accounts.by_key)},
        )
        return True

    def _state(self) -> tuple[int, int, int] | None:
        """Differs when the file was written or replaced; None when it cannot be read."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino)


def read_accounts(path: Path) -> Accounts:
    """The accounts of a file. Raises `AccountsUnreadable`, which never shows a secret."""
    try:
        return parse_accounts(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AccountsUnreadable(path, error.strerror or type(error).__name__) from None
    except UnicodeDecodeError:
        raise AccountsUnreadable(path, "it is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise AccountsUnreadable(path, f"it is not TOML: {error}") from None
    except (msgspec.ValidationError, _EntryError, PatternError) as error:
        raise AccountsUnreadable(path, str(error)) from None


def parse_accounts(text: str) -> Accounts:
    """The accounts that a text lists."""
    listed = msgspec.convert(tomllib.loads(text), _File)
    by_key: dict[str, Account] = {}
    for place, entry in enumerate(listed.accounts, 1):
        account = _account(entry, place)
        if account.access_key in by_key:
            raise _EntryError(f"accessKey {account.access_key!r} is listed twice")
        by_key[account.access_key] = account
    hosts = ",".join(listed.global_white_remote_addresses)
    return Accounts(by_key, parse_patterns(hosts))


class _Entry(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """An account in the file."""

    access_key: str
    secret_key: str
    white_remote_address: str = ""
    admin: bool = False
    default_topic_perm: str = "DENY"
    default_group_perm: str = "DENY"
    topic_perms: tuple[str, ...] = ()
    group_perms: tuple[str, ...] = ()


class _File(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    global_white_remote_addresses: tuple[str, ...] = ()
    accounts: tuple[_Entry, ...] = ()


class _EntryError(BrokerError):
    """An account that is not valid."""


def _account(entry: _Entry, place: int) -> Account:
    if len(entry.access_key) <= TOO_SHORT:
        raise _EntryError(f"the accessKey of account {place} must be longer than {TOO_SHORT}")
    if len(entry.secret_key) <= TOO_SHORT:
        raise _EntryError(
            f"the secretKey of account {entry.access_key!r} must be longer than {TOO_SHORT}"
        )
    who = f"account {entry.access_key!r}"
    return Account(
        access_key=entry.access_key,
        secret_key=entry.secret_key,
        white_hosts=parse_patterns(entry.white_remote_address),
        is_admin=entry.admin,
        grants={
            **_grants(Kind.TOPIC, entry.topic_perms, f"{who}: topicPerms"),
            **_grants(Kind.GROUP, entry.group_perms, f"{who}: groupPerms"),
        },
        defaults={
            Kind.TOPIC: _grant(entry.default_topic_perm, f"{who}: defaultTopicPerm"),
            Kind.GROUP: _grant(entry.default_group_perm, f"{who}: defaultGroupPerm"),
        },
    )


def _grants(kind: Kind, texts: Iterable[str], where: str) -> dict[tuple[Kind, str], Grant]:
    grants: dict[tuple[Kind, str], Grant] = {}
    for text in texts:
        name, equals, words = text.rpartition("=")
        if not equals or not name.strip():
            raise _EntryError(f"{where} must be like name=PUB|SUB, got {text!r}")
        grants[kind, name.strip()] = _grant(words, where)
    return grants


def _grant(words: str, where: str) -> Grant:
    """Apache reads every unknown word as DENY; here it is an error."""
    granted = _GRANTS.get(words.replace(" ", ""))
    if granted is None:
        raise _EntryError(f"{where} must be DENY, PUB, SUB or PUB|SUB, got {words!r}")
    return granted


_GRANTS: Mapping[str, Grant] = {
    "DENY": Grant.DENY,
    "PUB": Grant.PUB,
    "SUB": Grant.SUB,
    "PUB|SUB": Grant.PUB | Grant.SUB,
    "SUB|PUB": Grant.PUB | Grant.SUB,
}


def is_internal(topic: str) -> bool:
    """Whether the broker parks messages of other topics in this one."""
    return topic in _INTERNAL_TOPICS or topic.startswith(names.SYSTEM_TOPIC_PREFIX)
