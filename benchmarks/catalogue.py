"""Everything that is measured, in the order of the rooms, and what cannot be measured yet."""

from __future__ import annotations

from benchmarks import (
    broker_bench,
    client_bench,
    filter_bench,
    index_bench,
    message_bench,
    store_bench,
    wire_bench,
)
from benchmarks.runner import Absent, Bench

BENCHES: tuple[Bench, ...] = (
    *wire_bench.BENCHES,
    *message_bench.BENCHES,
    *filter_bench.BENCHES,
    *store_bench.BENCHES,
    *index_bench.BENCHES,
    *broker_bench.BENCHES,
    *client_bench.BENCHES,
)

ABSENT: tuple[Absent, ...] = (
    Absent(
        name="reading into Spark",
        room="peers",
        compared_with="the same source row by row",
        reason="comes with the Spark source",
    ),
)
