"""A consumer that stops in the middle of a backlog leaves neither a gap nor a repetition."""

from __future__ import annotations

import threading
from collections import Counter

from orbitmq import Consumer, ReceivedMessage
from orbitmq.testing import EmbeddedCluster

DEADLINE = 30.0
COUNT = 600


def test_what_begins_stays_a_prefix_of_its_queue_so_a_stop_repeats_nothing():
    handled: Counter[bytes] = Counter()
    lock = threading.Lock()

    def consume_until(cluster, wanted):
        reached = threading.Event()
        consumer = Consumer("g", name_server=cluster.name_server, consume_from="first", workers=4)

        @consumer.on("orders")
        def handle(message: ReceivedMessage) -> None:
            # Calls of different lengths, so that they end in another order than they began.
            threading.Event().wait(0.001 + message.queue_offset % 7 * 0.002)
            with lock:
                handled[message.body] += 1
                if len(handled) >= wanted:
                    reached.set()

        with consumer:
            assert reached.wait(DEADLINE)

    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=2)
        cluster.send("orders", *(f"{number}" for number in range(COUNT)))

        for wanted in (COUNT // 4, COUNT // 2, COUNT):
            consume_until(cluster, wanted)

        assert len(handled) == COUNT
        assert sum(handled.values()) == COUNT
