"""Which queue a message goes to.

Without a wish of the application, round and round, from a random place on, so that many producers
do not begin at the same queue. With a key, always the same one: `abs(hash % n)` with Java's
`String.hashCode`, in the order of queues that every client sees, so that producers in any language
agree. A selector is any callable that is given the queues and the message.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from orbitmq.client.errors import MessageRefused
from orbitmq.client.message import Message
from orbitmq.client.producer.faults import Faults
from orbitmq.client.queue import Queue
from orbitmq.javahash import java_hash

#: Picks one of the queues, which are sorted by broker and number.
Selector: TypeAlias = Callable[[Sequence[Queue], Message], Queue]


def by_key(key: str | int) -> Selector:
    """Messages with the same key go to the same queue as long as their number stays the same."""
    place = key_hash(key)

    def select(queues: Sequence[Queue], _: Message) -> Queue:
        return queues[_java_index(place, len(queues))]

    return select


def by_sharding_key(queues: Sequence[Queue], message: Message) -> Queue:
    """The queue of the message's own `sharding_key`."""
    if message.sharding_key is None:
        raise MessageRefused("sharding_key", "is needed by this selector, got None")
    return by_key(message.sharding_key)(queues, message)


def key_hash(key: str | int) -> int:
    """Java's `hashCode` of a String, an Integer or a Long."""
    if isinstance(key, str):
        return java_hash(key)
    if isinstance(key, bool) or not -(2**63) <= key < 2**63:
        raise MessageRefused("key", f"must be a text or a 64-bit number, got {key!r}")
    if -(2**31) <= key < 2**31:
        return key
    folded = (key ^ (key & 0xFFFF_FFFF_FFFF_FFFF) >> 32) & 0xFFFF_FFFF
    return folded - ((folded & 0x8000_0000) << 1)


def _java_index(hashed: int, count: int) -> int:
    """`abs(hashed % count)`, with Java's remainder, which has the sign of what is divided."""
    return abs(hashed) % count


class RoundRobin:
    """Goes through the queues of one topic. May be used by several threads at a time."""

    __slots__ = ("_places",)

    def __init__(self, chance: random.Random) -> None:
        self._places = itertools.count(chance.randrange(1 << 30))

    def next_queue(self, queues: Sequence[Queue]) -> Queue:
        """The next queue, whatever is known of its broker."""
        return queues[next(self._places) % len(queues)]

    def choose(self, queues: Sequence[Queue], faults: Faults, tried: Collection[str] = ()) -> Queue:
        """The next queue: of a broker not tried before and not avoided, if there is one.

        Otherwise of one that was not tried last, otherwise any.
        """
        if not tried and not faults.avoided:
            return self.next_queue(queues)
        last = next(reversed(list(tried)), None)
        for is_wanted in (
            lambda broker: broker not in tried and faults.is_available(broker),
            lambda broker: broker != last and faults.is_available(broker),
            lambda broker: broker not in tried,
            lambda broker: broker != last,
        ):
            found = self._next_of(queues, is_wanted)
            if found is not None:
                return found
        return self.next_queue(queues)

    def _next_of(self, queues: Sequence[Queue], is_wanted: Callable[[str], bool]) -> Queue | None:
        # Every look moves on, or the first wanted queue after unwanted ones would get their share.
        for _ in range(len(queues)):
            queue = queues[next(self._places) % len(queues)]
            if is_wanted(queue.broker):
                return queue
        return None
