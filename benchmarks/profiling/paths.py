"""The hot paths: which line of the benches is run for each, and who its processes are."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

from benchmarks.runner import Bench, Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPath:
    """One side of a bench: ours."""

    name: str
    about: str
    module: str  #: of the bench
    line: str  #: the bench's name
    here: str  #: the role of the process that runs it; others have their own
    #: Whether a process stands still while it is looked at, which gives exact stacks. It also wakes
    #: whoever rests, for most of a millisecond: with dozens of threads, or Spark's workers between
    #: their tasks, that is as much as the others do. Otherwise stacks that change while they are
    #: read are lost, and functions that are called often and end soon have too small a share.
    stands_still: bool = True

    def bench(self) -> Bench:
        """Imported when it is asked for: Spark and matplotlib take a second."""
        benches: tuple[Bench, ...] = importlib.import_module(self.module).BENCHES
        found = [each for each in benches if each.name == self.line and each.room != "peers"]
        assert len(found) == 1, f"{self.module} has {len(found)} lines named {self.line!r}"
        return found[0]


PATHS = (
    HotPath(
        name="send",
        about="the broker takes sends",
        module="benchmarks.broker_bench",
        line="sends of 1 KiB, 8 connections with 16 in flight",
        here="bench",
    ),
    HotPath(
        name="produce",
        about="our client sends",
        module="benchmarks.client_bench",
        line="sends submitted, 256 in flight",
        here="bench",
    ),
    HotPath(
        name="pull",
        about="the broker answers pulls",
        module="benchmarks.broker_bench",
        line="pulls of 32, four queues interleaved, 1 KiB",
        here="bench",
    ),
    HotPath(
        name="consume",
        about="our client consumes",
        module="benchmarks.client_bench",
        line="no-op handler",
        here="bench",
        stands_still=False,
    ),
    HotPath(
        name="decode",
        about="what a pull brought becomes messages",
        module="benchmarks.message_bench",
        line="objects, everything read, 1 KiB bodies",
        here="client",
    ),
    HotPath(
        name="dispatch",
        about="messages are handed over to handlers, and progress moves",
        module="benchmarks.client_bench",
        line="pull to listener with window and progress, 20 threads",
        here="client",
        stands_still=False,
    ),
    HotPath(
        name="spark",
        about="Spark reads a topic",
        module="benchmarks.spark_bench",
        line="batch read, 1 KiB, local[2]",
        here="Spark driver",
        stands_still=False,
    ),
)

#: Peers are neither warmed for long nor fetched: they are not looked at. Rounds are long enough
#: for what begins each of them (connections, Spark's planning) not to count.
SCALE = replace(Scale.quick(), round_seconds=0.4, megabytes=Scale().megabytes)

#: Who a process is, by words of its command line; the first that fit.
_ROLES = (
    ("benchmarks.load.generator", "load generator"),
    ("benchmarks.load.ourclient", "client"),
    ("orbitmq.cli broker", "broker"),
    ("orbitmq.cli up", "broker"),
    ("pyspark.sql.worker.", "Spark planner"),
    ("orbitmq.spark.workerdaemon", "Spark worker"),
    ("pyspark.daemon", "Spark worker"),
)


def role_of(command: str, path: HotPath) -> str:
    """Of a process with this command line."""
    if "benchmarks.profiling.workload" in command:
        return path.here
    return next((role for words, role in _ROLES if words in command), "other")
