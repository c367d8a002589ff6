"""The filters of pulls: compiled, limited, and kept while there is room.

A pull that carries its subscription is filtered by that (`of_pull`), any other by the subscription
of its group (`of_group`). An expression is compiled by the first pull that needs it, and kept with
the ones that were used last; one that is not valid is kept as its error. (Apache's broker registers
the expressions of heartbeats, and keeps that of a member that has left.)

Trap: a tag list is compiled from its text, not from the hashes in a heartbeat, which C++ clients
fill with zeros.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress

from orbitmq import names
from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.errors import InvalidFilter, OrbitError
from orbitmq.filter.tags import TAG, MessageFilter, TagFilter, compile_filter
from orbitmq.remoting.settings import Address
from orbitmq.wire.bodies import SubscriptionData
from orbitmq.wire.codes import ResponseCode

log = logging.getLogger(__name__)

#: Compiling an expression takes up to 140 ms, and a broker has one event loop. So the characters
#: that a connection may have compiled are limited by a token bucket, and those of all connections
#: of a host by a larger one; requests beyond are answered SYSTEM_BUSY, and clients repeat them
#: after one to three seconds. `RATE` is about a seventh of a core.
RATE = 32_768  #: characters a second
BURST = 3 * RATE  #: what a client may use after the pause with which it repeats a request
HOST_SHARES = 3
#: From this many buckets on, the full ones are removed.
_MANY = 1024


class CompileLater(SystemBusy):
    """Another expression was compiled in this step of the loop; this one is in a later step."""


class CompileLimit:
    """Limits what connections, and the hosts they come from, have compiled."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        #: The tokens of connections and hosts, negative for a debt, and the time of that level.
        self._levels: dict[Hashable, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._levels)

    def allows(self, payer: Address, characters: int) -> bool:
        """Whether there are enough tokens, or the buckets are full."""
        now = self._monotonic()
        return all(
            self._level(key, shares, now) >= min(characters, shares * BURST)
            for key, shares in _buckets(payer)
        )

    def charge(self, payer: Address, characters: int) -> None:
        now = self._monotonic()
        if len(self._levels) >= _MANY:
            for key in list(self._levels):
                shares = 1 if isinstance(key, Address) else HOST_SHARES
                if self._level(key, shares, now) >= shares * BURST:
                    del self._levels[key]
        for key, shares in _buckets(payer):
            self._levels[key] = (self._level(key, shares, now) - characters, now)

    def _level(self, key: Hashable, shares: int, now: float) -> float:
        level, at = self._levels.get(key, (shares * BURST, now))
        return min(shares * BURST, level + (now - at) * shares * RATE)


def _buckets(payer: Address) -> tuple[tuple[Hashable, int], ...]:
    return (payer, 1), (payer.host, HOST_SHARES)


# Compiled filters are kept, because the next pull brings the same expression. A compiled one takes
# up to a hundred times the memory of its text, so the room is counted in bytes. Tag lists have
# their own: they are compiled without limit, and new ones would displace SQL, which takes much
# longer to compile. The broker keeps the hashes of tags only.


#: Characters of an expression: 800 tags that are UUIDs, or some thousands of shorter ones.
LONGEST_EXPRESSION = 32_768
#: SQL expressions that are kept, and as many tag lists; and the bytes of each kind.
MOST_FILTERS = 4096
MOST_BYTES = 48 * 1024 * 1024
MOST_TAG_BYTES = 16 * 1024 * 1024

#: Bytes of a compiled filter, as measured: of any, for each hash of a tag list, and for each
#: character of an SQL expression.
_FILTER = 128
_HASH = 40
_CHARACTER = 100


