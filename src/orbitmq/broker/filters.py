"""The filters of pulls: compiled, limited, registered by groups and saved.

A pull that carries its subscription is filtered by that (`of_pull`), any other by the subscription
of its group (`of_group`): a group's expression other than tags is registered by its heartbeats,
with a version, and compiled then or by the first pull that needs it. The registered expression is
that of the live member with the highest version. (Apache's broker keeps the expression of a member
that has left.) It is kept for `KEPT_AFTER_LEAVING` after its group left, also across restarts.

Compiled filters are shared, and kept as far as there is room. Trap: a tag list is compiled from its
text, not from the hashes in a heartbeat, which C++ clients fill with zeros. Times are times of day,
because they are saved in consumerFilter.json.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from operator import itemgetter

import msgspec

from orbitmq import names
from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.broker.groups import Channel
from orbitmq.clock import milliseconds
from orbitmq.errors import InvalidFilter, OrbitError
from orbitmq.filter.tags import TAG, MessageFilter, TagFilter, compile_filter
from orbitmq.remoting.connection import Connection
from orbitmq.wire.bodies import SubscriptionData
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.javajson import Body, Int64

#: Compiling an expression takes up to 140 ms, and a broker has one event loop. So the characters
#: that a connection may have compiled are limited by a token bucket, and those of all connections
#: of a host by a larger one; requests beyond are answered SYSTEM_BUSY, and clients repeat them
#: after one to three seconds. `RATE` is about a seventh of a core.
RATE = 32_768  #: characters a second
BURST = 3 * RATE  #: what a client may use after the pause with which it repeats a request
HOST_SHARES = 3


class CompileLater(SystemBusy):
    """Another expression was compiled in this step of the loop; this one is in a later step."""


class TokenBuckets:
    """A token bucket for each key; full buckets take no memory."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        #: The level, negative for a debt, and the time of it.
        self._levels: dict[Hashable, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._levels)

    def has(self, key: Hashable, tokens: float, now: float) -> bool:
        """Whether there are enough tokens, or the bucket is full."""
        return self._level(key, now) >= min(tokens, self._burst)

    def take(self, key: Hashable, tokens: float, now: float) -> None:
        if len(self._levels) >= _MANY and key not in self._levels:
            for each in [each for each in self._levels if self._level(each, now) >= self._burst]:
                del self._levels[each]
        self._levels[key] = (self._level(key, now) - tokens, now)

    def forget(self, key: Hashable) -> None:
        self._levels.pop(key, None)

    def _level(self, key: Hashable, now: float) -> float:
        level, at = self._levels.get(key, (self._burst, now))
        return min(self._burst, level + (now - at) * self._rate)


#: From this many buckets on, the full ones are removed.
_MANY = 1024


