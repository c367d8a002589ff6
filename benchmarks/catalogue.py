"""Everything that is measured, in the order of the rooms, and what cannot be measured yet."""

from __future__ import annotations

from benchmarks import (
    broker_bench,
    client_bench,
    filter_bench,
    index_bench,
    message_bench,
    spark_bench,
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
    *spark_bench.BENCHES,
)

ABSENT: tuple[Absent, ...] = (
    Absent(
        name="batch read into Spark",
        room="peers",
        compared_with="Spark's own Kafka source with the same messages",
        reason="needs Spark's Kafka connector and a Kafka broker, which this runner does not fetch",
    ),
)
