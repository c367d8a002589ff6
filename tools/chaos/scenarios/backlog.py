"""R21: a large backlog, a cold start, and a consumer from the beginning."""

from __future__ import annotations

import itertools
import os
import time
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
_MIB = 1024 * 1024


def backlog(stage: Stage, effort: Effort) -> list[Figure]:
    """As many messages as fit the time, up to 10 million."""
    count = int(min(10_000_000, max(50_000, effort.seconds * 20_000)))
    count -= count % (_BATCH * _PARTS)
    broker = stage.broker("broker-a", "broker.store.preallocate_step=0")
    broker.start()
    create_topic(stage, queues=_QUEUES)
    filled = _fill(stage, count)
    broker.running.stop()
    _forget_pages(broker.folder)
    broker.start()
    stopped = broker.opened_in
    broker.kill()
    _forget_pages(broker.folder)
    broker.start()
    killed = broker.opened_in
    first, rates = _read(stage, count)
    spread = max(abs(rate / quantile(sorted(rates), 0.5) - 1) for rate in rates)
    size = broker.log_bytes() / _MIB
    return [
        tried("R21", "messages of backlog", count),
        told("R21", "size of the log", f"{size:,.0f} MiB, written in {filled:.0f} s"),
        at_most("R21", "opened after a stop, from settings to listening", stopped, 10, "s"),
        at_most("R21", "opened after a kill -9, likewise", killed, 10, "s"),
        at_most("R21", "first message after", first, 1.0, "s"),
        told("R21", "pull rate", f"{quantile(sorted(rates), 0.5):,.0f} messages a second"),
        # On a machine of one's own; what others do on this one is in the figure.
        at_most("R21", "largest deviation of a tenth from the middle rate", spread * 100, 20, "%"),
        none_of("R21", "complaints in logs", stage.complaints()),
    ]


def _fill(stage: Stage, count: int) -> float:
    began = time.monotonic()
    message = Message(TOPIC, _BODY)
    with Producer("fill", name_server=stage.name_server) as producer:
        queues = producer.queues(TOPIC)
        for number in range(count // _BATCH):
            producer.send_batch(
                [message] * _BATCH, queue=queues[number % len(queues)], timeout=30.0
            )
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


def _read(stage: Stage, count: int) -> tuple[float, list[float]]:
    """Seconds to the first message, and the rate of every tenth; every offset once, in order."""
    expected: dict[Queue, int] = {}
    began = time.monotonic()
    with PullConsumer("late", name_server=stage.name_server, consume_from="first") as consumer:
        consumer.subscribe(TOPIC)
        joined = time.monotonic()
        first = 0.0
        taken, step = 0, count // _PARTS
        marks = [time.monotonic()]
        while taken < count:
            messages = consumer.poll(10.0, max_messages=2000)
            if not messages:
                raise ScenarioFailed(f"only {taken} of {count} messages came")
            if not taken:
                first = time.monotonic() - joined
                marks = [time.monotonic()]
            for message in messages:
                queue, offset = message.queue, message.queue_offset
                if offset != expected.get(queue, 0):
                    raise ScenarioFailed(f"{queue}: {offset} came for {expected.get(queue, 0)}")
                expected[queue] = offset + 1
            taken += len(messages)
            if taken >= step * len(marks):
                marks.append(time.monotonic())
    if joined - began > 30:
        raise ScenarioFailed("joining the group took more than 30 s")
    # The first tenth has the start in it.
    spans = itertools.pairwise(marks[1:])
    return first, [step / (end - begin) for begin, end in spans]
