"""Where handlers run: a pool of threads for `def` handlers, of tasks for `async def` ones.

Jobs go to threads through a deque; one thread is woken. While calls are slow, it wakes another one
before it runs a job; quick calls run in a row. Results come back through a list, which the loop
polls every millisecond while there are any; the first one of a slow call wakes it.

The order of steps replaces locks. The loop adds a job before it checks for wakes; a thread checks
for jobs after it was woken. A thread adds a result before it reads the flag; the loop clears the
flag before it reads results. A worker marks its call as begun before it checks whether the queue
drains; a drain is announced before it checks for calls that have begun.

A handler runs in a copy of the consumer's context, so that nothing leaks to the next message.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, cast

from orbitmq.client.consumer.settings import MOST_WORKERS
from orbitmq.client.consumer.verdict import DONE, Outcome, Verdict, outcome_of_error
from orbitmq.client.loopthread import LoopCall
from orbitmq.errors import NotRunning
from orbitmq.parsing import whole

if TYPE_CHECKING:
    from orbitmq.client.consumer.handlers import Binding
    from orbitmq.client.consumer.window import OwnedQueue
    from orbitmq.client.message import ReceivedMessage


log = logging.getLogger(__name__)

#: How often the loop polls for results while there are any.
SETTLE_PAUSE: Final = 0.001
#: A call is quick if it takes no longer than it costs to wake a thread and to wait for its turn.
QUICK: Final = 0.00005
#: The part of a stop's time that is left for cancelled coroutines: a share, at most in seconds.
_UNWINDING_SHARE: Final = 0.1
_UNWINDING: Final = 1.0
#: How long after a shortage of threads the missing ones are tried again.
TRY_AGAIN: Final = 5.0
#: How long a task may run handlers that never wait before the loop gets a turn.
ON_END: Final = 0.005


class Job(Protocol):
    """Something to run in a worker. It never raises; it keeps its result."""

    @property
    def waiting(self) -> deque[Any] | None:
        """What several workers take from, one by one. None: one worker runs the job once."""

    @property
    def took(self) -> float:
        """Seconds of a slow one among the calls that are not settled; 0 without any."""

    def run_in(self, context: Context, workers: ThreadWorkers) -> bool:
        """Run in a thread, the application's part in copies of `context`.

        Returns whether a task waits for the end.
        """

    async def run_async(self) -> None:
        """Run on the loop; of what is waiting, the first."""


Finished: TypeAlias = Callable[[list[Any]], None]


class ThreadWorkers:
    """Runs jobs in threads.

    A handler that computes without a pause keeps the interpreter from the event loop for up to a
    switch interval (5 ms). Applications can lower it with `sys.setswitchinterval(0.0005)`.
    """

    def __init__(self, size: int, finished: Finished, *, name: str) -> None:
        """Made on the event loop, on which `finished` is called with lists of finished jobs."""
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._awaiting = LoopAwaiter(self._loop)
        self._context.run(AWAITING.set, self._awaiting)
        self._name = name
        self._finished = finished
        self._jobs: deque[Job] = deque()
        #: An entry for each thread that is being woken.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._done: list[Job] = []
        self._is_settling = False
        self._timer: asyncio.TimerHandle | None = None
        #: Whether calls were not quick lately. If not, the timer is set while jobs wait: a call
        #: that is slow all the same must not keep the others from the remaining threads.
        self._is_slow = True
        #: One entry for each thread that must end; a thread that takes one ends.
        self.ends: list[None] = []
        self._threads: set[threading.Thread] = set()
        self._size = 0
        #: Starts missing threads.
        self._retry: asyncio.TimerHandle | None = None
        self._numbers = 0
        self._all_ended: asyncio.Event = asyncio.Event()
        self.resize(size)

    @property
    def size(self) -> int:
        return self._size

    def submit(self, job: Job) -> None:
        """Run a job after those before; called on the loop."""
        self._jobs.append(job)
        if self._wakes.empty():
            self._wakes.put(None)
        if not self._is_slow and self._timer is None:
            self._is_settling = True
            self._timer = self._loop.call_later(SETTLE_PAUSE, self._settle)

    def resize(self, size: int) -> None:
        """Raises `RuntimeError` when not even one thread can be started."""
        retry, self._retry = self._retry, None
        if retry is not None:
            retry.cancel()
        for _ in range(self._size, size):
            if self._may_end():
                # A thread that was to end continues instead.
                self._size += 1
                continue
            try:
                self._start_thread()
            except RuntimeError as error:
                if not self._size:
                    raise
                # Fewer threads do the work until the others can be started.
                if retry is None:
                    text = "%s has %d threads, not %d: %s"
                    log.warning(text, self._name, self._size, size, error)
                self._retry = self._loop.call_later(TRY_AGAIN, self.resize, size)
                return
            self._size += 1
        for _ in range(size, self._size):
            self.ends.append(None)
            # Wakes an idle thread; a busy one ends after its job.
            self._wakes.put(None)
        self._size = size

    def _start_thread(self) -> None:
        """Raises `RuntimeError` when the system has no thread left."""
        self._numbers += 1
        thread = threading.Thread(
            target=self._work, name=f"{self._name}-{self._numbers}", daemon=True
        )
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            raise

    async def stop(self, timeout: float) -> int:  # noqa: ASYNC109
        """Begin nothing more and wait for running jobs; returns how many still run."""
        self._jobs.clear()
        self.resize(0)
        deadline = self._loop.time() + timeout
        try:
            await self._wait_for_threads(deadline - min(timeout * _UNWINDING_SHARE, _UNWINDING))
            late = len(self._threads)
        finally:
            # Also when the stop is cancelled.
            was_awaited = self._awaiting.end()
        await self._wait_for_threads(deadline)
        if not was_awaited:
            late = len(self._threads)
        self._settle()
        if self._timer is not None:
            self._timer.cancel()
        return late

    async def _wait_for_threads(self, deadline: float) -> None:
        while self._threads and (left := deadline - self._loop.time()) > 0:
            self._all_ended.clear()
            try:
                async with asyncio.timeout(left):
                    await self._all_ended.wait()
            except TimeoutError:
                break

    def awaits(self, task: asyncio.Task[Any]) -> bool:
        """Whether a thread waits for a task, which then belongs to its handler."""
        return self._awaiting.has(task)

    def threads(self) -> list[threading.Thread]:
        """All threads, idle ones included."""
        return list(self._threads)

    def _work(self) -> None:
        """The main function of a thread."""
        jobs, wakes, ends = self._jobs, self._wakes, self.ends
        try:
            while True:
                wakes.get()
                while jobs and not ends:
                    try:
                        job = jobs.popleft()
                    except IndexError:
                        break
                    if (waiting := job.waiting) is not None:
                        if not waiting:
                            continue
                        if len(waiting) > 1:
                            jobs.appendleft(job)
                    if jobs and self._is_slow and wakes.empty():
                        wakes.put(None)
                    self.report(job, at_once=job.run_in(self._context, self))
                    # An idle thread must not keep its last job alive.
                    del job, waiting
                if jobs and wakes.empty():
                    wakes.put(None)
                if ends and self._may_end():
                    break
            self._loop.call_soon_threadsafe(self._ended, threading.current_thread())
        except RuntimeError:
            # The loop is closed.
            log.debug("a worker outlived its event loop")

    def report(self, job: Job, *, at_once: bool = False) -> None:
        """Have the loop look at the results of a job; called by a thread."""
        self._done.append(job)
        if at_once or not self._is_settling:
            self._is_settling = True
            self._loop.call_soon_threadsafe(self._settle)

    def _may_end(self) -> bool:
        """Take one of the entries for threads that must end."""
        try:
            self.ends.pop()
        except IndexError:
            return False
        return True

    def _ended(self, thread: threading.Thread) -> None:
        self._threads.discard(thread)
        if not self._threads:
            self._all_ended.set()

    def _settle(self) -> None:
        """Report finished jobs and poll again soon; on the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        done = self._done
        if not done:
            self._is_settling = False
            # A job may have finished between the check and the flag.
            if not done:
                self._be_slow(bool(self._jobs) or self._is_slow)
                return
            self._is_settling = True
        # Only this method removes jobs; those that finish meanwhile are reported next time.
        jobs = done[:]
        del done[: len(jobs)]
        took = max(job.took for job in jobs)
        self._be_slow(took > QUICK if took else self._is_slow)
        self._timer = self._loop.call_later(SETTLE_PAUSE, self._settle)
        self._finished(list(dict.fromkeys(jobs)))

    def _be_slow(self, is_slow: bool) -> None:
        self._is_slow = is_slow
        if is_slow and self._jobs and self._wakes.empty():
            self._wakes.put(None)


