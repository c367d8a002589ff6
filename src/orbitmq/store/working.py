"""A thread that makes system calls for the owner, so that the owner need not wait for them.

The thread touches nothing of the store's state: a job is a function of files, and its outcome is
looked at by the owner. Without a thread (`start` never called) a job runs where it is submitted,
which makes a store whose every step can be repeated.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Job:
    """A call that is, or will be, made by the worker."""

    __slots__ = ("_args", "_call", "_done", "_result", "error")

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._call = call
        self._args = args
        self._done = threading.Event()
        self._result: Any = None
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()

    def result(self) -> Any:
        """What the call returned, or raise what it raised."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self._result

    def run(self) -> None:
        try:
            self._result = self._call(*self._args)
        except Exception as error:  # noqa: BLE001 - kept for the owner, who must not miss any
            self.error = error
        finally:
            self._done.set()


class Worker:
    """Runs jobs one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Any], *args: Any) -> Job:
        job = Job(call, args)
        if self._thread is None:
            job.run()
        else:
            self._jobs.put(job)
        return job

    def stop(self) -> None:
        """Finish what was submitted and end the thread; later jobs run where they are submitted."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
