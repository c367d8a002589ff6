"""Subscriptions: what a group consumes of each topic, and the check of conditions by a broker.

Brokers keep the newest version of a group's subscription and refuse pulls of a version that they
do not know yet. A version is the time of the change in milliseconds, and always above the one
before, also when the clock is set back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orbitmq.clock import milliseconds
from orbitmq.errors import BrokerRefused, ClientError, NoRoute, NotSupported, SettingError
from orbitmq.filter import SQL92, TAG, TagFilter, UnknownFilterType, compile_filter, parse_tags
from orbitmq.filter.tags import ALL
from orbitmq.logonce import LogOncePerOutage
from orbitmq.message.properties import TAGS
from orbitmq.names import check_topic
from orbitmq.wire.bodies import CheckClientRequest, SubscriptionData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.javajson import encode_body

if TYPE_CHECKING:
    from orbitmq.client.engine import Engine
    from orbitmq.client.message import ReceivedMessage


log = logging.getLogger(__name__)


_EVERYTHING = TagFilter(matches_all=True)


@dataclass(frozen=True, slots=True)
class Subscription:
    """A topic and the messages of it to consume. Made by `by_tags` and `by_sql`."""

    topic: str
    #: As it is sent: tags separated by `||`, `*` for everything, or a SQL92 condition.
    expression: str = ALL
    type: str = TAG
    #: When it was made, in milliseconds.
    version: int = 0
    tags: TagFilter = field(default=_EVERYTHING, compare=False, repr=False)

    @classmethod
    def by_tags(cls, topic: str, tags: str | None = ALL, *, version: int = 0) -> Subscription:
        """By tags: `paid || refunded`; `*`, nothing and None mean every message.

        Raises `InvalidFilter` when the text names no tag, `SettingError` for a bad topic.
        """
        if tags is not None and not isinstance(tags, str):
            raise SettingError(f"tags must be a text such as 'paid || refunded', got {tags!r}")
        found = parse_tags(tags)
        expression = ALL if found.matches_all else str(tags)
        return cls(check_topic(topic), expression, TAG, version, found)

    @classmethod
    def by_sql(cls, topic: str, condition: str, *, version: int = 0) -> Subscription:
        """By a condition on properties, such as `amount > 100 AND region = 'eu'`.

        It is checked here when the parser is installed (`InvalidFilter` shows the error), and by a
        broker in any case: see `check_subscriptions`.
        """
        given: object = condition
        if not isinstance(given, str) or not given.strip():
            raise SettingError(f"a SQL92 condition must be a text that is not empty, got {given!r}")
        # The parser is an extra; the broker that evaluates the condition has it.
        with suppress(UnknownFilterType):
            compile_filter(condition, SQL92)
        return cls(check_topic(topic), condition, SQL92, version)

    @property
    def is_by_tags(self) -> bool:
        return self.type == TAG

    def is_same_filter(self, other: Subscription) -> bool:
        """Whether both select the same messages, regardless of their versions."""
        return (self.type, self.expression) == (other.type, other.expression)

    def accepted(self, messages: Sequence[ReceivedMessage]) -> Sequence[ReceivedMessage]:
        """The messages that match. Brokers compare hashes of tags, which can collide."""
        if self.tags.matches_all:
            return messages
        wanted = self.tags.tags
        return [each for each in messages if each.stored.get_property(TAGS) in wanted]

    def to_data(self) -> SubscriptionData:
        """What heartbeats carry, as Java clients write it."""
        return SubscriptionData(
            topic=self.topic,
            sub_string=self.expression,
            expression_type=self.type,
            sub_version=self.version,
            tags_set=tuple(sorted(self.tags.tags)),
            code_set=self.tags.codes,
        )


class Subscriptions:
    """The subscriptions of one consumer, one per topic. Belongs to the event loop."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` returns the time in seconds since the epoch."""
        self._now = now
        self._by_topic: dict[str, Subscription] = {}
        self._last_version = 0

    def __len__(self) -> int:
        return len(self._by_topic)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(self._by_topic.values())

    def __contains__(self, topic: object) -> bool:
        return topic in self._by_topic

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(self._by_topic)

    def get(self, topic: str) -> Subscription | None:
        return self._by_topic.get(topic)

    def put(self, subscription: Subscription) -> Subscription:
        """Subscribe, or replace the subscription of the topic. Returns it with its version."""
        said = replace(subscription, version=self._next_version())
        self._by_topic[said.topic] = said
        return said

    def remove(self, topic: str) -> bool:
        """Unsubscribe; False when there was no such subscription."""
        return self._by_topic.pop(topic, None) is not None

    def to_data(self) -> tuple[SubscriptionData, ...]:
        """What heartbeats carry."""
        return tuple(each.to_data() for each in self._by_topic.values())

    def _next_version(self) -> int:
        self._last_version = max(milliseconds(self._now()), self._last_version + 1)
        return self._last_version


