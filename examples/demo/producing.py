"""Shops that send orders at a steady rate, in a process of their own, until they are ended.

Every line on the standard output is the number of orders that brokers have acknowledged. Numbers
are given out one after the other, so that is also all there is to know about which ones.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

import msgspec

from examples.demo.orders import TOPIC, make_order
from examples.demo.parent import end_with_parent
from orbitmq import AsyncProducer

#: Shops, each with a producer of its own.
SHOPS = 3
#: Seconds between two handfuls of orders.
BEAT = 0.05


async def main() -> None:
    options = arguments()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    end_with_parent()
    producers = [AsyncProducer(f"shop-{n}", name_server=options.name_server) for n in range(SHOPS)]
    for producer in producers:
        await producer.start()
    try:
        print(0, flush=True)
        number, began = 0, loop.time()
        while not ended.is_set():
            due = int((loop.time() - began) * options.rate)
            await asyncio.gather(
                *(
                    send(producers[each % SHOPS], each, options.seed)
                    for each in range(number, max(number, due))
                )
            )
            number = max(number, due)
            print(number, flush=True)
            try:
                async with asyncio.timeout(BEAT):
                    await ended.wait()
            except TimeoutError:
                continue
    finally:
        for producer in producers:
            await producer.stop()


async def send(producer: AsyncProducer, number: int, seed: int) -> None:
    order, tag = make_order(number, seed)
    await producer.send(
        TOPIC,
        msgspec.json.encode(order),
        tags=tag,
        keys=order.order,
        ordering_key=str(order.customer),  # the orders of a customer stay in order
        timeout=30,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("name_server")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