class _Room:
    """Filters of one kind by expression and language, as many as fit, the last used last."""

    __slots__ = ("_most", "_most_bytes", "bytes", "filters")

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.filters: OrderedDict[tuple[str | None, str], MessageFilter | OrbitError] = (
            OrderedDict()
        )
        #: The bytes of all of them.
        self.bytes = 0

    def add(self, key: tuple[str | None, str], compiled: MessageFilter | OrbitError) -> None:
        self.filters[key] = compiled
        self.bytes += memory_of(compiled) + sys.getsizeof(key[0])
        while self.bytes > self._most_bytes or len(self.filters) > self._most:
            (oldest, _), dropped = self.filters.popitem(last=False)
            self.bytes -= memory_of(dropped) + sys.getsizeof(oldest)


def memory_of(compiled: MessageFilter | OrbitError) -> int:
    """About how many bytes a filter takes."""
    if isinstance(compiled, TagFilter):
        return _FILTER + _HASH * len(compiled.codes)
    return _FILTER + _CHARACTER * len(getattr(compiled, "text", ""))


class FilterTable:
    """The compiled filters of a broker.

    As in Apache's broker, what follows a complete SQL expression is ignored, and logged.
    """

    def __init__(
        self,
        *,
        is_enabled: bool = False,
        cache_size: int = MOST_FILTERS,
        cache_bytes: int = MOST_BYTES,
        tag_cache_bytes: int = MOST_TAG_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        #: What each connection may have compiled.
        self.limit = CompileLimit(monotonic)
        #: Called before an expression other than tags is compiled.
        self.compiled: Callable[[], None] = lambda: None
        #: Whether pulls must leave compilation to a later step.
        self.must_wait: Callable[[], bool] = bool
        #: Whether subscriptions other than tags are served at all.
        self.is_enabled = is_enabled
        self._sql = _Room(cache_size, cache_bytes)
        self._tags = _Room(cache_size, tag_cache_bytes)

    def __len__(self) -> int:
        return len(self._sql.filters) + len(self._tags.filters)

    @property
    def bytes(self) -> int:
        """The bytes of all filters, about."""
        return self._sql.bytes + self._tags.bytes

    def of_pull(
        self,
        expression: str | None,
        expression_type: str | None,
        payer: Address | None = None,
    ) -> MessageFilter:
        """The filter that a pull carries; refuses with SUBSCRIPTION_PARSE_FAILED.

        Raises `SystemBusy` when `payer`, the client that has it compiled, exceeds its limit, and
        `CompileLater`. Without a payer there is no limit.
        """
        # As with Apache, an empty text is no expression, so whether it is enabled does not matter.
        if expression:
            self._check_enabled(expression_type)
        try:
            return self._get(expression, expression_type or TAG, payer)
        except Refused:
            raise
        except OrbitError as error:
            raise _not_parsed(error) from error

    def of_group(
        self,
        group: str,
        topic: str,
        subscription: SubscriptionData | None,
        version: int,
        payer: Address | None = None,
    ) -> MessageFilter:
        """The filter of a group; `subscription` is the group's, `version` that of the pull."""
        if subscription is None:
            raise Refused(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's subscription not exist: group {group!r}, topic {topic!r}; no "
                f"heartbeat names it, or with more than {LONGEST_EXPRESSION} characters, or it did "
                "not fit (`max_consumer_bytes`)",
            )
        if subscription.sub_version < version:
            raise Refused(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the consumer's subscription not latest: group {group!r}, topic {topic!r} has "
                f"version {subscription.sub_version}, the pull {version}",
            )
        kind = subscription.expression_type or TAG
        if kind == TAG:
            return self.of_pull(subscription.sub_string, TAG)
        self._check_enabled(kind)
        try:
            return self._get(subscription.sub_string, kind, payer, group=group, topic=topic)
        except Refused:
            raise
        except OrbitError as error:
            raise Refused(
                ResponseCode.FILTER_DATA_NOT_EXIST,
                f"the broker's consumer filter data is not exist: group {group!r}, topic "
                f"{topic!r}; the expression did not compile: {error}",
            ) from error

    def check(
        self, expression: str | None, expression_type: str | None, payer: Address | None = None
    ) -> None:
        """Refuse a subscription that cannot be served (CHECK_CLIENT_CONFIG).

        A consumer does not start when the answer is SYSTEM_BUSY. So an expression beyond the limit
        passes unread; its first pull is answered with what is wrong.
        """
        self._check_enabled(expression_type)
        try:
            _check_length(expression)
        except OrbitError as error:
            raise _not_parsed(error) from error
        if not _is_tags(expression_type):
            with suppress(SystemBusy):
                self.of_pull(expression, expression_type, payer)

    @staticmethod
    def too_long(subscription: SubscriptionData) -> Refused | None:
        """The refusal of a subscription in a heartbeat that is too long."""
        # Tags and hashes belong to the text in what clients send, but are kept as well.
        texts = (
            subscription.topic,
            subscription.sub_string or "",
            subscription.filter_class_source or "",
            "".join(subscription.tags_set),
            subscription.code_set,
        )
        if max(map(len, texts)) <= LONGEST_EXPRESSION:
            return None
        return Refused(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"parse the consumer's subscription failed: that to topic "
            f"{names.shown(subscription.topic)!r} has more than the {LONGEST_EXPRESSION} "
            "characters that are allowed, and is left out; name fewer tags, or filter in the "
            "consumer",
        )

    def _get(
        self, expression: str | None, kind: str, payer: Address | None, **fields: str
    ) -> MessageFilter:
        """The filter of an expression; raises `OrbitError` when it is not valid."""
        room = self._tags if kind == TAG else self._sql
        key = (expression, kind)
        found = room.filters.get(key)
        if found is not None:
            room.filters.move_to_end(key)
        else:
            _check_length(expression)
            found = (
                _compiled(expression, kind, fields)
                if room is self._tags
                else self._compile(expression, kind, payer, fields)
            )
            room.add(key, found)
        if isinstance(found, OrbitError):
            raise found.with_traceback(None)
        return found

    def _compile(
        self, expression: str | None, kind: str, payer: Address | None, fields: dict[str, str]
    ) -> MessageFilter | OrbitError:
        """Compile an expression at the expense of `payer`."""
        cost = len(expression or "")
        if payer is not None:
            if not self.limit.allows(payer, cost):
                raise SystemBusy
            if self.must_wait():
                raise CompileLater
        self.compiled()
        try:
            return _compiled(expression, kind, fields)
        finally:
            # Charged afterwards: on a slow machine tokens come back only between compilations.
            if payer is not None:
                self.limit.charge(payer, cost)

    def _check_enabled(self, expression_type: str | None) -> None:
        """Refuse an expression that is not enabled, before it is compiled."""
        if not self.is_enabled and not _is_tags(expression_type):
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                "the broker does not support consumers to filter messages by SQL92; "
                "set enablePropertyFilter=true",
            )