class TaskWorkers:
    """Runs jobs in a few long-lived tasks.

    One task is woken for new jobs; another one follows when its handler waits. Handlers that never
    wait thus run in a row in one task, at the cost of a function call.

    A handler that cancels its own task ends that call only. A loop that ends cancels all tasks,
    which must end the workers: a sentinel task, known to nothing else, tells the two apart.
    """

    def __init__(self, size: int, finished: Finished, *, name: str) -> None:
        """Made on the event loop; `finished` is called with lists of finished jobs."""
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._name = name
        self._finished = finished
        self._jobs: deque[Job] = deque()
        self._done: list[Job] = []
        self._idle: deque[asyncio.Future[None]] = deque()
        self._is_waking = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self._size = 0
        self._is_stopping = False
        #: The running coroutine of each busy task.
        self._at_work: dict[str, Coroutine[Any, Any, None]] = {}
        #: Cancelled only by a loop that ends.
        self._sentinel = self._loop.create_task(_stand(), name=f"{name}-sentinel")
        self.resize(size)

    @property
    def size(self) -> int:
        return self._size

    def submit(self, job: Job) -> None:
        """Run a job after those before."""
        self._jobs.append(job)
        if not self._is_waking:
            self._wake_one()

    def resize(self, size: int) -> None:
        self._size = size
        while len(self._tasks) < size and not self._is_stopping:
            self._hire()
        # Surplus tasks end after their job, or now.
        for _ in range(len(self._tasks) - size):
            self._wake_one()

    async def stop(self, timeout: float) -> int:  # noqa: ASYNC109
        """Begin nothing more and wait for running jobs; returns how many were cancelled."""
        self._is_stopping = True
        self._size = 0
        self._jobs.clear()
        while self._idle:
            waiter = self._idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
        tasks = set(self._tasks)
        late = set(tasks)
        try:
            if tasks:
                _, late = await asyncio.wait(tasks, timeout=timeout)
        finally:
            # Also when the stop is cancelled.
            for task in (*late, self._sentinel):
                task.cancel()
        await asyncio.wait((*late, self._sentinel), timeout=timeout)
        self._settle()
        return len(late)

    def tasks(self) -> list[asyncio.Task[None]]:
        """All tasks, idle ones included."""
        return list(self._tasks)

    def at_work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """The running coroutine of each busy task, by its name."""
        return dict(self._at_work)

    @property
    def _is_ending(self) -> bool:
        """Whether these workers stop, or the loop ends."""
        return self._is_stopping or self._sentinel.done() or self._sentinel.cancelling() > 0

    def _hire(self) -> None:
        self._numbers += 1
        task = self._loop.create_task(self._work(), name=f"{self._name}-task-{self._numbers}")
        self._tasks.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a worker task failed", exc_info=error)
        if len(self._tasks) < self._size and not self._is_ending:
            self._hire()

    async def _work(self) -> None:
        """The main coroutine of a task."""
        name = cast("asyncio.Task[None]", asyncio.current_task()).get_name()
        while not self._is_stopping:
            self._is_waking = False
            began = self._loop.time()
            while self._jobs and len(self._tasks) <= self._size:
                job = self._jobs[0]
                if job.waiting is None or len(job.waiting) < 2:  # not the last
                    self._jobs.popleft()
                await self._do(job, name)
                del job
                if self._loop.time() - began > ON_END:
                    await asyncio.sleep(0)
                    began = self._loop.time()
            if len(self._tasks) > self._size:
                # The other tasks take the remaining jobs.
                self._tasks.remove(cast("asyncio.Task[None]", asyncio.current_task()))
                self._wake_one()
                return
            await self._wait()

    async def _do(self, job: Job, name: str) -> None:
        self._at_work[name] = coroutine = job.run_async()
        try:
            await _Isolated(coroutine, self._context.copy(), self._wake_one)
        except asyncio.CancelledError:
            self._forgive_cancelling()
        except BaseException:
            # For example SystemExit. It ends this task, which is replaced; the job has its result.
            if not self._loop.is_closed():
                self._ended(job)
            raise
        finally:
            del self._at_work[name]
        self._ended(job)

    def _ended(self, job: Job) -> None:
        self._done.append(job)
        if len(self._done) == 1:
            self._loop.call_soon(self._settle)

    def _forgive_cancelling(self) -> None:
        """A handler that cancelled its own task ends that call only; a stop ends the task."""
        if self._is_ending:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()

    async def _wait(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._idle.append(waiter)
        try:
            await waiter
        except BaseException:
            # `_wake_one` may have removed it.
            if waiter in self._idle:
                self._idle.remove(waiter)
            raise

    def _wake_one(self) -> None:
        """Have one idle task look for jobs."""
        if not self._jobs and len(self._tasks) <= self._size:
            return
        while self._idle:
            waiter = self._idle.popleft()
            if not waiter.done():
                self._is_waking = True
                waiter.set_result(None)
                return

    def _settle(self) -> None:
        jobs, self._done = self._done, []
        if jobs:
            self._finished(list(dict.fromkeys(jobs)))


async def _stand() -> None:
    """Wait to be cancelled."""
    await asyncio.get_running_loop().create_future()


class _Isolated:
    """Awaits a coroutine in a context of its own, and reports when it has to wait.

    A task of its own would do the same at forty times the cost.
    """

    __slots__ = ("_context", "_coroutine", "_waits")

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, None],
        context: contextvars.Context,
        waits: Callable[[], None],
    ) -> None:
        self._coroutine = coroutine
        self._context = context
        self._waits = waits

    def __await__(self) -> Generator[Any, Any, None]:
        send, throw = self._coroutine.send, self._coroutine.throw
        run = self._context.run
        try:
            waited_for = run(send, None)
            while True:
                self._waits()
                try:
                    value = yield waited_for
                except BaseException as error:  # noqa: BLE001  # passed on to the coroutine
                    waited_for = run(throw, error)
                else:
                    waited_for = run(send, value)
        except StopIteration:
            return


