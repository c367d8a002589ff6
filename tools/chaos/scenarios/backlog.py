"""R21: a large backlog, a cold start, and a consumer from the beginning.

Is the pull rate steady? Each tenth of the backlog is read in some tenths of a second, in which
somebody else who wakes up on the machine is seen. What others do can only make it slower. So the
backlog is read several times, each time after a kill and with nothing of it in memory, and of every
tenth the best time counts: what is slow each time is slow because of what is there.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orbitmq import Message, Producer, PullConsumer, Queue
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
    firsts: list[float] = []
    readings: list[list[float]] = []
    for number in range(_READINGS):
        broker.kill()
        _forget_pages(broker.folder)
        broker.start()
        killed.append(broker.opened_in)
        first, times = _read(stage, f"late-{number}", count)
        firsts.append(first)
        readings.append(times)
    rates = steady_rates(readings, count // _PARTS)
    middle = quantile(sorted(rates), 0.5)
    spread = max(abs(rate / middle - 1) for rate in rates)
    size = broker.log_bytes() / _MIB
    return [
        tried("R21", "messages of backlog", count),
        told("R21", "size of the log", f"{size:,.0f} MiB, written in {filled:.0f} s"),
        at_most("R21", "opened after a stop, from settings to listening", stopped, 10, "s"),
        at_most("R21", "opened after a kill -9, likewise", max(killed), 10, "s"),
        at_most("R21", "first message after", max(firsts), 1.0, "s"),
        told("R21", "pull rate", f"{middle:,.0f} messages a second"),
        at_most(
            "R21",
            f"largest deviation of a tenth from the middle rate, the best of {_READINGS} readings",
            spread * 100,
            20,
            "%",
        ),
        none_of("R21", "complaints in logs", stage.complaints()),
    ]


def steady_rates(readings: Sequence[Sequence[float]], step: int) -> list[float]:
    """The rate of every part of `step` messages, from the best of the times that it took."""
    return [step / min(times) for times in zip(*readings, strict=True)]


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


def _read(stage: Stage, group: str, count: int) -> tuple[float, list[float]]:
    """Seconds to the first message, and for every tenth; every offset once, in order."""
    expected: dict[Queue, int] = {}
    began = time.monotonic()
    with PullConsumer(group, name_server=stage.name_server, consume_from="first") as consumer:
        consumer.subscribe(TOPIC)
        joined = time.monotonic()
        if joined - began > 30:
            raise ScenarioFailed("joining the group took more than 30 s")
        first = 0.0
        taken, step = 0, count // _PARTS
        marks: list[tuple[int, float]] = []
        while taken < count:
            messages = consumer.poll(10.0, max_messages=2000)
            if not messages:
                raise ScenarioFailed(f"only {taken} of {count} messages came")
            if not taken:
                first = time.monotonic() - joined
            for message in messages:
                queue, offset = message.queue, message.queue_offset
                if offset != expected.get(queue, 0):
                    raise ScenarioFailed(f"{queue}: {offset} came for {expected.get(queue, 0)}")
                expected[queue] = offset + 1
            taken += len(messages)
            if taken >= step * (len(marks) + 1):
                marks.append((taken, time.monotonic()))
    # The first tenth has the start in it. A part ends with a poll, and hardly ever at its number.
    return first, [
        (end - begin) * step / (upto - since)
        for (since, begin), (upto, end) in itertools.pairwise(marks)
    ]
