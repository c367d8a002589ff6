"""Writes streams in record batches: PySpark 4.1 and later."""

from __future__ import annotations

from pyspark.sql.datasource import DataSourceStreamArrowWriter

from orbitmq.spark.writer import TopicStreamWriter


class RocketMQStreamWriter(TopicStreamWriter, DataSourceStreamArrowWriter):
    """Writes a stream."""