# ---- both kinds together


class WorkerPool:
    """Runs calls of handlers in threads or tasks, `size` of each kind at the same time."""

    def __init__(self, size: int, finished: Callable[[list[Any]], None], *, group: str) -> None:
        """Made on the event loop, on which `finished` is called. Starts nothing yet."""
        self._size = size
        self._runs_finished = finished
        self._name = f"orbitmq-{group[:100]}"
        self._threads: ThreadWorkers | None = None
        self._tasks: TaskWorkers | None = None

    @property
    def size(self) -> int:
        """How many calls run at the same time; fewer than set while threads are short."""
        return self._size if self._threads is None else min(self._size, self._threads.size)

    def submit(self, job: Calls | Run) -> None:
        """Run calls."""
        self.workers_for(job.is_async).submit(job)

    async def call_directly(
        self, binding: Binding, message: ReceivedMessage, monotonic: Callable[[], float]
    ) -> DirectCall:
        """Call a handler once, as one of the calls at the same time; returns when it has ended."""
        call = DirectCall(binding, message, monotonic)
        self.workers_for(binding.is_async).submit(call)
        await call.done.wait()
        return call

    def _finished(self, jobs: list[Any]) -> None:
        direct = [job for job in jobs if isinstance(job, DirectCall)]
        for call in direct:
            call.done.set()
        self._runs_finished([job for job in jobs if job not in direct] if direct else jobs)

    def workers_for(self, is_async: bool) -> ThreadWorkers | TaskWorkers:
        """The workers for one kind of handler; started with their first call."""
        if is_async:
            if self._tasks is None:
                self._tasks = TaskWorkers(self._size, self._finished, name=self._name)
            return self._tasks
        if self._threads is None:
            self._threads = ThreadWorkers(self._size, self._finished, name=self._name)
        return self._threads

    def resize(self, size: int) -> None:
        """Run `size` calls of each kind at the same time."""
        self._size = whole(size, "workers", most=MOST_WORKERS)
        for workers in (self._threads, self._tasks):
            if workers is not None:
                workers.resize(size)

    @property
    def is_caller(self) -> bool:
        """Whether the caller is a handler."""
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

    async def stop(self, timeout: float) -> int:  # noqa: ASYNC109
        """Begin nothing more; returns how many calls still run after `timeout` seconds."""
        late = 0
        for workers in (self._threads, self._tasks):
            if workers is not None:
                late += await workers.stop(timeout)
        return late

    def stacks(self) -> str:
        """The stacks of all threads and of busy tasks, as text."""
        parts = []
        if self._threads is not None:
            frames = sys._current_frames()  # the only way to see other threads
            for thread in self._threads.threads():
                if thread.ident in frames:
                    parts.append((thread.name, traceback.format_stack(frames[thread.ident])))
            frames.clear()  # it holds our own frame: a reference cycle
        if self._tasks is not None:
            for name, coroutine in self._tasks.at_work().items():
                parts.append((name, _stack_of(coroutine)))
        return "\n".join(f"{name}\n{''.join(lines)}" for name, lines in parts)


