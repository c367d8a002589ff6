"""An event loop whose time is a number: it passes when there is nothing else to do.

Everything that runs on it runs in one thread, and in an order that follows from the program alone,
so that what happened once happens again. Whatever belongs to one machine of the simulated world
runs in a context of its own (`Machine`), which the callbacks and tasks made there inherit; so a
machine can be stopped as a whole, wherever its code happens to be.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import itertools
import selectors
import socket
from asyncio import base_events
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tests.support.simulation_network import Network

T = TypeVar("T")

#: What the clocks of all machines show when a simulation begins.
EPOCH = 1_700_000_000.0
#: How long a step of the loop takes at least. Also the fastest machine needs some time for one, and
#: programs may rely on that: who waits for a moment that is nearly there would wait for ever.
STEP_TIME = 1e-6
#: A simulation that needs more steps never ends.
MOST_STEPS = 2_000_000
#: How long work that real programs give to a thread takes.
THREAD_TIME = 0.001

_here: contextvars.ContextVar[Machine | None] = contextvars.ContextVar("machine", default=None)


class Stuck(AssertionError):
    """Nothing can ever happen again, or too much has."""


class Machine:
    """Where a part of the simulated system runs. Tells its time, which may be set wrong."""

    def __init__(self, loop: VirtualLoop, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.is_alive = True
        #: Seconds by which the clock on its wall is ahead.
        self.ahead = 0.0
        self.context = contextvars.copy_context()
        self.context.run(_here.set, self)
        self._loop = loop
        self._timers: dict[asyncio.TimerHandle, None] = {}

    def now(self) -> float:
        return EPOCH + self.ahead + self._loop.time()

    def monotonic(self) -> float:
        return self._loop.time()

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a task here."""
        return self._loop.create_task(work, context=self.context)

    def die(self) -> None:
        """End everything that runs here. Tasks are ended with nobody listening any more."""
        self.is_alive = False
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for task in self.tasks:
            task.cancel()

    # ---- used by the loop

    def add_timer(self, timer: asyncio.TimerHandle) -> None:
        if len(self._timers) > 256:
            now = self._loop.time()
            gone = [each for each in self._timers if each.cancelled() or each.when() < now]
            for each in gone:
                del self._timers[each]
        self._timers[timer] = None

    @property
    def tasks(self) -> list[_NumberedTask]:
        """What has not ended, in the order in which it was begun."""
        # Lists of our own, kept up to date, would be a tenth of all that a simulation does.
        running = asyncio.all_tasks(self._loop)
        return sorted(
            (task for task in running if isinstance(task, _NumberedTask) and task.machine is self),
            key=hash,
        )


def current_machine() -> Machine | None:
    """The machine that the calling code runs on."""
    return _here.get()


class VirtualLoop(base_events.BaseEventLoop):
    """An event loop without a clock, sockets and threads."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Waiting(self)
        self._virtual = 0.0
        self._clock_resolution = 1e-9
        self.steps = 0
        #: For whatever would else be told apart by where it lies in memory.
        self.numbers = itertools.count()
        self.network: Network | None = None
        #: What went wrong unheard on a machine that lives.
        self.complaints: list[str] = []
        self.set_task_factory(_make_task)  # type: ignore[arg-type]  # newer options go through
        self.set_exception_handler(_note_failure)

    def time(self) -> float:
        return self._virtual

    def pass_time(self, seconds: float | None) -> None:
        """Nothing is to be done before so much time has passed; None: ever again."""
        self.steps += 1
        if seconds is None:
            raise Stuck("every task waits for another one")
        if self.steps > MOST_STEPS:
            raise Stuck(f"{self.steps} steps and no end at {self._virtual:.3f} s")
        self._virtual += max(seconds, STEP_TIME)

    # ---- what real loops do with a selector, sockets and threads

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def call_at(  # type: ignore[override]  # any callback
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        machine = _here.get() if context is None else context.get(_here)
        if machine is not None:
            if machine.is_alive:
                machine.add_timer(timer)
            else:
                timer.cancel()
        return timer

    def run_in_executor(  # type: ignore[override]  # a future, as it says
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call soon, in this thread: whoever waits for it sees others run in between."""
        done: asyncio.Future[T] = self.create_future()

        def call() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                done.set_exception(error)

        self.call_later(THREAD_TIME, call)
        return done

    async def getaddrinfo(  # type: ignore[override]
        self, host: str | None, port: int | None, **_: Any
    ) -> list[tuple[Any, ...]]:
        name = (host or "0.0.0.0", port or 0)  # noqa: S104 - nothing is bound
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", name)]

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], host: str, port: int, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        if self.network is None:
            raise OSError(errno.ENETUNREACH, "there is no network")
        protocol = protocol_factory()
        transport = await self.network.connect(protocol, host, port)
        return transport, protocol

    async def connect_accepted_socket(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], sock: Any, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        protocol = protocol_factory()
        return sock.open(protocol), protocol


class _Waiting:
    """Stands in the place of a selector, which is where loops wait."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.pass_time(timeout)
        return []


class _NumberedTask(asyncio.Task[Any]):
    """A task of a machine, whose place in a set does not depend on where it lies in memory."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        machine: Machine | None,
        *,
        loop: VirtualLoop,
        **options: Any,
    ) -> None:
        self._number = next(loop.numbers)
        self.machine = machine
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Task[Any]:
    assert isinstance(loop, VirtualLoop)
    context = options.get("context")
    machine = _here.get() if context is None else context.get(_here)
    task = _NumberedTask(coroutine, machine, loop=loop, **options)
    if machine is not None and not machine.is_alive:
        task.cancel()
    return task


def _note_failure(loop: asyncio.AbstractEventLoop, details: Mapping[str, Any]) -> None:
    assert isinstance(loop, VirtualLoop)
    # A failure that nobody asked for is told when its task is gone, wherever that is.
    task = details.get("task") or details.get("future")
    machine = task.machine if isinstance(task, _NumberedTask) else _here.get()
    if machine is None or machine.is_alive:
        error = details.get("exception")
        loop.complaints.append(f"{details.get('message')}: {error!r}")
