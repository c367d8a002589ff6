"""The C++ client from PyPI, alone in its process: reads wishes, a line of JSON each.

Run with its package on the path (see `clientprocesses`). Native code calls our listener, which does
as little as that of any other client. The process ends with `os._exit`, because unloading the
library is not safe.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from typing import Any

from rocketmq import client, ffi  # type: ignore[import-not-found]

_SILENCE = 60.0
#: Of one send: see there.
_ATTEMPTS = 100
_BODIES = [f"{number:08d}".ljust(1024, "x") for number in range(1024)]

#: What native code still calls; Python must not collect it.
kept: list[Any] = []
producers: dict[str, Any] = {}


def main() -> None:
    for line in sys.stdin:
        wish = json.loads(line)
        try:
            told = send(wish) if wish["type"] == "Send" else consume(wish)
        except Exception as error:  # noqa: BLE001  # told to the bench, which judges
            told = {"type": "Failed", "reason": f"{type(error).__name__}: {error}"}
        # The library writes to standard output as it likes, but never a line that begins so.
        os.write(1, b"\n@" + json.dumps(told).encode() + b"\n")


def send(wish: dict[str, Any]) -> dict[str, Any]:
    producer = producers.get(wish["name_server"])
    if producer is None:
        producer = producers[wish["name_server"]] = client.Producer("bench-cpp")
        producer.set_namesrv_addr(wish["name_server"])
        producer.start()
    each = wish["count"] // wish["threads"]
    ready = threading.Barrier(wish["threads"] + 1)
    failures: list[Exception] = []

    def work() -> None:
        ready.wait()
        try:
            for number in range(each):
                send_one(producer, wish["topic"], number)
        except Exception as error:  # noqa: BLE001  # told by the thread that waits
            failures.append(error)

    send_one(producer, wish["topic"], 0)
    threads = [threading.Thread(target=work) for _ in range(wish["threads"])]
    for thread in threads:
        thread.start()
    ready.wait()
    began, cpu = time.monotonic(), time.process_time()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return spent(each * wish["threads"], began, cpu)


def send_one(producer: Any, topic: str, number: int) -> None:
    message = client.Message(topic)
    message.set_body(_BODIES[number % len(_BODIES)])
    message.set_tags("paid")
    message.set_keys(f"order-{number}")
    for attempt in range(_ATTEMPTS):
        try:
            producer.send_sync(message)
        except Exception:
            # With eight threads it says at times that a topic has no route, and has one later. The
            # attempts that failed count in its time.
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return


def consume(wish: dict[str, Any]) -> dict[str, Any]:
    consumer = client.PushConsumer(wish["group"])
    consumer.set_namesrv_addr(wish["name_server"])
    consumer.set_instance_name(wish["group"])
    consumer.set_thread_count(20)
    numbers = itertools.count(1)
    clocks: list[tuple[float, float]] = []
    ended: list[dict[str, Any]] = []
    is_complete = threading.Event()

    def take(_consumer: object, _handle: object) -> int:
        had = next(numbers)
        if had == 1:
            clocks.append((time.monotonic(), time.process_time()))
        elif had == wish["count"]:
            ended.append(spent(had - 1, *clocks[0]))
            is_complete.set()
        return 0

    callback = ffi.MSG_CALLBACK_FUNC(take)
    kept.extend((callback, consumer))
    ffi.dll.Subscribe(consumer._handle, wish["topic"].encode(), b"*")
    ffi.dll.RegisterMessageCallback(consumer._handle, callback)
    consumer.start()
    if not is_complete.wait(_SILENCE):
        raise TimeoutError(f"{next(numbers) - 1} of {wish['count']} messages came")
    consumer.shutdown()
    return ended[0]


def spent(count: int, began: float, cpu: float) -> dict[str, Any]:
    ended, used = time.monotonic(), time.process_time() - cpu
    return {"type": "Spent", "messages": count, "began": began, "ended": ended, "cpu": used}


if __name__ == "__main__":
    main()
    os._exit(0)
