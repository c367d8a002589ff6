"""Everything that is measured, in the order of the rooms, and what cannot be measured yet."""

from __future__ import annotations

from benchmarks import filter_bench, index_bench, message_bench, store_bench, wire_bench
from benchmarks.runner import Absent, Bench

BENCHES: tuple[Bench, ...] = (
    *wire_bench.BENCHES,
    *message_bench.BENCHES,
    *filter_bench.BENCHES,
    *store_bench.BENCHES,
    *index_bench.BENCHES,
)

_NEEDS_BROKER = "comes with the broker; the store alone does not answer requests"

ABSENT: tuple[Absent, ...] = (
    Absent(
        name="single sends, batches, pulls, latency, memory",
        room="peers",
        compared_with="Apache RocketMQ's broker",
        reason=f"{_NEEDS_BROKER}, and Apache's needs Java and its distribution",
    ),
    Absent(
        name="sends and pulls against the floor of a connection",
        room="peers",
        compared_with="a server with a constant answer, an echo server",
        reason=_NEEDS_BROKER,
    ),
    Absent(
        name="push consumer, blocking send",
        room="peers",
        compared_with="executor.submit, run_coroutine_threadsafe",
        reason="comes with the client",
    ),
    Absent(
        name="reading into Spark",
        room="peers",
        compared_with="the same source row by row",
        reason="comes with the Spark source",
    ),
)
