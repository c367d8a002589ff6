"""The Celery application that worker processes of the tests run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery

import orbitmq.integrations.kombu  # noqa: F401  # makes the scheme known

app = Celery("tests", broker=os.environ.get("TEST_BROKER", "orbitmq://"), backend="rpc://")
app.conf.worker_prefetch_multiplier = 1


def note(path: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(text + "\n")


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def name_of_node() -> str:
    return os.environ["TEST_NODE"]


@app.task(acks_late=True, reject_on_worker_lost=True)
def until(path: str, flag: str) -> str:
    """Runs until a file is there."""
    note(path, os.environ["TEST_NODE"])
    while not Path(flag).exists():
        time.sleep(0.05)
    return os.environ["TEST_NODE"]


@app.task(bind=True, max_retries=5)
def third_time(self, path: str) -> int:
    note(path, str(time.time()))
    if self.request.retries < 2:
        raise self.retry(countdown=2)
    return int(self.request.retries)
