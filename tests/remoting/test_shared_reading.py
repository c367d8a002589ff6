"""Threads that read the socket themselves: one leads, and everybody gets what is his."""

from __future__ import annotations

import asyncio
import dis
import random
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

import pytest

import orbitmq.remoting
from orbitmq.remoting.blocking import BlockingSide
from orbitmq.remoting.channels import connect
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Dispatcher, Result
from orbitmq.remoting.settings import ConnectionLost, ConnectionSettings, RequestTimedOut
from orbitmq.wire.command import Command, encode_command
from tests.support.askingthreads import (
    ECHO,
    HOLD,
    LENT_FOR_LONG,
    QUESTION,
    Holding,
    ask,
    begin,
    echo,
    in_threads,
    lend,
    lent,
    raw_peer,
    until_threads_read,
)
from tests.support.remoting import DEADLINE, serving, until

REMOTING = str(Path(orbitmq.remoting.__file__).parent)


def _hold(_: Connection, request: Command) -> Result:
    return LATER


async def test_once_threads_are_at_it_they_are_answered_without_the_loop() -> None:
    with raw_peer(lambda request: encode_command(request.answer(0, body=request.body))) as peer:
        connection = await connect(peer.address, settings=LENT_FOR_LONG)
        side = connection.for_threads()
        await in_threads(lambda: ask(side, ECHO, b"first"))
        answers: list[bytes] = []
        asking = threading.Thread(
            target=lambda: answers.extend(ask(side, ECHO, b"%d" % number) for number in range(20))
        )

        asking.start()
        asking.join(DEADLINE)  # the loop does nothing meanwhile

        assert answers == [b"%d" % number for number in range(20)]
        connection.abort()
        await connection.wait_closed()


async def test_answers_in_any_order_reach_those_who_asked() -> None:
    holding = Holding()
    async with (
        serving({ECHO: echo, HOLD: holding}) as server,
        lent(server) as (connection, side, reading),
    ):
        bodies = [b"%d" % number for number in range(12)]
        asking = begin(*(partial(ask, side, HOLD, body) for body in bodies))
        await until(lambda: len(holding.held) == len(bodies))
        chance = random.Random(7)

        while holding.held:
            holding.answer(chance.randrange(len(holding.held)))
            await asyncio.sleep(0)

        assert await asking == bodies
        assert connection.pending_requests == 0
        assert reading._reads > 0


async def test_a_leader_whose_time_is_up_leaves_the_lead_to_another() -> None:
    holding = Holding()
    async with (
        serving({ECHO: echo, HOLD: holding}) as server,
        lent(server) as (connection, side, _),
    ):
        leading = begin(partial(ask, side, HOLD, b"late", timeout=0.3))
        await until(lambda: bool(holding.held), "a leader")
        following = begin(*(partial(ask, side, HOLD, b"%d" % place) for place in range(3)))
        await until(lambda: len(holding.held) == 4)

        (late,) = await leading
        while len(holding.held) > 1:
            holding.answer(1)

        assert isinstance(late, RequestTimedOut)
        assert await following == [b"0", b"1", b"2"]
        assert connection.pending_requests == 0


async def test_threads_that_read_are_told_of_the_end_of_the_connection() -> None:
    async with (
        serving({ECHO: echo, HOLD: _hold}) as server,
        lent(server) as (connection, side, reading),
    ):
        asking = begin(*(partial(ask, side, HOLD) for _ in range(10)))
        await until(lambda: connection.pending_requests == 10)
        assert reading.is_lent

        for peer in tuple(server.connections):
            peer.abort("killed")

        assert [type(outcome) for outcome in await asking] == [ConnectionLost] * 10
        assert not connection.is_open


async def test_threads_that_read_are_told_when_the_connection_is_closed_here() -> None:
    async with (
        serving({ECHO: echo, HOLD: _hold}) as server,
        lent(server) as (connection, side, _),
    ):
        asking = begin(*(partial(ask, side, HOLD) for _ in range(5)))
        await until(lambda: connection.pending_requests == 5)

        connection.close("for a test")

        outcomes = await asking
        assert [type(outcome) for outcome in outcomes] == [ConnectionLost] * 5
        assert all("for a test" in str(outcome) for outcome in outcomes)


async def test_bytes_that_are_no_frame_end_the_connection_for_all() -> None:
    def answer(request: Command) -> bytes:
        if request.code == ECHO:
            return encode_command(request.answer(0, body=request.body))
        return b"\xff" * 64 if request.body == b"spoil" else b""

    with raw_peer(answer) as peer:
        connection = await connect(peer.address)
        side = connection.for_threads()
        await in_threads(lambda: ask(side, ECHO))
        waiting = begin(*(partial(ask, side, HOLD) for _ in range(3)))
        await until(lambda: connection.pending_requests == 3)

        outcomes = [*await in_threads(lambda: ask(side, HOLD, b"spoil")), *await waiting]

        assert [type(outcome) for outcome in outcomes] == [ConnectionLost] * 4
        assert "no frame" in str(outcomes[0])
        await connection.wait_closed()


