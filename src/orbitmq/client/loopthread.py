"""A background thread with an event loop: where the sync faces of clients do their work.

The thread is a daemon, and is stopped in order when the interpreter exits, so that a program that
forgets to stop a client still ends, without complaints about tasks left behind.
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
    """One event loop on a thread of its own. Its methods may be called from any other thread."""

    def __init__(self, name: str = "orbitmq") -> None:
        self._name = name
        self._check_process = ProcessCheck("this client", from_start=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        #: The thread that is ending; concurrent calls of `stop` wait for it, too.
        self._ending: threading.Thread | None = None
        self._ident: int | None = None
        # A loop knows its tasks only weakly, and callers may throw the future away.
        self._submitted: set[concurrent.futures.Future[Any]] = set()
        # Guards `_loop` and `_thread`: what was submitted under it was submitted before the stop,
        # so that the loop still sees it, and cancels it, before it is closed. Nothing is waited for
        # under it. A fork copies it in whatever state: the process is checked before it is taken.
        # A thread may take it twice: a signal handler can interrupt the thread that has it.
        self._life = threading.RLock()

    def start(self) -> None:
        """Returns when the loop runs. Nothing happens if it does already."""
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
        """Cancel what still runs, and end the thread. May be called again, and after a fork.

        Whoever calls it waits for the end, also of what another one has stopped meanwhile.
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
        # A fork may give the number of the thread, which it does not have, to one of its own.
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

        When the time is up, or the caller is interrupted, the coroutine is cancelled; the loop
        goes on. Raises `TimeoutError` in the first case.
        """
        try:
            self.check_other()
        except WrongUse:
            coroutine.close()
            raise
        call: LoopCall[T] = LoopCall()
        try:
            # An interrupt may come at any point here, and the coroutine is given up in any case.
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
        """Raise `WrongUse` on this very thread, where nothing may wait for the loop."""
        # On the way of every blocking call: of two reasons against it, the cheaper one first.
        if threading.get_ident() == self._ident and self.is_current:
            raise WrongUse(
                "a blocking call on the client's own thread would wait for itself; "
                "use the async face in callbacks and handlers that run there"
            )

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Have a coroutine run on the loop; its result comes in a future."""
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
                        raise  # not of the loop: what interrupts a thread can have any type
                # A signal handler on this thread may have stopped it meanwhile, also in the middle
                # of that call: a loop takes it then without complaint, and never comes to it.
                if loop.is_closed() and _is_unbegun(coroutine):
                    raise NotRunning("this client", was_stopped=True)
        except OrbitError:
            coroutine.close()
            raise


def _is_unbegun(coroutine: Coroutine[Any, Any, T]) -> bool:
    return inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED


class LoopCall(Generic[T]):
    """A coroutine on the loop that a thread waits for.

    The loop never waits for the thread. With a `concurrent.futures.Future` it might, for ever: a
    thread that is interrupted in the middle of `result` can leave its condition locked.
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
                # It may have been given up by another thread than the one that waits.
                self._gate.release()
            return
        task = loop.create_task(coroutine)
        task.add_done_callback(self._settle)
        self._task, self._loop = task, loop
        self._look_again(task)

    def _look_again(self, task: asyncio.Task[T]) -> None:
        """It may have been given up while it was begun, by a thread that did not see the task."""
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
        """What came of it, when it was waited for."""
        if self._task is None or self._task.cancelled():
            raise concurrent.futures.CancelledError
        return self._task.result()


class BlockingFace:
    """The blocking face of an asynchronous object that lives on a loop's thread.

    Its methods are made by `waiting`, so that both faces share signatures and docstrings.
    """

    def __init__(self, part: object, thread: LoopThread) -> None:
        self._part = part
        self._thread = thread

    def _check(self) -> None:
        """Called before each call; raises why none may be made."""


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
            # asyncio lets these through: a `sys.exit` in a handler would end the thread,
            # and leave all other callers waiting. The caller of that coroutine gets the error.
            log.warning("%s on the thread of a client, which goes on", type(error).__name__)
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
