"""R21: a large backlog, a cold start, and a consumer from the beginning.

Is the pull rate steady? Each tenth of the backlog is read in some tenths of a second, in which
somebody else who wakes up on the machine is seen, by a clock on the wall. So the rate is that of
the work: messages by seconds of processor that the broker and the reader needed for them, the
system's share for reading files included. The backlog is read several times, each time after a kill
and with nothing of it in memory, and of every tenth the middle one of its times counts: others who
take the caches disturb some of them, and what is slow each time is slow because of what is there.
The first tenth has the start in it. The last one was fetched while the one before it was handled,
so that its work is counted there. Neither is compared. Waiting is no work, and is looked at by
itself: how long the reader was without a message.
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

from orbitmq import Message, Producer, PullConsumer, Queue
from tools.chaos.census import processor_time
from tools.chaos.effort import TOPIC, Effort, create_topic
from tools.chaos.figures import Figure, at_most, none_of, told, tried
from tools.chaos.programs import ScenarioFailed, Stage
from tools.chaos.timing import quantile

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
    rates = steady_rates([each.parts for each in readings], count // _PARTS)
    middle = quantile(sorted(rates), 0.5)
    spread = max(abs(rate / middle - 1) for rate in rates)
    pulled = count / min(each.took for each in readings)
    size = broker.log_bytes() / _MIB
    return [
        tried("R21", "messages of backlog", count),
        told("R21", "size of the log", f"{size:,.0f} MiB, written in {filled:.0f} s"),
        at_most("R21", "opened after a stop, from settings to listening", stopped, 10, "s"),
        at_most("R21", "opened after a kill -9, likewise", max(killed), 10, "s"),
        at_most("R21", "first message after", max(each.first for each in readings), 1.0, "s"),
        told(
            "R21",
            f"pull rate, the best of {_READINGS} readings",
            f"{pulled:,.0f} messages a second",
        ),
        told("R21", "of both processes' time", f"{middle:,.0f} messages a second"),
        at_most(
            "R21",
            f"largest deviation of a tenth from that, the middle of {_READINGS} readings of each",
            spread * 100,
            20,
            "%",
        ),
        at_most(
            "R21",
            "longest time without a message, in the best of the readings",
            min(each.longest_wait for each in readings),
            1.0,
            "s",
        ),
        none_of("R21", "complaints in logs", stage.complaints()),
    ]


@dataclass(frozen=True, slots=True)
class Reading:
    """One cold reading of everything."""

    first: float  #: seconds until the first message came
    took: float  #: until the last did
    parts: list[float]  #: seconds of processor for every tenth but the first and the last
    longest_wait: float  #: from one message to the next


def steady_rates(readings: Sequence[Sequence[float]], step: int) -> list[float]:
    """The rate of every part of `step` messages, from the middle one of the times that it took."""
    return [step / statistics.median(times) for times in zip(*readings, strict=True)]


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
        marks: list[tuple[int, float]] = []
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
                marks.append((taken, processor_time(broker) + time.process_time()))
    return Reading(
        first=arrivals[0] - joined,
        took=arrivals[-1] - joined,
        # A part ends with a poll, and hardly ever at its number.
        parts=[
            (end - begin) * step / (upto - since)
            for (since, begin), (upto, end) in itertools.pairwise(marks[:-1])
        ],
        longest_wait=max((b - a for a, b in itertools.pairwise(arrivals)), default=0.0),
    )
