"""The `rocketmq` data source: `spark.read.format("rocketmq")` and its three sisters.

Spark imports this module once per session, for everybody who has it installed, and makes instances
in several processes, each of which is asked for one thing. So nothing is imported before it is
needed.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from orbitmq.spark.workerends import cause_first, leave_quietly

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql.types import StructType

    from orbitmq.spark.batchreader import RocketMQBatchReader
    from orbitmq.spark.streamreader import StreamReader
    from orbitmq.spark.writer import RocketMQWriter, TopicStreamWriter


class RocketMQSource(DataSource):
    """Topics as DataFrames."""

    def __init__(self, options: dict[str, str]) -> None:
        from orbitmq.spark.workergarbage import put_modules_aside  # noqa: PLC0415

        super().__init__(options)
        leave_quietly()
        put_modules_aside()

    @classmethod
    def name(cls) -> str:
        # All that Spark asks of the worker that looks for sources.
        leave_quietly()
        return "rocketmq"

    @cause_first()
    def schema(self) -> StructType:
        from orbitmq.spark.errors import OptionsNotPassed  # noqa: PLC0415
        from orbitmq.spark.options import include_properties  # noqa: PLC0415
        from orbitmq.spark.schema import full_schema  # noqa: PLC0415

        if "provider" in self.options:
            # CREATE TABLE asks for the columns, with the options, as it does never again.
            raise OptionsNotPassed
        return full_schema(include_properties=include_properties(self.options))

    @cause_first()
    def reader(self, schema: StructType) -> RocketMQBatchReader:
        from orbitmq.spark.batchreader import RocketMQBatchReader  # noqa: PLC0415
        from orbitmq.spark.options import batch_options  # noqa: PLC0415

        with _told_of_tables(self.options):
            return RocketMQBatchReader(batch_options(self.options), schema)

    @cause_first()
    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  # Spark's name
        from orbitmq.spark.options import stream_options  # noqa: PLC0415
        from orbitmq.spark.streamreader import stream_reader  # noqa: PLC0415

        return stream_reader(stream_options(self.options), schema)

    @cause_first()
    def writer(self, schema: StructType, overwrite: bool) -> RocketMQWriter:
        from orbitmq.spark.connections import links_to  # noqa: PLC0415
        from orbitmq.spark.options import write_options  # noqa: PLC0415
        from orbitmq.spark.writer import RocketMQWriter, check_topic  # noqa: PLC0415

        with _told_of_tables(self.options):
            options = write_options(self.options)
            writer = RocketMQWriter(options, schema, overwrite=overwrite)
        # On the driver: of a wrong address every task would tell, again and again.
        links_to(options.access).reach()
        check_topic(options)
        return writer

    @cause_first()
    def streamWriter(  # type: ignore[override]  # either kind of writer  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> TopicStreamWriter:
        from orbitmq.spark.options import write_options  # noqa: PLC0415
        from orbitmq.spark.writer import check_topic, stream_writer  # noqa: PLC0415

        options = write_options(self.options)
        writer = stream_writer(options, schema, overwrite=overwrite)
        check_topic(options)
        return writer


@contextmanager
def _told_of_tables(options: Mapping[str, str]) -> Iterator[None]:
    """Whoever reads or writes without any option may have given some to a table."""
    from orbitmq.spark.errors import OptionsNotPassed, SourceError  # noqa: PLC0415

    try:
        yield
    except SourceError as error:
        if options:
            raise
        raise OptionsNotPassed(str(error)) from error
