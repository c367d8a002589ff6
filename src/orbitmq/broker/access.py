"""Whether a request may be carried out: who sent it, and what that account is allowed.

Off unless there is a file of accounts: then every request is let through and the fields with
credentials are ignored. With one, a request passes if

1. it comes from a host in the global white list; or else
2. it names an account, and comes from a host in the white list of that account; or else
3. it is signed with the secret of the account that it names, and that account has every permission
   that `NEEDS` lists for its code. A code that is not listed is administration.

The permissions are worked out from the same typed headers and bodies that the handlers read, so
that nobody can show one topic here and another one there. We ask for more than Apache does in four
places, each of which lets somebody read or write what is denied to him there: a retry topic belongs
to the group in its name, not to the one that the request claims; a message that is named by its
place in the log (looked at, sent back, ended as a transaction) counts with the topic that it is
really in; the broker's own topics are not covered by defaults (see `accounts`); and a request
without any field is checked like any other.

A refusal says what is missing, but not whether an access key exists: an unknown key and a wrong
signature are answered alike, and take the same time.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from orbitmq.broker import names
from orbitmq.broker.accounts import Account, AccountsFile, Grant, Kind, is_internal
from orbitmq.broker.parts import Parts
from orbitmq.message.errors import MessageError
from orbitmq.message.stored import decode_message
from orbitmq.message.wellknown import REAL_TOPIC
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.errors import Refused
from orbitmq.remoting.occurrences import Occurrences
from orbitmq.store.errors import StoreError
from orbitmq.store.store import Store
from orbitmq.wire.acl import access_key_of, is_signed_by
from orbitmq.wire.bodies.base import decode_body
from orbitmq.wire.bodies.membership import CheckClientRequest, HeartbeatData, LockBatch
from orbitmq.wire.codes import RequestCode as Code
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.membership import GetConsumerListRequest, UnregisterClientRequest
from orbitmq.wire.headers.offsets import (
    GetEarliestStoreTimeRequest,
    GetMaxOffsetRequest,
    GetMinOffsetRequest,
    QueryConsumerOffsetRequest,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from orbitmq.wire.headers.pull import PullMessageRequest, QueryMessageRequest, ViewMessageRequest
from orbitmq.wire.headers.send import RecallMessageRequest, SendMessageRequest
from orbitmq.wire.headers.transactions import ConsumerSendBackRequest, EndTransactionRequest

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


class Need(NamedTuple):
    """A permission that a request needs."""

    kind: Kind
    name: str
    grant: Grant


def open_access(parts: Parts) -> Access:
    """The access rules of a broker, kept up to date. Raises `AccountsUnreadable`."""
    settings = parts.settings.access
    access = Access(settings.accounts, parts.store)
    if access.is_on:
        parts.background.every(settings.check_interval, access.refresh)
    return access


class Access:
    """Lets requests pass or refuses them."""

    def __init__(self, accounts: Path | None, store: Store) -> None:
        self._file = AccountsFile(accounts) if accounts is not None else None
        self._store = store
        self._noted = Occurrences()
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
        if self._file is not None:
            self._file.refresh()

    def check(self, connection: Connection, request: Command) -> None:
        """Raise `Refused` unless the request may be carried out."""
        if self._file is None:
            return
        accounts = self._file.accounts
        host = connection.remote.host
        if host in accounts.white_hosts:
            return
        key = access_key_of(request)
        if key is None:
            raise self._refusal(Reason.NO_CREDENTIALS, None, host, _ASKS_FOR_CREDENTIALS)
        account = accounts.by_key.get(key)
        if account is not None and host in account.white_hosts:
            return
        is_signed = is_signed_by(request, account.secret_key if account else _NOBODYS_SECRET)
        if account is None:
            raise self._refusal(Reason.UNKNOWN_KEY, key, host, _NOT_RECOGNISED)
        if not is_signed:
            raise self._refusal(Reason.WRONG_SIGNATURE, key, host, _NOT_RECOGNISED)
        if not account.is_admin:
            self._check_permissions(account, request, host)

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

    def _topic_at(self, offset: int) -> str | None:
        """The topic that the message at a place of the log belongs to, wherever it waits."""
        try:
            message = decode_message(self._store.message_at(offset))
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

#: Finds the topic of the message at a place of the log.
TopicAt = Callable[[int], str | None]
Needs = Callable[[Command, TopicAt], Iterable[Need]]


def _topic(topic: str, grant: Grant) -> Need:
    """A permission on a topic; for a retry topic it is that of its group."""
    group = names.group_of_retry_topic(topic)
    return Need(Kind.TOPIC, topic, grant) if group is None else _group(group)


def _group(group: str) -> Need:
    return Need(Kind.GROUP, group, Grant.SUB)


def _send(request: Command, _: TopicAt) -> Iterable[Need]:
    yield _topic(request.header(SendMessageRequest).topic, Grant.PUB)


def _recall(request: Command, _: TopicAt) -> Iterable[Need]:
    yield _topic(request.header(RecallMessageRequest).topic, Grant.PUB)


def _end_transaction(request: Command, topic_at: TopicAt) -> Iterable[Need]:
    header = request.header(EndTransactionRequest)
    for topic in {header.topic, topic_at(header.commit_log_offset)}:
        if topic:
            yield _topic(topic, Grant.PUB)


def _send_back(request: Command, topic_at: TopicAt) -> Iterable[Need]:
    header = request.header(ConsumerSendBackRequest)
    yield _group(header.group)
    topic = topic_at(header.offset)
    if topic is not None:
        yield _topic(topic, Grant.SUB)


def _pull(request: Command, _: TopicAt) -> Iterable[Need]:
    header = request.header(PullMessageRequest)
    yield _group(header.consumer_group)
    yield _topic(header.topic, Grant.SUB)


def _view(request: Command, topic_at: TopicAt) -> Iterable[Need]:
    topic = topic_at(request.header(ViewMessageRequest).offset)
    if topic is not None:
        yield _topic(topic, Grant.SUB)


def _of_topic(
    kind: type[
        QueryMessageRequest
        | SearchOffsetRequest
        | GetMaxOffsetRequest
        | GetMinOffsetRequest
        | GetEarliestStoreTimeRequest
    ],
) -> Needs:
    """What is asked about a topic alone."""

    def needs(request: Command, _: TopicAt) -> Iterable[Need]:
        yield _topic(request.header(kind).topic, Grant.SUB)

    return needs


def _progress(
    kind: type[QueryConsumerOffsetRequest | UpdateConsumerOffsetRequest],
) -> Needs:
    def needs(request: Command, _: TopicAt) -> Iterable[Need]:
        header = request.header(kind)
        yield _group(header.consumer_group)
        yield _topic(header.topic, Grant.SUB)

    return needs


def _heartbeat(request: Command, _: TopicAt) -> Iterable[Need]:
    """Producers' groups are free: they give nobody anything."""
    for consumer in decode_body(HeartbeatData, request.body).consumer_data_set:
        yield _group(consumer.group_name)
        for subscription in consumer.subscription_data_set:
            yield _topic(subscription.topic, Grant.SUB)


