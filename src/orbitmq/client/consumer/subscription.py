"""What a group wants of a topic: a tag expression or a SQL92 condition, and when that was said.

Brokers keep the newest subscription of a group, by its version, and refuse pulls of a version that
they have not heard of yet. A version is the time of the change in milliseconds, and always above
the one before it, however fast changes follow each other or the clock is set back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orbitmq.client.errors import SettingError
from orbitmq.client.names import check_topic
from orbitmq.clock import milliseconds
from orbitmq.filter import SQL92, TAG, TagFilter, UnknownFilterType, compile_filter, parse_tags
from orbitmq.filter.tags import ALL
from orbitmq.message.wellknown import TAGS
from orbitmq.wire.bodies.membership import SubscriptionData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orbitmq.client.received import ReceivedMessage

_EVERYTHING = TagFilter(matches_all=True)


@dataclass(frozen=True, slots=True)
class Subscription:
    """A topic and which of its messages are wanted. Make them with `by_tags` and `by_sql`."""

    topic: str
    #: As it is sent: tags with `||` between, `*` for everything, or a SQL92 condition.
    expression: str = ALL
    type: str = TAG
    #: When it was said, in milliseconds.
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

        It is checked here when the parser is installed (`InvalidFilter` shows the fault), and by
        a broker in any case: see `subscriptioncheck`.
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
        """Whether both want the same of their topics, whenever they were said."""
        return (self.type, self.expression) == (other.type, other.expression)

    def accepted(self, messages: Sequence[ReceivedMessage]) -> Sequence[ReceivedMessage]:
        """Those that were asked for: a broker compares hashes of tags, and hashes collide."""
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
        """`now` tells the time in seconds since the epoch."""
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
        """Subscribe; replaces what was said about the topic before. Returns it with its version."""
        said = replace(subscription, version=self._next_version())
        self._by_topic[said.topic] = said
        return said

    def remove(self, topic: str) -> bool:
        """Unsubscribe; False when there was no such subscription."""
        return self._by_topic.pop(topic, None) is not None

    def renew(self, topic: str) -> None:
        """Give a subscription a new version: the share of the queues has changed."""
        if (said := self._by_topic.get(topic)) is not None:
            self._by_topic[topic] = replace(said, version=self._next_version())

    def to_data(self) -> tuple[SubscriptionData, ...]:
        """What heartbeats carry."""
        return tuple(each.to_data() for each in self._by_topic.values())

    def _next_version(self) -> int:
        self._last_version = max(milliseconds(self._now()), self._last_version + 1)
        return self._last_version
