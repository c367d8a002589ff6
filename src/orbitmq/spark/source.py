"""The `rocketmq` data source: `spark.read.format("rocketmq")` and its three sisters.

Spark imports this module once per session, for everybody who has it installed, and makes instances
in several processes, each of which is asked for one thing. So nothing is imported before it is
needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from orbitmq.spark.batchreader import RocketMQBatchReader
    from orbitmq.spark.streamreader import StreamReader
    from orbitmq.spark.writer import RocketMQWriter, TopicStreamWriter


class RocketMQSource(DataSource):
    """Topics as DataFrames."""

    def __init__(self, options: dict[str, str]) -> None:
        from orbitmq.spark.workerends import leave_quietly  # noqa: PLC0415
        from orbitmq.spark.workergarbage import put_modules_aside  # noqa: PLC0415

        super().__init__(options)
        leave_quietly()
        put_modules_aside()

    @classmethod
    def name(cls) -> str:
        return "rocketmq"

    def schema(self) -> StructType:
        from orbitmq.spark.options import include_properties  # noqa: PLC0415
        from orbitmq.spark.schema import full_schema  # noqa: PLC0415

        return full_schema(include_properties=include_properties(self.options))

    def reader(self, schema: StructType) -> RocketMQBatchReader:
        from orbitmq.spark.batchreader import RocketMQBatchReader  # noqa: PLC0415
        from orbitmq.spark.options import batch_options  # noqa: PLC0415

        return RocketMQBatchReader(batch_options(self.options), schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  # Spark's name
        from orbitmq.spark.options import stream_options  # noqa: PLC0415
        from orbitmq.spark.streamreader import stream_reader  # noqa: PLC0415

        return stream_reader(stream_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> RocketMQWriter:
        from orbitmq.spark.connections import links_to  # noqa: PLC0415
        from orbitmq.spark.options import write_options  # noqa: PLC0415
        from orbitmq.spark.writer import RocketMQWriter  # noqa: PLC0415

        options = write_options(self.options)
        writer = RocketMQWriter(options, schema, overwrite=overwrite)
        # On the driver: of a wrong address every task would tell, again and again.
        links_to(options.access).reach()
        return writer

    def streamWriter(  # type: ignore[override]  # either kind of writer  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> TopicStreamWriter:
        from orbitmq.spark.options import write_options  # noqa: PLC0415
        from orbitmq.spark.writer import stream_writer  # noqa: PLC0415

        return stream_writer(write_options(self.options), schema, overwrite=overwrite)
