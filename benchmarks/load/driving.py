"""Keeps so many requests on their way on every connection, and counts what comes back.

Answers are cut and counted, their code is looked at, and their bodies are skipped: a generator that
did more would be slower than what it measures.
"""

from __future__ import annotations

import select
import socket
import time

from benchmarks.load.asking import Drive, Driven
from benchmarks.load.frames import frames_of
from benchmarks.load.proc import cpu_seconds

_BUFFER = 1 << 20
_SUCCESS = b'{"code":0,'
#: The code stands behind the two length words.
_CODE_AT = 8
#: Longer than anything that is measured takes; a server that is silent for so long has failed.
_SILENCE = 30.0


def drive(wanted: Drive) -> Driven:
    frames = frames_of(wanted.requests)
    lines = [_Line(wanted.target.port, frames, place) for place in range(wanted.connections)]
    try:
        return _drive(wanted, lines)
    finally:
        for line in lines:
            line.socket.close()


def _drive(wanted: Drive, lines: list[_Line]) -> Driven:
    poll = select.epoll()
    by_handle = {line.socket.fileno(): line for line in lines}
    for handle in by_handle:
        poll.register(handle, select.EPOLLIN)
    buffer = bytearray(_BUFFER)
    view = memoryview(buffer)
    left = wanted.count or 1 << 60
    # The connections are there and warm before the clock starts.
    for line in lines:
        line.send(1)
    waiting = set(by_handle)
    while waiting:
        for handle, _ in _ready(poll):
            by_handle[handle].receive(view)
            if by_handle[handle].answers:
                waiting.discard(handle)
    for line in lines:
        line.answers = line.bytes = 0
        line.send(wanted.in_flight)
    left -= len(lines) * wanted.in_flight
    cpu, began = cpu_seconds(wanted.target.pid), time.perf_counter()
    end = began + wanted.seconds if wanted.seconds else float("inf")
    answers = 0
    while time.perf_counter() < end and answers < (wanted.count or left):
        for handle, _ in _ready(poll):
            line = by_handle[handle]
            came = line.receive(view)
            answers += came
            if came and left > 0:
                line.send(min(came, left))
                left -= came
    seconds = time.perf_counter() - began
    return Driven(
        messages=answers * wanted.requests.per_request,
        bytes=sum(line.bytes for line in lines),
        seconds=seconds,
        cpu=cpu_seconds(wanted.target.pid) - cpu,
        refused=sum(line.refused for line in lines),
        refusal=next((line.refusal for line in lines if line.refusal), ""),
    )


def _ready(poll: select.epoll) -> list[tuple[int, int]]:
    ready = poll.poll(_SILENCE)
    if not ready:
        raise TimeoutError(f"the server was silent for {_SILENCE:g} s")
    return ready


class _Line:
    """One connection: its place in the frames, and how much of an answer is still to come."""

    __slots__ = (
        "_at",
        "_frames",
        "_head",
        "_rest",
        "answers",
        "bytes",
        "refusal",
        "refused",
        "socket",
    )

    def __init__(self, port: int, frames: list[bytes], place: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frames = frames
        self._at = place * 37 % len(frames)
        self._rest = 0
        self._head = b""
        self.answers = 0
        self.bytes = 0
        self.refused = 0
        self.refusal = ""

    def send(self, count: int) -> None:
        frames, at = self._frames, self._at
        self._at = (at + count) % len(frames)
        if count == 1:
            self.socket.sendall(frames[at])
        else:
            chosen = frames[at : at + count]
            while len(chosen) < count:
                chosen += frames[: count - len(chosen)]
            self.socket.sendall(b"".join(chosen))

    def receive(self, view: memoryview) -> int:
        """Read once; how many answers are complete."""
        size = self.socket.recv_into(view)
        if not size:
            raise ConnectionError("the server has closed the connection")
        self.bytes += size
        at = complete = 0
        while at < size:
            if self._rest:
                step = min(self._rest, size - at)
                self._rest -= step
                at += step
                if not self._rest:
                    complete += 1
                continue
            if self._head or size - at < 4:
                taken = 4 - len(self._head)
                self._head += bytes(view[at : at + taken])
                at += taken
                if len(self._head) == 4:
                    self._rest = int.from_bytes(self._head, "big")
                    self._head = b""
                continue
            code = view[at + _CODE_AT : min(at + _CODE_AT + len(_SUCCESS), size)]
            if code != _SUCCESS[: len(code)]:
                self.refused += 1
                self.refusal = self.refusal or bytes(view[at : min(at + 300, size)]).decode(
                    "utf-8", "replace"
                )
            self._rest = int.from_bytes(view[at : at + 4], "big")
            at += 4
        self.answers += complete
        return complete
