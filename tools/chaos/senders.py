"""Roles that send: plain messages, messages for later, transactions."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Unpack

from orbitmq import Message, Producer, ReceivedMessage, SendResult, SendSettings
from orbitmq.client.producer.core import SendOptions
from orbitmq.errors import OrbitError
from orbitmq.wire.codes import TransactionState
from tools.chaos.history import Acked, Invoked, Refused, Unknown, Value, body_of, now, value_of
from tools.chaos.work import Worker


def produce(worker: Worker) -> None:
    """Send value after value; one of a key at a time unless `in_flight` says otherwise."""
    options = worker.options
    settings = SendSettings(
        timeout=options.timeout,
        attempt_timeout=options.attempt_timeout,
        retries=options.retries,
        max_in_flight=options.in_flight,
    )
    pace = _Pace(options.rate, worker.ended)
    with Producer("chaos-producers", client=worker.client, sending=settings) as producer:
        worker.say_ready()
        sequence = 0
        while not worker.ended.is_set() and sequence != (options.count or -1):
            if options.is_keyed:
                value = Value(options.name, sequence, f"{options.name}-{sequence % options.keys}")
                _send(worker, producer, value, worker.acked, ordering_key=value.key)
            else:
                value = Value(options.name, sequence, str(sequence))
                _send(worker, producer, value, worker.acked)
            sequence += 1
            pace.wait()
        producer.flush(options.timeout * 4)


_NoteAcked = Callable[[Value, SendResult], None]


def _send(
    worker: Worker,
    producer: Producer,
    value: Value,
    acked: _NoteAcked,
    **how: Unpack[SendOptions],
) -> None:
    """Send a value and note what became of it: at once, or when several may be under way, later."""
    worker.recorder.write(Invoked(now(), str(value)))
    topic, body = worker.options.topic, body_of(value, worker.options.size)

    def done(sent: Future[SendResult]) -> None:
        error = sent.exception()
        if error is None:
            acked(value, sent.result())
        elif isinstance(error, Exception):
            worker.failed(value, error)

    try:
        if worker.options.in_flight == 1:
            acked(value, producer.send(topic, body, **how))
        else:
            producer.submit(topic, body, **how).add_done_callback(done)
    except OrbitError as error:
        worker.failed(value, error)


def produce_later(worker: Worker) -> None:
    """Send messages that are due after mixed times; the sequence says when, in milliseconds."""
    options = worker.options
    chance = random.Random(options.seed)  # noqa: S311  # repeats a run
    settings = SendSettings(
        timeout=options.timeout, retries=options.retries, max_in_flight=options.in_flight
    )
    pace = _Pace(options.rate, worker.ended)
    levels = {1: 1.0, 2: 5.0, 3: 10.0, 4: 30.0}

    def acked(value: Value, sent: SendResult) -> None:
        # The offset is that of a queue which nobody reads; this place is the producer's own.
        queue = f"%DELAY%{value.producer}"
        worker.recorder.write(Acked(now(), str(value), queue, value.sequence))

    with Producer("chaos-later", client=worker.client, sending=settings) as producer:
        worker.say_ready()
        for number in range(options.count):
            if worker.ended.is_set():
                break
            level = chance.choice((0, *options.levels))
            delay = levels.get(level) or chance.uniform(options.delay_from, options.delay_to)
            # When it is due by the machine's date, in the key, for whoever receives it.
            due = round((time.time() + delay) * 1000)
            value = Value(options.name, number, f"{level}-{due}")
            if level:
                _send(worker, producer, value, acked, delay_level=level)
            else:
                _send(worker, producer, value, acked, deliver_at=due / 1000)
            pace.wait()
        producer.flush(options.timeout * 4)


def transact(worker: Worker) -> None:
    """Half messages, and what becomes of each follows from its sequence, as from a database."""
    options = worker.options
    chance = random.Random(options.seed)  # noqa: S311  # repeats a run
    settings = SendSettings(timeout=options.timeout, retries=options.retries)
    pace = _Pace(options.rate, worker.ended)

    def check(message: ReceivedMessage) -> bool:
        return is_committed(value_of(message.body))

    with Producer(
        "chaos-transactions", client=worker.client, sending=settings, check=check
    ) as producer:
        worker.say_ready()
        sequence = 0
        while not worker.ended.is_set() and options.rate and sequence != (options.count or -1):
            # Every message has a key of its own: commits have no order.
            value = Value(options.name, sequence, str(sequence))
            sequence += 1
            _transact_one(worker, producer, value, knows=chance.random() < 0.7)
            pace.wait()
        # Somebody has to be there to be asked.
        worker.ended.wait()


def _transact_one(worker: Worker, producer: Producer, value: Value, *, knows: bool) -> None:
    worker.recorder.write(Invoked(now(), str(value)))
    if not is_committed(value):
        # Whatever becomes of the half message, nobody may see it.
        worker.recorder.write(Refused(now(), str(value), "rolled back"))
    try:
        half = producer.send_half(
            Message(worker.options.topic, body_of(value, worker.options.size))
        )
    except OrbitError as error:
        if is_committed(value):
            worker.recorder.write(Unknown(now(), str(value), str(error)[:300]))
        return
    if is_committed(value):
        worker.recorder.write(Acked(now(), str(value), f"%HALF%{value.producer}", value.sequence))
    if knows:
        state = TransactionState.COMMIT if is_committed(value) else TransactionState.ROLLBACK
    else:
        state = TransactionState.UNKNOWN
    try:
        producer.end_transaction(half, state)
    except OrbitError:
        return  # it was not said; the broker asks


def is_committed(value: Value) -> bool:
    """What the application has decided: two of three are committed."""
    return value.sequence % 3 != 1


class _Pace:
    """Spreads sends evenly; what was missed is not made up for."""

    def __init__(self, rate: float, ended: threading.Event) -> None:
        self._step = 1 / rate if rate else 0.0
        self._next = time.monotonic()
        self._ended = ended

    def wait(self) -> None:
        if self._step:
            self._next = max(self._next + self._step, time.monotonic() - 1.0)
            left = self._next - time.monotonic()
            if left > 0:
                self._ended.wait(left)
