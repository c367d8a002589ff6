"""Spares a Python worker of Spark from looking through its modules for garbage after every task.

A worker that is kept collects all garbage when a task has ended. That goes through every object
that the process has: with PySpark, Arrow and this package 60,000 of them, 25 milliseconds, to find
next to nothing. As much time is enough to read ten thousand messages. So what is there when a
worker has done its first task is put aside for good; it is modules, and they stay anyway. Garbage
that comes later is found as before, and whatever is not part of a cycle is freed as before.

Only in processes that Spark forks for itself: what others do with their memory is their business.
"""

from __future__ import annotations

import gc
import os
from functools import cache

from orbitmq.spark.sparkprocesses import is_worker


def put_modules_aside() -> None:
    """Let no later collection look at what is there now. Does something once in a worker."""
    if is_worker():
        _freeze(os.getpid())


@cache
def _freeze(_process: int) -> None:
    """Once: even to ask whether anything was put aside takes a walk through all of it."""
    gc.collect()
    gc.freeze()
