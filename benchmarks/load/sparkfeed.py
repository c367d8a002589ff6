"""Fills a topic at a steady pace, alone in its process, until its input ends.

    python -m benchmarks.load.sparkfeed PORT TOPIC BODY_SIZE RATE

Sends batches at the instants at which they are due; a broker that is late gets them all when it is
ready again. Says "ready" when the first batch is stored.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from itertools import count

from benchmarks.load.asking import Sends
from benchmarks.load.frames import frames_of

_PER_REQUEST = 32
#: Requests on their way; a broker that falls behind gets no more.
_MOST_OPEN = 512
#: How often is looked whether something is due, in seconds.
_TICK = 0.01


def main(port: int, topic: str, body_size: int, rate: float) -> None:
    frames = frames_of(Sends(topic=topic, body_size=body_size, per_request=_PER_REQUEST))
    with socket.create_connection(("127.0.0.1", port)) as line:
        answers = _Answers(line)
        line.sendall(frames[0])
        while not answers.count:
            answers.receive()
        print("ready", flush=True)
        began, interval = time.perf_counter(), _PER_REQUEST / rate
        for sent in count(1):
            while (
                time.perf_counter() < began + sent * interval or sent - answers.count > _MOST_OPEN
            ):
                for each in select.select([line, sys.stdin], [], [], _TICK)[0]:
                    if each is sys.stdin:
                        return
                    answers.receive()
            line.sendall(frames[sent % len(frames)])


class _Answers:
    """Counts what comes back."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._rest = b""
        self.count = 0

    def receive(self) -> None:
        data = self._line.recv(1 << 16)
        if not data:
            raise ConnectionError("the broker has closed the connection")
        data = self._rest + data
        at = 0
        while len(data) - at >= 4:
            size = 4 + int.from_bytes(data[at : at + 4], "big")
            if len(data) - at < size:
                break
            self.count += 1
            at += size
        self._rest = data[at:]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
