"""One member of the shipping group, in a process of its own: a plain Python consumer.

Every line on the standard output is the key of an order that it has shipped.
"""

from __future__ import annotations

import sys
import threading

from examples.demo.orders import SHIPPING, TOPIC
from examples.demo.parent import end_with_parent
from orbitmq import Consumer, ReceivedMessage


def main(name_server: str) -> None:
    consumer = Consumer(SHIPPING, name_server=name_server, consume_from="earliest", workers=4)
    one_at_a_time = threading.Lock()

    @consumer.on(TOPIC)
    def ship(message: ReceivedMessage) -> None:
        with one_at_a_time:
            sys.stdout.write(f"{message.keys[0]}\n")

    # A line is in the pipe before its order counts as shipped, whatever ends this process.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a text stream
    end_with_parent()
    consumer.run()


if __name__ == "__main__":
    main(sys.argv[1])
