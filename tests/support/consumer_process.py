"""A consumer as a process: ``python consumer_process.py NAME_SERVER GROUP TOPIC FILE``.

Every message that its handler has finished becomes a line of the file, which all processes of a
test share: when (by the clock that all processes of a machine share), who, queue, offset. SIGTERM
ends it in order.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.message import ReceivedMessage

#: How long a handler takes.
WORK = 0.002


def main(name_server: str, group: str, topic: str, path: str) -> None:
    # Short lines in this mode are written whole, one after the other, by whichever process.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    idle = threading.Event()
    consumer = Consumer(group, name_server=name_server, consume_from="first", workers=8)

    @consumer.on(topic)
    def consume(message: ReceivedMessage) -> None:
        idle.wait(WORK)
        place = f"{message.queue.id} {message.queue_offset}"
        os.write(file, f"{time.monotonic():.6f} {os.getpid()} {place}\n".encode())

    consumer.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
