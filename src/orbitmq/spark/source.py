"""The `rocketmq` data source: `spark.read.format("rocketmq")` and its three sisters; its columns.

Trap: Spark imports this module in every session where OrbitMQ is installed, and makes instances
in several processes that each need one method. So methods import what they need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from orbitmq.spark.internals import cause_first, exit_quietly, freeze_modules

if TYPE_CHECKING:
    import pyarrow as pa

    from orbitmq.spark.options import BodyOptions
    from orbitmq.spark.readers import RocketMQBatchReader, StreamReader
    from orbitmq.spark.write import RocketMQWriter, TopicStreamWriter


class RocketMQSource(DataSource):
    """Topics as DataFrames."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        exit_quietly()
        freeze_modules()

    @classmethod
    def name(cls) -> str:
        exit_quietly()  # the worker that looks for sources calls nothing else
        return "rocketmq"

    @cause_first()
    def schema(self) -> StructType | str:
        from orbitmq.spark.options import body_options, include_properties  # noqa: PLC0415
        from orbitmq.spark.tables import options_of_new_table, with_options  # noqa: PLC0415

        of_table = options_of_new_table(self.options)
        options = self.options if of_table is None else of_table
        body, has_properties = body_options(options), include_properties(options)
        columns: StructType | str = full_schema(include_properties=has_properties)
        if body is not None:
            columns = schema_with_value(body, include_properties=has_properties)
        return columns if of_table is None else with_options(columns, of_table)

    @cause_first()
    def reader(self, schema: StructType) -> RocketMQBatchReader:
        from orbitmq.spark.options import batch_options  # noqa: PLC0415
        from orbitmq.spark.readers import RocketMQBatchReader  # noqa: PLC0415
        from orbitmq.spark.tables import FOR_BATCHES, options_for  # noqa: PLC0415

        options = options_for(schema, self.options, FOR_BATCHES)
        with _tables_explained(options):
            return RocketMQBatchReader(batch_options(options), schema)

    @cause_first()
    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  # Spark's name
        from orbitmq.spark.options import stream_options  # noqa: PLC0415
        from orbitmq.spark.readers import stream_reader  # noqa: PLC0415
        from orbitmq.spark.tables import FOR_STREAMS, options_for  # noqa: PLC0415

        options = options_for(schema, self.options, FOR_STREAMS)
        with _tables_explained(options):
            return stream_reader(stream_options(options), schema)

    @cause_first()
    def writer(self, schema: StructType, overwrite: bool) -> RocketMQWriter:
        from orbitmq.spark.internals import connections_to  # noqa: PLC0415
        from orbitmq.spark.options import write_options  # noqa: PLC0415
        from orbitmq.spark.tables import FOR_WRITES, options_for  # noqa: PLC0415
        from orbitmq.spark.write import RocketMQWriter  # noqa: PLC0415

        given = options_for(schema, self.options, FOR_WRITES)
        with _tables_explained(given):
            options = write_options(given)
            writer = RocketMQWriter(options, schema, overwrite=overwrite)
        writer.is_of_table = given is not self.options
        # On the driver: otherwise every task would report a wrong address, several times.
        connections_to(options.access).check_reachable()
        writer.check_target()
        return writer

    @cause_first()
    def streamWriter(  # type: ignore[override]  # either kind of writer  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> TopicStreamWriter:
        from orbitmq.spark.options import write_options  # noqa: PLC0415
        from orbitmq.spark.tables import FOR_WRITES, options_for  # noqa: PLC0415
        from orbitmq.spark.write import stream_writer  # noqa: PLC0415

        given = options_for(schema, self.options, FOR_WRITES)
        options = write_options(given)
        writer = stream_writer(options, schema, overwrite=overwrite)
        writer.is_of_table = given is not self.options
        writer.check_target()
        return writer


@contextmanager
def _tables_explained(options: Mapping[str, str]) -> Iterator[None]:
    """Explains an error of a query without any option: its table may have lost some."""
    from orbitmq.spark.options import OptionsNotPassed, SourceError  # noqa: PLC0415

    try:
        yield
    except SourceError as error:
        if options:
            raise
        raise OptionsNotPassed(str(error)) from error


# The columns. Spark passes a schema on and prunes nothing by itself: a schema without `body` or
# `properties` is how a query says that it does not need them, and they are then not decoded.

#: Every column, in order. The types are those of `message.arrow.MESSAGE_SCHEMA`.
COLUMNS: Final[Mapping[str, DataType]] = {
    "topic": StringType(),
    "brokerName": StringType(),
    "queueId": IntegerType(),
    "queueOffset": LongType(),
    "msgId": StringType(),
    "tags": StringType(),
    "keys": StringType(),
    "body": BinaryType(),
    "flag": IntegerType(),
    "reconsumeTimes": IntegerType(),
    "bornTimestamp": TimestampType(),
    "storeTimestamp": TimestampType(),
    "properties": MapType(StringType(), StringType()),
}
#: Null in some messages: a producer need not give them, and may give what cannot be read.
NULLABLE: Final = frozenset({"tags", "keys", "body", "bornTimestamp", "storeTimestamp"})


def full_schema(*, include_properties: bool = True) -> StructType:
    """What a query gets that gives no schema of its own."""
    return StructType(
        [
            StructField(name, kind)
            for name, kind in COLUMNS.items()
            if include_properties or name != "properties"
        ]
    )


def schema_with_value(body: BodyOptions, *, include_properties: bool) -> StructType | str:
    """The same with decoded bodies; as DDL if only the JVM can tell the type of `value`."""
    from orbitmq.spark.bodies import CORRUPT, CORRUPT_TYPE, VALUE, value_type  # noqa: PLC0415

    columns: dict[str, DataType | str] = {
        name: kind
        for name, kind in COLUMNS.items()
        if (name != "body" or body.has_body) and (name != "properties" or include_properties)
    }
    columns[VALUE] = value_type(body)
    if body.bad == "corrupt":
        columns[CORRUPT] = CORRUPT_TYPE
    fields = [
        StructField(name, kind) for name, kind in columns.items() if isinstance(kind, DataType)
    ]
    if len(fields) == len(columns):
        return StructType(fields)
    return ", ".join(
        f"{name} {kind.simpleString() if isinstance(kind, DataType) else kind}"
        for name, kind in columns.items()
    )


def check_schema(schema: StructType, body: BodyOptions | None = None) -> None:
    """Refuse a schema that messages cannot be read into. Raises `SchemaRefused`."""
    from orbitmq.spark.options import SchemaRefused  # noqa: PLC0415

    seen: set[str] = set()
    if body is not None:
        from orbitmq.spark.bodies import value_in  # noqa: PLC0415

        value_in(schema)
    for column in schema.fields:
        kind = _kind_of(column, body)
        if kind is None:
            raise SchemaRefused(f"{_unknown(column.name)}; there are: {_declared()}")
        if column.name in seen:
            raise SchemaRefused(f"column {column.name!r} is in the schema twice")
        seen.add(column.name)
        if not is_same(column.dataType, kind):
            raise SchemaRefused(
                f"column {column.name!r} is {kind.simpleString()}, the schema says "
                f"{column.dataType.simpleString()}; cast it after loading"
            )
        if not column.nullable and (column.name in NULLABLE or column.name not in COLUMNS):
            raise SchemaRefused(
                f"column {column.name!r} is null in some messages, so it cannot be NOT NULL"
            )


def _kind_of(column: StructField, body: BodyOptions | None) -> DataType | None:
    """The type that a column must have; None for an unknown one. Raises `SchemaRefused`."""
    if body is None or column.name in COLUMNS:
        return COLUMNS.get(column.name)
    from orbitmq.spark.bodies import (  # noqa: PLC0415
        CORRUPT,
        CORRUPT_TYPE,
        VALUE,
        check_value_type,
    )

    if column.name == VALUE:
        check_value_type(column.dataType, body)
        return column.dataType
    return CORRUPT_TYPE if column.name == CORRUPT else None


def arrow_schema(schema: StructType) -> pa.Schema:
    """The same for Arrow: Spark compares types and nullability exactly."""
    import pyarrow as pa  # noqa: PLC0415  # planning needs no Arrow

    from orbitmq.message.arrow import MESSAGE_SCHEMA  # noqa: PLC0415
    from orbitmq.spark.bodies import arrow_type  # noqa: PLC0415

    fields = []
    for column in schema.fields:
        if column.name not in COLUMNS:
            fields.append(pa.field(column.name, arrow_type(column.dataType), column.nullable))
            continue
        field = MESSAGE_SCHEMA.field(column.name).with_nullable(column.nullable)
        if isinstance(column.dataType, MapType) and not column.dataType.valueContainsNull:
            texts = pa.field("value", pa.string(), nullable=False)
            field = field.with_type(pa.map_(pa.string(), texts))
        fields.append(field)
    return pa.schema(fields)


def is_same(given: DataType, kind: DataType) -> bool:
    """Whether two types are the same, whatever the nullability of a map's values."""
    if isinstance(kind, MapType):
        return (
            isinstance(given, MapType)
            and given.keyType == kind.keyType
            and given.valueType == kind.valueType
        )
    return given == kind


def _unknown(name: str) -> str:
    for known in COLUMNS:
        if known.lower() == name.lower():
            return f"there is no column {name!r}, but {known!r}: names are compared with their case"
    return f"there is no column {name!r}"


def _declared() -> str:
    return ", ".join(f"{name} {kind.simpleString()}" for name, kind in COLUMNS.items())
