"""Does with the C++ client what it is told, line by line; runs in a process of its own.

Every line of the input is a JSON object with `do` and its arguments. Every one is answered by a
line `{"done": ...}` or `{"failed": ...}`; what consumers receive comes in between as
`{"message": ...}`. The process ends with `os._exit`, because unloading the library is not safe.

Serves both packages, `rocketmq` 0.4.4 and `rocketmq-client-python` 0.5.0rc2; what only one of them
has is imported where it is used. Callbacks are our own: those of the packages raise inside native
code when a message fails.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rocketmq import client, ffi  # type: ignore[import-not-found]

#: Seconds that an asynchronous send may take.
DEADLINE = 10.0

#: Named beside credentials; the client asks for one.
CHANNEL = "OrbitMQ"

consumers: dict[str, Any] = {}
#: What native code still calls; Python must not collect it.
kept: list[Any] = []
writing = threading.Lock()


def main() -> None:
    producers: dict[str, Any] = {}
    # Collecting a producer shuts it down, which takes seconds when its broker is gone.
    kept.append(producers)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            done = COMMANDS[asked.pop("do")](producers=producers, **asked)
        except Exception as error:  # noqa: BLE001  # told to the test, which judges
            tell(failed=f"{type(error).__name__}: {error}")
        else:
            tell(done=done)


def tell(**line: Any) -> None:
    with writing:
        os.write(1, json.dumps(line).encode() + b"\n")


# Producing.


def produce(
    producers: dict[str, Any], *, group: str, name_server: str, keys: Sequence[str] = ()
) -> None:
    producer = client.Producer(group)
    producer.set_namesrv_addr(name_server)
    if keys:
        producer.set_session_credentials(*keys, CHANNEL)
    producer.start()
    producers[group] = producer


def send(
    producers: dict[str, Any], *, group: str, how: str, messages: list[dict[str, Any]]
) -> list[list[Any]]:
    """Status, id and offset of every message, as far as the way of sending gives them."""
    producer = producers[group]
    made = [make(**message) for message in messages]
    return [list(result) for result in WAYS[how](producer, made)]


def make(
    *,
    topic: str,
    body: str,
    tag: str | None = None,
    keys: str | None = None,
    delay: int | None = None,
    properties: dict[str, str] | None = None,
) -> Any:
    message = client.Message(topic)
    message.set_body(body)
    if tag is not None:
        message.set_tags(tag)
    if keys is not None:
        message.set_keys(keys)
    if delay is not None:
        message.set_delay_time_level(delay)
    for name, value in (properties or {}).items():
        message.set_property(name, value)
    kept.append(message)
    return message


def send_sync(producer: Any, messages: list[Any]) -> Iterable[Any]:
    return [producer.send_sync(message) for message in messages]


def send_oneway(producer: Any, messages: list[Any]) -> Iterable[Any]:
    for message in messages:
        producer.send_oneway(message)
    return []


def send_async(producer: Any, messages: list[Any]) -> Iterable[Any]:
    ended = threading.Semaphore(0)
    results: list[Any] = []

    def take(result: Any) -> None:
        results.append(result)
        ended.release()

    def fail(error: Any) -> None:
        results.append(["failed", str(error)])
        ended.release()

    for message in messages:
        producer.send_async(message, take, fail)
    for _ in messages:
        if not ended.acquire(timeout=DEADLINE):
            raise TimeoutError("an asynchronous send was not answered")
    return results


def send_ordered(producer: Any, messages: list[Any]) -> Iterable[Any]:
    """All to the queue that the number 1 selects."""
    return [producer.send_orderly(message, 1) for message in messages]


def send_sharded(producer: Any, messages: list[Any]) -> Iterable[Any]:
    return [producer.send_orderly_with_sharding_key(message, "shard") for message in messages]


def send_batch(producer: Any, messages: list[Any]) -> Iterable[Any]:
    return [producer.send_batch(messages)]


WAYS: dict[str, Callable[[Any, list[Any]], Iterable[Any]]] = {
    "sync": send_sync,
    "oneway": send_oneway,
    "async": send_async,
    "ordered": send_ordered,
    "sharded": send_sharded,
    "batch": send_batch,
}


def transact(
    producers: dict[str, Any],
    *,
    group: str,
    name_server: str,
    topic: str,
    bodies: dict[str, str],
    checked: str = "UNKNOWN",
) -> list[list[Any]]:
    """Send half messages; `bodies` says which verdict each one gets, `checked` later questions'."""
    status = client.TransactionStatus

    def check(message: Any) -> Any:
        tell(checked=message.body.decode())
        return status[checked]

    if group not in producers:
        producer = client.TransactionMQProducer(group, check)
        producer.set_namesrv_addr(name_server)
        producer.start()
        producers[group] = producer
    producer = producers[group]
    results = []
    for body, verdict in bodies.items():
        message = make(topic=topic, body=body)
        result = producer.send_message_in_transaction(
            message, lambda _message, _arguments, verdict=verdict: status[verdict]
        )
        results.append(list(result))
    return results


