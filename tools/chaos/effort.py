"""How much a scenario does, and the parts that several scenarios share."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from orbitmq import Admin, PullConsumer
from orbitmq.errors import OrbitError
from tools.chaos.history import Acked, BodyCorrupt, Corrupt, Read, Recorder, now, value_of
from tools.chaos.programs import Program, ScenarioFailed, Stage, wait_until

TOPIC = "chaos"
#: For what was sent to be read once nothing disturbs any more.
DRAIN = 60.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How long the nemesis is at work, and the seed of what it does."""

    seconds: float
    seed: int = 1

    @property
    def chance(self) -> random.Random:
        return random.Random(self.seed)  # noqa: S311  # repeats a run, guards nothing

    def times(self, each: float, least: int = 1) -> int:
        """How often something fits that takes so many seconds."""
        return max(least, int(self.seconds // each))


def create_topic(stage: Stage, topic: str = TOPIC, queues: int = 16) -> None:
    """Make a topic; the broker may still be telling the name server of itself."""

    def is_made() -> bool:
        try:
            with Admin(name_server=stage.name_server) as admin:
                admin.topics.create(topic, queues=queues, exist_ok=True)
        except OrbitError:
            return False
        return True

    wait_until(is_made, f"topic {topic} is made")


def finish(programs: Iterable[Program]) -> None:
    """Have workers end in order."""
    for program in programs:
        if program.stop() != 0:
            raise ScenarioFailed(f"{program.name} failed: {program.output()[-2000:]}")


def drain(stage: Stage, groups: Iterable[str], deadline: float = DRAIN) -> float:
    """Wait until every group has read whatever was acknowledged; seconds that it took.

    Infinite when some never came: the checker says which.
    """
    names = tuple(groups)

    def is_drained() -> bool:
        events = stage.events()
        acked = {event.value for event in events if isinstance(event, Acked)}
        seen: dict[str, set[str]] = {name: set() for name in names}
        for event in events:
            if isinstance(event, Read) and event.group in seen:
                seen[event.group].add(event.value)
        return all(acked <= values for values in seen.values())

    try:
        return wait_until(is_drained, "everything is read", deadline, every=0.25)
    except ScenarioFailed:
        return inf


def audit(stage: Stage, topic: str = TOPIC, group: str = "audit") -> int:
    """Read every queue from its first to its last message, as a group of its own; how many."""
    recorder = Recorder(stage.histories / f"{group}.jsonl")
    count = 0
    with PullConsumer(group, name_server=stage.name_server, consume_from="first") as consumer:
        queues = consumer.queues(topic)
        ends = consumer.end_offsets(queues)
        firsts = consumer.first_offsets(queues)
        missing = {queue: end for queue, end in ends.items() if end > firsts[queue]}
        consumer.assign(tuple(missing))
        for queue in missing:
            consumer.seek(queue, firsts[queue])
        deadline = now() + DRAIN
        while missing and now() < deadline:
            for message in consumer.poll(1.0, max_messages=2000):
                place = str(message.queue), message.queue_offset
                try:
                    value = value_of(message.body)
                except BodyCorrupt as error:
                    recorder.write(Corrupt(now(), group, *place, str(error)))
                else:
                    recorder.write(Read(now(), group, group, *place, str(value)))
                count += 1
                if message.queue_offset + 1 >= missing.get(message.queue, 0):
                    missing.pop(message.queue, None)
    recorder.close()
    if missing:
        raise ScenarioFailed(f"the audit did not reach the end of {sorted(map(str, missing))}")
    return count
