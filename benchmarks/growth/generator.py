"""The generator of the curves, alone in its process: a wish is a line of JSON on its input."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from benchmarks.growth.asking import Done, Load, Wish
from benchmarks.growth.lines import Line, SendingLine, lines_of
from benchmarks.load.proc import cpu_seconds

#: Connections are there and answers come before the clock starts.
_WARM_UP = 0.05
_SILENCE = 30.0


def main() -> None:
    for line in sys.stdin.buffer:
        done = fulfil(msgspec.json.decode(line, type=Wish))
        sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")
        sys.stdout.buffer.flush()


def fulfil(wish: Wish) -> Done:
    try:
        with ExitStack() as stack:
            return _bring(wish, [_begun(load, stack) for load in wish.loads])
    except (OSError, ValueError) as error:
        return Done(failure=f"{type(error).__name__}: {error}")


def _begun(load: Load, stack: ExitStack) -> list[Line]:
    lines = [stack.enter_context(line) for line in lines_of(load)]
    for line in lines:
        line.begin()
    return lines


@dataclass(frozen=True, slots=True)
class _State:
    at: float
    cpu: float
    sent: int
    read: int

    @classmethod
    def now(cls, pids: set[int], lines: Sequence[Line]) -> _State:
        return cls(
            time.perf_counter(),
            sum(map(cpu_seconds, pids)),
            sum(line.messages for line in lines if isinstance(line, SendingLine)),
            sum(line.messages for line in lines if not isinstance(line, SendingLine)),
        )


def _bring(wish: Wish, begun: list[list[Line]]) -> Done:
    lines = [line for each in begun for line in each]
    pids = {load.target.pid for load in wish.loads}
    with select.epoll() as poll:
        by_handle = {line.socket.fileno(): line for line in lines}
        for handle in by_handle:
            poll.register(handle, select.EPOLLIN)
        _go_on(poll, by_handle, _WARM_UP)
        before = _State.now(pids, lines)
        _go_on(poll, by_handle, wish.seconds, before.sent + before.read + wish.least)
        after = _State.now(pids, lines)
    return Done(
        sent=after.sent - before.sent,
        read=after.read - before.read,
        seconds=after.at - before.at,
        cpu=after.cpu - before.cpu,
    )


def _go_on(
    poll: select.epoll, by_handle: dict[int, Line], seconds: float, until_done: int = 0
) -> None:
    """For so long, and until so many messages are counted."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or (
        until_done and sum(line.messages for line in by_handle.values()) < until_done
    ):
        ready = poll.poll(_SILENCE)
        if not ready:
            raise TimeoutError(f"no server answered for {_SILENCE:g} s")
        for handle, _ in ready:
            by_handle[handle].receive()


if __name__ == "__main__":
    main()
