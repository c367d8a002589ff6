"""Topics as administration shows them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from orbitmq.client.admin.errors import BadRequest
from orbitmq.client.admin.listing import Unreachable
from orbitmq.client.names import DEAD_LETTER_PREFIX, RETRY_PREFIX, is_system_topic
from orbitmq.client.queue import Queue

_LETTERS = {"r": 4, "w": 2}


class Permission(enum.IntFlag):
    """What may be done with a topic's queues."""

    NONE = 0
    INHERIT = 1
    WRITE = 2
    READ = 4
    READ_WRITE = 6

    @property
    def letters(self) -> str:
        """`rw`, `r`, `w`, or `-` for neither."""
        text = "".join(letter for letter, bit in _LETTERS.items() if self & bit)
        return text or "-"

    @classmethod
    def of(cls, value: Permission | int | str) -> Permission:
        """A permission as people write it: `rw`, `r`, `w`, `-`, or its number."""
        if isinstance(value, str) and not value.isdecimal():
            letters = value.lower()
            if letters == "-" or (letters and set(letters) <= _LETTERS.keys()):
                return cls(sum(_LETTERS[each] for each in set(letters) if each in _LETTERS))
        elif not isinstance(value, bool) and 0 <= int(value) <= 7:
            return cls(int(value))
        raise BadRequest(f"a permission must be rw, r, w, - or a number from 0 to 7, got {value!r}")


class TopicKind(enum.StrEnum):
    """What a topic is for."""

    NORMAL = "normal"
    FIFO = "fifo"
    DELAY = "delay"
    TRANSACTION = "transaction"
    MIXED = "mixed"
    RETRY = "retry"
    DEAD_LETTER = "dlq"
    SYSTEM = "system"


#: Topics that nobody made by hand; lists for people leave them out unless asked for.
NOT_LISTED = frozenset({TopicKind.SYSTEM, TopicKind.RETRY, TopicKind.DEAD_LETTER})

_BY_MESSAGE_TYPE: Mapping[str, TopicKind] = {
    kind.value.upper(): kind
    for kind in (
        TopicKind.NORMAL,
        TopicKind.FIFO,
        TopicKind.DELAY,
        TopicKind.TRANSACTION,
        TopicKind.MIXED,
    )
}
MESSAGE_TYPES = tuple(_BY_MESSAGE_TYPE)
#: The attribute that says which messages a topic is meant for.
MESSAGE_TYPE = "message.type"


def kind_of(topic: str, attributes: Mapping[str, str], system: frozenset[str]) -> TopicKind:
    """What a topic is for; `system` has the names that brokers call their own."""
    if topic.startswith(RETRY_PREFIX):
        return TopicKind.RETRY
    if topic.startswith(DEAD_LETTER_PREFIX):
        return TopicKind.DEAD_LETTER
    if topic in system or is_system_topic(topic):
        return TopicKind.SYSTEM
    return _BY_MESSAGE_TYPE.get(attributes.get(MESSAGE_TYPE, ""), TopicKind.NORMAL)


@dataclass(frozen=True, slots=True)
class TopicOnBroker:
    """How a topic is configured on one broker."""

    broker: str
    write_queues: int
    read_queues: int
    permission: Permission
    is_ordered: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic on all brokers that have it."""

    name: str
    kind: TopicKind
    brokers: tuple[TopicOnBroker, ...]

    @property
    def write_queues(self) -> int:
        """On all brokers together."""
        return sum(each.write_queues for each in self.brokers)

    @property
    def read_queues(self) -> int:
        return sum(each.read_queues for each in self.brokers)

    @property
    def permission(self) -> Permission:
        """What may be done with it on at least one broker."""
        together = Permission.NONE
        for each in self.brokers:
            together |= each.permission
        return together

    @property
    def is_ordered(self) -> bool:
        return any(each.is_ordered for each in self.brokers)

    @property
    def is_uniform(self) -> bool:
        """Whether all brokers have it configured alike."""
        configs = {
            (each.write_queues, each.read_queues, each.permission, each.is_ordered)
            for each in self.brokers
        }
        return len(configs) <= 1


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """What is in a queue. Times are epoch seconds; None when there is no message."""

    queue: Queue
    min_offset: int
    max_offset: int
    first_stored_at: float | None
    last_stored_at: float | None

    @property
    def messages(self) -> int:
        return self.max_offset - self.min_offset


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """What is in a topic."""

    topic: str
    queues: tuple[QueueStatus, ...]
    #: Messages per second that come in.
    in_rate: float
    unreachable: tuple[Unreachable, ...] = ()

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.queues)

    @property
    def first_stored_at(self) -> float | None:
        return min(filter(None, (each.first_stored_at for each in self.queues)), default=None)

    @property
    def last_stored_at(self) -> float | None:
        return max(filter(None, (each.last_stored_at for each in self.queues)), default=None)


@dataclass(frozen=True, slots=True)
class RouteBroker:
    """A broker in a route: where it and its slaves are, and what producers and consumers get."""

    broker: str
    cluster: str
    #: Addresses by broker id; 0 is the master.
    addresses: Mapping[int, str] = field(hash=False)
    write_queues: int
    read_queues: int
    permission: Permission


@dataclass(frozen=True, slots=True)
class Route:
    """Where clients find a topic."""

    topic: str
    brokers: tuple[RouteBroker, ...]
    #: `broker-a:4;broker-b:4` for an ordered topic.
    order_config: str | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """Messages and bytes per second over the last minute, and how many there were today."""

    messages: float = 0.0
    bytes: float = 0.0
    messages_today: int = 0

    def __add__(self, other: Rate) -> Rate:
        return Rate(
            self.messages + other.messages,
            self.bytes + other.bytes,
            self.messages_today + other.messages_today,
        )


@dataclass(frozen=True, slots=True)
class TopicRates:
    """How fast a topic is written, and read by whom."""

    topic: str
    incoming: Rate
    outgoing: Mapping[str, Rate] = field(hash=False)
    unreachable: tuple[Unreachable, ...] = ()