class CompileLimit:
    """Limits what connections, and the hosts they come from, have compiled."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._connections = TokenBuckets(RATE, BURST)
        self._hosts = TokenBuckets(HOST_SHARES * RATE, HOST_SHARES * BURST)

    def __len__(self) -> int:
        return len(self._connections)

    def allows(self, channel: Channel, characters: int) -> bool:
        now, host = self._monotonic(), _host_of(channel)
        return self._connections.has(channel, characters, now) and (
            host is None or self._hosts.has(host, characters, now)
        )

    def charge(self, channel: Channel, characters: int) -> None:
        now, host = self._monotonic(), _host_of(channel)
        self._connections.take(channel, characters, now)
        if host is not None:
            self._hosts.take(host, characters, now)

    def forget(self, channel: Channel) -> None:
        """A connection was closed; its host may come back with another one."""
        self._connections.forget(channel)


def _host_of(channel: Channel) -> str | None:
    return channel.remote.host if isinstance(channel, Connection) else None


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

#: An expression and its language.
_Key = tuple[str | None, str]


class CompiledFilters:
    """The filters that were used last."""

    def __init__(
        self,
        *,
        lenient: bool,
        most: int = MOST_FILTERS,
        most_bytes: int = MOST_BYTES,
        most_tag_bytes: int = MOST_TAG_BYTES,
    ) -> None:
        self._lenient = lenient
        self._sql = _Room(most, most_bytes)
        self._tags = _Room(most, most_tag_bytes)

    def __len__(self) -> int:
        return len(self._sql.filters) + len(self._tags.filters)

    @property
    def bytes(self) -> int:
        """The bytes of all of them."""
        return self._sql.bytes + self._tags.bytes

    def has(self, expression: str | None, kind: str) -> bool:
        """Whether a filter is there without compiling."""
        return (expression, kind) in self._room(kind).filters

    def get(self, expression: str | None, kind: str) -> MessageFilter:
        """The filter of an expression; raises `OrbitError` when it is not valid."""
        key = (expression, kind)
        room = self._room(kind)
        found = room.filters.get(key)
        if found is not None:
            room.filters.move_to_end(key)
            return found
        compiled = self._compile(expression, kind)
        room.add(key, compiled)
        return compiled

    def _room(self, kind: str) -> _Room:
        return self._tags if kind == TAG or not kind else self._sql

    def _compile(self, expression: str | None, kind: str) -> MessageFilter:
        check_length(expression)
        compiled = compile_filter(expression, kind, lenient=self._lenient)
        if isinstance(compiled, TagFilter):
            return TagFilter(codes=compiled.codes, matches_all=compiled.matches_all)
        return compiled


class _Room:
    """Filters of one kind, as many as fit, the last used last."""

    __slots__ = ("_most", "_most_bytes", "bytes", "filters")

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.filters: OrderedDict[_Key, MessageFilter] = OrderedDict()
        #: The bytes of all of them.
        self.bytes = 0

    def add(self, key: _Key, compiled: MessageFilter) -> None:
        self.filters[key] = compiled
        self.bytes += _size(key[0], compiled)
        while self.bytes > self._most_bytes or len(self.filters) > self._most:
            (oldest, _), dropped = self.filters.popitem(last=False)
            self.bytes -= _size(oldest, dropped)


def check_length(expression: str | None) -> None:
    """Raise `InvalidFilter` for an expression that is too long."""
    if expression is not None and len(expression) > LONGEST_EXPRESSION:
        raise InvalidFilter(
            f"the expression has {len(expression)} characters, {LONGEST_EXPRESSION} are allowed",
            expression,
            LONGEST_EXPRESSION,
        )


def memory_of(compiled: MessageFilter) -> int:
    """About how many bytes a filter takes."""
    if isinstance(compiled, TagFilter):
        return _FILTER + _HASH * len(compiled.codes)
    return _FILTER + _CHARACTER * len(getattr(compiled, "text", ""))


def _size(expression: str | None, compiled: MessageFilter) -> int:
    return memory_of(compiled) + sys.getsizeof(expression)


log = logging.getLogger(__name__)

KEPT_AFTER_LEAVING = 24 * 3600.0
#: Bytes, about, of registrations whose group has left.
LEFT_ROOM = 16 * 1024 * 1024
#: Characters that are compiled when a file is read, in about a second; the others when needed.
_COMPILED_AT_START = 256 * 1024
#: Seconds before a start at which the consumers of before count as having left.
_BEFORE_START = 30.0


class FilterTable:
    """Registered and compiled filters.

    `lenient`: as in Apache's broker, what follows a complete SQL expression is ignored, and logged.
    """

    def __init__(
        self,
        *,
        is_enabled: bool = False,
        lenient: bool = True,
        cache_size: int = MOST_FILTERS,
        cache_bytes: int = MOST_BYTES,
        tag_cache_bytes: int = MOST_TAG_BYTES,
        kept: float = KEPT_AFTER_LEAVING,
        left_room: int = LEFT_ROOM,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        #: What each connection may have compiled.
        self.limit = CompileLimit(monotonic)
        #: Called before an expression other than tags is compiled.
        self.compiled: Callable[[], None] = _nothing
        #: Whether pulls must leave compilation to a later step.
        self.must_wait: Callable[[], bool] = bool
        #: Whether subscriptions other than tags are served at all.
        self.is_enabled = is_enabled
        self._kept = kept
        self._compiled = CompiledFilters(
            lenient=lenient,
            most=cache_size,
            most_bytes=cache_bytes,
            most_tag_bytes=tag_cache_bytes,
        )
        self._registrations: dict[str, dict[str, Registration]] = {}
        self._left_room = left_room
        #: Registrations whose group has left, with their sizes, the last one last.
        self._left: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._left_bytes = 0
        #: Increases with every change of what the file says.
        self.revision = 0

    # Pulls.

    def of_pull(
        self,
        expression: str | None,
        expression_type: str | None,
        payer: Channel | None = None,
    ) -> MessageFilter:
        """The filter that a pull carries; refuses with SUBSCRIPTION_PARSE_FAILED.

        Raises `SystemBusy` when `payer`, the connection that has it compiled, exceeds its limit,
        and `CompileLater`. Without a payer there is no limit.
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
        payer: Channel | None = None,
    ) -> MessageFilter:
        """The filter of a group; `subscription` is the group's, `version` that of the pull."""
        if subscription is None:
            raise Refused(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's subscription not exist: group {group!r}, topic {topic!r}; no "
                f"heartbeat names it, or with more than {LONGEST_EXPRESSION} characters",
            )
        if subscription.sub_version < version:
            raise Refused(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the consumer's subscription not latest: group {group!r}, topic {topic!r} has "
                f"version {subscription.sub_version}, the pull {version}",
            )
        if _is_tags(subscription.expression_type):
            return self.of_pull(subscription.sub_string, TAG)
        registration = self._registrations.get(group, {}).get(topic)
        if registration is None:
            raise Refused(
                ResponseCode.FILTER_DATA_NOT_EXIST,
                f"the broker's consumer filter data is not exist: group {group!r}, topic "
                f"{topic!r}; the expression did not compile, or no heartbeat has come yet",
            )
        if registration.version < version:
            raise Refused(
                ResponseCode.FILTER_DATA_NOT_LATEST,
                f"the broker's consumer filter data is not latest: group {group!r}, topic "
                f"{topic!r} has version {registration.version}, the pull {version}",
            )
        self._check_enabled(registration.expression_type)
        return registration.filter or self._registered(group, topic, registration, payer)

    def _registered(
        self,
        group: str,
        topic: str,
        registration: Registration,
        payer: Channel | None,
    ) -> MessageFilter:
        """The filter of a registration that does not keep it, compiled if necessary."""
        expression, kind = registration.expression, registration.expression_type
        try:
            if registration.was_compiled:
                # Its problems were logged then, and there are many pulls.
                return self._get(expression, kind, payer)
            compiled = self._compile(group, topic, expression, kind, payer)
        except Refused:
            raise
        except OrbitError as error:
            self._drop(group, topic)
            raise Refused(
                ResponseCode.FILTER_DATA_NOT_EXIST,
                f"the broker's consumer filter data is not exist: group {group!r}, topic "
                f"{topic!r}; the expression did not compile: {error}",
            ) from error
        registration.keep(compiled)
        return compiled

    def _get(self, expression: str | None, kind: str, payer: Channel | None) -> MessageFilter:
        if _is_tags(kind) or self._compiled.has(expression, kind):
            return self._compiled.get(expression, kind)
        if payer is not None:
            if not self.limit.allows(payer, _cost(expression)):
                raise SystemBusy
            if self.must_wait():
                raise CompileLater
        self.compiled()
        try:
            return self._compiled.get(expression, kind)
        finally:
            # Charged afterwards: on a slow machine tokens come back only between compilations.
            if payer is not None:
                self.limit.charge(payer, _cost(expression))

    def check(
        self, expression: str | None, expression_type: str | None, payer: Channel | None = None
    ) -> None:
        """Refuse a subscription that cannot be served (CHECK_CLIENT_CONFIG).

        A consumer does not start when the answer is SYSTEM_BUSY. So an expression beyond the limit
        passes unread; its first pull is answered with what is wrong.
        """
        self._check_enabled(expression_type)
        try:
            check_length(expression)
        except OrbitError as error:
            raise _not_parsed(error) from error
        if not _is_tags(expression_type):
            with suppress(SystemBusy):
                self.of_pull(expression, expression_type, payer)

    def _check_enabled(self, expression_type: str | None) -> None:
        """Refuse an expression that is not enabled, before it is compiled."""
        if not self.is_enabled and not _is_tags(expression_type):
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                "the broker does not support consumers to filter messages by SQL92; "
                "set enablePropertyFilter=true",
            )

    # Heartbeats.

    @staticmethod
    def too_long(subscription: SubscriptionData) -> Refused | None:
        """The refusal of a subscription that is too long."""
        # Tags and hashes belong to the text in what clients send, but are kept as well.
        if len(subscription.code_set) <= LONGEST_EXPRESSION and all(
            len(text) <= LONGEST_EXPRESSION for text in _texts(subscription)
        ):
            return None
        return Refused(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"parse the consumer's subscription failed: that to topic "
            f"{names.shown(subscription.topic)!r} has more than the {LONGEST_EXPRESSION} "
            "characters that are allowed, and is left out; name fewer tags, or filter in the "
            "consumer",
        )

    def register(
        self,
        group: str,
        subscriptions: Iterable[SubscriptionData],
        now: float,
        payer: Channel | None = None,
    ) -> None:
        """Take over all subscriptions of a group; topics that are missing count as left.

        New expressions are compiled as far as the limit of `payer` allows, and the rest when they
        are needed; without a payer all of them.
        """
        known = self._registrations.get(group)
        named: set[str] = set()
        for subscription in subscriptions:
            if _is_tags(subscription.expression_type) or not subscription.sub_string:
                continue
            named.add(subscription.topic)
            self._register_one(group, subscription, now, payer)
        if known is not None:
            self._leave(group, [topic for topic in known if topic not in named], now)

    def leave(self, group: str, now: float) -> None:
        """The last consumer of a group has left."""
        self._leave(group, list(self._registrations.get(group, ())), now)

    def clean(self, now: float) -> int:
        """Remove registrations that were left long ago; how many."""
        old = []
        for group, topic in self._left:
            left_at = self._registrations[group][topic].left_at
            if left_at is not None and now - left_at >= self._kept:
                old.append((group, topic))
        for group, topic in old:
            self._drop(group, topic)
        return len(old)

    def _leave(self, group: str, topics: Iterable[str], now: float) -> None:
        for topic in topics:
            registration = self._registrations[group][topic]
            if registration.left_at is None:
                self._note_left(group, topic, registration, now)
                self.revision += 1
        self._make_room()

    def _note_left(self, group: str, topic: str, registration: Registration, at: float) -> None:
        registration.left_at = at
        size = registration.size + len(group) + len(topic)
        self._left[group, topic] = size
        self._left_bytes += size

    def _note_back(self, group: str, topic: str) -> None:
        self._left_bytes -= self._left.pop((group, topic), 0)

    def _make_room(self) -> None:
        while self._left_bytes > self._left_room:
            self._drop(*next(iter(self._left)))

    def _drop(self, group: str, topic: str) -> None:
        self._note_back(group, topic)
        topics = self._registrations[group]
        del topics[topic]
        if not topics:
            del self._registrations[group]
        self.revision += 1

    def _register_one(
        self, group: str, subscription: SubscriptionData, now: float, payer: Channel | None
    ) -> None:
        topic = subscription.topic
        expression = subscription.sub_string or ""
        kind = subscription.expression_type
        version = subscription.sub_version
        known = self._registrations.get(group, {}).get(topic)
        if known is not None and known.says(expression, kind):
            if known.version != version or known.left_at is not None:
                known.version = version
                known.left_at = None
                self._note_back(group, topic)
                self.revision += 1
            return
        compiled: MessageFilter | None = None
        try:
            compiled = self._compile(group, topic, expression, kind, payer)
        except SystemBusy:
            pass  # by the first pull that needs it
        except OrbitError:
            if known is not None:
                self._drop(group, topic)
            return
        made = Registration(expression, kind, compiled, version, now)
        self._note_back(group, topic)
        self._registrations.setdefault(group, {})[topic] = made
        self.revision += 1

    def _compile(
        self,
        group: str,
        topic: str,
        expression: str,
        kind: str,
        payer: Channel | None = None,
    ) -> MessageFilter:
        fields = {"group": group, "topic": topic, "expression": expression}
        try:
            compiled = self._get(expression, kind, payer)
        except Refused:
            raise
        except OrbitError as error:
            log.warning("subscription does not compile: %s", error, extra=fields)
            raise
        ignored = getattr(compiled, "ignored_from", None)
        if ignored is not None:
            log.warning(
                "the end of a subscription is ignored: %r", expression[ignored:], extra=fields
            )
        return compiled

    # The file.

    def load(self, file: FilterFile, now: float) -> None:
        """Take over a file; expressions that do not compile are left out.

        Of a long file only the ones that were left last are compiled now.
        """
        saved = [
            (data.left_at(now - _BEFORE_START), group, data)
            for filters in file.filter_data_by_topic.values()
            for group, data in filters.group_filter_data.items()
        ]
        saved.sort(key=itemgetter(0), reverse=True)
        loaded: list[tuple[float, str, str, Registration]] = []
        characters = 0
        for left_at, group, data in saved:
            expression, kind, topic = data.expression, data.expression_type, data.topic
            compiled: MessageFilter | None = None
            characters += len(expression)
            if characters <= _COMPILED_AT_START:
                try:
                    compiled = self._compile(group, topic, expression, kind)
                except OrbitError:
                    continue
            made = Registration(
                expression, kind, compiled, data.client_version, data.born_time / 1000
            )
            loaded.append((left_at, group, topic, made))
        for left_at, group, topic, made in reversed(loaded):
            self._note_back(group, topic)
            self._registrations.setdefault(group, {})[topic] = made
            self._note_left(group, topic, made, left_at)
        self._make_room()
        self.revision += 1

    def file(self) -> FilterFile:
        """A copy for consumerFilter.json."""
        by_topic: dict[str, dict[str, FilterData]] = {}
        for group, topics in self._registrations.items():
            for topic, registration in topics.items():
                by_topic.setdefault(topic, {})[group] = registration.data(group, topic)
        return FilterFile(
            filter_data_by_topic={
                topic: TopicFilters(group_filter_data=groups, topic=topic)
                for topic, groups in sorted(by_topic.items())
            }
        )


