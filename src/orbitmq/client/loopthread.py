"""A background thread with an event loop, on which the blocking clients do their work.

The thread is a daemon and is stopped gracefully when the interpreter exits. A program that forgets
to stop a client therefore ends, without warnings about pending tasks.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from orbitmq.client.engine import ProcessCheck
from orbitmq.errors import NotRunning, OrbitError, WrongUse

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class Life:
    """Makes `start` and `stop` a context manager."""

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class LoopThread:
    """An event loop on its own thread. Its methods may be called from any other thread."""

    def __init__(self, name: str = "orbitmq") -> None:
        self._name = name
        self._check_process = ProcessCheck("this client", from_start=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        #: The thread that is ending; concurrent calls of `stop` wait for it, too.
        self._ending: threading.Thread | None = None
        self._ident: int | None = None
        # The loop has weak references to its tasks only, and callers may drop the future.
        self._submitted: set[concurrent.futures.Future[Any]] = set()
        # Guards `_loop` and `_thread`: work submitted before a stop reaches the loop, which cancels
        # it before it is closed. Nothing is awaited under it. A fork may copy it while it is taken,
        # so the process is checked first. Reentrant: a signal handler can interrupt the thread that
        # has it.
        self._life = threading.RLock()

    def start(self) -> None:
        """Returns when the loop runs. Does nothing if it runs already."""
        self._check_process.begin()
        with self._life:
            if self._thread is not None:
                return
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(loop,), name=self._name, daemon=True)
            thread.start()
            self._loop, self._thread, self._ident = loop, thread, thread.ident
        atexit.register(self.stop)

    def stop(self, timeout: float = 10.0) -> None:
        """Cancel the remaining tasks and end the thread. May be repeated, also after a fork.

        Every caller waits for the end, also when another thread has begun the stop.
        """
        if not self._check_process.is_same:
            return
        if threading.current_thread() is self._thread:
            raise WrongUse("a client's own thread cannot wait for its own end; stop it elsewhere")
        with self._life:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = self._ident = None
            if loop is not None and thread is not None:
                self._ending = thread
                loop.call_soon_threadsafe(loop.stop)
            ending = self._ending
        if ending is None or ending is threading.current_thread():
            return
        atexit.unregister(self.stop)
        ending.join(timeout)
        if ending.is_alive():
            log.error("thread %r does not end: something blocks its event loop", self._name)

    @property
    def is_running(self) -> bool:
        return self._loop is not None and self._check_process.is_same

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this thread."""
        # A fork may reuse the ident of this thread, which it does not have.
        return threading.get_ident() == self._ident and self._check_process.is_same

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; raises `NotRunning` or `UsedAfterFork`."""
        self._check_process()
        if self._loop is None:
            raise NotRunning("this client")
        return self._loop

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """The result of a coroutine that runs on the loop.

        On a timeout, or when the caller is interrupted, the coroutine is cancelled. Raises
        `TimeoutError` in the first case.
        """
        try:
            self.check_other()
        except WrongUse:
            coroutine.close()
            raise
        call: LoopCall[T] = LoopCall()
        try:
            # An interrupt may come at any point here; the coroutine is always cancelled.
            self._begin(coroutine, call)
            is_done = call.wait(timeout)
        except BaseException:
            call.give_up()
            raise
        if not is_done:
            call.give_up()
            raise TimeoutError
        return self._outcome(call)

    def _outcome(self, call: LoopCall[T]) -> T:
        try:
            return call.outcome()
        except concurrent.futures.CancelledError:
            if self._loop is None:
                raise NotRunning("this client", was_stopped=True) from None
            raise

    def check_other(self) -> None:
        """Raise `WrongUse` on this thread itself, where waiting for the loop would block it."""
        # Part of every blocking call, so the cheaper check comes first.
        if threading.get_ident() == self._ident and self.is_current:
            raise WrongUse(
                "a blocking call on the client's own thread would wait for itself; "
                "use the async face in callbacks and handlers that run there"
            )

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop; the future gets its result."""
        try:
            self._check_process()
            with self._life:
                loop = self.loop
                future: concurrent.futures.Future[T] | None = None
                try:
                    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
                except RuntimeError:
                    if not loop.is_closed():
                        raise  # as in `_begin`
                if future is None or (loop.is_closed() and _is_unbegun(coroutine)):
                    raise NotRunning("this client", was_stopped=True)
        except OrbitError:
            coroutine.close()
            raise
        self._submitted.add(future)
        future.add_done_callback(self._submitted.discard)
        return future

    def _begin(self, coroutine: Coroutine[Any, Any, T], call: LoopCall[T]) -> None:
        try:
            self._check_process()
            with self._life:
                loop = self.loop
                try:
                    loop.call_soon_threadsafe(call.begin, loop, coroutine)
                except RuntimeError:
                    if not loop.is_closed():
                        raise  # not of the loop: an interrupted thread can raise any type
                # A signal handler on this thread may have stopped the loop, also in the middle of
                # that call: the loop then accepts the coroutine and never runs it.
                if loop.is_closed() and _is_unbegun(coroutine):
                    raise NotRunning("this client", was_stopped=True)
        except OrbitError:
            coroutine.close()
            raise


