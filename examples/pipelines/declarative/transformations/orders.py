"""A topic as a streaming table, a table that is made of it, and a topic that gets the result.

The cluster is the one that ORBITMQ_NAME_SERVER names.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


@dp.table
def raw_orders() -> DataFrame:
    """Every message of the topic, once."""
    return (
        spark.readStream.format("rocketmq")
        .option("subscribe", "orders")
        .option("group", "orders-pipeline")
        .option("startingOffsets", "earliest")
        .load()
    )


@dp.materialized_view
def orders_by_tag() -> DataFrame:
    return spark.read.table("raw_orders").groupBy("tags").count()


dp.create_sink(name="paid_orders", format="rocketmq", options={"topic": "paid"})


@dp.append_flow(target="paid_orders")
def paid() -> DataFrame:
    return spark.readStream.table("raw_orders").where("tags = 'paid'").select("body", "keys")
