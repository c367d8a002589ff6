"""The workers of one consumer: threads for its `def` handlers, tasks for the `async def` ones."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orbitmq.client.checks import whole
from orbitmq.client.consumer.settings import MOST_WORKERS
from orbitmq.client.consumer.workers import TaskWorkers, ThreadWorkers, Workers

if TYPE_CHECKING:
    from orbitmq.client.consumer.calls import DirectCall, Run


class Crew:
    """Runs calls of handlers wherever each of them belongs, `size` of each kind at once."""

    def __init__(self, size: int, finished: Callable[[list[Any]], None], *, group: str) -> None:
        """Made on the event loop; `finished` is told what is done, there. Starts nothing yet."""
        self._size = size
        self._finished = finished
        self._name = f"orbitmq-{group[:100]}"
        self._threads: ThreadWorkers | None = None
        self._tasks: TaskWorkers | None = None

    @property
    def size(self) -> int:
        """How many calls are made at once; fewer than wanted while the system lacks threads."""
        return self._size if self._threads is None else min(self._size, self._threads.size)

    def submit(self, job: Run | DirectCall) -> None:
        """Have calls made."""
        self.workers_for(job.is_async).submit(job)

    def workers_for(self, is_async: bool) -> Workers:
        """Those that call one kind of handlers; started with their first call."""
        if is_async:
            if self._tasks is None:
                self._tasks = TaskWorkers(self._size, self._finished, name=self._name)
            return self._tasks
        if self._threads is None:
            self._threads = ThreadWorkers(self._size, self._finished, name=self._name)
        return self._threads

    def resize(self, size: int) -> None:
        """From now on `size` calls of each kind at once."""
        self._size = whole(size, "workers", most=MOST_WORKERS)
        for workers in (self._threads, self._tasks):
            if workers is not None:
                workers.resize(size)

    @property
    def is_caller(self) -> bool:
        """Whether it is a handler that asks."""
        if self._threads is not None and threading.current_thread() in self._threads.threads():
            return True
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return False
        if task is None:
            return False
        if self._threads is not None and self._threads.awaits(task):
            return True
        return self._tasks is not None and task in self._tasks.tasks()

    async def stop(self, timeout: float) -> int:  # noqa: ASYNC109  # the workers share it
        """Begin nothing more; returns how many calls still run after `timeout` seconds."""
        late = 0
        for workers in (self._threads, self._tasks):
            if workers is not None:
                late += await workers.stop(timeout)
        return late

    def stacks(self) -> str:
        """Where each worker is, as text: threads that wait for work too, tasks that do any."""
        parts = []
        if self._threads is not None:
            frames = sys._current_frames()  # the only way to see other threads
            for thread in self._threads.threads():
                if thread.ident in frames:
                    parts.append((thread.name, traceback.format_stack(frames[thread.ident])))
            frames.clear()  # the own one is in there: a circle, with all that the threads hold
        if self._tasks is not None:
            for name, coroutine in self._tasks.at_work().items():
                parts.append((name, _stack_of(coroutine)))
        return "\n".join(f"{name}\n{''.join(lines)}" for name, lines in parts)


def _stack_of(coroutine: object) -> list[str]:
    """Where a coroutine waits, and those that it waits for: tasks show their own frame only."""
    lines: list[str] = []
    waiting: object = coroutine
    while inspect.iscoroutine(waiting):
        if waiting.cr_frame is not None:
            lines += traceback.format_list(
                traceback.StackSummary.extract([(waiting.cr_frame, waiting.cr_frame.f_lineno)])
            )
        waiting = waiting.cr_await
    return lines