# ---- checks of subscriptions


class SubscriptionRefused(NotSupported):
    """A broker cannot serve a subscription: it does not parse it, or has no such filter."""

    def __init__(self, topic: str, expression: str, reason: str) -> None:
        self.topic = topic
        self.expression = expression
        self.reason = reason
        super().__init__(f"the broker refuses {expression!r} for topic {topic!r}: {reason}")


#: Answers of brokers that cannot check now: one that is busy, and one that is too old.
_UNCHECKED = (ResponseCode.SYSTEM_BUSY, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)


async def check_subscriptions(
    engine: Engine, group: str, subscriptions: Iterable[Subscription]
) -> None:
    """Have a broker of each topic check subscriptions by SQL92. Raises `SubscriptionRefused`.

    A topic without a broker that can check now is checked with its first pull.
    """
    for subscription in tuple(subscriptions):
        if not subscription.is_by_tags:
            await _check(engine, group, subscription)


async def _check(engine: Engine, group: str, subscription: Subscription) -> None:
    topic = subscription.topic
    body = CheckClientRequest(
        client_id=engine.client_id, group=group, subscription_data=subscription.to_data()
    )
    problem: ClientError
    try:
        where = await engine.routes.broker_of(topic)
        await engine.ask(where, RequestCode.CHECK_CLIENT_CONFIG, body=encode_body(body))
    except NoRoute as error:
        problem = error
    except BrokerRefused as refused:
        if refused.code not in _UNCHECKED:
            reason = refused.remark or refused.name
            raise SubscriptionRefused(topic, subscription.expression, reason) from refused
        problem = refused
    else:
        return
    log.warning(
        "the subscription of group %s to %s was not checked: %s",
        group,
        topic,
        problem,
        extra={"group": group, "topic": topic},
    )


# ---- subscriptions that match nothing


#: Seconds before a subscription is logged as unmatched: other queues may be about to answer.
_MOMENT = 1.0


class UnmatchedFilters:
    """Finds subscriptions that have matched no message so far, which may be a typing error."""

    def __init__(self, group: str) -> None:
        self._group = group
        #: By topic: the subscription and how many messages were filtered out; None after a match.
        self._passed: dict[str, tuple[Subscription, int | None]] = {}
        self._outages = LogOncePerOutage(log)
        #: Topics that are looked at soon.
        self._looks: set[str] = set()

    def note(self, wanted: Subscription, matched: int, passed: int) -> None:
        """Count the result of a pull."""
        topic = wanted.topic
        known, before = self._passed.get(topic, (wanted, 0))
        if not known.is_same_filter(wanted):
            before = 0
            self._outages.forget(topic)
        if matched:
            self._outages.recovered(topic)
        self._passed[topic] = (wanted, None if matched or before is None else before + passed)

    def is_settled(self, wanted: Subscription) -> bool:
        """Whether a message has matched, or the lack of matches was logged."""
        known, passed = self._passed.get(wanted.topic, (wanted, 0))
        is_known = passed is None or self._outages.is_failing(wanted.topic)
        return is_known and known.is_same_filter(wanted)

    def at_end(self, topic: str, is_read: Callable[[str], bool]) -> None:
        """A queue has no further match for now: check soon whether its topic has any."""
        if topic not in self._looks and self._passed[topic][1]:
            self._looks.add(topic)
            asyncio.get_running_loop().call_later(_MOMENT, self._look, topic, is_read)

    def _look(self, topic: str, is_read: Callable[[str], bool]) -> None:
        """Log once that nothing has matched, if all queues of the topic were read."""
        self._looks.discard(topic)
        if topic not in self._passed or self._outages.is_failing(topic) or not is_read(topic):
            return
        wanted, passed = self._passed[topic]
        if passed:
            self._outages.failed(
                topic,
                "group %s gets nothing of %s so far: of %d messages none has matched the %s %r; "
                "check how they are written, or wait for such messages",
                self._group,
                topic,
                passed,
                "tags" if wanted.is_by_tags else "condition",
                wanted.expression,
            )

    def forget(self, topic: str) -> None:
        """A queue is read from elsewhere, or no queue is left: count from the beginning."""
        if self._passed.get(topic, (None, None))[1]:
            del self._passed[topic]
            self._outages.forget(topic)

    def current(self) -> tuple[str, ...]:
        """The unmatched subscriptions, a sentence each."""
        return self._outages.current()
