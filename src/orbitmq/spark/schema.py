"""The columns that can be read, and what a schema given by the user asks for.

Spark passes a schema on to the source but prunes nothing by itself; so a schema without `body` or
`properties` is how a query says that it does not need them, and they are then not decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

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

from orbitmq.spark.errors import SchemaRefused

if TYPE_CHECKING:
    import pyarrow as pa

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


def check_schema(schema: StructType) -> None:
    """Refuse a schema that messages cannot be read into."""
    seen: set[str] = set()
    for column in schema.fields:
        kind = COLUMNS.get(column.name)
        if kind is None:
            raise SchemaRefused(f"{_unknown(column.name)}; there are: {_declared()}")
        if column.name in seen:
            raise SchemaRefused(f"column {column.name!r} is in the schema twice")
        seen.add(column.name)
        if not _is_same(column.dataType, kind):
            raise SchemaRefused(
                f"column {column.name!r} is {kind.simpleString()}, the schema says "
                f"{column.dataType.simpleString()}; cast it after loading"
            )
        if not column.nullable and column.name in NULLABLE:
            raise SchemaRefused(
                f"column {column.name!r} is null in some messages, so it cannot be NOT NULL"
            )


def arrow_schema(schema: StructType) -> pa.Schema:
    """The same for Arrow: Spark compares types and nullability exactly."""
    import pyarrow as pa  # noqa: PLC0415  # planning needs no Arrow

    from orbitmq.message.arrow import MESSAGE_SCHEMA  # noqa: PLC0415

    fields = []
    for column in schema.fields:
        field = MESSAGE_SCHEMA.field(column.name).with_nullable(column.nullable)
        if isinstance(column.dataType, MapType) and not column.dataType.valueContainsNull:
            texts = pa.field("value", pa.string(), nullable=False)
            field = field.with_type(pa.map_(pa.string(), texts))
        fields.append(field)
    return pa.schema(fields)


def _is_same(given: DataType, kind: DataType) -> bool:
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