def _unregister(request: Command, _: TopicAt) -> Iterable[Need]:
    group = request.header(UnregisterClientRequest).consumer_group
    if group:
        yield _group(group)


def _members(request: Command, _: TopicAt) -> Iterable[Need]:
    yield _group(request.header(GetConsumerListRequest).consumer_group)


def _check_client(request: Command, _: TopicAt) -> Iterable[Need]:
    asked = decode_body(CheckClientRequest, request.body)
    if asked.group:
        yield _group(asked.group)
    if asked.subscription_data is not None:
        yield _topic(asked.subscription_data.topic, Grant.SUB)


def _lock(request: Command, _: TopicAt) -> Iterable[Need]:
    asked = decode_body(LockBatch, request.body)
    yield _group(asked.consumer_group)
    for topic in {queue.topic for queue in asked.mq_set}:
        yield _topic(topic, Grant.SUB)


def _nothing(_: Command, __: TopicAt) -> Iterable[Need]:
    """Any account will do: the broker only answers that it does not know such requests."""
    return ()


#: What the requests of producers and consumers need. Every other request needs an admin.
NEEDS: Mapping[int, Needs] = {
    Code.SEND_MESSAGE: _send,
    Code.SEND_MESSAGE_V2: _send,
    Code.SEND_BATCH_MESSAGE: _send,
    Code.SEND_REPLY_MESSAGE: _send,
    Code.SEND_REPLY_MESSAGE_V2: _send,
    Code.RECALL_MESSAGE: _recall,
    Code.END_TRANSACTION: _end_transaction,
    Code.CONSUMER_SEND_MSG_BACK: _send_back,
    Code.PULL_MESSAGE: _pull,
    Code.LITE_PULL_MESSAGE: _pull,
    Code.QUERY_CONSUMER_OFFSET: _progress(QueryConsumerOffsetRequest),
    Code.UPDATE_CONSUMER_OFFSET: _progress(UpdateConsumerOffsetRequest),
    Code.LOCK_BATCH_MQ: _lock,
    Code.UNLOCK_BATCH_MQ: _lock,
    Code.SEARCH_OFFSET_BY_TIMESTAMP: _of_topic(SearchOffsetRequest),
    Code.GET_MAX_OFFSET: _of_topic(GetMaxOffsetRequest),
    Code.GET_MIN_OFFSET: _of_topic(GetMinOffsetRequest),
    Code.GET_EARLIEST_MSG_STORETIME: _of_topic(GetEarliestStoreTimeRequest),
    Code.QUERY_MESSAGE: _of_topic(QueryMessageRequest),
    Code.VIEW_MESSAGE_BY_ID: _view,
    Code.HEART_BEAT: _heartbeat,
    Code.UNREGISTER_CLIENT: _unregister,
    Code.GET_CONSUMER_LIST_BY_GROUP: _members,
    Code.CHECK_CLIENT_CONFIG: _check_client,
    Code.QUERY_ASSIGNMENT: _nothing,
}