# Consuming.


def consume(
    producers: dict[str, Any],
    *,
    group: str,
    name_server: str,
    topic: str,
    expression: str = "*",
    orderly: bool = False,
    broadcasting: bool = False,
    fail: int | dict[str, int] = 0,
    instance: str = "one",
    keys: Sequence[str] = (),
) -> None:
    """Start a consumer that fails every message so many times, or those of these bodies."""
    del producers
    model = ffi.MessageModel.BROADCASTING if broadcasting else ffi.MessageModel.CLUSTERING
    consumer = client.PushConsumer(group, orderly=orderly, message_model=model)
    consumer.set_namesrv_addr(name_server)
    consumer.set_instance_name(instance)
    if keys:
        consumer.set_session_credentials(*keys, CHANNEL)
    seen: collections.Counter[str] = collections.Counter()

    def take(_consumer: object, handle: object) -> int:
        message = client.RecvMessage(handle)
        told = describe(message) | {"consumer": instance}
        tell(message=told)
        body = told["body"]
        seen[body] += 1
        times = fail.get(body, 0) if isinstance(fail, dict) else fail
        return 1 if seen[body] <= times else 0

    callback = ffi.MSG_CALLBACK_FUNC(take)
    kept.append(callback)
    ffi.dll.Subscribe(consumer._handle, topic.encode(), expression.encode())
    register = (
        ffi.dll.RegisterMessageCallbackOrderly if orderly else ffi.dll.RegisterMessageCallback
    )
    register(consumer._handle, callback)
    consumer.start()
    consumers[instance] = consumer


def stop_consuming(producers: dict[str, Any], *, instance: str = "one") -> None:
    del producers
    consumer = consumers.pop(instance)
    kept.append(consumer)
    consumer.shutdown()


def pull(
    producers: dict[str, Any], *, group: str, name_server: str, topic: str
) -> list[dict[str, Any]]:
    """Everything in the topic, from the beginning."""
    del producers
    consumer = client.PullConsumer(group)
    kept.append(consumer)
    consumer.set_namesrv_addr(name_server)
    consumer.start()
    return [describe(message) for message in consumer.pull(topic)]


def describe(message: Any) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "body": message.body.decode(),
        "tag": (message.tags or b"").decode(),
        "keys": (message.keys or b"").decode(),
        "queue": message.queue_id,
        "offset": message.queue_offset,
        "times": message.reconsume_times,
        "id": message.id,
        "colour": (message.get_property("colour") or b"").decode(),
    }


COMMANDS: dict[str, Callable[..., Any]] = {
    "produce": produce,
    "send": send,
    "transact": transact,
    "consume": consume,
    "stop_consuming": stop_consuming,
    "pull": pull,
}


if __name__ == "__main__":
    main()
    os._exit(0)
