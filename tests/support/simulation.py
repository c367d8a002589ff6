"""One simulated life of a cluster: everything in it follows from a seed.

    producers send, two consumer groups consume, and meanwhile things happen to all of them
    then everything is healed, and what was acknowledged must come out within `DRAIN`
    then it is looked for what must not have happened

`PYTHONHASHSEED=0 python -m tests.support.simulation SEED --trace` prints what happened in one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from orbitmq.broker.errors import PutStatus
from orbitmq.broker.locks import OrderLocks
from orbitmq.broker.progress import ProgressTable
from orbitmq.broker.writes import Writes
from orbitmq.client.consumer.locks import QueueLock
from orbitmq.client.consumer.sendback import SendBack
from orbitmq.client.consumer.window import Window
from orbitmq.errors import OrbitError
from orbitmq.store.settings import FlushPolicy
from tests.support.powerloss import ForgetfulFiles
from tests.support.simulation_history import History, Moment
from tests.support.simulation_loop import Stuck, VirtualLoop
from tests.support.simulation_network import Weather
from tests.support.simulation_world import GROUPS, ORDERED, World, simulated_edges

#: Seconds in which things go wrong, and in which all must be well again afterwards.
TROUBLE = 20.0
DRAIN = 400.0
MESSAGES = 8
#: From one thing that goes wrong to the next; and until it is mended, at the longest: longer than
#: `CLIENT_LIFE`, so that members count as gone that live.
PAUSES = (0.1, 0.5, 3.0, 6.0)
LONG = 20.0


@dataclass(frozen=True, slots=True)
class Report:
    """What a life came to."""

    seed: int
    violations: tuple[str, ...]
    fingerprint: str
    trace: tuple[str, ...]
    acked: int
    duplicates: int
    seconds: float
    steps: int


def simulate(seed: int) -> Report:
    """Live one life."""
    dice = random.Random(seed)
    loop = VirtualLoop()
    history = History(loop.time)
    with _scratch() as folder, simulated_edges(loop, seed):
        world = World(
            loop,
            dice,
            Path(folder),
            history,
            brokers=dice.choice((1, 2)),
            policy=dice.choice((FlushPolicy.SYNC, FlushPolicy.ASYNC)),
        )
        try:
            with contextlib.suppress(_Enough):
                loop.run_until_complete(_live(world))
        except Stuck as stuck:
            history.violations.append(f"stuck: {stuck}")
        except OrbitError as error:
            history.violations.append(f"broken: {error}".replace(folder, "..."))
        finally:
            # Failures that nobody asked for are told when their tasks are gone.
            gc.collect()
            world.abandon_stores()
            loop.run_until_complete(world.end_machines())
            loop.close()
    history.violations += [f"unheard: {each}" for each in loop.complaints]
    return Report(
        seed,
        tuple(history.violations),
        history.fingerprint,
        tuple(history.trace),
        history.acked,
        history.duplicates,
        loop.time(),
        loop.steps,
    )


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for the disks; in memory where that is possible, since nothing is to stay."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it
    where = memory if os.access(memory, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="orbitmq-simulation-", dir=where)


class _Enough(Exception):
    """What follows would only repeat what was found."""


async def _live(world: World) -> None:
    await world.start_name_server()
    for node in world.brokers:
        await world.start_broker(node)
    for group in GROUPS:
        for _ in range(2):
            await world.join(group)
    producers = [asyncio.create_task(world.produce(name, MESSAGES)) for name in ("p1", "p2", "p3")]
    watching = asyncio.create_task(_watch(world))
    await _Trouble(world).run()
    await asyncio.gather(*producers)
    await _drain(world)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    world.history.check_log(world.log())
    world.history.check_unseen(GROUPS)
    if world.history.violations:
        raise _Enough
    await world.end()
    world.check_progress()


async def _watch(world: World) -> None:
    while True:
        world.check_progress()
        await asyncio.sleep(0.5)


async def _drain(world: World) -> None:
    """Wait until everything that was acknowledged has been consumed."""
    end = world.loop.time() + DRAIN
    while world.history.unseen(GROUPS) and world.loop.time() < end:  # noqa: ASYNC110  # of a table
        await asyncio.sleep(1.0)
    # Progress is reported every five seconds.
    await asyncio.sleep(6.0)


class _Trouble:
    """What goes wrong, and when."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._dice = random.Random(world.dice.random())
        self._repairs: list[asyncio.Task[None]] = []
        self._kinds: tuple[Callable[[], None], ...] = (
            *(self._crash_broker,) * 3,
            *(self._kill_member,) * 2,
            self._leave,
            self._join,
            *(self._separate,) * 2,
            *(self._cut_off_owner,) * 2,
            *(self._cut,) * 3,
            self._bad_weather,
            self._crash_name_server,
            self._set_clock,
        )

    async def run(self) -> None:
        world, dice = self._world, self._dice
        end = world.loop.time() + TROUBLE
        while world.loop.time() < end:
            await asyncio.sleep(dice.choice(PAUSES))
            dice.choice(self._kinds)()
        await asyncio.gather(*self._repairs)
        world.network.weather = Weather()

    def _later(self, work: Callable[[], object], pauses: tuple[float, ...]) -> None:
        """Do the opposite after a while."""

        async def repair() -> None:
            await asyncio.sleep(self._dice.choice(pauses))
            outcome = work()
            if asyncio.iscoroutine(outcome):
                await outcome

        self._repairs.append(asyncio.create_task(repair()))

    def _crash_broker(self) -> None:
        world, dice = self._world, self._dice
        node = dice.choice(world.brokers)
        if node.broker is None:
            return
        # Without a flush before the answer, only the death of the process is promised to cost
        # nothing.
        power = world.policy is FlushPolicy.SYNC and dice.random() < 0.7
        abruptly = power and dice.random() < 0.5

        async def crash_and_return() -> None:
            if dice.random() < 0.9:
                # Failures are rarer, and worth a wait.
                moment, most = dice.choice((*((Moment.ACKED, 5.0),) * 2, (Moment.FAILED, 15.0)))
                await world.until(moment, node.name, most)
                await asyncio.sleep(dice.choice((0.0, 0.001, 0.01, 0.05)))
            if node.machine is None or not node.machine.is_alive:
                return  # somebody else was quicker
            await world.crash_broker(node, power=power, abruptly=abruptly)
            await asyncio.sleep(dice.choice((0.1, 1.0, 8.0, LONG)))
            await world.start_broker(node)

        broker = node.broker
        with contextlib.suppress(Exception):
            broker.parts  # noqa: B018 - raises while it starts
            self._repairs.append(asyncio.create_task(crash_and_return()))

    def _kill_member(self) -> None:
        world, dice = self._world, self._dice
        members = [each for each in world.members if not each.is_stopping]
        if members:
            member = dice.choice(members)
            member.is_stopping = True
            abruptly = dice.random() < 0.5
            self._later(lambda: world.kill(member, abruptly=abruptly), (0.0,))
            self._later(lambda: world.join(member.group), (0.0, 3.0, 10.0))

    def _leave(self) -> None:
        world, dice = self._world, self._dice
        members = [each for each in world.members if not each.is_stopping]
        if members:
            member = dice.choice(members)
            member.is_stopping = True
            self._later(lambda: world.leave(member), (0.0,))
            self._later(lambda: world.join(member.group), (0.0, 3.0, 10.0))

    def _join(self) -> None:
        group = self._dice.choice(GROUPS)
        self._later(lambda: self._world.join(group), (0.0,))

    def _separate(self) -> None:
        hosts = sorted({machine.host for machine in self._world.living})
        one, other = self._dice.sample(hosts, 2)
        self._part(one, other, (0.5, 4.0, 10.0, LONG))

    def _cut_off_owner(self) -> None:
        """Of locks, for longer than the broker keeps them: others take over while it lives."""
        world, dice = self._world, self._dice
        members = [each for each in world.members if each.group == ORDERED]
        if members:
            self._part(
                dice.choice(members).machine.host, dice.choice(world.brokers).host, (LONG, 2 * LONG)
            )

    def _part(self, one: str, other: str, pauses: tuple[float, ...]) -> None:
        world = self._world
        world.history.note("separate", one, other)
        world.network.separate(one, other)
        self._later(lambda: world.network.join(one, other), pauses)

    def _cut(self) -> None:
        connections = self._world.network.connections()
        if connections:
            end = self._dice.choice(connections)
            self._world.history.note("cut", end.machine.name, end.number)
            end.cut()

    def _bad_weather(self) -> None:
        network = self._world.network
        self._world.history.note("weather")
        network.weather = Weather(slow_share=0.3, slow_delay=3.0, torn_share=0.5, cut_share=0.03)

        def clear() -> None:
            network.weather = Weather()

        self._later(clear, (1.0, 5.0, 10.0))

    def _crash_name_server(self) -> None:
        world = self._world
        if world.name_server is None:
            return
        world.name_server = None

        async def crash_and_return() -> None:
            await world.crash_name_server()
            await asyncio.sleep(self._dice.choice((0.5, 10.0)))
            await world.start_name_server()

        self._repairs.append(asyncio.create_task(crash_and_return()))

    def _set_clock(self) -> None:
        machine = self._dice.choice(self._world.living)
        machine.ahead += self._dice.choice((-4.0, -0.5, 0.5, 4.0))
        self._world.history.note("clock", machine.name, machine.ahead)


