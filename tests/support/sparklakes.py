"""The recipes of docs/howto/exactly-once.md for Delta and Iceberg, each batch written twice.

    python -m tests.support.sparklakes NAME_SERVER PACKAGES IVY FOLDER

Prints the rows of both tables as JSON. A process of its own, with a PySpark that both support.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from orbitmq.spark.session import local_session

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "exactly-once.md"
EXTENSIONS = (
    "io.delta.sql.DeltaSparkSessionExtension",
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
)


def main(name_server: str, packages: str, cache: str, folder: str) -> None:
    os.chdir(folder)
    spark = local_session(
        "lakes",
        cores=2,
        settings={
            "spark.jars.packages": packages,
            "spark.jars.ivy": cache,
            "spark.sql.extensions": ",".join(EXTENSIONS),
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
            "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
            "spark.sql.catalog.lake.type": "hadoop",
            "spark.sql.catalog.lake.warehouse": str(Path(folder) / "lake"),
            "spark.log.level": "ERROR",
        },
    )
    columns = "brokerName STRING, queueId INT, queueOffset BIGINT, text STRING"
    spark.sql(f"CREATE TABLE lake.web.clicks ({columns}) USING iceberg")
    recipes: dict[str, Any] = {}
    for text in re.findall(r"```text\n(def into_.*?)```", PAGE.read_text(), re.DOTALL):
        exec(text, recipes)  # noqa: S102  # what readers paste

    def each(batch: Any, number: int) -> None:
        for recipe in ("into_delta", "into_iceberg"):
            for _ in range(2):  # as Spark repeats a batch
                recipes[recipe](batch, number)

    messages = spark.readStream.format("rocketmq").option("nameServer", name_server)
    messages = messages.option("subscribe", "clicks").option("startingOffsets", "earliest")
    query = (
        messages.option("maxOffsetsPerTrigger", "200")
        .load()
        .writeStream.foreachBatch(each)
        .option("checkpointLocation", "checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    delta = spark.read.format("delta").load("clicks-delta").collect()
    iceberg = spark.table("lake.web.clicks").collect()
    print(json.dumps([[int(row.text) for row in rows] for rows in (delta, iceberg)]), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
