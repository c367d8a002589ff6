"""Roles that read: members of groups whose handlers are called, and one that is polled."""

from __future__ import annotations

import threading

from orbitmq import (
    Consumer,
    ConsumeSettings,
    PollSettings,
    PullConsumer,
    PullSettings,
    Queue,
    ReceivedMessage,
)
from orbitmq.client.consumer.locks import LockSettings
from orbitmq.errors import OrbitError
from tools.chaos.history import Assigned, Entered, Read, now
from tools.chaos.work import Worker


def consume(worker: Worker) -> None:
    """Members of one group, or of several."""
    options = worker.options
    names = (
        [options.group]
        if options.groups == 1
        else [f"{options.group}-{number}" for number in range(options.groups)]
    )
    consumers = [_consumer(worker, group) for group in names]
    for consumer in consumers:
        consumer.start()
    worker.say_ready()
    worker.ended.wait()
    for consumer in consumers:
        consumer.stop()


def _consumer(worker: Worker, group: str) -> Consumer:
    options = worker.options
    idle = threading.Event()

    def assigned(topic: str, _: tuple[Queue, ...], own: tuple[Queue, ...]) -> None:
        if topic == options.topic:
            queues = tuple(str(queue) for queue in own)
            worker.recorder.write(Assigned(now(), group, options.name, queues))

    consumer = Consumer(
        group,
        client=worker.client,
        ordered=options.ordered,
        consume_from="first",
        consume=ConsumeSettings(workers=options.workers),
        locks=LockSettings(life=options.lock_life, renewal=options.lock_renewal),
        pull=PullSettings(hold=options.hold, timeout=options.pull_timeout),
        on_assignment=assigned,
    )

    @consumer.on(options.topic)
    def handle(message: ReceivedMessage) -> None:
        if options.ordered:
            worker.took(group, message, Entered)
        if options.work:
            idle.wait(options.work)
        worker.took(group, message, Read)

    return consumer


def pull(worker: Worker) -> None:
    """A consumer that is polled, and commits what it has noted."""
    options = worker.options

    def assigned(topic: str, _: tuple[Queue, ...], own: tuple[Queue, ...]) -> None:
        queues = tuple(str(queue) for queue in own)
        worker.recorder.write(Assigned(now(), options.group, options.name, queues))

    polling = PollSettings(
        auto_commit=False, pull=PullSettings(hold=options.hold, timeout=options.pull_timeout)
    )
    with PullConsumer(
        options.group,
        client=worker.client,
        consume_from="first",
        polling=polling,
        on_assignment=assigned,
    ) as consumer:
        consumer.subscribe(options.topic)
        worker.say_ready()
        while not worker.ended.is_set():
            messages = consumer.poll(0.2)
            for message in messages:
                worker.took(options.group, message, Read)
            if messages:
                try:
                    consumer.commit()
                except OrbitError:
                    continue  # the broker is away; a later commit says as much and more
