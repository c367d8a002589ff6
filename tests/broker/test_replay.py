"""Reading a long backlog beside a live consumer: how much of it in a turn, and what that costs.

Latencies are those of three processes and real sockets. The machine may be busy with other things,
so the best of several rounds counts, and the middle of its messages; by how much a replay makes the
99th percentile larger is measured by the benchmarks.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.load.asking import Drive, Driven, Pace, Paced, Pulls, Sends, Target
from benchmarks.load.processes import Generator, OurBroker
from orbitmq.store.settings import StoreSettings
from tests.support.tries import shortest_of

MIB = 1 << 20
BODY = 8192
BACKLOG = 128 * MIB
OLD = Sends(topic="old", body_size=BODY, queues=1, per_request=32)

#: Live messages a second, one every few milliseconds, so that each finds a pull that is held.
RATE = 200.0
SECONDS = 0.6
#: Seconds in which whoever waits gets what arrives: a few of the turns that a replay takes, and far
#: less than all that is asked for.
PROMISED = 0.050
ROUNDS = 40
DEADLINE = 120.0


@pytest.fixture
def replay():
    with Generator() as generator:
        yield generator


@pytest.mark.feature("I8")
@pytest.mark.timeout(180)
def test_a_replay_does_not_slow_the_tail(tmp_path, replay):
    read: list[int] = []
    with OurBroker(tmp_path) as broker, Generator() as live, ThreadPoolExecutor(1) as pool:

        def beside():
            replaying = pool.submit(_replay, replay, broker.target, seconds=SECONDS + 0.1)
            paced = _pace(live, broker.target)
            read.append(replaying.result(DEADLINE).bytes)
            return paced.median

        _fill(replay, broker.target)
        _pace(live, broker.target)
        took = shortest_of(beside, PROMISED, ROUNDS)

    print(f"\n{took * 1000:.2f} ms, {sum(read) / MIB:.0f} MiB read in {len(read)} rounds")
    assert all(read)
    assert took < PROMISED


@pytest.mark.feature("I8")
@pytest.mark.timeout(180)
async def test_what_is_sent_of_a_backlog_between_two_looks_at_the_sockets_is_bounded(
    start_broker, replay
):
    broker = await start_broker(store=StoreSettings(preallocate_step=0))
    target = Target(port=broker.address.port, pid=os.getpid())
    loop = asyncio.get_running_loop()
    steps: list[int] = []

    def sent():
        groups = broker.parts.counters.groups.items()
        return sum(counts.get_bytes for (topic, _), counts in groups if topic == OLD.topic)

    before = 0

    def look():
        """Once in every step of the loop."""
        nonlocal before
        now = sent()
        steps.append(now - before)
        before = now
        if not done.done():
            loop.call_soon(look)

    async with asyncio.timeout(DEADLINE):
        await asyncio.to_thread(_fill, replay, target)
        done = asyncio.ensure_future(
            asyncio.to_thread(_replay, replay, target, in_flight=64, count=2000)
        )
        loop.call_soon(look)
        read = (await done).bytes

    largest_answer = broker.parts.settings.store.read.memory_bytes + BODY + 1024
    assert read > BACKLOG
    # The turn of those who waited, that of what a socket brought, and the answer that ends each.
    assert max(steps) <= 2 * (broker.parts.settings.pull.step_bytes + largest_answer)


def _fill(generator: Generator, target: Target) -> None:
    count = BACKLOG // (BODY * OLD.per_request)
    wish = Drive(target=target, requests=OLD, connections=1, in_flight=8, count=count)
    done = generator.ask(wish)
    assert isinstance(done, Driven)
    assert not done.refused, done.refusal


def _pace(generator: Generator, target: Target) -> Paced:
    """Live messages, sent and received by a process that does nothing else."""
    wish = Pace(
        target=target, way="broker", topic="live", body_size=1024, rate=RATE, seconds=SECONDS
    )
    done = generator.ask(wish)
    assert isinstance(done, Paced)
    return done


def _replay(
    generator: Generator,
    target: Target,
    *,
    in_flight: int = 8,
    seconds: float = 0.0,
    count: int = 0,
) -> Driven:
    """The whole backlog, over and over, as fast as it comes, with pulls asked for ahead."""
    pulls = Pulls(topic=OLD.topic, queues=1, per_request=32, messages=BACKLOG // BODY)
    wish = Drive(
        target=target,
        requests=pulls,
        connections=1,
        in_flight=in_flight,
        seconds=seconds,
        count=count,
    )
    done = generator.ask(wish)
    assert isinstance(done, Driven)
    assert not done.refused, done.refusal
    return done
