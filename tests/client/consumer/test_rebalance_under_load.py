"""Eight consumer processes, sixteen queues: joins, leaves and kills while messages pour in.

A broker process, and consumers that are processes too, so that a kill is one. What each has
finished is written down with the time; from that come the figures: messages that nobody got, those
that somebody got twice and why, and how long each queue stood still.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest

from orbitmq.client.engine import Engine
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.routes import Queue
from orbitmq.remoting.settings import parse_address
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers import CreateTopicRequest
from tests.support.broker import until
from tests.support.client import quick_settings
from tests.support.command import Started, environment

TOPIC = "orders"
GROUP = "billing"
COUNT = 16
CONSUMERS = 8
#: Between two messages of one queue.
PAUSE = 0.02
#: How often progress is reported: what a kill may repeat.
PROGRESS_INTERVAL = 5.0
DEADLINE = 60.0
SCRIPT = Path(__file__).parents[2] / "support" / "consumer_process.py"

Place = tuple[int, int]


@dataclass
class Written:
    """What the consumers wrote."""

    path: Path
    #: When and by whom each message was finished.
    finished: dict[Place, list[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _read: int = 0

    def look(self) -> None:
        """Read what is new."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            at, pid, queue, offset = line.split()
            place = int(queue), int(offset)
            self.finished[place].append((float(at), int(pid)))
            self.times[place[0]].append(float(at))

    def count(self) -> int:
        """How many different messages were finished."""
        self.look()
        return len(self.finished)

    def owners(self, since: float) -> dict[int, int]:
        """Who finished the last message of each queue, if that was after `since`."""
        last: dict[int, tuple[float, int]] = {}
        for (queue, _), finishes in self.finished.items():
            last[queue] = max(last.get(queue, (since, 0)), *finishes)
        return {queue: pid for queue, (at, pid) in last.items() if at > since}


class Flock:
    """The consumer processes."""

    def __init__(self, name_server: str, written: Written) -> None:
        self._words = [name_server, GROUP, TOPIC, str(written.path)]
        self.living: list[subprocess.Popen[bytes]] = []
        self._leaving: list[subprocess.Popen[bytes]] = []
        self.killed: set[int] = set()

    def join(self) -> None:
        command = [sys.executable, str(SCRIPT), *self._words]
        self.living.append(subprocess.Popen(command, env=environment()))

    def leave(self) -> None:
        """Have the oldest end in order."""
        process = self.living.pop(0)
        self._leaving.append(process)
        process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the oldest at this instant."""
        process = self.living.pop(0)
        self.killed.add(process.pid)
        process.kill()
        process.wait(timeout=DEADLINE)

    def end(self) -> None:
        """All end in order, and say that they did."""
        while self.living:
            self.leave()
        for process in self._leaving:
            assert process.wait(timeout=DEADLINE) == 0

    def bury(self) -> None:
        for process in (*self.living, *self._leaving):
            process.kill()
            process.wait(timeout=DEADLINE)


@contextmanager
def running(folder: Path) -> Iterator[tuple[Started, Flock, Written]]:
    written = Written(folder / "written")
    written.path.touch()
    with ExitStack() as stack:
        up = stack.enter_context(
            Started("up", "--namesrv-port", "0", "--broker-port", "0", cwd=folder)
        )
        flock = Flock(up.address("name server"), written)
        stack.callback(flock.bury)
        yield up, flock, written


class Load:
    """Sends to every queue, again and again."""

    def __init__(self, producer: AsyncProducer) -> None:
        self._producer = producer
        self.sent: set[Place] = set()
        self.gaps: list[float] = []
        self._is_over = asyncio.Event()

    async def run(self) -> None:
        last = time.monotonic()
        while not self._is_over.is_set():
            results = await asyncio.gather(
                *(
                    self._producer.send(TOPIC, b"x" * 100, queue=Queue(TOPIC, "broker-a", place))
                    for place in range(COUNT)
                )
            )
            for place, result in enumerate(results):
                self.sent.add((place, result.queue_offset))
            now = time.monotonic()
            self.gaps.append(now - last)
            last = now
            await asyncio.sleep(PAUSE)

    def end(self) -> None:
        self._is_over.set()


async def consumed_by(flock: Flock, written: Written) -> None:
    """Return when every queue is consumed by one of those that are there, and each by its share."""
    since = time.monotonic()
    wanted = {process.pid for process in flock.living}

    def is_so() -> bool:
        written.look()
        owners = written.owners(since)
        return len(owners) == COUNT and set(owners.values()) == wanted

    await until(is_so, DEADLINE)


async def make_topic(engine: Engine, broker: str) -> None:
    header = CreateTopicRequest(
        topic=TOPIC,
        default_topic="TBW102",
        read_queue_nums=COUNT,
        write_queue_nums=COUNT,
        perm=6,
        topic_filter_type="SINGLE_TAG",
    )
    await engine.ask(parse_address(broker), RequestCode.UPDATE_AND_CREATE_TOPIC, header)


#: What happens at the same time in each step, once eight are there.
STEPS = (
    ("leave",),
    ("kill",),
    ("join", "leave"),
    ("kill", "join", "join"),
    ("leave", "leave", "join"),
    ("kill", "kill", "join", "join"),
    ("leave", "join", "join"),
)


async def _story(flock: Flock, written: Written) -> None:
    """A step is over when every queue is with one of those that are there, and all have some."""
    for _ in range(2):
        for _ in range(CONSUMERS // 2):
            flock.join()
        await consumed_by(flock, written)
    for step in STEPS:
        for change in step:
            getattr(flock, change)()
        await consumed_by(flock, written)


@pytest.mark.timeout(240)
async def test_joins_leaves_and_kills_leave_no_gap_and_only_kills_repeat_messages(tmp_path):
    with running(tmp_path) as (up, flock, written):
        settings = quick_settings(up.address("name server"))
        async with Engine(settings) as engine:
            await make_topic(engine, up.address("broker-a"))
            async with AsyncProducer.on(engine, "makers") as producer:
                load = Load(producer)
                sending = asyncio.create_task(load.run())
                await _story(flock, written)
                load.end()
                await sending
        await until(lambda: written.count() == len(load.sent), DEADLINE)
        await asyncio.to_thread(flock.end)
        written.look()

    gaps = load.sent - set(written.finished)
    repeated = {place: who for place, who in written.finished.items() if len(who) > 1}
    by_kills = {place for place, who in repeated.items() if flock.killed & {pid for _, pid in who}}
    pauses = {
        queue: max(after - before for before, after in itertools.pairwise(sorted(times)))
        for queue, times in written.times.items()
    }
    print(
        f"{len(load.sent)} messages; {len(gaps)} lost; {len(repeated)} repeated, "
        f"{len(by_kills)} of them after {len(flock.killed)} kills; longest pause of a queue "
        f"{max(pauses.values()):.3f} s, median {median(pauses.values()):.3f} s; "
        f"longest pause of the sender {max(load.gaps):.3f} s"
    )
    assert gaps == set()
    assert set(repeated) == by_kills
    # What was in flight and what was finished since the last report, of the killed ones' queues.
    allowed = len(flock.killed) * (COUNT // 4) * (PROGRESS_INTERVAL / PAUSE)
    assert len(by_kills) <= allowed
    # Far below the two minutes after which a broker gives a silent member up.
    assert median(pauses.values()) < 30.0