def _texts(subscription: SubscriptionData) -> tuple[str, ...]:
    return (
        subscription.topic,
        subscription.sub_string or "",
        subscription.filter_class_source or "",
        "".join(subscription.tags_set),
    )


def _not_parsed(error: OrbitError) -> Refused:
    return Refused(
        ResponseCode.SUBSCRIPTION_PARSE_FAILED,
        f"parse the consumer's subscription failed: {error}",
    )


def _nothing() -> None:
    """Stands for `compiled` before it is set."""


def _cost(expression: str | None) -> int:
    """The characters that compilation counts for; a longer text is refused unread."""
    return min(len(expression or ""), LONGEST_EXPRESSION)


def _is_tags(expression_type: str | None) -> bool:
    return not expression_type or expression_type == TAG


# Registrations, and consumerFilter.json.


#: Bytes of a registration beside its texts and its filter.
_REGISTRATION = 512
#: Bytes of a filter that its registration keeps; a larger one is compiled again if necessary.
_KEPT_BYTES = 64 * 1024


class Registration:
    """A group's filter for a topic, other than tags."""

    __slots__ = (
        "born_at",
        "expression",
        "expression_type",
        "filter",
        "left_at",
        "size",
        "version",
        "was_compiled",
    )

    def __init__(
        self,
        expression: str,
        expression_type: str,
        compiled: MessageFilter | None,
        version: int,
        at: float,
    ) -> None:
        self.expression = expression
        self.expression_type = expression_type
        #: None when it takes much memory, or is not compiled yet.
        self.filter: MessageFilter | None = None
        self.was_compiled = False
        #: Bytes that it takes, about.
        self.size = _REGISTRATION + len(expression) + len(expression_type)
        if compiled is not None:
            self.keep(compiled)
        self.version = version
        self.born_at = at
        #: None while the group has members.
        self.left_at: float | None = None

    def keep(self, compiled: MessageFilter) -> None:
        """Keep the filter, unless it takes much memory."""
        self.was_compiled = True
        if (size := memory_of(compiled)) <= _KEPT_BYTES:
            self.filter = compiled
            self.size += size

    def says(self, expression: str, expression_type: str) -> bool:
        return self.expression == expression and self.expression_type == expression_type

    def data(self, group: str, topic: str) -> FilterData:
        """The registration as it is written."""
        return FilterData(
            born_time=milliseconds(self.born_at),
            client_version=self.version,
            consumer_group=group,
            dead_time=0 if self.left_at is None else milliseconds(self.left_at),
            expression=self.expression,
            expression_type=self.expression_type,
            topic=topic,
        )


class FilterData(Body, frozen=True, kw_only=True):
    """A registration in consumerFilter.json; times are in milliseconds."""

    born_time: Int64 = 0
    client_version: Int64 = 0
    consumer_group: str
    dead_time: Int64 = 0
    expression: str
    expression_type: str
    topic: str

    def left_at(self, otherwise: float) -> float:
        """When its group left; if that is not known, `otherwise`, but not before it was born."""
        if self.dead_time > 0 and self.dead_time >= self.born_time:
            return self.dead_time / 1000
        return max(self.born_time / 1000, otherwise)


class TopicFilters(Body, frozen=True, kw_only=True):
    """The registrations for one topic, by group."""

    group_filter_data: dict[str, FilterData] = msgspec.field(default_factory=dict)
    topic: str


class FilterFile(Body, frozen=True, kw_only=True):
    """consumerFilter.json, by topic.

    Apache's broker adds bloom filter positions to each entry and, at start, ignores a file without
    them: it then compiles what the first heartbeats bring.
    """

    filter_data_by_topic: dict[str, TopicFilters] = msgspec.field(default_factory=dict)