# ---- mistakes that somebody might make, put into the real code: a simulation has to find them

Plant = Callable[[], AbstractContextManager[Any]]


def _answers_before_the_flush() -> AbstractContextManager[Any]:
    when_flushed = Writes._answer_when_flushed

    def answer(self: Writes, turn: Any, end: int) -> None:
        if turn.putters:
            when_flushed(self, turn, end)
        else:
            self._answer(turn, PutStatus.PUT_OK)

    return mock.patch.object(Writes, "_answer_when_flushed", answer)


def _forgets_to_flush() -> AbstractContextManager[Any]:
    return mock.patch.object(ForgetfulFiles, "sync", return_value=None)


def _everybody_gets_the_lock() -> AbstractContextManager[Any]:
    def lock(
        self: OrderLocks, group: str, client_id: str, queues: Iterable[Any], now: float
    ) -> tuple[Any, ...]:
        return tuple(queues)

    return mock.patch.object(OrderLocks, "lock", lock)


def _reports_what_is_being_consumed() -> AbstractContextManager[Any]:
    """Progress is where the next pull begins, not the first that is unfinished."""
    return mock.patch.object(Window, "commit_offset", property(lambda self: self._end))


def _believes_in_locks_for_ever() -> AbstractContextManager[Any]:
    """A member goes on with its messages when the broker may have given its lock to others."""

    def is_held(self: QueueLock, now: float) -> bool:
        return self._until != float("-inf")

    return mock.patch.object(QueueLock, "is_held", is_held)


