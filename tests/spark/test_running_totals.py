"""The totals that the demo's stream keeps: exact, whatever batches are repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from examples.demo.revenue import Place, Revenue, Totals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCHES: list[list[tuple[str, str, str, int]]] = [
    [("DE", "gold", "paid", 100), ("DE", "gold", "refunded", 900), ("FR", "new", "paid", 30)],
    [("DE", "gold", "paid", 5)],
    [],
    [("FR", "new", "paid", 2), ("JP", "new", "paid", 1)],
]
EXACT = {
    Place("DE", "gold"): Revenue(3, 105),
    Place("FR", "new"): Revenue(2, 32),
    Place("JP", "new"): Revenue(1, 1),
}


def test_totals_go_on_and_a_batch_that_is_repeated_is_added_once(spark, tmp_path):
    totals = Totals(tmp_path)

    # A driver that is started again repeats its last batch, whether it was written or not.
    for number in (0, 0, 1, 1, 2, 3, 3):
        totals.add(batch(spark, number), number)

    assert totals.latest() == EXACT
    assert totals.upto(0) == {
        Place("DE", "gold"): Revenue(2, 100),
        Place("FR", "new"): Revenue(1, 30),
    }


def batch(spark: SparkSession, number: int) -> DataFrame:
    return spark.createDataFrame(
        BATCHES[number], "country STRING, segment STRING, tags STRING, cents BIGINT"
    )
