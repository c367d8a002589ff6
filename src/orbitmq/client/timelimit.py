"""A limit on the time that a handler may take, as middleware.

An `async def` handler is cancelled, as by `asyncio.timeout`. A `def` handler is interrupted: the
error is raised in its thread at the next step of Python code. A call into C that does not return -
a socket without a timeout, a lock - is not ended by that; the error comes when it returns.

The delicate part is that an interruption is asynchronous: asked for just before the handler ends,
it would strike the worker's own code just after. Whoever interrupts therefore does so under a lock
that the handler's thread takes when it leaves, and what has not struck by then is made to strike
there. It could be withdrawn instead, but CPython 3.11 then goes on looking for it for as long as
the process lives: in every thread, and for ever at the first call of a thread that is traced.

So an interruption that was asked for always strikes: in the handler, or when it is left. Nothing
that a thread does gets round that, as it can only end by leaving; but as long as the handler is in
a call into C, the interruption waits, and CPython 3.11 looks for it as above. That cannot be helped
from outside: nobody can see whether it has struck, so it cannot be asked for once more later. Code
that the interpreter lets raise nothing, a `__del__` or the callback of a weak reference, swallows
what strikes there; the handler then feels it when it leaves.

Nor is it sure whom it strikes. CPython finds a thread by its ident, and in 3.11 a thread that is
being started has the ident of the one that starts it, until the system has it run for the first
time. An interruption in between is the new thread's: it dies before it says that it has begun, and
`Thread.start` waits for that for ever. So a handler that is in the middle of starting a thread is
not interrupted, but looked at again in a moment; while it is looked at, nobody comes further into
`Thread.start` than a lock of `threading`, which the watch has. What goes round `Thread`, by
`_thread.start_new_thread`, can still lose a thread; the handler then feels it when it leaves.

Limits can be around each other, and then the outer one may strike in the very lines by which the
inner one is entered or left. That is why leaving is begun again until it has got through, and why
the end of the delivery does it once more: a call that nobody left would strike whatever comes next.

A fork takes the limit along but not its thread, and locks in whatever state that thread had them:
there the watch begins anew. A call in the middle of which a process forks has no limit in the fork.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import time
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn

from orbitmq.client.durations import Duration, seconds
from orbitmq.client.errors import SettingError
from orbitmq.client.forks import tell_of_forks

if TYPE_CHECKING:
    from orbitmq.client.middleware import Delivery, Surrounding

#: How long the thread that watches stays without anything to watch.
_IDLE: Final = 10.0
#: After how long it looks again at a call that could not be interrupted just then.
_MOMENT: Final = 0.001


class TimeLimitExceeded(Exception):
    """Raised in a handler that took too long.

    Not a `TimeoutError`, which is an `OSError`: it can strike in any line, and code around a socket
    or a file would take it for trouble with that.
    """


class TimeLimit:
    """Ends handlers that take longer than `limit` seconds; their messages come again."""

    def __init__(self, limit: Duration) -> None:
        self.limit = seconds(limit, "TimeLimit.limit")
        if self.limit <= 0:
            raise SettingError(f"TimeLimit.limit must be positive, got {limit!r}")
        self._watch = _Watch(self.limit)

    def __repr__(self) -> str:
        return f"TimeLimit({self.limit:g})"

    def __reduce__(self) -> tuple[type[TimeLimit], tuple[float]]:
        # Its thread and its locks do not travel.
        return TimeLimit, (self.limit,)

    def __call__(self, delivery: Delivery) -> Surrounding:
        if delivery.is_async:
            return asyncio.timeout(self.limit)
        call = _Interruptible(self._watch)
        delivery.at_end(call.end)
        return call


class _Interruptible:
    """One call of a `def` handler. Interrupted by the watch, entered and left by its thread."""

    __slots__ = ("_is_over", "_lock", "_thread", "_was_interrupted", "_watch")

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        self._thread = 0
        self._is_over = False
        self._was_interrupted = False

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._watch.add(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()
        if self._was_interrupted:
            raise TimeLimitExceeded(
                f"the handler took longer than {self._watch.limit:g} s"
            ) from error

    def end(self, _: Delivery) -> None:
        """The delivery is over, whether or not this was entered, or left."""
        if not self._is_over:
            self._leave()

    def _leave(self) -> None:
        while not self._is_over:
            try:
                with self._lock:
                    self._is_over = True
                    if self._was_interrupted:
                        _be_struck(self._thread)
            except TimeLimitExceeded:
                # Here, or on the way here: the same as in the handler's last line. Unless the lock
                # was not taken yet: then it may be another limit's, and this one is yet to come.
                continue
        self._watch.remove(self)

    def interrupt(self) -> bool:
        """Called by the watch when the time is up. False: it cannot be now, but in a moment."""
        with self._lock:
            if self._is_over:
                return True
            self._was_interrupted = _strike(self._thread)
            return self._was_interrupted

    def forked(self) -> None:
        """Its thread has forked, and this is the fork: nobody else is here to hold the lock."""
        self._lock = threading.Lock()


class _Watch:
    """Interrupts calls when their time is up. Its thread lives as long as there are calls."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        # Entered by itself: another limit may interrupt a thread here, and the `with` of a
        # condition can be interrupted when it has taken its lock and does not hold it yet.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # When each call is due: not many, as each has a thread at work.
        self._due: dict[_Interruptible, float] = {}
        # All calls, also one that is being interrupted: nobody else has its lock after that.
        self._calls: set[_Interruptible] = set()
        self._thread: threading.Thread | None = None
        tell_of_forks(self)

    def before_fork(self) -> None:
        """Nothing: whatever state the locks are in, the fork gets new ones."""

    def after_fork(self, *, is_child: bool) -> None:
        if not is_child:
            return
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._due.clear()
        self._thread = None
        for call in self._calls:
            call.forked()
        self._calls.clear()

    def add(self, call: _Interruptible) -> None:
        with self._lock:
            if self._thread is None or self._thread.ident is None:
                # Noted first, as another limit may strike when it has just been started. One that
                # the system had no thread for is without an ident: the next call tries it again.
                self._thread = threading.Thread(
                    target=self._watch, name="orbitmq-time-limit", daemon=True
                )
                self._thread.start()
            elif not self._due:
                self._changed.notify()
            self._calls.add(call)
            self._due[call] = time.monotonic() + self.limit

    def remove(self, call: _Interruptible) -> None:
        with self._lock:
            self._due.pop(call, None)
            self._calls.discard(call)

    def _watch(self) -> None:
        while (call := self._next()) is not None:
            if call.interrupt():
                # It may never come to leave: the error can strike before its exit's first line.
                self.remove(call)
            else:
                self._look_again(call)

    def _look_again(self, call: _Interruptible) -> None:
        with self._lock:
            if call in self._calls:  # it may have left meanwhile
                self._due[call] = time.monotonic() + _MOMENT

    def _next(self) -> _Interruptible | None:
        """The next call whose time is up, when it is; None after some time without any call."""
        with self._lock:
            while True:
                if not self._due and not self._changed.wait(_IDLE) and not self._due:
                    self._thread = None
                    return None
                if not self._due:
                    continue
                call, due = min(self._due.items(), key=itemgetter(1))
                left = due - time.monotonic()
                if left <= 0:
                    del self._due[call]
                    return call
                self._changed.wait(min(left, threading.TIMEOUT_MAX))