def _is_unbegun(coroutine: Coroutine[Any, Any, T]) -> bool:
    return inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED


class LoopCall(Generic[T]):
    """A coroutine on the loop that a thread waits for.

    The loop never waits for the thread. With a `concurrent.futures.Future` it might: a thread that
    is interrupted in `result` can leave the future's condition locked.
    """

    __slots__ = ("_gate", "_is_given_up", "_loop", "_task")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self._is_given_up = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None

    def begin(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        """On the loop."""
        if self._is_given_up:
            try:
                coroutine.close()
            finally:
                # A thread other than the waiting one may have given it up.
                self._gate.release()
            return
        task = loop.create_task(coroutine)
        task.add_done_callback(self._settle)
        self._task, self._loop = task, loop
        self._look_again(task)

    def _look_again(self, task: asyncio.Task[T]) -> None:
        """Cancel it if a thread gave it up while it began and did not see the task."""
        if self._is_given_up:
            task.cancel()

    def _settle(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            # Retrieved even without a waiter: otherwise asyncio logs it.
            task.exception()
        self._gate.release()

    def wait(self, timeout: float | None) -> bool:
        """Block until there is an outcome; False when the time is up."""
        return self._gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout))

    def give_up(self) -> None:
        """Cancel it, now or when it begins. Remaining waiters get `CancelledError`."""
        self._is_given_up = True
        if self._loop is not None and self._task is not None:
            # A loop that is closed has cancelled all of its tasks.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)

    def is_task(self, task: asyncio.Task[Any]) -> bool:
        """Whether it is this task that runs the coroutine."""
        return self._task is task

    def outcome(self) -> T:
        """The result of the coroutine. Call `wait` first."""
        if self._task is None or self._task.cancelled():
            raise concurrent.futures.CancelledError
        return self._task.result()


class BlockingFace:
    """The blocking face of an asynchronous object on a loop's thread.

    Its methods are made by `waiting`, so that both faces share signatures and docstrings.
    """

    def __init__(self, part: object, thread: LoopThread) -> None:
        self._part = part
        self._thread = thread

    def _check(self) -> None:
        """Called before each call; raises the reason when calls are not possible."""


def waiting(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[BlockingFace, P], R]:
    """The blocking face of a method: it returns when the method is done."""

    @functools.wraps(method)
    def wait(self: BlockingFace, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check()
        bound: Callable[..., Coroutine[Any, Any, R]] = getattr(self._part, method.__name__)
        return self._thread.run(bound(*args, **kwargs))

    return wait


# ---- on the thread


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        _run_until_stopped(loop)
        _finish(loop)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except (KeyboardInterrupt, SystemExit) as error:
            # asyncio does not catch these: `sys.exit` in a handler would end the thread and leave
            # all other callers waiting. The caller of that coroutine gets the error.
            log.warning("%s on the thread of a client, which continues", type(error).__name__)
        else:
            return


def _finish(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
