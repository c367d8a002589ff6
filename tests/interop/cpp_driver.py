"""Drives the C++ client of the `rocketmq` 0.4.4 package; runs under an interpreter that has it.

``python cpp_driver.py <name server> send|consume``. The client's own listener wrapper raises
inside a native callback when a message fails, so a callback of our own is registered. The
process ends with `os._exit`: unloading the library is not safe.
"""

from __future__ import annotations

import os
import sys
import threading

from rocketmq import ffi  # type: ignore[import-not-found]
from rocketmq.client import Message, Producer, PushConsumer, RecvMessage  # type: ignore[import-not-found]

DEADLINE = 60.0
MESSAGES = 3


def main() -> bool:
    name_server, command = sys.argv[1:]
    return {"send": send, "consume": consume}[command](name_server)


def send(name_server: str) -> bool:
    producer = Producer("cpp-producer")
    producer.set_namesrv_addr(name_server)
    producer.start()
    for i in range(MESSAGES):
        producer.send_sync(_message(i))
    producer.send_batch([_message(i) for i in range(MESSAGES)])
    producer.send_oneway(_message(0))
    producer.shutdown()
    return True


def consume(name_server: str) -> bool:
    arrived = threading.Semaphore(0)
    consumer = PushConsumer("cpp-consumer")
    consumer.set_namesrv_addr(name_server)

    def take(_consumer: object, handle: object) -> int:
        print(RecvMessage(handle).id, flush=True)
        arrived.release()
        return 0

    callback = ffi.MSG_CALLBACK_FUNC(take)
    ffi.dll.Subscribe(consumer._handle, b"Cpp", b"red || blue")
    ffi.dll.RegisterMessageCallback(consumer._handle, callback)
    consumer.start()
    done = all(arrived.acquire(timeout=DEADLINE) for _ in range(MESSAGES))
    consumer.shutdown()
    return done


def _message(number: int) -> Message:
    message = Message("Cpp")
    message.set_keys(f"key-{number}")
    message.set_tags("red")
    message.set_property("colour", "blau")
    message.set_body(f"body {number}")
    return message


if __name__ == "__main__":
    os._exit(0 if main() else 3)