async def test_the_loop_is_answered_when_threads_have_stopped_to_ask() -> None:
    """The reading is still lent to them, and nobody looks at it for long."""
    async with serving({ECHO: echo}) as server, lent(server) as (connection, _, reading):
        assert reading.is_lent

        answer = await connection.request(ECHO, body=b"alone", timeout=DEADLINE)

        assert bytes(answer.body) == b"alone"
        assert not reading.is_lent


async def test_the_loop_is_answered_while_a_thread_reads() -> None:
    holding = Holding()
    async with (
        serving({ECHO: echo, HOLD: holding}) as server,
        lent(server) as (connection, side, reading),
    ):
        asking = begin(partial(ask, side, HOLD, b"slow", timeout=100 * DEADLINE))
        await until(lambda: bool(reading._pollers), "a leader")

        answers = [
            bytes((await connection.request(ECHO, body=body, timeout=DEADLINE)).body)
            for body in (b"one", b"two" * 50_000)
        ]

        assert answers == [b"one", b"two" * 50_000]
        assert not asking.done()
        holding.answer(0)
        assert await asking == [b"slow"]


@pytest.mark.parametrize("is_led", [True, False])
async def test_what_the_peer_asks_is_served_whoever_reads(is_led: bool) -> None:
    """Also when threads have just stopped to send, and none reads."""
    asked: list[bytes] = []
    holding = Holding()
    settings = LENT_FOR_LONG if is_led else ConnectionSettings()

    def note(_: Connection, request: Command) -> Command:
        asked.append(bytes(request.body))
        return request.answer(0)

    async with (
        serving({ECHO: echo, HOLD: holding}) as server,
        lent(server, Dispatcher({QUESTION: note}), settings) as (_, side, reading),
    ):
        asking = begin(partial(ask, side, HOLD)) if is_led else None
        if is_led:
            await until(lambda: bool(holding.held) and bool(reading._pollers))
        (peer,) = server.connections

        answer = await peer.request(QUESTION, body=b"how is it?", timeout=DEADLINE)

        assert answer.code == 0
        assert asked == [b"how is it?"]
        if asking is not None:
            holding.answer(0)
            await asking
        else:
            await until(lambda: not reading.is_lent, "the loop's reading")


async def test_threads_tasks_and_the_peer_get_what_is_theirs_all_at_once() -> None:
    """Bodies of all sizes, from many threads and tasks, while the peer asks, too."""
    stopped = asyncio.Event()

    def body_of(chance: random.Random) -> bytes:
        return chance.randbytes(chance.choice([1, 300, 20_000, 150_000]))

    def work(side: BlockingSide, seed: int) -> int:
        chance = random.Random(seed)
        for _ in range(40):
            body = body_of(chance)
            assert ask(side, ECHO, body) == body
        return seed

    async def converse(
        connection: Connection, code: int, seed: int, pause: Callable[[], Awaitable[None]]
    ) -> int:
        chance, count = random.Random(seed), 0
        while not stopped.is_set():
            body = body_of(chance)
            answer = await connection.request(code, body=body, timeout=DEADLINE)
            assert bytes(answer.body) == body
            count += 1
            await pause()
        return count

    async with (
        serving({ECHO: echo}) as server,
        lent(server, Dispatcher({QUESTION: echo}), ConnectionSettings()) as (
            connection,
            side,
            reading,
        ),
    ):
        (peer,) = server.connections
        others = asyncio.gather(
            converse(connection, ECHO, 1, partial(until_threads_read, reading, stopped)),
            converse(peer, QUESTION, 2, partial(asyncio.sleep, 0.002)),
        )

        done = await in_threads(*(partial(work, side, seed) for seed in range(8)))
        stopped.set()

        assert done == list(range(8))
        assert min(await others) > 0
        assert reading._reads > 0
        assert connection.is_open


class Interrupt(BaseException):
    """What strikes a thread, as Ctrl-C does."""


class InterruptLikeASocket(TimeoutError):
    """What signal handlers of applications raise; also an `OSError`."""


class InterruptLikeALock(RuntimeError):
    """Also what a closed loop raises."""


