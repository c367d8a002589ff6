"""The filter of a pull: from what the pull itself says, or from what its group said before.

A pull that carries its subscription is filtered by that (`of_pull`). Any other is filtered by
what heartbeats said (`of_group`): tags by the group's subscription, other languages by the
expression that was registered and compiled when the heartbeat came, with the version of that
subscription:

* an expression that does not compile leaves no registration, and pulls are answered
  FILTER_DATA_NOT_EXIST until the client sends something better;
* a pull that quotes a newer version than the registered one is answered FILTER_DATA_NOT_LATEST.

What is registered is the group's subscription as `ConsumerTable` works it out, the one with the
highest version among the live members. So an older version with another expression means that the
newer one's members have left, and replaces it; Apache's broker, which sees single heartbeats, has
to ignore older versions and goes on filtering by the expression of somebody who is gone.

When a group leaves, or drops a topic, its registration is kept for `KEPT_AFTER_LEAVING`, across
restarts too (consumerFilter.json), so that consumers that come back find it compiled. After a
restart everybody counts as having just left.

Expressions are compiled once and shared (the last `cache_size` of them). A tag list is compiled
from its text: what a heartbeat says about hashes is not to be trusted, C++ clients fill in zeros.
Times are times of day, since they go into the file.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

import msgspec

from orbitmq.broker.errors import Refused
from orbitmq.errors import OrbitError
from orbitmq.filter.subscription import TAG, MessageFilter, compile_filter
from orbitmq.wire.bodies.base import Body, Int64
from orbitmq.wire.bodies.membership import SubscriptionData
from orbitmq.wire.codes import ResponseCode

log = logging.getLogger(__name__)

KEPT_AFTER_LEAVING = 24 * 3600.0
CACHE_SIZE = 4096
#: When consumers are believed to have left that were there before a restart.
_BEFORE_START = 30.0


class FilterData(Body, frozen=True, kw_only=True):
    """A registration as consumerFilter.json has it; times in milliseconds, dead: from born on."""

    born_time: Int64 = 0
    client_version: Int64 = 0
    consumer_group: str
    dead_time: Int64 = 0
    expression: str
    expression_type: str
    topic: str


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


class _Registration:
    __slots__ = (
        "born_at",
        "expression",
        "expression_type",
        "filter",
        "left_at",
        "version",
    )

    def __init__(
        self,
        expression: str,
        expression_type: str,
        compiled: MessageFilter,
        version: int,
        at: float,
    ) -> None:
        self.expression = expression
        self.expression_type = expression_type
        self.filter = compiled
        self.version = version
        self.born_at = at
        #: None while somebody of the group is there.
        self.left_at: float | None = None

    def says(self, expression: str, expression_type: str) -> bool:
        return self.expression == expression and self.expression_type == expression_type


class FilterTable:
    """Compiled filters, by group and topic.

    `lenient` is how Apache's broker reads SQL: what follows a complete expression is ignored. It is
    then logged, since the author certainly meant something by it.
    """

    def __init__(
        self,
        *,
        is_enabled: bool = False,
        lenient: bool = True,
        cache_size: int = CACHE_SIZE,
        kept: float = KEPT_AFTER_LEAVING,
    ) -> None:
        #: Whether subscriptions other than tags are served at all.
        self.is_enabled = is_enabled
        self._kept = kept
        self._compiled = functools.lru_cache(cache_size)(
            functools.partial(compile_filter, lenient=lenient)
        )
        self._registrations: dict[str, dict[str, _Registration]] = {}
        #: Counts what the file would say differently; the saver compares it with what it saved.
        self.revision = 0

    # Pulls.

    def of_pull(self, expression: str | None, expression_type: str | None) -> MessageFilter:
        """The filter that a pull brings along; refuses with SUBSCRIPTION_PARSE_FAILED."""
        try:
            compiled = self._compiled(expression, expression_type or TAG)
        except OrbitError as error:
            raise Refused(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED,
                f"parse the consumer's subscription failed: {error}",
            ) from error
        self._check_enabled(compiled)
        return compiled

    def of_group(
        self, group: str, topic: str, subscription: SubscriptionData | None, version: int
    ) -> MessageFilter:
        """The filter for a pull without one; `subscription` is the group's, `version` its own."""
        if subscription is None:
            raise Refused(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's subscription not exist: group {group!r}, topic {topic!r}",
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
        self._check_enabled(registration.filter)
        return registration.filter

    def check(self, expression: str | None, expression_type: str | None) -> None:
        """Refuse a subscription that cannot be served (CHECK_CLIENT_CONFIG)."""
        if not _is_tags(expression_type):
            self.of_pull(expression, expression_type)

    def _check_enabled(self, compiled: MessageFilter) -> None:
        if compiled.needs_properties and not self.is_enabled:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                "the broker does not support consumers to filter messages by SQL92; "
                "set enablePropertyFilter=true",
            )

    # Heartbeats.

    def register(self, group: str, subscriptions: Iterable[SubscriptionData], now: float) -> None:
        """Take over all that a group subscribes to; what it no longer names counts as left."""
        known = self._registrations.get(group)
        named: set[str] = set()
        for subscription in subscriptions:
            if _is_tags(subscription.expression_type) or not subscription.sub_string:
                continue
            named.add(subscription.topic)
            self._register_one(group, subscription, now)
        if known is not None:
            for topic, registration in known.items():
                if topic not in named and registration.left_at is None:
                    registration.left_at = now
                    self.revision += 1

    def leave(self, group: str, now: float) -> None:
        """The last consumer of a group is gone."""
        for registration in self._registrations.get(group, {}).values():
            if registration.left_at is None:
                registration.left_at = now
                self.revision += 1

    def clean(self, now: float) -> int:
        """Forget what was left long ago; how many there were."""
        cleaned = 0
        for group, topics in list(self._registrations.items()):
            for topic, registration in list(topics.items()):
                left_at = registration.left_at
                if left_at is not None and now - left_at >= self._kept:
                    del topics[topic]
                    cleaned += 1
            if not topics:
                del self._registrations[group]
        self.revision += cleaned
        return cleaned

    def _register_one(self, group: str, subscription: SubscriptionData, now: float) -> None:
        topic = subscription.topic
        expression = subscription.sub_string or ""
        kind = subscription.expression_type
        version = subscription.sub_version
        known = self._registrations.get(group, {}).get(topic)
        if known is not None and known.says(expression, kind):
            if known.version != version or known.left_at is not None:
                known.version = version
                known.left_at = None
                self.revision += 1
            return
        compiled = self._try_compile(group, topic, expression, kind)
        if compiled is not None:
            made = _Registration(expression, kind, compiled, version, now)
            self._registrations.setdefault(group, {})[topic] = made
            self.revision += 1
        elif known is not None:
            del self._registrations[group][topic]
            self.revision += 1

    def _try_compile(
        self, group: str, topic: str, expression: str, kind: str
    ) -> MessageFilter | None:
        fields = {"group": group, "topic": topic, "expression": expression}
        try:
            compiled = self._compiled(expression, kind)
        except OrbitError as error:
            log.warning("subscription does not compile: %s", error, extra=fields)
            return None
        ignored = getattr(compiled, "ignored_from", None)
        if ignored is not None:
            log.warning(
                "the end of a subscription is ignored: %r", expression[ignored:], extra=fields
            )
        return compiled

    # The file.

    def load(self, file: FilterFile, now: float) -> None:
        """Take over what a file says; what does not compile is left out."""
        for filters in file.filter_data_by_topic.values():
            for group, data in filters.group_filter_data.items():
                compiled = self._try_compile(
                    group, data.topic, data.expression, data.expression_type
                )
                if compiled is None:
                    continue
                loaded = _Registration(
                    data.expression,
                    data.expression_type,
                    compiled,
                    data.client_version,
                    data.born_time / 1000,
                )
                is_dead = data.dead_time >= data.born_time and data.dead_time > 0
                loaded.left_at = (
                    data.dead_time / 1000 if is_dead else max(loaded.born_at, now - _BEFORE_START)
                )
                self._registrations.setdefault(group, {})[data.topic] = loaded
        self.revision += 1

    def file(self) -> FilterFile:
        """A copy for consumerFilter.json."""
        by_topic: dict[str, dict[str, FilterData]] = {}
        for group, topics in self._registrations.items():
            for topic, registration in topics.items():
                by_topic.setdefault(topic, {})[group] = _data(group, topic, registration)
        return FilterFile(
            filter_data_by_topic={
                topic: TopicFilters(group_filter_data=groups, topic=topic)
                for topic, groups in sorted(by_topic.items())
            }
        )


def _data(group: str, topic: str, registration: _Registration) -> FilterData:
    left_at = registration.left_at
    return FilterData(
        born_time=round(registration.born_at * 1000),
        client_version=registration.version,
        consumer_group=group,
        dead_time=0 if left_at is None else round(left_at * 1000),
        expression=registration.expression,
        expression_type=registration.expression_type,
        topic=topic,
    )


def _is_tags(expression_type: str | None) -> bool:
    return not expression_type or expression_type == TAG
