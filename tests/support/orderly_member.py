"""A member in order, as a process: ``python orderly_member.py NAME_SERVER GROUP TOPIC FILE LIFE``.

Lines of the file tell what it does, with the time by the clock that all processes of a machine
share: ``begin`` and ``end`` of each handler call, and ``lost`` when it has given up a lock. After
the message ``pause`` it stops itself, as SIGSTOP from anywhere would, with the next messages
fetched already. SIGTERM ends it in order.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.consumer.locks import LockSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.settings import ClientSettings


class Diary(logging.Handler):
    """Notes what happens, also what the client logs about its locks."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.WARNING)
        # Short lines in this mode are written whole, one after the other, by whichever thread.
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, *words: object) -> None:
        line = " ".join(map(str, (f"{time.monotonic():.6f}", *words)))
        os.write(self._file, f"{line}\n".encode())

    def emit(self, record: logging.LogRecord) -> None:
        if "order lock" in record.getMessage():
            self.note("lost")


def main(name_server: str, group: str, topic: str, path: str, life: str) -> None:
    diary = Diary(path)
    logging.getLogger("orbitmq").addHandler(diary)
    consumer = Consumer(
        group,
        name_server=name_server,
        ordered=True,
        consume_from="first",
        client=ClientSettings(client_ip="127.0.0.1", instance="a", heartbeat=0.1),
        locks=LockSettings(life=float(life), renewal=float(life) / 3),
    )
    was_paused = False

    @consumer.on(topic)
    def consume(message: ReceivedMessage) -> None:
        nonlocal was_paused
        diary.note("begin", message.queue_offset)
        diary.note("end", message.queue_offset)
        if message.text() == "pause" and not was_paused:
            was_paused = True
            # To this thread: it does not return from the call, and all others stop with it.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    consumer.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
