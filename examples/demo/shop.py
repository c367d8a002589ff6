"""A shop that never stops selling: appends order events to a store until it is ended.

Run as a process of its own, because the demo kills it. Every line that it prints says how many of
its messages are on the disk; what was printed must never be lost.
"""

from __future__ import annotations

import logging
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from time import time

import msgspec

from orbitmq.message import UniqueIds, encode_properties
from orbitmq.message.hosts import pack_host
from orbitmq.store.settings import FlushPolicy, FlushSettings, StoreSettings
from orbitmq.store.store import Store

TOPIC = "orders"
QUEUES = 4
#: Sends that a broker would find in one read of its sockets.
TURN = 64
COUNTRIES = ("DE", "FR", "IN", "JP", "US")
TAGS = ("created", "paid", "paid", "paid", "refunded")


class Order(msgspec.Struct, frozen=True):
    """What a body holds."""

    order: str
    country: str
    cents: int


@dataclass(slots=True)
class Shop:
    """Makes the same orders every time: number and seed decide."""

    name: str
    random: random.Random

    def order(self, number: int) -> tuple[Order, dict[str, str]]:
        country = self.random.choice(COUNTRIES)
        order = Order(f"{self.name}-{number}", country, self.random.randrange(100, 100_000))
        tag = self.random.choice(TAGS)
        properties = {
            "TAGS": tag,
            "KEYS": order.order,
            "country": country,
            "cents": str(order.cents),
        }
        return order, properties


def main(folder: Path, name: str) -> None:
    # What a start after a crash has to say is shown by the demo itself.
    logging.getLogger("orbitmq").addHandler(logging.NullHandler())
    is_open = True

    def close(_number: int, _frame: object) -> None:
        nonlocal is_open
        is_open = False

    signal.signal(signal.SIGTERM, close)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the demo, which then ends us
    shop = Shop(name, random.Random(name))
    unique_ids = UniqueIds("127.0.0.1")
    host = pack_host("127.0.0.1", 0)
    encode = msgspec.json.encode
    settings = StoreSettings(flush=FlushSettings(policy=FlushPolicy.SYNC))
    with Store(folder, settings) as store:
        number = 0
        print("open", flush=True)
        while is_open:
            born_ms = int(time() * 1000)
            for _ in range(TURN):
                order, properties = shop.order(number)
                properties["UNIQ_KEY"] = unique_ids()
                packed = encode_properties(properties)
                store.append(TOPIC, number % QUEUES, encode(order), packed, born_ms, host)
                number += 1
            store.wait_flushed(store.write())
            store.tick()
            print(number, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
