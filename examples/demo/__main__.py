"""OrbitMQ at work: orders into a broker, billed by a Spark pipeline with retries and dead letters,
shipped by plain consumers whose members come and go; at the end a summary that adds up.

    make demo                                   about a minute
    make demo ARGS="--seconds 20 --rate 1000"
    make demo ARGS="--keep"                     leaves broker data and results where they are

Three shops send orders. The group `billing` consumes them in a structured stream on Spark: some
orders fail at the first attempt and succeed at the second, a few are hopeless and end as dead
letters; what is billed is joined with the customers and summed up. The group `shipping` consumes
the same orders with plain Python consumers, of which two join late and one leaves early. Kill one
(`kill -9`): the others take over its queues, some orders come twice and none is lost. Everything
runs on this machine, in processes of its own. In a terminal, and without `--seconds`, the console
stays afterwards until a key is pressed. Ctrl-C ends the demo within five seconds, at any time, and
shows how far it came.
"""

from __future__ import annotations

import sys

from examples.demo.interrupts import Interrupts


def main() -> int:
    interrupts = Interrupts()
    interrupts.take()
    # Only now, because these imports take a second, in which somebody may press Ctrl-C.
    from examples.demo.options import parsed  # noqa: PLC0415

    options = parsed()
    from examples.demo.running import run  # noqa: PLC0415

    try:
        return run(options, interrupts)
    finally:
        interrupts.ignore()


if __name__ == "__main__":
    sys.exit(main())
