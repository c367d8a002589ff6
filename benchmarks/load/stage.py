"""What the lines about the broker share: started when one of them asks, ended together."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Self, TypeVar, cast

from benchmarks.load.asking import (
    Drive,
    Driven,
    Outcome,
    Pace,
    Paced,
    Requests,
    Sends,
    Target,
    Wish,
)
from benchmarks.load.proc import cpu_seconds
from benchmarks.load.processes import Floor, Generator, OurBroker, apache_broker
from benchmarks.runner import NotAtHand

T = TypeVar("T")

#: Pulls of more than 32 messages are answered in full; Apache's default stops there.
_GENEROUS = ("broker.store.read.memory_count=1024", "broker.store.read.memory_bytes=4194304")
_SYNC = ("broker.store.flush.policy=sync",)

#: CPU of a server that rests, as a share of a core, and how long that is waited for.
_RESTS = 0.15
_SETTLING = 1.0
_LOOK = 0.1


class Stage:
    """The processes by name, and what they have been filled with."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: dict[object, object] = {}
        self._filled: set[tuple[int, Requests]] = set()
        self._kept: dict[Wish, deque[Outcome]] = defaultdict(deque)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.clear()
        self._filled.clear()
        self._kept.clear()
        self._stack.close()

    # The processes.

    @property
    def generator(self) -> Generator:
        return self._once("generator", Generator)

    @property
    def second_generator(self) -> Generator:
        """For load beside other load."""
        return self._once("second generator", Generator)

    def broker(self) -> OurBroker:
        """Ours, with asynchronous flush."""
        return self._once("broker", lambda: OurBroker(self._folder(), *_GENEROUS))

    def sync_broker(self) -> OurBroker:
        """Ours, which waits for the disk."""
        return self._once("sync broker", lambda: OurBroker(self._folder(), *_SYNC))

    def floor(self, kind: str, answer_size: int = 0) -> Target:
        return self._once((kind, answer_size), lambda: Floor(kind, answer_size)).target

    def apache(self) -> tuple[Target, float]:
        """Apache's broker, and how long it took to start. Raises `NotAtHand`.

        It is cold: lines warm it up with their own load.
        """
        if "apache" not in self._made:
            try:
                self._made["apache"] = self._stack.enter_context(apache_broker())
            except NotAtHand as reason:
                self._made["apache"] = reason
        made = self._made["apache"]
        if isinstance(made, NotAtHand):
            raise made
        return cast("tuple[Target, float]", made)

    def _folder(self) -> Path:
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="orbitmq-bench-")))

    def _once(self, name: object, make: Callable[[], AbstractContextManager[T]]) -> T:
        if name not in self._made:
            self._made[name] = self._stack.enter_context(make())
        return cast("T", self._made[name])

    # Load.

    def drive(
        self,
        target: Target,
        requests: Requests,
        load: tuple[int, int],
        *,
        seconds: float = 0.0,
        count: int = 0,
        again: bool = False,
    ) -> Driven:
        """Connections and requests in flight on each, for some time or some requests."""
        wish = _drive(target, requests, load, seconds, count)
        outcome = self._fulfilled(wish, again=again)
        assert isinstance(outcome, Driven)
        return outcome

    def has_kept(
        self, target: Target, requests: Requests, load: tuple[int, int], seconds: float
    ) -> bool:
        """Whether there is something to look at again."""
        return bool(self._kept[_drive(target, requests, load, seconds)])

    def has_kept_pace(self, wish: Pace) -> bool:
        return bool(self._kept[wish])

    def pace(self, wish: Pace, *, again: bool = False) -> Paced:
        outcome = self._fulfilled(wish, again=again)
        assert isinstance(outcome, Paced)
        return outcome

    def _fulfilled(self, wish: Wish, *, again: bool) -> Outcome:
        """`again`: what came of the same wish before, seen from another side, if it is kept."""
        kept = self._kept[wish]
        if again and kept:
            return kept.popleft()
        outcome = self.generator.ask(wish)
        if not again:
            kept.append(outcome)
        return outcome

    def warmed_up(self) -> None:
        """What was measured until now is not to be looked at again."""
        self._kept.clear()

    def fill(self, target: Target, sends: Sends, count: int) -> None:
        """See that a topic has messages, so that there is something to pull."""
        if (target.pid, sends) not in self._filled:
            self._filled.add((target.pid, sends))
            # In one piece and in order, so that it is known which message lies beside which.
            done = self.drive(target, sends, (1, 16), count=count)
            check(done)

    def settle(self, *targets: Target) -> None:
        """Wait until what earlier lines left behind is worked off, but not for ever."""
        pause = threading.Event()
        end = time.perf_counter() + _SETTLING
        before = sum(cpu_seconds(target.pid) for target in targets)
        while time.perf_counter() < end:
            pause.wait(_LOOK)
            now = sum(cpu_seconds(target.pid) for target in targets)
            if now - before < _RESTS * _LOOK:
                return
            before = now


def _drive(
    target: Target, requests: Requests, load: tuple[int, int], seconds: float, count: int = 0
) -> Drive:
    connections, in_flight = load
    return Drive(
        target=target,
        requests=requests,
        connections=connections,
        in_flight=in_flight,
        seconds=seconds,
        count=count,
    )


def check(done: Driven) -> Driven:
    """A broker that refuses is fast; that does not count."""
    if done.refused:
        raise ChildProcessError(f"{done.refused} requests were refused, the first: {done.refusal}")
    return done
