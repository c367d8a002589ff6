"""Who may do what: the accounts of a broker and the file that lists them.

The file is TOML and has the words of RocketMQ's `plain_acl.yml`, with their meaning:

    globalWhiteRemoteAddresses = ["10.10.103.*"]

    [[accounts]]
    accessKey = "orders-service"
    secretKey = "..."
    whiteRemoteAddress = ""
    admin = false
    defaultTopicPerm = "DENY"
    defaultGroupPerm = "SUB"
    topicPerms = ["orders=PUB|SUB", "audit=PUB"]
    groupPerms = ["billing=SUB"]

Whoever comes from a host in `globalWhiteRemoteAddresses` needs no account. Whoever comes from a
host in an account's `whiteRemoteAddress` and names its access key needs no signature and may do
everything, so leave it empty unless the network itself keeps others out.

A topic or group that is not listed gets the account's default. The default does not reach topics
in which the broker keeps messages of other topics (delayed ones, half ones): who may read those may
read everything, so they have to be listed by name.
"""

from __future__ import annotations

import enum
import logging
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from orbitmq.broker import names
from orbitmq.broker.addresspatterns import NO_HOSTS, HostPatterns, PatternError, parse_patterns
from orbitmq.broker.errors import BrokerError

log = logging.getLogger(__name__)

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
    """A file of accounts that is not there, or does not say what it should."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"accounts in {path}: {problem}")


class Grant(enum.IntFlag):
    """What may be done with a topic or a group."""

    DENY = 0
    PUB = 1
    SUB = 2

    @property
    def words(self) -> str:
        """As it stands in a file."""
        return "|".join(grant.name or "" for grant in self) or "DENY"


class Kind(enum.StrEnum):
    """What a permission is about."""

    TOPIC = "topic"
    GROUP = "group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Somebody who may use the broker."""

    access_key: str
    secret_key: str = field(repr=False)
    white_hosts: HostPatterns = NO_HOSTS
    is_admin: bool = False
    #: What is granted by name, and by default.
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
    """Everybody who may use the broker."""

    by_key: Mapping[str, Account]
    white_hosts: HostPatterns = NO_HOSTS


class AccountsFile:
    """The accounts of a file, as of its last readable state."""

    def __init__(self, path: Path) -> None:
        """Raises `AccountsUnreadable`: a broker must not begin without the accounts it wants."""
        self._path = path
        self._seen = self._state()
        self.accounts = read_accounts(path)

    def refresh(self) -> bool:
        """Read the file again if it has changed; whether the accounts are other ones now.

        A file that cannot be read changes nothing, and is logged once.
        """
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state
        try:
            self.accounts = read_accounts(self._path)
        except AccountsUnreadable as error:
            log.error("%s; the accounts from before stay in force", error)  # noqa: TRY400  # no bug
            return False
        log.info(
            "accounts read",
            extra={"file": str(self._path), "accounts": len(self.accounts.by_key)},
        )
        return True

    def _state(self) -> tuple[int, int, int] | None:
        """Differs when the file was written or replaced; None when it cannot be looked at."""
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
    except msgspec.ValidationError as error:
        raise AccountsUnreadable(path, str(error)) from None
    except (_EntryError, PatternError) as error:
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
    """An account as it stands in the file."""

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
    """An account that makes no sense."""


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
    """Apache takes every word that it does not know for DENY; a typing error is one here."""
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
    """Whether the broker keeps messages of other topics in this one."""
    return topic in _INTERNAL_TOPICS or topic.startswith(names.SYSTEM_TOPIC_PREFIX)
