"""Nothing is left of lost connections and stopped consumers.

What a process holds is counted in one of its own: here, other tests have caches of their own.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest

from orbitmq.client.consumer.handlers import bind_handler
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.consumer.workers import Calls as HandlerCalls
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.producer.core import parse_send_args
from orbitmq.client.routes import Queue
from tests.support.consuming import GROUP, QUEUE, received

ROOT = Path(__file__).parents[2]
COUNTED = "tests/soak/client_leaks.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("left_of", ["connections_that_were_lost", "consumers_that_were_stopped"])
def test_nothing_is_left_of(left_of, tmp_path):
    alone = {name: text for name, text in os.environ.items() if "XDIST" not in name}
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", f"{COUNTED}::test_nothing_is_left_of_{left_of}"),
            *("--basetemp", str(tmp_path / "counted"), "-p", "no:xdist"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=alone,
        timeout=280,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout


# ---- calls that are part of a cycle


class Application:
    """Remembers what it is called by, as a traceback that is kept does."""

    kept: object = None

    def handle(self, message: ReceivedMessage) -> None: ...

    def select(self, queues: Sequence[Queue], _: Message) -> Queue:
        return queues[0]


def _handler_call(application: Application) -> object:
    binding = bind_handler(application.handle, group=GROUP)
    return HandlerCalls(binding, OwnedQueue(QUEUE, 0, now=0.0), [received()], time.monotonic)


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
