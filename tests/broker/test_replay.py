"""Reading a long backlog beside live consumers: three processes and real sockets.

Latencies are compared in pairs of rounds, one with and one without the replay, because the machine
may be busy with other things. What others do can only make an attempt worse, so the best of a few
counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.load.asking import Drive, Driven, Pace, Paced, Pulls, Sends, Target
from benchmarks.load.processes import Generator, OurBroker

MIB = 1 << 20
BODY = 8192
BACKLOG = 128 * MIB
#: Read in all while live messages are looked at.
REPLAYED = 1024 * MIB

OLD = Sends(topic="old", body_size=BODY, queues=1, per_request=32)
ROUNDS = 3
ATTEMPTS = 8
SECONDS = 0.8
#: Whoever gets everything within this time is not slowed, whatever the other figure is.
SLOWED = 0.002


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Target]:
    with OurBroker(tmp_path) as broker:
        yield broker.target


@pytest.mark.timeout(180)
def test_a_replay_does_not_slow_the_tail(broker: Target) -> None:
    with Generator() as live, Generator() as replay, ThreadPoolExecutor(1) as pool:
        _fill(replay, broker)
        _pace(live, broker)
        ratios: list[float] = []
        read = 0
        for _ in range(ATTEMPTS):
            quiet, beside = [], []
            for _ in range(ROUNDS):
                quiet.append(_pace(live, broker).p99)
                replaying = pool.submit(_replay, replay, broker)
                beside.append(_pace(live, broker).p99)
                read += replaying.result().bytes
            slow = statistics.median(beside)
            ratios.append(0.0 if slow <= SLOWED else slow / statistics.median(quiet))
            if ratios[-1] <= 2 and read >= REPLAYED:
                break

    assert read >= REPLAYED
    assert min(ratios) <= 2, ratios


def _fill(generator: Generator, target: Target) -> None:
    count = BACKLOG // (BODY * OLD.per_request)
    wish = Drive(target=target, requests=OLD, connections=1, in_flight=8, count=count)
    done = generator.ask(wish)
    assert isinstance(done, Driven)
    assert not done.refused, done.refusal


def _pace(generator: Generator, target: Target) -> Paced:
    """Live messages, one every few milliseconds."""
    wish = Pace(
        target=target, way="broker", topic="live", body_size=1024, rate=400.0, seconds=SECONDS
    )
    done = generator.ask(wish)
    assert isinstance(done, Paced)
    return done


def _replay(generator: Generator, target: Target) -> Driven:
    """The whole backlog, over and over, as fast as it comes, with pulls asked for ahead."""
    pulls = Pulls(topic=OLD.topic, queues=1, per_request=32, messages=BACKLOG // BODY)
    wish = Drive(target=target, requests=pulls, connections=1, in_flight=8, seconds=SECONDS + 0.1)
    done = generator.ask(wish)
    assert isinstance(done, Driven)
    assert not done.refused, done.refusal
    return done