def _stack_of(coroutine: object) -> list[str]:
    """The stack of a coroutine and of those that it awaits; a task shows its own frame only."""
    lines: list[str] = []
    waiting: object = coroutine
    while inspect.iscoroutine(waiting):
        if waiting.cr_frame is not None:
            lines += traceback.format_list(
                traceback.StackSummary.extract([(waiting.cr_frame, waiting.cr_frame.f_lineno)])
            )
        waiting = waiting.cr_await
    return lines


# ---- calls of handlers
#
# Calls are made on the event loop, run in workers and settled on the loop. A call whose queue
# drains before it begins has no outcome.


class _Begun:
    """The call that one worker is in."""

    __slots__ = ("began", "messages")

    def __init__(self) -> None:
        #: 0: none so far.
        self.began = 0.0
        self.messages: Sequence[ReceivedMessage] = ()


class Calls:
    """Concurrent calls of one handler with messages of one queue: workers take one by one.

    One object for a whole pull: with an object for each waiting call, the garbage collector would
    run several times in each pull.
    """

    __slots__ = (
        "_begun", "_done", "_is_reported", "_monotonic", "_others", "_times", "binding", "given_up",
        "is_async", "left", "owned", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        binding: Binding,
        owned: OwnedQueue,
        messages: Sequence[ReceivedMessage],
        monotonic: Callable[[], float],
    ) -> None:
        self.binding = binding
        self.owned = owned
        self.is_async = binding.is_async
        #: Messages, or batches of them, as the handler takes them.
        self.waiting: deque[Any] = deque(messages)
        if (size := binding.batch_size) > 1:
            self.waiting = deque(
                tuple(messages[begin : begin + size]) for begin in range(0, len(messages), size)
            )
        self._monotonic = monotonic
        #: Offsets of calls that timed out: delivered again, whatever the outcome. The loop's own.
        self.given_up: set[int] = set()
        #: Messages that are not settled. The loop's own.
        self.left = len(messages)
        self._begun: set[_Begun] = set()
        self._is_reported = False
        # Results of workers since the loop has looked: messages, or batches, of calls that
        # succeeded completely; the others, without an outcome if the handler was not called; and
        # the duration of each call in seconds.
        self._done: list[Any] = []
        self._others: list[tuple[Sequence[ReceivedMessage], Outcome | None]] = []
        self._times: list[float] = []

    @property
    def took(self) -> float:
        # The second longest of every eighth: a single one may have been interrupted by the system.
        some = sorted(self._times[::8])
        return some[-2:][0] if some else 0.0

    @property
    def is_begun(self) -> bool:
        """Whether some have begun and are not settled."""
        # In the reverse order of the workers.
        is_running = any(each.began for each in tuple(self._begun))
        return is_running or bool(self._done or self._others)

    def begun(self) -> list[Sequence[ReceivedMessage]]:
        """The messages of each call that runs."""
        return [each.messages for each in tuple(self._begun) if each.began]

    def late(self, before: float) -> list[Sequence[ReceivedMessage]]:
        """The messages of calls that run since before a time."""
        late = []
        for each in tuple(self._begun):
            # In the reverse order of the workers.
            messages = each.messages
            if messages and each.began < before:
                late.append(messages)
        return late

    def unsettled(self) -> list[ReceivedMessage]:
        """Messages of calls that have begun and are not settled."""
        ended = [*self._messages(self._done), *(each for some, _ in self._others for each in some)]
        return list(dict.fromkeys([each for some in self.begun() for each in some] + ended))

    def take_results(
        self,
    ) -> tuple[
        Sequence[ReceivedMessage],
        Sequence[tuple[Sequence[ReceivedMessage], Outcome | None]],
        Sequence[float],
    ]:
        """What has ended: messages of successful calls, other calls, and durations."""
        self._is_reported = False
        done, others, times = _taken(self._done), _taken(self._others), _taken(self._times)
        found = self._messages(done)
        self.left -= len(found) + sum([len(some) for some, _ in others])
        return found, others, times

    def _messages(self, done: list[Any]) -> list[ReceivedMessage]:
        if self.binding.batch_size == 1:
            return done
        return [message for some in done for message in some]

    def run_in(self, context: Context, workers: ThreadWorkers) -> bool:
        owned, monotonic, call = self.owned, self._monotonic, self.binding.call
        queue, ownership, copy = owned.queue, owned.ownership, context.copy
        waiting, is_single = self.waiting, self.binding.batch_size == 1
        done, times, ends = self._done, self._times, workers.ends
        begun = _Begun()
        self._begun.add(begun)
        ended = monotonic()
        while waiting:
            try:
                some = waiting.popleft()
            except IndexError:
                break
            messages = (some,) if is_single else some
            begun.began = began = ended
            begun.messages = messages
            if owned.is_draining:
                self._others.append((messages, None))
                continue
            outcome = copy().run(call, queue, messages, ownership)
            ended = monotonic()
            times.append(ended - began)
            if outcome is DONE:
                done.append(some)
            else:
                self._others.append((messages, outcome))
            if not self._is_reported:
                self._is_reported = True
                workers.report(self)
            if ends:
                break
        self._begun.discard(begun)
        return False

    async def run_async(self) -> None:
        some = self.waiting.popleft()
        messages = (some,) if self.binding.batch_size == 1 else some
        owned, outcome = self.owned, None
        if owned.is_draining:
            self._others.append((messages, None))
            return
        begun = _Begun()
        begun.began, begun.messages = self._monotonic(), messages
        self._begun.add(begun)
        try:
            outcome = await self.binding.call_async(owned.queue, messages, owned.ownership)
        except BaseException as error:
            outcome = outcome_of_error(error, messages)
            raise
        finally:
            self._times.append(self._monotonic() - begun.began)
            if outcome is DONE:
                self._done.append(some)
            else:
                self._others.append((messages, outcome))
            self._begun.discard(begun)