def _compiled(
    expression: str | None, kind: str, fields: dict[str, str]
) -> MessageFilter | OrbitError:
    """The filter of an expression, or what is wrong; logged for a group."""
    extra = {**fields, "expression": expression}
    try:
        compiled = compile_filter(expression, kind, lenient=True)
    except OrbitError as error:
        if fields:
            log.warning("subscription does not compile: %s", error, extra=extra)
        return error
    if isinstance(compiled, TagFilter):
        return TagFilter(codes=compiled.codes, matches_all=compiled.matches_all)
    ignored = getattr(compiled, "ignored_from", None)
    if fields and ignored is not None:
        log.warning(
            "the end of a subscription is ignored: %r", (expression or "")[ignored:], extra=extra
        )
    return compiled


def _check_length(expression: str | None) -> None:
    """Raise `InvalidFilter` for an expression that is too long."""
    if expression is not None and len(expression) > LONGEST_EXPRESSION:
        raise InvalidFilter(
            f"the expression has {len(expression)} characters, {LONGEST_EXPRESSION} are allowed",
            expression,
            LONGEST_EXPRESSION,
        )


def _not_parsed(error: OrbitError) -> Refused:
    return Refused(
        ResponseCode.SUBSCRIPTION_PARSE_FAILED,
        f"parse the consumer's subscription failed: {error}",
    )


def _is_tags(expression_type: str | None) -> bool:
    return not expression_type or expression_type == TAG
