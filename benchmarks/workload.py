"""Messages that look like people's: keys, tags, times and unique ids all differ.

Identical messages flatter every cache and every guess about sizes, so nothing here repeats more
than it would in real life.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import cycle, islice

from orbitmq.message.record import encode_record, pack_host, record_constants, topic_field

TOPICS = ("orders", "payments", "shipments", "customer-events")
TAGS = ("created", "paid", "sent", "returned")
START_MS = 1_700_000_000_000
BORN_HOST = pack_host("192.168.3.14", 51234)
#: Making more takes longer than sending them.
_DIFFERENT = 1024
STORE_HOST = pack_host("192.168.3.1", 10911)


@dataclass(frozen=True, slots=True)
class Message:
    """What a producer hands over."""

    topic: str
    queue_id: int
    body: bytes
    properties: bytes


def messages(count: int, body_size: int, *, topics: int = 1, seed: int = 1) -> list[Message]:
    """`count` messages with bodies of `body_size` bytes, over the queues of some topics in turn."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        properties = {
            "KEYS": f"order-{chance.randrange(10**9)}",
            "UNIQ_KEY": f"{chance.getrandbits(128):032X}",
            "CLUSTER": "DefaultCluster",
            "WAIT": "true",
            "TAGS": TAGS[chance.randrange(len(TAGS))],
            "amount": f"{chance.randrange(100_000) / 100}",
            "country": chance.choice(("de", "cn", "us", "br")),
        }
        text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
        made.append(
            Message(TOPICS[number % topics], number % 4, _body(chance, body_size), text.encode())
        )
    return made


def bodies(count: int, size: int, *, seed: int = 1) -> list[bytes]:
    """`count` bodies of messages, of which no two in a row are alike."""
    different = [each.body for each in messages(min(count, _DIFFERENT), size, seed=seed)]
    return list(islice(cycle(different), count))


def records(count: int, body_size: int, *, topics: int = 1, seed: int = 1) -> list[bytes]:
    """The same as they lie in the log, one after the other."""
    offset, made = 0, []
    for number, message in enumerate(messages(count, body_size, topics=topics, seed=seed)):
        born_ms = START_MS + number
        constants = record_constants(0, born_ms, BORN_HOST, born_ms + 2, STORE_HOST)
        size, pieces = encode_record(
            message.body,
            topic_field(message.topic),
            message.properties,
            message.queue_id,
            0,
            number,
            offset,
            constants,
        )
        offset += size
        made.append(b"".join(pieces))
    return made


def _body(chance: random.Random, size: int) -> bytes:
    text = f'{{"id": {chance.randrange(10**12)}, "note": "'.encode()
    return (text + chance.randbytes(size // 2 + 1).hex().encode())[:size]