_T = TypeVar("_T")


def _taken(results: list[_T]) -> list[_T]:
    """Remove and return what is in a list to which threads append."""
    found = results[:]
    del results[: len(found)]
    return found


class Run:
    """Calls with messages of one queue, one after the other, until one fails or the time is up."""

    waiting = None
    __slots__ = (
        "_begins", "_lasts", "_monotonic", "began", "calls", "ended", "is_async", "outcomes",
        "owned",
    )  # fmt: skip

    def __init__(
        self,
        calls: Sequence[tuple[Binding, Sequence[ReceivedMessage]]],
        owned: OwnedQueue,
        monotonic: Callable[[], float],
        *,
        lasts: float,
    ) -> None:
        """No call begins later than `lasts` seconds after the first."""
        self.calls = calls
        self.owned = owned
        self.is_async = calls[0][0].is_async
        self._monotonic = monotonic
        self._lasts = lasts
        self.began = 0.0
        self.ended = 0.0
        #: The outcomes of the calls, in order.
        self.outcomes: list[Outcome] = []
        #: When each call began; may have one more entry than there are outcomes.
        self._begins: list[float] = []

    @property
    def took(self) -> float:
        return self.ended - self.began

    def times(self) -> list[float]:
        """The duration of each call in seconds."""
        begins = self._begins[: len(self.outcomes)]
        return [end - began for began, end in zip(begins, [*begins[1:], self.ended], strict=False)]

    def run_in(self, context: Context, workers: ThreadWorkers) -> bool:
        context.copy().run(self.run)
        return True

    def run(self) -> None:
        """Run the calls in this thread."""
        self.began = self._monotonic()
        queue, ownership = self.owned.queue, self.owned.ownership
        for binding, messages in self.calls:
            if not self._may_go_on():
                break
            outcome = binding.call(queue, messages, ownership)
            self.outcomes.append(outcome)
            if not _is_good(outcome):
                break
        self.ended = self._monotonic()

    async def run_async(self) -> None:
        self.began = self._monotonic()
        queue, ownership = self.owned.queue, self.owned.ownership
        messages: Sequence[ReceivedMessage] = ()
        try:
            for binding, messages in self.calls:
                if not self._may_go_on():
                    break
                outcome = await binding.call_async(queue, messages, ownership)
                self.outcomes.append(outcome)
                if not _is_good(outcome):
                    break
        except BaseException as error:
            self.outcomes.append(outcome_of_error(error, messages))
            raise
        finally:
            self.ended = self._monotonic()

    def _may_go_on(self) -> bool:
        owned = self.owned
        if owned.is_draining:
            return False
        now = self._monotonic()
        # The first call runs in any case, so that a short slice makes progress.
        if self.outcomes and now - self.began >= self._lasts:
            return False
        self._begins.append(now)
        return owned.lock is None or owned.lock.is_held(now)


