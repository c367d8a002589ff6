"""The thread on which sync faces do their work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import sys
import threading

import pytest

from orbitmq.client import loopthread
from orbitmq.client.loopthread import LoopThread
from orbitmq.errors import NotRunning, WrongUse

DEADLINE = 20.0


@pytest.fixture
def thread():
    thread = LoopThread("orbitmq-test")
    thread.start()
    yield thread
    thread.stop()


async def _double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def _names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_when_the_time_is_up_the_coroutine_is_cancelled(thread):
    cancelled = threading.Event()

    async def wait():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        thread.run(wait(), timeout=0.01)

    assert cancelled.wait(DEADLINE)
    assert thread.run(_double(3)) == 6


class Interrupt(BaseException):
    """What strikes a thread, as Ctrl-C does."""


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_wherever_a_caller_is_interrupted_the_thread_goes_on(thread):
    """Also inside of what the standard library does for it: the loop must never wait for that."""
    files = (loopthread.__file__, threading.__file__, inspect.getfile(concurrent.futures.Future))
    place, has_struck = 0, True

    while has_struck:
        has_struck = False
        left = place

        def strike(frame, event, _):
            nonlocal left, has_struck
            if event in ("call", "c_return") and frame.f_code.co_filename in files:
                left -= 1
                if left == -1:
                    has_struck = True
                    raise Interrupt

        sys.setprofile(strike)
        try:
            thread.run(_double(1), timeout=DEADLINE)
        except Interrupt:
            assert has_struck
        finally:
            sys.setprofile(None)
        assert thread.submit(_double(3)).result(DEADLINE) == 6, place
        place += 1

    assert place > 10


@pytest.mark.parametrize(
    ("call", "ends"),
    [
        (lambda thread: thread.run(_double(1), timeout=DEADLINE), {2, NotRunning}),
        (
            lambda thread: thread.submit(_double(1)).result(DEADLINE),
            {2, NotRunning, concurrent.futures.CancelledError},
        ),
    ],
    ids=["run", "submit"],
)
def test_wherever_a_signal_handler_stops_it_no_caller_is_left_waiting(call, ends):
    """Also within the call that hands a coroutine over to the loop, which is closed then."""
    files = (loopthread.__file__, asyncio.base_events.__file__, asyncio.tasks.__file__)
    place, has_struck = 0, True
    outcomes: set[object] = set()

    while has_struck:
        has_struck = False
        left = place
        thread = LoopThread("orbitmq-handled")
        thread.start()

        def strike(frame, _, __, thread=thread):
            nonlocal left, has_struck
            if frame.f_code.co_filename in files:
                left -= 1
                if left == -1:
                    has_struck = True
                    thread.stop()

        sys.setprofile(strike)
        try:
            outcomes.add(call(thread))
        except (NotRunning, concurrent.futures.CancelledError) as error:
            outcomes.add(type(error))
        finally:
            sys.setprofile(None)
            thread.stop()
        place += 1

    assert place > 10
    assert {2, NotRunning} <= outcomes <= ends


def test_a_coroutine_that_exits_does_not_take_the_thread_with_it(thread):
    async def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        thread.run(leave(), timeout=DEADLINE)

    assert thread.run(_double(3), timeout=DEADLINE) == 6


def test_a_blocking_call_on_the_own_thread_is_refused_instead_of_waiting_for_ever(thread):
    async def call_itself():
        assert thread.is_current
        with pytest.raises(WrongUse, match="wait for itself"):
            thread.run(_double(1))
        with pytest.raises(WrongUse, match="own end"):
            thread.stop()

    thread.run(call_itself(), timeout=DEADLINE)


def test_before_the_start_and_after_the_stop_calls_are_refused():
    thread = LoopThread()

    with pytest.raises(NotRunning, match="start it"):
        thread.run(_double(1))
    thread.start()
    thread.start()
    was_running = thread.is_running
    thread.stop()
    thread.stop()

    assert (was_running, thread.is_running) == (True, False)
    with pytest.raises(NotRunning):
        thread.submit(_double(1))


def test_a_stop_cancels_what_runs_and_tells_who_waits():
    thread = LoopThread("orbitmq-stopping")
    thread.start()
    begun = threading.Event()
    cleaned = threading.Event()

    async def wait():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(thread.run, wait())
        assert begun.wait(DEADLINE)
        thread.stop()

        with pytest.raises(NotRunning):
            waiting.result(DEADLINE)
    assert cleaned.is_set()
    assert "orbitmq-stopping" not in _names()


def test_calls_that_race_with_the_stop_are_answered_or_refused_but_never_left_waiting():
    for _ in range(20):
        thread = LoopThread()
        thread.start()
        go = threading.Barrier(5)

        def call(thread=thread, go=go):
            go.wait(DEADLINE)
            done = 0
            try:
                while True:
                    thread.run(_double(1), timeout=DEADLINE)
                    done += 1
            except NotRunning:
                return done

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(call) for _ in range(4)]
            go.wait(DEADLINE)
            thread.stop()

            assert all(each.result(DEADLINE) >= 0 for each in calls)
