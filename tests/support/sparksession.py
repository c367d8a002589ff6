"""A Spark session for tests, on two cores, in which a failed task fails its job at once."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextlib.contextmanager
def running_session(name: str) -> Iterator[SparkSession]:
    from orbitmq.spark.session import local_session

    warehouse = tempfile.TemporaryDirectory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PySpark's own, at import and start
        session = local_session(
            name,
            cores=2,
            attempts=1,
            settings={
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
                "spark.sql.shuffle.partitions": "2",
                "spark.log.level": "ERROR",
                "spark.sql.warehouse.dir": warehouse.name,
            },
        )
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()
        warehouse.cleanup()