class DirectCall:
    """A call that an administrator asked for. Its outcome has no effect on the queue."""

    waiting = None

    def __init__(
        self, binding: Binding, message: ReceivedMessage, monotonic: Callable[[], float]
    ) -> None:
        self._binding = binding
        self._message = message
        self._monotonic = monotonic
        self.began = 0.0
        self.ended = 0.0
        self.outcome: Outcome | None = None
        #: Set on the loop when it has ended.
        self.done = asyncio.Event()

    @property
    def took(self) -> float:
        return self.ended - self.began

    def run_in(self, context: Context, workers: ThreadWorkers) -> bool:
        self.began = self._monotonic()
        call = self._binding.call
        self.outcome = context.copy().run(call, self._message.queue, [self._message])
        self.ended = self._monotonic()
        return True

    async def run_async(self) -> None:
        self.began = self._monotonic()
        try:
            self.outcome = await self._binding.call_async(self._message.queue, [self._message])
        except BaseException as error:
            self.outcome = outcome_of_error(error, [self._message])
            raise
        finally:
            self.ended = self._monotonic()


def _is_good(outcome: Outcome) -> bool:
    return not outcome.failed and outcome.verdict in (Verdict.SUCCESS, Verdict.COMMIT)


# ---- coroutines that `def` handlers return
#
# A lambda or a decorator may return the coroutine of an `async def` function. The worker thread
# then has it run on the event loop and waits for it, so that workers, middleware and time limits
# hold for both halves. Threads without a consumer's loop, as in Spark tasks, use a loop of their
# own.