if sys.version_info < (3, 12):

    def _strike(thread: int) -> bool:
        """Have the error raised in a thread; False: another one might get it, so nobody did."""
        # The lock is the interpreter's own; that of 3.11 does not change any more.
        with threading._active_limbo_lock:  # type: ignore[attr-defined]
            if _is_starting_another(thread):
                return False
            _raise_in(thread)
            return True

    def _is_starting_another(thread: int) -> bool:
        """Whether a thread is in `Thread.start`, with one that has not got as far as its ident."""
        frame = sys._current_frames().get(thread)
        while frame is not None:
            # By its name: applications put functions of their own into the place of this one.
            if frame.f_code.co_name == "start" and frame.f_globals is vars(threading):
                started: threading.Thread = frame.f_locals["self"]
                if started.ident is None:
                    return True
            frame = frame.f_back
        return False

else:

    def _strike(thread: int) -> bool:
        """Have the error raised in a thread."""
        _raise_in(thread)
        return True


def _raise_in(thread: int) -> None:
    """Have the error raised in a thread at its next step."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(TimeLimitExceeded)
    )


def _be_struck(thread: int) -> NoReturn:
    """Use up an error that may wait for this thread: it has one at most, and it comes now."""
    while True:  # again, if a thread that it has just started got it
        _raise_in(thread)
