"""Everything that is measured, in the order of the rooms."""

from __future__ import annotations

from benchmarks import (
    broker_bench,
    client_bench,
    filter_bench,
    index_bench,
    kafka_bench,
    message_bench,
    spark_bench,
    store_bench,
    wire_bench,
)
from benchmarks.growth.curves import CURVES
from benchmarks.runner import Bench

__all__ = ["BENCHES", "CURVES"]

BENCHES: tuple[Bench, ...] = (
    *wire_bench.BENCHES,
    *message_bench.BENCHES,
    *filter_bench.BENCHES,
    *store_bench.BENCHES,
    *index_bench.BENCHES,
    *broker_bench.BENCHES,
    *client_bench.BENCHES,
    *kafka_bench.BENCHES,
    *spark_bench.BENCHES,
)
