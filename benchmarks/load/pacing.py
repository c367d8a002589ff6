"""Sends at a steady pace on one connection and receives on another, as a consumer would.

A message counts from the instant at which it was due, so that a server which holds up the sender is
not flattered.
"""

from __future__ import annotations

import select
import socket
import statistics
import struct
import time
from itertools import cycle

from benchmarks.load.asking import Pace, Paced, Sends
from benchmarks.load.frames import frames_of, pull

_size = struct.Struct(">i").unpack_from
_HOLD_MS = 15_000
_SILENCE = 10.0


def pace(wanted: Pace) -> Paced:
    sender, receiver = (_connected(wanted.target.port) for _ in range(2))
    try:
        if wanted.way == "relay":
            arrivals: _Relayed | _Pulled = _Relayed(receiver)
        else:
            arrivals = _Pulled(receiver, wanted.topic, _first_offset(sender, wanted))
        late = _pace(wanted, sender, receiver, arrivals)
    finally:
        sender.close()
        receiver.close()
    late.sort()
    return Paced(
        messages=len(late),
        median=statistics.median(late),
        p99=late[min(len(late) - 1, len(late) * 99 // 100)],
    )


def _pace(
    wanted: Pace, sender: socket.socket, receiver: socket.socket, arrivals: _Relayed | _Pulled
) -> list[float]:
    frames = cycle(frames_of(_sends(wanted)))
    interval = 1 / wanted.rate
    count = int(wanted.rate * wanted.seconds)
    poll = select.poll()
    poll.register(sender, select.POLLIN)
    poll.register(receiver, select.POLLIN)
    late: list[float] = []
    began = time.perf_counter() + 0.01
    sent = 0
    heard = began
    while len(late) < count:
        now = time.perf_counter()
        if sent < count and now >= began + sent * interval:
            sender.sendall(next(frames))
            sent += 1
            continue
        until = began + sent * interval - now if sent < count else 1.0
        # The kernel rounds up to a millisecond, which is as long as the interval: spin instead.
        for handle, _ in poll.poll(until * 1000 if until > 0.002 else 0):
            if handle == sender.fileno():
                # Answers to sends; the relay gives none.
                sender.recv(1 << 16)
                continue
            came = arrivals.receive()
            heard = time.perf_counter()
            late += [
                heard - began - number * interval for number in range(len(late), len(late) + came)
            ]
        if now - heard > _SILENCE:
            raise TimeoutError(f"{len(late)} of {sent} messages came, and then none")
    return late


class _Relayed:
    """Frames come as they were sent."""

    def __init__(self, receiver: socket.socket) -> None:
        self._socket = receiver
        self._stream = bytearray()

    def receive(self) -> int:
        return len(_whole_frames(self._socket, self._stream))


class _Pulled:
    """Messages come as answers to pulls, each of which is followed by the next pull at once."""

    def __init__(self, receiver: socket.socket, topic: str, offset: int) -> None:
        self._socket = receiver
        self._topic = topic
        self._offset = offset
        self._stream = bytearray()
        self._opaque = 0
        self._ask()

    def _ask(self) -> None:
        self._opaque += 1
        self._socket.sendall(pull(self._topic, 0, self._offset, 32, self._opaque, hold_ms=_HOLD_MS))

    def receive(self) -> int:
        came = 0
        for frame in _whole_frames(self._socket, self._stream):
            header_size = _size(frame, 4)[0] & 0xFFFFFF
            at = 8 + header_size
            while at < len(frame):
                at += _size(frame, at)[0]
                came += 1
            self._offset += came
            self._ask()
        return came


def _whole_frames(connection: socket.socket, stream: bytearray) -> list[bytes]:
    data = connection.recv(1 << 18)
    if not data:
        raise ConnectionError("the server has closed the connection")
    stream += data
    found = []
    while len(stream) >= 4:
        end = 4 + _size(stream, 0)[0]
        if len(stream) < end:
            break
        found.append(bytes(stream[:end]))
        del stream[:end]
    return found


def _first_offset(sender: socket.socket, wanted: Pace) -> int:
    """Send one message, which makes the topic; the offset behind it."""
    sender.sendall(frames_of(_sends(wanted))[0])
    stream = bytearray()
    while not (frames := _whole_frames(sender, stream)):
        continue
    text = frames[0].decode("utf-8", "replace")
    if '"queueOffset":"' not in text:
        raise ValueError(f"the first send was refused: {text[:300]}")
    return int(text.partition('"queueOffset":"')[2].partition('"')[0]) + 1


def _sends(wanted: Pace) -> Sends:
    return Sends(topic=wanted.topic, body_size=wanted.body_size, queues=1)


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