#: How often a waiting thread checks that the loop is open, and receives interrupts.
_LOOK: Final = 0.1


def awaited(awaitable: Awaitable[object]) -> object:
    """The result of an awaitable, on the loop of the consumer that this thread works for."""
    awaiting = AWAITING.get(None)
    coroutine = _coroutine(awaitable)
    return asyncio.run(coroutine) if awaiting is None else awaiting.wait_for(coroutine)


class LoopAwaiter:
    """Runs coroutines on one event loop for threads that wait for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: set[LoopCall[object]] = set()
        self._is_over = False

    def wait_for(self, coroutine: Coroutine[Any, Any, object]) -> object:
        """The result of a coroutine; called by a thread. Cancelled if the thread is interrupted.

        Raises `NotRunning` when the loop closes or the workers stop before it ends.
        """
        call: LoopCall[object] = LoopCall()
        self._calls.add(call)
        try:
            is_done = self._begin(call, coroutine) and self._wait(call)
        except BaseException:
            call.give_up()
            raise
        finally:
            self._calls.discard(call)
        if not is_done:
            with contextlib.suppress(RuntimeError, ValueError):
                coroutine.close()
            raise NotRunning("this consumer", was_stopped=True)
        return call.outcome()

    def _begin(self, call: LoopCall[object], coroutine: Coroutine[Any, Any, object]) -> bool:
        # `end` sets the flag and then reads the calls; here it is the reverse.
        if self._is_over:
            return False
        try:
            self._loop.call_soon_threadsafe(call.begin, self._loop, coroutine)
        except RuntimeError:
            return False
        return True

    def _wait(self, call: LoopCall[object]) -> bool:
        while not call.wait(_LOOK):
            if self._loop.is_closed():
                return False
        return True

    def end(self) -> bool:
        """Cancel all coroutines and refuse new ones; on the loop. Whether there were any."""
        self._is_over = True
        calls = tuple(self._calls)
        for call in calls:
            call.give_up()
        return bool(calls)

    def has(self, task: asyncio.Task[Any]) -> bool:
        """Whether a task is one of those waited for."""
        return any(call.is_task(task) for call in tuple(self._calls))


#: Set in the context in which threads run handlers.
AWAITING: Final[ContextVar[LoopAwaiter]] = ContextVar("orbitmq.awaiting")


def _coroutine(awaitable: Awaitable[object]) -> Coroutine[Any, Any, object]:
    if isinstance(awaitable, Coroutine):
        return awaitable

    async def wait() -> object:
        return await awaitable

    return wait()
