"""The filter of a pull: from what the pull itself says, or from what its group said before.

A pull that carries its subscription is filtered by that (`of_pull`). Any other is filtered by
what heartbeats said (`of_group`): tags by the group's subscription, other languages by the
expression that was registered when the heartbeat came, with the version of that subscription. It is
compiled then as well, or by the first pull that needs it: whoever sends much may have only so much
of it compiled at a time (`compileallowance`).

* an expression that does not compile leaves no registration, and pulls are answered
  FILTER_DATA_NOT_EXIST until the client sends something better;
* a pull that quotes a newer version than the registered one is answered FILTER_DATA_NOT_LATEST.

What is registered is the group's subscription as `ConsumerTable` works it out, the one with the
highest version among the live members. So an older version with another expression means that the
newer one's members have left, and replaces it; Apache's broker, which sees single heartbeats, has
to ignore older versions and goes on filtering by the expression of somebody who is gone.

When a group leaves, or drops a topic, its registration is kept for `KEPT_AFTER_LEAVING`, across
restarts too (consumerFilter.json), so that consumers that come back find it compiled. After a
restart everybody counts as having just left. Of those that were left there is no more than
`LEFT_ROOM` takes: the oldest go first, and are compiled anew should somebody come back.

Expressions are compiled once and shared (`compiledfilters`). A tag list is compiled from its text:
what a heartbeat says about hashes is not to be trusted, C++ clients fill in zeros. An expression
longer than `LONGEST_EXPRESSION` is refused: in a pull, and in a heartbeat (`too_long`), which then
leaves no subscription. Times are times of day, since they go into the file.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from operator import itemgetter

from orbitmq.broker import names
from orbitmq.broker.clients import Channel
from orbitmq.broker.compileallowance import CompileAllowances, Postponed
from orbitmq.broker.compiledfilters import (
    LONGEST_EXPRESSION,
    MOST_BYTES,
    MOST_FILTERS,
    MOST_TAG_BYTES,
    CompiledFilters,
    check_length,
)
from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.broker.filterregistration import FilterData, FilterFile, Registration, TopicFilters
from orbitmq.errors import OrbitError
from orbitmq.filter.subscription import TAG, MessageFilter
from orbitmq.wire.bodies.membership import SubscriptionData
from orbitmq.wire.codes import ResponseCode

log = logging.getLogger(__name__)

KEPT_AFTER_LEAVING = 24 * 3600.0
#: Bytes, about, of registrations that nobody is there for.
LEFT_ROOM = 16 * 1024 * 1024
#: Characters that are compiled when a file is read, in about a second; the others when needed.
_COMPILED_AT_START = 256 * 1024
#: Seconds that a check waits for its expression: Apache's clients give up after 3, and end.
_LONGEST_CHECK = 1.0
#: When consumers are believed to have left that were there before a restart.
_BEFORE_START = 30.0


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
        cache_size: int = MOST_FILTERS,
        cache_bytes: int = MOST_BYTES,
        tag_cache_bytes: int = MOST_TAG_BYTES,
        kept: float = KEPT_AFTER_LEAVING,
        left_room: int = LEFT_ROOM,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        #: What each connection may have compiled; whoever closes connections has them forgotten.
        self.allowances = CompileAllowances(monotonic)
        #: Told when an expression other than tags was compiled.
        self.compiled: Callable[[], None] = _nothing
        #: Whether pulls have to wait with what is to be compiled, although they may have it.
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
        #: Those that nobody is there for, by group and topic, with their sizes; who left last last.
        self._left: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._left_bytes = 0
        #: Counts what the file would say differently; the saver compares it with what it saved.
        self.revision = 0

    # Pulls.

    def of_pull(
        self,
        expression: str | None,
        expression_type: str | None,
        payer: Channel | None = None,
        *,
        has_waited: bool = False,
    ) -> MessageFilter:
        """The filter that a pull brings along; refuses with SUBSCRIPTION_PARSE_FAILED.

        `payer` is who has it compiled, should that be necessary, and is told when (`Postponed`);
        without one it is done now. `has_waited` says that this is then.
        """
        # Nothing at all is no expression, as with Apache: whether it would be served is no matter.
        if expression:
            self._check_enabled(expression_type)
        try:
            return self._get(expression, expression_type or TAG, payer, has_waited=has_waited)
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
        *,
        has_waited: bool = False,
    ) -> MessageFilter:
        """The filter for a pull without one; `subscription` is the group's, `version` its own."""
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
        return registration.filter or self._registered(
            group, topic, registration, payer, has_waited=has_waited
        )

    def _registered(
        self,
        group: str,
        topic: str,
        registration: Registration,
        payer: Channel | None,
        *,
        has_waited: bool,
    ) -> MessageFilter:
        """The filter of a registration that does not have it, compiled if it is not at hand."""
        expression, kind = registration.expression, registration.expression_type
        try:
            if registration.was_compiled:
                # What there is to say about it was logged then, and pulls are many.
                return self._get(expression, kind, payer, has_waited=has_waited)
            compiled = self._compile(group, topic, expression, kind, payer, has_waited=has_waited)
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

    def _get(
        self, expression: str | None, kind: str, payer: Channel | None, *, has_waited: bool = False
    ) -> MessageFilter:
        if _is_tags(kind):
            return self._compiled.get(expression, kind)
        if not self._compiled.has(expression, kind):
            if payer is not None:
                self._pay(payer, expression, kind, has_waited=has_waited)
            self.compiled()
        if payer is not None:
            self.allowances.settle(payer, (expression, kind))
        return self._compiled.get(expression, kind)

    def _pay(self, payer: Channel, expression: str | None, kind: str, *, has_waited: bool) -> None:
        """Raise `Postponed` unless it may be compiled now."""
        # Whoever has waited for one expression may need another by now, and has not paid for that.
        if has_waited and self.allowances.has_reserved(payer, (expression, kind)):
            return
        wait = self.allowances.reserve(payer, (expression, kind), _cost(expression))
        if wait > 0 or self.must_wait():
            raise Postponed(wait)

    def _may_compile(self, expression: str | None, kind: str, payer: Channel | None) -> bool:
        """Whether there is an allowance for it, or none is needed."""
        return (
            payer is None
            or self._compiled.has(expression, kind)
            or self.allowances.take(payer, _cost(expression))
        )

    def check(
        self,
        expression: str | None,
        expression_type: str | None,
        payer: Channel | None = None,
        *,
        has_waited: bool = False,
    ) -> None:
        """Refuse a subscription that cannot be served (CHECK_CLIENT_CONFIG); or `Postponed`.

        A consumer that is told that we are busy does not start. So what it would have to wait long
        for passes unread: its first pull is told what is wrong with it.
        """
        self._check_enabled(expression_type)
        try:
            check_length(expression)
        except OrbitError as error:
            raise _not_parsed(error) from error
        if _is_tags(expression_type):
            return
        try:
            self.of_pull(expression, expression_type, payer, has_waited=has_waited)
        except SystemBusy as busy:
            if isinstance(busy, Postponed) and busy.seconds <= _LONGEST_CHECK:
                raise

    def _check_enabled(self, expression_type: str | None) -> None:
        """Refuse what is not served, right or wrong: nobody has to compile that."""
        if not self.is_enabled and not _is_tags(expression_type):
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                "the broker does not support consumers to filter messages by SQL92; "
                "set enablePropertyFilter=true",
            )

    # Heartbeats.

    @staticmethod
    def too_long(subscription: SubscriptionData) -> Refused | None:
        """Why a subscription is not taken over: nobody has to keep that much."""
        # Tags and hashes are those of the text, in what clients send; they are kept, too.
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
        """Take over all that a group subscribes to; what it no longer names counts as left.

        What is new is compiled as far as `payer` may have that done, and the rest when it is
        needed; without one, all of it is.
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
        """The last consumer of a group is gone."""
        self._leave(group, list(self._registrations.get(group, ())), now)

    def clean(self, now: float) -> int:
        """Forget what was left long ago; how many there were."""
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
        if self._may_compile(expression, kind, payer):
            try:
                with self.allowances.compiling(payer):
                    compiled = self._compile(group, topic, expression, kind)
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
        *,
        has_waited: bool = False,
    ) -> MessageFilter:
        fields = {"group": group, "topic": topic, "expression": expression}
        try:
            compiled = self._get(expression, kind, payer, has_waited=has_waited)
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
        """Take over what a file says; what does not compile is left out.

        Of a long file only those who left last are compiled now.
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
    """For a table that nobody is told of."""


def _cost(expression: str | None) -> int:
    """What compiling takes from an allowance; what is too long is refused unread."""
    return min(len(expression or ""), LONGEST_EXPRESSION)


def _is_tags(expression_type: str | None) -> bool:
    return not expression_type or expression_type == TAG