def _forgets_progress() -> AbstractContextManager[Any]:
    """A broker does not read at its start how far groups had come."""

    def load(self: ProgressTable, *_: Any, **__: Any) -> bool:
        return False

    return mock.patch.object(ProgressTable, "load", load)


def _drops_what_failed() -> AbstractContextManager[Any]:
    async def send_back(self: SendBack, message: Any, failure: Any) -> bool:
        await asyncio.sleep(0)
        return True

    return mock.patch.object(SendBack, "send_back", send_back)


#: By name; with what the history has to say about it.
PLANTS: dict[str, tuple[Plant, frozenset[str]]] = {
    "answers-before-the-flush": (_answers_before_the_flush, frozenset({"lost"})),
    "forgets-to-flush": (_forgets_to_flush, frozenset({"lost", "inconsistent", "broken"})),
    "everybody-gets-the-lock": (_everybody_gets_the_lock, frozenset({"overlapping", "reordered"})),
    "reports-what-is-being-consumed": (_reports_what_is_being_consumed, frozenset({"skipped"})),
    "believes-in-locks-for-ever": (_believes_in_locks_for_ever, frozenset({"overlapping"})),
    "forgets-progress": (_forgets_progress, frozenset({"forgotten"})),
    "drops-what-failed": (_drops_what_failed, frozenset({"unseen"})),
}


def main(arguments: list[str]) -> None:
    """Live the lives of seeds, and print one line of JSON for each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int, nargs="?", default=1, help="how many")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="a mistake to put into the code")
    parser.add_argument("--trace", action="store_true", help="print what happened, event by event")
    parser.add_argument(
        "--until-found",
        action="store_true",
        help="end with the first violation, and whether it comes again",
    )
    parser.add_argument("--log", action="store_true", help="let the code log")
    chosen = parser.parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of names in sets follows from it.
        parser.error("set PYTHONHASHSEED=0, or the same seed is not the same life")
    if not chosen.log:
        logging.disable(logging.CRITICAL)
    planted = PLANTS[chosen.plant][0]() if chosen.plant else contextlib.nullcontext()
    # Garbage is collected once in a life, at its end: what was lived before changes nothing.
    gc.collect()
    gc.freeze()
    gc.disable()
    with planted:
        for seed in range(chosen.first, chosen.first + chosen.count):
            report = simulate(seed)
            if chosen.trace:
                print("\n".join(report.trace))
            line = asdict(report)
            del line["trace"]
            print(json.dumps(line), flush=True)
            if report.violations and chosen.until_found:
                print(json.dumps({"is_repeated": simulate(seed) == report}))
                return


if __name__ == "__main__":
    main(sys.argv[1:])
