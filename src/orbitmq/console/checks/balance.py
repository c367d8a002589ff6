"""Whether members of a group share the queues of a topic evenly.

The usual strategies give every member as many queues as any other, or one less. So a member that
has two more than another one shows that they do not see the same members, do not use the same
strategy, or do not let go of what they should. Strategies that are uneven on purpose (by hash, by
machine room, by hand) are left alone, if members tell that they use one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from orbitmq.client.admin.membervalues import RunningInfo
from orbitmq.client.names import is_retry_topic

#: Seconds that it must last. Members that come and go are noticed within 20 s at the latest; but
#: who consumes in order gets the queues of one that died only when its locks are 60 s old.
UNEVEN_AFTER = 90.0
#: Looks in which all members must have had the same numbers of queues, the first and the last too:
#: who shares anew meanwhile is not stuck.
UNEVEN_LOOKS = 3
#: How strategies are called by members, and by Java's as the name of a class.
_STRATEGY = "allocateMessageQueueStrategy"
_EVEN = ("avg", "averagely")
_BY_ROOM = ("machine_room", "machineroom")


@dataclass(frozen=True, slots=True)
class Uneven:
    """A topic whose queues are not shared evenly."""

    topic: str
    #: How many queues each member has, those with the most first.
    counts: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """`client-1 has 4 of its queues and client-2 has none`"""
        (most, many), (least, few) = self.counts[0], self.counts[-1]
        return f"{most} has {many} of its queues and {least} has {few or 'none'}"


def uneven_topics(running: Mapping[str, RunningInfo]) -> Iterator[Uneven]:
    """The topics of a group that are shared unevenly, by what all its members say."""
    if any(_is_uneven_on_purpose(info) for info in running.values()):
        return
    topics = {each.topic for info in running.values() for each in info.subscriptions}
    for topic in sorted(topics):
        if is_retry_topic(topic):
            continue
        counts = {
            client_id: sum(each.queue.topic == topic for each in info.queues if not each.is_dropped)
            for client_id, info in running.items()
            if any(each.topic == topic for each in info.subscriptions)
        }
        if max(counts.values()) - min(counts.values()) > 1:
            ranked = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
            yield Uneven(topic, tuple(ranked))


def _is_uneven_on_purpose(info: RunningInfo) -> bool:
    # Java's default prints an object: `org.apache…AllocateMessageQueueAveragely@1b2c`.
    said = info.properties.get(_STRATEGY, "").partition("@")[0].lower()
    is_even = any(word in said for word in _EVEN) and not any(word in said for word in _BY_ROOM)
    return bool(said) and not is_even
