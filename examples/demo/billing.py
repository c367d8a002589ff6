"""The Spark pipeline: orders are billed, enriched, summed up and written as Parquet.

It is an ordinary structured stream. `judged` calls the handler for every row on the executors and
adds what it said as columns; rows that are fine go on, the others are given back to the broker,
which delivers them to the group again after a delay that grows, and at last as dead letters. What
it does is reported to the console, which shows the query beside its group.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.demo.orders import BILLING, CUSTOMERS, MAX_RETRIES, TOPIC, segment_of
from examples.demo.revenue import Totals, rows_in
from examples.demo.sparkstart import JAVA_GONE, without_java
from orbitmq import ReceivedMessage, Retry
from orbitmq.spark import judged, process, settle, with_retries
from orbitmq.spark.health import SentBackCounts
from orbitmq.spark.internals import query_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from orbitmq.spark.health import QueryReports

SCHEMA = "order STRING, customer INT, country STRING, cents BIGINT, account STRING"


def bill(message: ReceivedMessage) -> None:
    """Runs on Spark's executors, and would run the same in a `Consumer`."""
    account = message.json()["account"]
    if account == "busy" and message.attempt == 1:
        raise Retry("the bank is busy")
    if account == "unknown":
        raise ValueError("the bank knows no such account")


@dataclass(slots=True)
class Counts:
    """What the pipeline has done so far. Written by Spark's callback, read by the screen."""

    batches: int = 0
    billed: int = 0
    #: Given back to the broker, to come again; those that are given up are counted there.
    retried: int = 0
    batch_seconds: float = 0.0
    #: What the paid orders come to, as the stream itself keeps it.
    cents: int = 0


class Billing:
    """The pipeline, from its start to its stop."""

    def __init__(self, spark: SparkSession, name_server: str, console: str, folder: Path) -> None:
        self.counts = Counts()
        self.results = folder / "billed"
        self.totals = Totals(folder / "revenue")
        self._spark = spark
        self._name_server = name_server
        self._console = console
        self._checkpoint = folder / "checkpoint"
        self._query: StreamingQuery | None = None
        self._returned = SentBackCounts()
        self._reports: QueryReports | None = None
        self._lock = threading.Lock()
        self._customers = customers(spark)

    def warm_up(self) -> None:
        """Have Spark load what it needs, with an empty topic: the first time takes seconds."""
        nothing = (
            self._spark.read.format("rocketmq")
            .option("nameServer", self._name_server)
            .option("subscribe", TOPIC)
            .load()
        )
        enriched(process(nothing, bill, group=BILLING), self._customers).collect()

    def start(self) -> None:
        """Begin with the first order there is."""
        from orbitmq.spark.health import report_queries  # noqa: PLC0415  # imports Spark

        self._reports = report_queries(
            self._spark, self._console, groups={BILLING: BILLING}, returned=self._returned
        )
        topics = with_retries(TOPIC, group=BILLING, name_server=self._name_server)
        self._query = (
            self._spark.readStream.format("rocketmq")
            .option("nameServer", self._name_server)
            .option("subscribe", topics)
            .option("group", BILLING)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", 50_000)
            .load()
            .writeStream.queryName(BILLING)
            .option("checkpointLocation", str(self._checkpoint))
            .foreachBatch(self._bill)
            .start()
        )

    def stop(self, within: float | None = None) -> None:
        """After the batch that runs; `within` seconds whatever it does."""
        if self._query is not None:
            # A batch that is cut off would be repeated by the next start, not lost; here nobody
            # starts again, so it is let through.
            is_free = self._lock.acquire(timeout=-1 if within is None else within)
            try:
                if is_free:
                    with without_java():
                        self._query.stop()
            finally:
                if is_free:
                    self._lock.release()
        if self._reports is not None:
            with without_java():
                self._reports.stop()

    def orders(self) -> int:
        """How many orders are billed, counted in the results; one that came twice counts once."""
        with self._lock:  # no batch is being written
            rows = rows_in(self.results)
        return len(set(rows.column("order").to_pylist())) if rows.num_rows else 0

    @property
    def problem(self) -> str | None:
        """Why it has ended, if it has."""
        if self._query is None:
            return None
        try:
            if self._query.isActive:
                return None
            error = self._query.exception()
        except JAVA_GONE:
            return "Spark's Java has ended, see spark.log"
        return str(error) if error is not None else "the stream has ended"

    def _bill(self, batch: DataFrame, number: int) -> None:
        with self._lock:
            began = time.monotonic()
            with judged(batch, bill, group=BILLING) as rows:
                # A batch that Spark repeats has the same number, and replaces what it wrote.
                billed = enriched(rows.where("outcome = 'ok'"), self._customers)
                billed.write.mode("overwrite").parquet(str(self.results / f"batch={number}"))
                self.totals.add(billed, number)
                settled = settle(
                    rows, BILLING, name_server=self._name_server, max_retries=MAX_RETRIES
                )
            self._returned.add(query_of(batch), settled)
            totals = self.totals.upto(number).values()
            self.counts.batches += 1
            self.counts.billed = sum(each.orders for each in totals)
            self.counts.cents = sum(each.cents for each in totals)
            self.counts.retried += settled.retried
            self.counts.batch_seconds = time.monotonic() - began


def enriched(orders: DataFrame, known: DataFrame) -> DataFrame:
    """The orders as columns of their own, with what is known about their customers."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # Spark's own way to call it

    parsed = orders.withColumn("fields", F.from_json(F.col("body").cast("string"), SCHEMA))
    return parsed.select("fields.*", "tags", "reconsumeTimes", "storeTimestamp").join(
        known, "customer", "left"
    )


def customers(spark: SparkSession) -> DataFrame:
    """A small table to join with."""
    rows = [(number, segment_of(number)) for number in range(CUSTOMERS)]
    return spark.createDataFrame(rows, "customer INT, segment STRING")
