"""Connections that send, read or follow, and count messages.

Answers are cut apart and their headers looked at; bodies are skipped. What must be known of a
header is found by its name, not parsed: a generator that did more would be busier than the broker.
"""

from __future__ import annotations

import re
import socket
import struct
from typing import Self

from benchmarks.growth.asking import Follows, Load, Reads, Sends
from benchmarks.growth.frames import (
    PullFrame,
    heartbeat,
    max_offset,
    read_frames,
    send_frames,
)

_SILENCE = struct.pack("ll", 30, 0)  #: seconds and microseconds
_BUFFER = 1 << 20
_SUCCESS = b'{"code":0,'
_RESPONSE = b'"flag":1,'
_opaque = re.compile(rb'"opaque":(\d+)')
_next_offset = re.compile(rb'"nextBeginOffset":"(\d+)"')
_offset = re.compile(rb'"offset":"(\d+)"')
_lengths = struct.Struct(">iI").unpack_from


def lines_of(load: Load) -> list[Line]:
    """The connections of a load, not begun yet."""
    port, work = load.target.port, load.work
    places = range(load.connections)
    if isinstance(work, Sends):
        return [SendingLine(port, work, load.in_flight, place) for place in places]
    if isinstance(work, Reads):
        return [ReadingLine(port, work, load.in_flight, place) for place in places]
    return [FollowingLine(port, work, place, load.connections) for place in places]


class Line:
    """One connection; what is to be done with an answer is told by those below."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's own limits: those of Python cost another system call each time.
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, limit, _SILENCE)
        self.messages = 0
        self._view = memoryview(bytearray(_BUFFER))
        self._rest = b""  #: of a frame whose header is not complete
        self._header = b""  #: of the frame whose body is still coming
        self._missing = 0  #: bytes of that body

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def begin(self) -> None:
        """Put the first requests on their way."""
        raise NotImplementedError

    def receive(self) -> None:
        """Read once, count, and ask for as much again."""
        if answers := [header for header in self._headers() if _RESPONSE in header]:
            self._answered(answers)

    def ask(self, frame: bytes) -> bytes:
        """One request and its answer, without anything else on the way."""
        self.socket.sendall(frame)
        while True:
            for header in self._headers():
                if _RESPONSE in header:
                    return self._checked(header)

    def end_of(self, topic: str, queue_id: int) -> int:
        """The offset that the next message of a queue will get."""
        return _number(_offset, self.ask(max_offset(topic, queue_id)))

    def _answered(self, headers: list[bytes]) -> None:
        raise NotImplementedError

    def _checked(self, header: bytes) -> bytes:
        """A broker that refuses is fast; that does not count."""
        if not header.startswith(_SUCCESS):
            raise ValueError(f"refused: {header.decode('utf-8', 'replace')[:300]}")
        return header

    def _headers(self) -> list[bytes]:
        """Those of the frames that one read completes."""
        size = self.socket.recv_into(self._view)
        if not size:
            raise ConnectionError("the broker has closed the connection")
        at, found = 0, []
        if self._missing:
            at = min(self._missing, size)
            self._missing -= at
            if self._missing:
                return []
            found.append(self._header)
        data: bytes | memoryview = self._view
        if self._rest:
            data, at = self._rest + bytes(self._view[:size]), 0
            size = len(data)
        while size - at >= 8:
            total, mark = _lengths(data, at)
            end = at + 8 + (mark & 0xFFFFFF)
            if end > size:
                break
            header = bytes(data[at + 8 : end])
            at += 4 + total
            if at > size:
                self._missing, self._header = at - size, header
                break
            found.append(header)
        self._rest = bytes(data[at:size])
        return found


class SendingLine(Line):
    """Keeps so many sends on their way."""

    def __init__(self, port: int, work: Sends, in_flight: int, place: int) -> None:
        super().__init__(port)
        self._frames = send_frames(work)
        self._at = place * 37 % len(self._frames)
        self._in_flight = in_flight

    def begin(self) -> None:
        self._send(self._in_flight)

    def _answered(self, headers: list[bytes]) -> None:
        for header in headers:
            self._checked(header)
        self.messages += len(headers)
        self._send(len(headers))

    def _send(self, count: int) -> None:
        frames, at = self._frames, self._at
        self._at = (at + count) % len(frames)
        self.socket.sendall(
            frames[at]
            if count == 1
            else b"".join([frames[(at + step) % len(frames)] for step in range(count)])
        )


class ReadingLine(Line):
    """Keeps so many pulls on their way, each at another place."""

    def __init__(self, port: int, work: Reads, in_flight: int, place: int) -> None:
        super().__init__(port)
        self._frames, self._offsets = read_frames(work)
        self._at = place * 37 % len(self._frames)
        self._in_flight = in_flight

    def begin(self) -> None:
        for _ in range(self._in_flight):
            self._pull()

    def _answered(self, headers: list[bytes]) -> None:
        for header in headers:
            asked = self._offsets[_number(_opaque, self._checked(header))]
            self.messages += _number(_next_offset, header) - asked
            self._pull()

    def _pull(self) -> None:
        # A step that visits every frame, and neighbours only after a long while.
        self._at = (self._at + 389) % len(self._frames)
        self.socket.sendall(self._frames[self._at])


class FollowingLine(Line):
    """A consumer: knows where it is in each of its queues."""

    def __init__(self, port: int, work: Follows, place: int, consumers: int) -> None:
        super().__init__(port)
        self._topic = work.topic
        self._group = "growth-shared" if work.is_shared else f"growth-{place}"
        self._client = f"growth@{place}"
        mine = range(place, work.queues, consumers) if work.is_shared else range(work.queues)
        self._queues = list(mine)
        self._offsets: list[int] = []
        self._pulls = [
            PullFrame(self._group, self._topic, queue_id, index)
            for index, queue_id in enumerate(self._queues)
        ]

    def begin(self) -> None:
        self.ask(heartbeat(self._client, self._group, self._topic))
        self._offsets = [self.end_of(self._topic, queue_id) for queue_id in self._queues]
        self.socket.sendall(
            b"".join(
                [pull.at(offset) for pull, offset in zip(self._pulls, self._offsets, strict=True)]
            )
        )

    def _answered(self, headers: list[bytes]) -> None:
        pulls = []
        for header in headers:
            index = _number(_opaque, self._checked(header))
            offset = _number(_next_offset, header)
            self.messages += offset - self._offsets[index]
            self._offsets[index] = offset
            pulls.append(self._pulls[index].at(offset))
        self.socket.sendall(b"".join(pulls))


def _number(field: re.Pattern[bytes], header: bytes) -> int:
    found = field.search(header)
    if found is None:
        raise ValueError(f"an answer without {field.pattern!r}: {header[:300]!r}")
    return int(found[1])