#: Instructions after which the interpreter looks whether a thread is to be interrupted. After the
#: call of a function that is Python code it does not: that one's own RESUME is the place.
_LOOKS_AFTER = frozenset({"CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "RESUME"})


#: A thread that waits for its answer has more points than that, be it that it reads or sleeps.
_FEWEST_POINTS = 25


class _StrikeAt:
    """Raises at the n-th point where a thread that is in `remoting` can be interrupted."""

    def __init__(self, place: int, error: type[BaseException]) -> None:
        self._left = place
        self._error = error
        self._last: dict[FrameType, str] = {}
        self._names: dict[CodeType, dict[int, str]] = {}
        self.where: str | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> _StrikeAt | None:
        if event == "call" and frame.f_back is not None:
            self._last[frame.f_back] = "a call of Python code"
        if not frame.f_code.co_filename.startswith(REMOTING):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and self.where is None:
            last = self._last.get(frame, "RESUME")
            self._last[frame] = self._name(frame)
            if last in _LOOKS_AFTER:
                self._look(frame, last)
        return self

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """The same without the rounds of loops: for a thread's function for profiling."""
        is_point = event in ("call", "c_return") and self.where is None
        if is_point and frame.f_code.co_filename.startswith(REMOTING):
            self._look(frame, event)

    def _look(self, frame: FrameType, last: str) -> None:
        self._left -= 1
        if self._left < 0:
            file = Path(frame.f_code.co_filename).stem
            self.where = f"{file}:{frame.f_lineno} {frame.f_code.co_name} after {last}"
            raise self._error

    def _name(self, frame: FrameType) -> str:
        names = self._names.get(frame.f_code)
        if names is None:
            names = {each.offset: each.opname for each in dis.get_instructions(frame.f_code)}
            self._names[frame.f_code] = names
        return names[frame.f_lasti]


def _struck(strike: _StrikeAt, work: Callable[[], object]) -> object:
    if sys.version_info >= (3, 12):
        # Instructions are not told reliably there: any thread that comes to one without being
        # traced itself switches that off, for all threads that are in the same function.
        sys.setprofile(strike.profile)
    else:
        sys.settrace(strike)
    try:
        return work()
    finally:
        sys.setprofile(None)
        sys.settrace(None)


async def _until_done_or_held(holding: Holding, *asking: asyncio.Task[list[object]]) -> None:
    await until(lambda: bool(holding.held) or all(task.done() for task in asking))


@pytest.mark.parametrize(
    ("error", "leads"),
    [
        (Interrupt, True),
        (InterruptLikeASocket, True),
        (InterruptLikeALock, True),
        (Interrupt, False),
    ],
)
async def test_wherever_a_thread_is_interrupted_the_others_are_answered(
    error: type[BaseException], leads: bool
) -> None:
    """And it gets what struck it. Only frames on their way out cannot be saved, with the rest."""
    place = 0
    is_struck = True
    holding = Holding()
    settings = ConnectionSettings(reading_look=0.1)
    async with asyncio.timeout(10 * DEADLINE), serving({ECHO: echo, HOLD: holding}) as server:
        while is_struck:
            async with lent(server, settings=settings) as (connection, side, reading):
                while is_struck and not _is_over(connection):
                    await lend(side, reading)
                    strike = _StrikeAt(place, error)
                    outcome, others = await _strike_one_of_three(strike, side, holding, leads)

                    if strike.where is not None:
                        place += 1
                        assert isinstance(outcome, error), strike.where
                    else:
                        assert outcome == b"struck"
                        # It may have come too late to read, or to wait at all, on a busy machine:
                        # that way has fewer points, so once more.
                        is_struck = place <= _FEWEST_POINTS
                    if not _is_over(connection):
                        assert others == [b"another", b"another", b"later"], strike.where
                        assert connection.pending_requests == 0
                    else:
                        assert connection.reason == "a thread was interrupted while it wrote"
                        assert "blocking" in str(strike.where)
                        await until(lambda: connection.pending_requests == 0)
                if not _is_over(connection):
                    await until(lambda: not reading.is_lent, "the loop's reading")


def _is_over(connection: Connection) -> bool:
    return not connection.is_open


async def _strike_one_of_three(
    strike: _StrikeAt, side: BlockingSide, holding: Holding, leads: bool
) -> tuple[object, list[object]]:
    """What becomes of the thread that is struck, and of those beside it and after it."""
    works: list[Callable[[], object]] = [
        partial(_struck, strike, partial(ask, side, HOLD, b"struck")),
        partial(ask, side, HOLD, b"another"),
    ]
    first = begin(works[not leads])
    await _until_done_or_held(holding, first)
    second = begin(works[leads], partial(ask, side, HOLD, b"another"))
    while not (first.done() and second.done()):
        await _until_done_or_held(holding, first, second)
        while holding.held:
            holding.answer(0)
    outcomes = [*await first, *await second]
    outcome = outcomes.pop(not leads)
    return outcome, outcomes + await in_threads(lambda: ask(side, ECHO, b"later"))
