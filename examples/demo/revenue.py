"""Revenue by country and segment, kept by the stream as running totals.

Every batch adds what it billed to the totals of the batch before, and writes the sums into a folder
of its own, `upto=<batch>`. So a batch that Spark repeats, after whatever has ended it, begins with
the same totals and replaces its own folder: nothing is added twice. An order that fails is added
by the batch in which it succeeds, and one that is given up by none. (One that was given back by a
batch which is then repeated comes again twice, as messages may; totals for the books would look at
`order` as well.)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from examples.demo.orders import PAID

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA = "country STRING, segment STRING, orders BIGINT, cents BIGINT"
_BY = ["country", "segment"]


class Place(NamedTuple):
    """Whose revenue it is."""

    country: str
    segment: str


class Revenue(NamedTuple):
    """Orders that were billed, and what the paid ones among them come to."""

    orders: int
    cents: int


class Totals:
    """The running totals of one stream."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, billed: DataFrame, batch: int) -> None:
        """Write the totals up to the end of this batch. To be called for every batch, in order."""
        from pyspark.sql import functions as F  # noqa: N812, PLC0415  # Spark's own way to call it

        paid = F.when(F.col("tags") == PAID, F.col("cents")).otherwise(0)
        sums = billed.select(*_BY, F.lit(1).alias("orders"), paid.alias("cents"))
        if batch:
            before = billed.sparkSession.read.schema(SCHEMA).parquet(str(self._upto(batch - 1)))
            sums = sums.unionByName(before)
        (
            sums.groupBy(*_BY)
            .agg(F.sum("orders").alias("orders"), F.sum("cents").alias("cents"))
            .coalesce(1)
            .write.mode("overwrite")
            .parquet(str(self._upto(batch)))
        )

    def upto(self, batch: int) -> dict[Place, Revenue]:
        """The totals that a batch has written."""
        rows = ds.dataset(self._upto(batch), format="parquet").to_table().to_pylist()
        return {
            Place(row["country"], row["segment"]): Revenue(row["orders"], row["cents"])
            for row in rows
        }

    def latest(self) -> dict[Place, Revenue]:
        """The totals of the last batch that was finished; none if there was no batch."""
        finished = [int(mark.parent.name[5:]) for mark in self.folder.glob("upto=*/_SUCCESS")]
        return self.upto(max(finished)) if finished else {}

    def _upto(self, batch: int) -> Path:
        return self.folder / f"upto={batch}"


def rows_in(results: Path) -> pa.Table:
    """The billed orders, as they lie there."""
    return ds.dataset(results).to_table() if any(results.rglob("*.parquet")) else pa.table({})


def of_rows(rows: pa.Table) -> dict[Place, Revenue]:
    """The same from the billed orders themselves, all at once and without Spark: the check."""
    if not rows.num_rows:
        return {}
    paid = pc.if_else(pc.equal(rows.column("tags"), PAID), rows.column("cents"), 0)
    sums = (
        rows.select(_BY)
        .append_column("cents", paid)
        .group_by(_BY)
        .aggregate([("cents", "count"), ("cents", "sum")])
    )
    return {
        Place(row["country"], row["segment"]): Revenue(row["cents_count"], row["cents_sum"])
        for row in sums.to_pylist()
    }
