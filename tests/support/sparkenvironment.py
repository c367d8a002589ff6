"""A read on a Spark cluster whose executors get their Python environment with the job.

    python -m tests.support.sparkenvironment NAME_SERVER TOPIC MASTER ARCHIVE

PYSPARK_PYTHON is `./environment/bin/python`, in the archive (tar.gz). Prints what was read as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from orbitmq.spark.session import prepare
from tests.support.sparkpipeline import ON_A_CLUSTER, QUICK

if TYPE_CHECKING:
    import pyarrow as pa


def main(name_server: str, topic: str, master: str, archive: str) -> None:
    prepare(os.environ)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("environment")
    settings = {**QUICK, **ON_A_CLUSTER, "spark.archives": f"{archive}#environment"}
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    source = {"nameServer": name_server, "subscribe": topic}
    rows = spark.read.format("rocketmq").options(**source).load()

    def places(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            here = [f"{sys.prefix} {Path.cwd()}"] * batch.num_rows
            yield pa.RecordBatch.from_pydict({"place": here})

    found = [row.place for row in rows.mapInArrow(places, "place STRING").collect()]
    print(json.dumps(found), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
