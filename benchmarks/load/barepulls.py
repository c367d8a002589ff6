"""The least that a consumer has to do: ask for messages, cut them apart, call a function for each.

One request is on its way for each queue, as in our client and in Apache's. There is no progress, no
flow control, no second thread, and nothing that fails is tried again.
"""

from __future__ import annotations

import select
import socket
import struct

from benchmarks.load.frames import pull
from orbitmq.message.stored import StoredMessage, decode_messages

_QUEUES = 4
_MOST = 32
_SILENCE = 30.0
_lengths = struct.Struct(">ii").unpack_from
_NEXT_OFFSET = b'"nextBeginOffset":"'


def consume_bare(port: int, topic: str, count: int) -> int:
    """Consume at least `count` messages of a topic with four queues."""
    poll = select.poll()
    readers = {}
    try:
        for queue_id in range(_QUEUES):
            reader = _Reader(port, topic, queue_id)
            readers[reader.socket.fileno()] = reader
            poll.register(reader.socket, select.POLLIN)
            reader.ask()
        had = 0
        while had < count:
            ready = poll.poll(_SILENCE * 1000)
            if not ready:
                raise TimeoutError(f"{had} of {count} messages came, and then none")
            for handle, _ in ready:
                for message in readers[handle].receive():
                    _take(message)
                    had += 1
        return had
    finally:
        for reader in readers.values():
            reader.socket.close()


def _take(_: StoredMessage) -> None:
    """The listener."""


class _Reader:
    """One queue, one connection."""

    def __init__(self, port: int, topic: str, queue_id: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._topic = topic
        self._queue_id = queue_id
        self._offset = 0

    def ask(self) -> None:
        request = pull(self._topic, self._queue_id, self._offset, _MOST, 1, hold_ms=10_000)
        self.socket.sendall(request)

    def receive(self) -> list[StoredMessage]:
        head = self._exactly(8)
        total, header_size = _lengths(head)
        header = self._exactly(header_size & 0xFFFFFF)
        body = self._exactly(total - 4 - len(header))
        at = header.index(_NEXT_OFFSET) + len(_NEXT_OFFSET)
        self._offset = int(header[at : header.index(b'"', at)])
        self.ask()
        return decode_messages(body)

    def _exactly(self, size: int) -> bytes:
        if not size:
            return b""
        data = self.socket.recv(size, socket.MSG_WAITALL)
        if len(data) != size:
            raise ConnectionError("the broker has closed the connection")
        return data
