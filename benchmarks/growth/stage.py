"""The processes that the curves share: started when one of them asks, ended together."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Self, TypeVar, cast

import msgspec

from benchmarks.growth.asking import Done, Load, Wish
from benchmarks.growth.filling import Filling, fill
from benchmarks.growth.frames import create_topic
from benchmarks.growth.lines import Line
from benchmarks.load.asking import Target
from benchmarks.load.processes import Child, Floor, OurBroker

T = TypeVar("T")


class LoadFailed(Exception):
    """The generator could not bring the load, or the broker refused it."""


class Generator(Child):
    """Brings the loads, in a process of its own."""

    def __init__(self) -> None:
        super().__init__("-m", "benchmarks.growth.generator")

    def ask(self, wish: Wish) -> Done:
        self.say(msgspec.json.encode(wish))
        done = msgspec.json.decode(self.line(), type=Done)
        if done.failure:
            raise LoadFailed(done.failure)
        return done


class GrowthStage:
    """Brokers by name, with their topics."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: dict[str, object] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.clear()
        self._stack.close()

    def broker(self, name: str, fillings: Sequence[Filling] = ()) -> Target:
        """A broker, on a store that was filled before it was started."""

        def start() -> OurBroker:
            root = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="orbitmq-bench-"))
            if fillings:
                fill(Path(root), fillings)
            return OurBroker(Path(root))

        target = self._once(name, start).target
        for filling in fillings:
            self.topic(target, filling.topic, filling.queues)
        return target

    def topic(self, target: Target, topic: str, queues: int) -> str:
        """See that a topic has exactly so many queues."""
        with Line(target.port) as line:
            line.ask(create_topic(topic, queues))
        return topic

    def messages_in_each_queue(self, target: Target, topic: str, queues: int) -> int:
        """In the one that has fewest."""
        with Line(target.port) as line:
            return min(line.end_of(topic, queue_id) for queue_id in range(queues))

    def constant_answers(self, size: int = 0) -> Target:
        return self._once(f"constant {size}", lambda: Floor("constant", size)).target

    def bring(self, seconds: float, *loads: Load, least: int = 0) -> Done:
        wish = Wish(loads=loads, seconds=seconds, least=least)
        return self._once("generator", Generator).ask(wish)

    def _once(self, name: str, make: Callable[[], AbstractContextManager[T]]) -> T:
        if name not in self._made:
            self._made[name] = self._stack.enter_context(make())
        return cast("T", self._made[name])
