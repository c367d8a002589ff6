"""A client for Kafka, alone in its process: reads wishes from standard input, a line of JSON each.

    python -m benchmarks.load.kafkaclient confluent|aiokafka

Both have their defaults, but for `acks=1`: the leader answers when it has a message in its page
cache, as a broker of ours with asynchronous flush does. Idempotence and compression are off by
default in both; confluent-kafka lingers for 5 ms, aiokafka not at all.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.load.asking import Failed
from benchmarks.load.clientwork import ClientOutcome, ClientWish, Consume, Send, Spent
from benchmarks.load.taking import SILENCE, Arriving, Taking
from benchmarks.workload import bodies

#: Messages that one call gets at most; aiokafka's gives all that are there.
_PER_CALL = 500
#: `produce` calls between two looks at what came back.
_LOOK = 256


def main(library: str) -> None:
    # That a topic is only now made is no news here.
    logging.basicConfig(level=logging.ERROR)
    work = Confluent() if library == "confluent" else Aiokafka()
    for line in sys.stdin.buffer:
        wish = msgspec.json.decode(line, type=ClientWish)
        outcome: ClientOutcome
        try:
            match wish:
                case Send():
                    outcome = work.send(wish)
                case Consume():
                    outcome = work.consume(wish)
                case _:
                    outcome = Failed(reason=f"{library} is not asked to deliver")
        except Exception as error:  # noqa: BLE001  # told to the bench, which judges
            outcome = Failed(reason=f"{type(error).__name__}: {error}")
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()


class Confluent:
    """confluent-kafka: C inside."""

    def __init__(self) -> None:
        import confluent_kafka  # noqa: PLC0415  # of one of two processes

        self._library = confluent_kafka
        self._producers: dict[str, Any] = {}

    def send(self, wish: Send) -> Spent:
        producer = self._producer(wish.name_server)
        several = bodies(wish.count, wish.body_size)
        producer.produce(wish.topic, several[0])
        producer.flush(SILENCE)  # finds the partitions
        outcomes: list[int] = []

        def note(error: object, message: Any) -> None:
            if error is not None:
                raise ConnectionError(str(error))
            outcomes.append(message.offset())

        produce, poll, topic = producer.produce, producer.poll, wish.topic
        taking = Taking()
        for number, body in enumerate(several):
            while True:
                try:
                    produce(topic, body, on_delivery=note)
                    break
                except BufferError:  # no room for so many
                    poll(0.01)
            if number % _LOOK == 0:
                poll(0)
        producer.flush(SILENCE)
        spent = taking.spent(wish.count)
        if len(outcomes) != wish.count:
            raise TimeoutError(f"{len(outcomes)} of {wish.count} messages have an outcome")
        return spent

    def _producer(self, address: str) -> Any:
        if address not in self._producers:
            settings = {"bootstrap.servers": address, "acks": "1"}
            self._producers[address] = self._library.Producer(settings)
        return self._producers[address]

    def consume(self, wish: Consume) -> Spent:
        consumer = self._library.Consumer(
            {
                "bootstrap.servers": wish.name_server,
                "group.id": wish.group,
                "auto.offset.reset": "earliest",
            }
        )
        try:
            consumer.subscribe([wish.topic])
            arriving = Arriving(wish.count)
            until = time.monotonic() + SILENCE
            while not arriving.is_complete:
                # It waits as long as this for the last of so many.
                batch = consumer.consume(num_messages=_PER_CALL, timeout=0.5)
                if not batch:
                    if time.monotonic() > until:
                        raise TimeoutError(f"the messages did not come within {SILENCE:g} s")
                    continue
                if wish.way == "sync":
                    for message in batch:
                        _handle(message, arriving.note_one)
                else:
                    arriving.note(sum(bool(message.value()) for message in batch))
            return arriving.wait()
        finally:
            consumer.close()


class Aiokafka:
    """aiokafka, on an event loop; its decoder is compiled."""

    def __init__(self) -> None:
        import aiokafka  # noqa: PLC0415  # of one of two processes

        self._library = aiokafka

    def send(self, wish: Send) -> Spent:
        return asyncio.run(self._send(wish))

    async def _send(self, wish: Send) -> Spent:
        several = bodies(wish.count, wish.body_size)
        producer = self._library.AIOKafkaProducer(bootstrap_servers=wish.name_server, acks=1)
        async with producer:
            await producer.send_and_wait(wish.topic, several[0])
            taking = Taking()
            futures = [await producer.send(wish.topic, body) for body in several]
            await producer.flush()
            for future in futures:
                future.result()
            return taking.spent(wish.count)

    def consume(self, wish: Consume) -> Spent:
        return asyncio.run(self._consume(wish))

    async def _consume(self, wish: Consume) -> Spent:
        consumer = self._library.AIOKafkaConsumer(
            wish.topic,
            bootstrap_servers=wish.name_server,
            group_id=wish.group,
            auto_offset_reset="earliest",
        )
        async with consumer:
            arriving = Arriving(wish.count)
            while not arriving.is_complete:
                found = await consumer.getmany(timeout_ms=round(SILENCE * 1000))
                if not found:
                    raise TimeoutError(f"nothing came for {SILENCE:g} s")
                for batch in found.values():
                    if wish.way == "sync":
                        for message in batch:
                            _handle(message, arriving.note_one)
                    else:
                        arriving.note(sum(bool(message.value) for message in batch))
            return arriving.wait()


def _handle(_: object, note: Callable[[], None]) -> None:
    """What a handler of ours does that does nothing."""
    note()


if __name__ == "__main__":
    main(sys.argv[1])
