"""R21: a large backlog, a cold start, and a consumer from the beginning.

Is the pull rate steady? Each tenth of the backlog is read in some tenths of a second, in which
somebody else who wakes up on the machine is seen, by a clock on the wall. So what is held to the
bound is the work: messages by seconds of processor that the broker and the reader needed for them,
the system's share for reading files included. By the clock on the wall the bound is wider. The
backlog is read several times, each time after a kill and with nothing of it in memory, and of every
tenth the middle one of its times counts: others who take the caches disturb some of them, and what
is slow each time is slow because of what is there. The first tenth has the start in it. The last
one was fetched while the one before it was handled, so that its work is counted there. Neither is
compared. Waiting is no work, and is looked at by itself: how long the reader was without a message.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from orbitmq import Message, Producer, PullConsumer, Queue
from tools.chaos.census import processor_time
from tools.chaos.effort import TOPIC, Effort, create_topic
from tools.chaos.figures import Figure, at_most, none_of, told, tried
from tools.chaos.programs import ScenarioFailed, Stage

_QUEUES = 8
_BATCH = 250
_BODY = b"x" * 100
_PARTS = 10
_READINGS = 5
#: Messages that are sent and read so often in a second of a run.
_PACE = 40_000
_MIB = 1024 * 1024


def backlog(stage: Stage, effort: Effort) -> list[Figure]:
    """As many messages as fit the time, up to 10 million."""
    count = int(min(10_000_000, max(50_000, effort.seconds * _PACE)))
    count -= count % (_BATCH * _PARTS)
    broker = stage.broker("broker-a", "broker.store.preallocate_step=0")
    broker.start()
    create_topic(stage, queues=_QUEUES)
    filled = _fill(stage, count)
    broker.running.stop()
    _forget_pages(broker.folder)
    broker.start()
    stopped = broker.opened_in
    killed: list[float] = []
    readings: list[Reading] = []
    for number in range(_READINGS):
        broker.kill()
        _forget_pages(broker.folder)
        broker.start()
        killed.append(broker.opened_in)
        readings.append(_read(stage, f"late-{number}", count, broker.running.pid))
    step = count // _PARTS
    work = steady_rates([each.work for each in readings], step)
    pulled = steady_rates([each.times for each in readings], step)
    size = broker.log_bytes() / _MIB
    return [
        tried("R21", "messages of backlog", count),
        told("R21", "size of the log", f"{size:,.0f} MiB, written in {filled:.0f} s"),
        at_most("R21", "opened after a stop, from settings to listening", stopped, 10, "s"),
        at_most("R21", "opened after a kill -9, likewise", max(killed), 10, "s"),
        at_most("R21", "first message after", max(each.first for each in readings), 1.0, "s"),
        *_steadiness("of both processes' time", work, 20),
        *_steadiness("by the clock", pulled, 50),
        at_most(
            "R21",
            f"longest time without a message, the middle of {_READINGS} readings",
            statistics.median(each.longest_wait for each in readings),
            1.0,
            "s",
        ),
        none_of("R21", "complaints in logs", stage.complaints()),
    ]


@dataclass(frozen=True, slots=True)
class Reading:
    """One cold reading of everything."""

    first: float  #: seconds until the first message came
    work: list[float]  #: seconds of processor for every tenth but the first and the last
    times: list[float]  #: seconds on the clock for the same
    longest_wait: float  #: from one message to the next


class _Mark(NamedTuple):
    """Where a reading is at the end of a tenth."""

    taken: int
    work: float
    at: float


def steady_rates(readings: Sequence[Sequence[float]], step: int) -> list[float]:
    """The rate of every part of `step` messages, from the middle one of the times that it took."""
    return [step / statistics.median(times) for times in zip(*readings, strict=True)]


def _steadiness(what: str, rates: Sequence[float], limit: float) -> list[Figure]:
    """A rate, and how far the worst of its parts is from it, in percent."""
    middle = statistics.median(rates)
    return [
        told("R21", f"messages a second {what}", f"{middle:,.0f}"),
        at_most(
            "R21",
            f"largest deviation of a tenth {what}, the middle of {_READINGS} readings of each",
            deviation(rates) * 100,
            limit,
            "%",
        ),
    ]


def deviation(rates: Sequence[float]) -> float:
    """By which share of the middle one the one that is farthest from it differs."""
    middle = statistics.median(rates)
    return max(abs(rate / middle - 1) for rate in rates)


def _fill(stage: Stage, count: int) -> float:
    began = time.monotonic()
    messages = [Message(TOPIC, _BODY)] * _BATCH
    with Producer("fill", name_server=stage.name_server) as producer:
        queues = producer.queues(TOPIC)

        def send(number: int) -> None:
            producer.send_batch(messages, queue=queues[number % len(queues)], timeout=30.0)

        # Two, so that one batch is made while another one is stored.
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(send, range(count // _BATCH)):
                pass
    return time.monotonic() - began


def _forget_pages(folder: Path) -> None:
    """Have the kernel read everything from the disk again, as after a start of the machine."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _read(stage: Stage, group: str, count: int, broker: int) -> Reading:
    """Every offset once, in order."""
    expected: dict[Queue, int] = {}
    began = time.monotonic()
    with PullConsumer(group, name_server=stage.name_server, consume_from="first") as consumer:
        consumer.subscribe(TOPIC)
        joined = time.monotonic()
        if joined - began > 30:
            raise ScenarioFailed("joining the group took more than 30 s")
        taken, step = 0, count // _PARTS
        marks: list[_Mark] = []
        arrivals: list[float] = []
        while taken < count:
            messages = consumer.poll(10.0, max_messages=2000)
            if not messages:
                raise ScenarioFailed(f"only {taken} of {count} messages came")
            arrivals.append(time.monotonic())
            for message in messages:
                queue, offset = message.queue, message.queue_offset
                if offset != expected.get(queue, 0):
                    raise ScenarioFailed(f"{queue}: {offset} came for {expected.get(queue, 0)}")
                expected[queue] = offset + 1
            taken += len(messages)
            if taken >= step * (len(marks) + 1):
                work = processor_time(broker) + time.process_time()
                marks.append(_Mark(taken, work, arrivals[-1]))
    # A part ends with a poll, and hardly ever at its number.
    parts = [
        (begin, end, step / (end.taken - begin.taken))
        for begin, end in itertools.pairwise(marks[:-1])
    ]
    return Reading(
        first=arrivals[0] - joined,
        work=[(end.work - begin.work) * share for begin, end, share in parts],
        times=[(end.at - begin.at) * share for begin, end, share in parts],
        longest_wait=max((b - a for a, b in itertools.pairwise(arrivals)), default=0.0),
    )
