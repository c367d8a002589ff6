"""Who waits for which queue, and for which group.

Messages arrive in queues; everything else that concerns those who wait concerns a topic, a group,
or a group's part of a topic. So there are two ways to a pull, and nobody has to look at those whom
something does not concern: there may be a hundred thousand of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from orbitmq.broker.heldpull import HeldPull

#: An ordered set.
_Pulls = dict[HeldPull, None]


class WaitingTable:
    """All pulls that wait for messages."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[int, _Pulls]] = {}
        self._groups: dict[str, dict[str, _Pulls]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, pull: HeldPull) -> None:
        of_topic = self._queues.get(pull.topic)
        if of_topic is None:
            of_topic = self._queues[pull.topic] = {}
        waiting = of_topic.get(pull.queue_id)
        if waiting is None:
            waiting = of_topic[pull.queue_id] = {}
        waiting[pull] = None
        of_group = self._groups.get(pull.group)
        if of_group is None:
            of_group = self._groups[pull.group] = {}
        waiting = of_group.get(pull.topic)
        if waiting is None:
            waiting = of_group[pull.topic] = {}
        waiting[pull] = None

    def remove(self, pull: HeldPull) -> None:
        of_topic = self._queues[pull.topic]
        waiting = of_topic[pull.queue_id]
        del waiting[pull]
        if not waiting:
            del of_topic[pull.queue_id]
            if not of_topic:
                del self._queues[pull.topic]
        of_group = self._groups[pull.group]
        waiting = of_group[pull.topic]
        del waiting[pull]
        if not waiting:
            del of_group[pull.topic]
            if not of_group:
                del self._groups[pull.group]

    def of_queue(self, topic: str, queue_id: int) -> Collection[HeldPull]:
        """Those who wait for a queue, who came first first; changes with the table."""
        of_topic = self._queues.get(topic)
        return () if of_topic is None else of_topic.get(queue_id, ())

    def find(
        self, topic: str | None, queue_id: int | None, group: str | None
    ) -> Iterator[HeldPull]:
        """Those who wait for a queue, a topic or anything, or only a group's.

        The table may change meanwhile; whoever comes then may be left out.
        """
        if group is None:
            for name in tuple(self._queues) if topic is None else (topic,):
                of_topic = self._queues.get(name, {})
                for number in tuple(of_topic) if queue_id is None else (queue_id,):
                    yield from tuple(of_topic.get(number, ()))
            return
        for name in tuple(self._groups.get(group, ())) if topic is None else (topic,):
            for pull in tuple(self._groups.get(group, {}).get(name, ())):
                if queue_id is None or pull.queue_id == queue_id:
                    yield pull
