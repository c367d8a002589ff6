"""Where a message is now, for every group that consumes its topic.

A group's progress says whether the message was passed; copies of it, which keep its unique id, say
what came afterwards: parked until the next attempt, waiting in the retry topic, dead. One that was
sent again begins at its first attempt: the dead letters that it was made of tell of those before.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.members import AsyncConsumers
from orbitmq.client.admin.membervalues import Members
from orbitmq.client.admin.progress import Progress
from orbitmq.client.admin.resentmarks import RESENT_FROM
from orbitmq.client.admin.topology import BrokerNode, Directory, Topology
from orbitmq.client.names import (
    DEAD_LETTER_PREFIX,
    RETRY_PREFIX,
    dead_letter_topic,
    is_system_group,
    retry_topic,
)
from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage
from orbitmq.filter.errors import InvalidFilter
from orbitmq.filter.tags import parse_tags
from orbitmq.message.wellknown import DLQ_ORIGIN_TOPIC, REAL_TOPIC, RETRY_TOPIC
from orbitmq.wire.bodies.route import GroupList
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers.topics import TopicRequest

#: Where brokers keep copies until they are due: by delay level, and by time.
PARKED_TOPICS = ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer")

#: All copies with a unique id in a topic, by their time.
Copies = Callable[[str, str], Awaitable[tuple[ReceivedMessage, ...]]]


class Fate(enum.StrEnum):
    """What became of a message in a group."""

    WAITING = "not consumed yet"
    CONSUMED = "consumed"
    FILTERED = "passed over by the subscription"
    PARKED = "failed, parked until its next attempt"
    RETRYING = "failed, waiting for its next attempt now"
    DEAD = "dead letter"
    BROADCAST = "broadcast: every member keeps its own progress"
    NO_PROGRESS = "the group has no progress in its queue"


@dataclass(frozen=True, slots=True)
class Track:
    """A message and a group."""

    group: str
    fate: Fate
    is_online: bool
    #: How often it was tried and failed, as far as copies show; before it was resent as well.
    failures: int = 0
    #: The copy that the fate speaks about: in the retry topic, among the dead letters or parked.
    copy: ReceivedMessage | None = None
    #: How often it died and was sent again.
    resent: int = 0

    @property
    def text(self) -> str:
        """What became of the message, in words."""
        if not self.resent:
            return self.fate.value
        times = "" if self.resent == 1 else f" {self.resent} times"
        return f"died and was resent{times}: {self.fate.value}"


class Tracking:
    """Follows messages."""

    def __init__(
        self,
        asking: Asking,
        directory: Directory,
        consumers: AsyncConsumers,
        progress: Progress,
        copies: Copies,
    ) -> None:
        self._asking = asking
        self._directory = directory
        self._consumers = consumers
        self._progress = progress
        self._copies = copies

    async def track(self, message: ReceivedMessage) -> tuple[Track, ...]:
        topology = await self._directory.look()
        original = await self._original(message)
        groups = await self._groups(topology, original.queue.topic)
        parked: list[ReceivedMessage] = []
        if message.unique_id is not None:
            for topic in PARKED_TOPICS:
                parked += await self._copies(topic, message.unique_id)
        tracks = await self._asking.all(
            self._track(topology, group, original, parked) for group in groups
        )
        return tuple(tracks)

    async def _original(self, message: ReceivedMessage) -> ReceivedMessage:
        """The message as it was sent, of a copy that a group got."""
        if not message.queue.topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)):
            return message
        topic = message.get(DLQ_ORIGIN_TOPIC) or message.get(RETRY_TOPIC)
        if topic is None or message.unique_id is None:
            return message
        found = await self._copies(topic, message.unique_id)
        return found[0] if found else message

    async def _groups(self, topology: Topology, topic: str) -> Sequence[str]:
        async def ask(node: BrokerNode) -> tuple[str, ...]:
            code = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO
            header = TopicRequest(topic=topic)
            return (await self._asking.told(GroupList, node.address, code, header)).group_list

        outcomes = await self._asking.each(topology.readers(), ask)
        done = outcomes.check(f"asking who consumes {topic!r}")
        groups = {group for part in done.values() for group in part}
        return sorted(group for group in groups if not is_system_group(group))

    async def _track(
        self,
        topology: Topology,
        group: str,
        message: ReceivedMessage,
        parked: Sequence[ReceivedMessage],
    ) -> Track:
        members, _ = await self._consumers.look(group, topology)
        is_online = members is not None
        if members is not None and members.model == "broadcasting":
            return Track(group, Fate.BROADCAST, is_online)
        later = await self._later(topology, group, message, parked)
        if later is not None:
            fate, copy, letters = later
            failures = sum(each.reconsume_times for each in (copy, *letters))
            return Track(group, fate, is_online, failures, copy, len(letters))
        offset = await self._offset(topology, group, message.queue)
        if offset is None:
            return Track(group, Fate.NO_PROGRESS, is_online)
        if offset <= message.queue_offset:
            return Track(group, Fate.WAITING, is_online)
        if members is not None and not _is_wanted(members, message):
            return Track(group, Fate.FILTERED, is_online)
        return Track(group, Fate.CONSUMED, is_online)

    async def _later(
        self,
        topology: Topology,
        group: str,
        message: ReceivedMessage,
        parked: Sequence[ReceivedMessage],
    ) -> tuple[Fate, ReceivedMessage, Sequence[ReceivedMessage]] | None:
        """What the last copy that the group has of a message says, and the dead letters that it was
        made of; None when there is none."""
        if message.unique_id is None:
            return None
        topic = retry_topic(group)
        retried = await self._copies(topic, message.unique_id)
        dead = await self._copies(dead_letter_topic(group), message.unique_id)
        waiting = [each for each in parked if each.get(REAL_TOPIC) == topic]
        last = max((*retried, *dead, *waiting), key=lambda each: each.stored.store_ms, default=None)
        if last is None:
            return None
        letters = _resent_letters(last, dead)
        if last in dead:
            return Fate.DEAD, last, letters
        if last in waiting:
            return Fate.PARKED, last, letters
        offset = await self._offset(topology, group, last.queue)
        is_done = offset is not None and offset > last.queue_offset
        return (Fate.CONSUMED if is_done else Fate.RETRYING), last, letters

    async def _offset(self, topology: Topology, group: str, queue: Queue) -> int | None:
        return await self._progress.offset(topology.reader(queue.broker), group, queue)


def _resent_letters(
    copy: ReceivedMessage, dead: Sequence[ReceivedMessage]
) -> list[ReceivedMessage]:
    """The dead letters that a copy was made of, from the last one back to the first."""
    letters = {letter.offset_id: letter for letter in dead}
    found: list[ReceivedMessage] = []
    while (letter := letters.pop(copy.get(RESENT_FROM, ""), None)) is not None:
        found.append(letter)
        copy = letter
    return found


def _is_wanted(members: Members, message: ReceivedMessage) -> bool:
    """Whether the group's tags let a message through; what SQL says only the broker knows."""
    for subscription in members.subscriptions:
        if subscription.topic != message.queue.topic or subscription.expression_type != "TAG":
            continue
        try:
            return parse_tags(subscription.expression).accepts_tag(message.tags)
        except InvalidFilter:
            return True
    return True
