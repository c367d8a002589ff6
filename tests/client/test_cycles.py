"""What holds functions of the application may be part of a cycle, and is collected all the same."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from contextvars import copy_context

import pytest

from orbitmq.client.consumer.handlers import bind_handler
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.consumer.workers import Call as HandlerCall
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.producer.core import parse_send_args
from orbitmq.client.routes import Queue
from tests.support.consuming import GROUP, QUEUE, received


class Application:
    """Remembers what it is called by, as a traceback that is kept does."""

    kept: object = None

    def handle(self, message: ReceivedMessage) -> None: ...

    def select(self, queues: Sequence[Queue], _: Message) -> Queue:
        return queues[0]


def _handler_call(application: Application) -> object:
    binding = bind_handler(application.handle, group=GROUP)
    return HandlerCall(binding, OwnedQueue(QUEUE, 0, now=0.0), [received()], time.monotonic)


def _send_call(application: Application) -> object:
    return parse_send_args("orders", b"paid", {"selector": application.select}, 3.0)


@pytest.mark.parametrize("made", [_handler_call, _send_call])
def test_a_call_that_its_own_function_keeps_is_collected(made):
    application = Application()
    application.kept = made(application)
    gone = weakref.ref(application)

    del application
    gc.collect()

    assert gone() is None


def test_nothing_is_left_of_a_handler_that_failed():
    left: list[weakref.ref[Application]] = []

    def fail(message):
        local = Application()
        left.append(weakref.ref(local))
        raise ValueError(message.msg_id)

    call = HandlerCall(
        bind_handler(fail, group=GROUP), OwnedQueue(QUEUE, 0, now=0.0), [received()], time.monotonic
    )
    call.run_in(copy_context())
    assert call.outcome is not None
    assert call.outcome.failure is not None

    del call
    gc.collect()

    assert [each() for each in left] == [None]
