"""One Spark session and one cluster for all tests of the source."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from orbitmq.spark.session import local_session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PySpark's own, at import and start
        session = local_session(
            "orbitmq tests",
            cores=2,
            attempts=1,
            settings={
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
                "spark.sql.shuffle.partitions": "2",
                "spark.log.level": "ERROR",
            },
        )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
