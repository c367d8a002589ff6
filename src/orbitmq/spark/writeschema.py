"""The columns that can be written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from orbitmq.spark.errors import SchemaRefused
from orbitmq.spark.schema import COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa

_NUMBERS: Final = (IntegerType, LongType, ShortType, ByteType)
#: What each column may be, and how that is said to a person.
WRITABLE: Final[Mapping[str, tuple[tuple[type[DataType], ...], str]]] = {
    "body": ((BinaryType, StringType), "binary or string"),
    "topic": ((StringType,), "string"),
    "tags": ((StringType,), "string"),
    "keys": ((StringType, ArrayType), "string, with spaces between keys, or array<string>"),
    "properties": ((MapType,), "map<string,string>"),
    "queueId": (_NUMBERS, "int"),
    "brokerName": ((StringType,), "string"),
    "shardingKey": ((StringType,), "string"),
    "delayLevel": (_NUMBERS, "int"),
    "deliverAt": ((TimestampType,), "timestamp"),
    "flag": (_NUMBERS, "int"),
    "identity": ((StringType,), "string"),
}
#: What a read brings and a broker sets anew: messages that were read can be written as they are.
IGNORED: Final = frozenset(COLUMNS.keys() - WRITABLE.keys())


def check_writable(schema: StructType, *, topic: str | None) -> None:
    """Refuse a schema that is not one of messages."""
    names = set(schema.names)
    if "body" not in names:
        raise SchemaRefused("a column 'body' (binary or string) is needed to write messages")
    if topic is None and "topic" not in names:
        raise SchemaRefused("either the option 'topic' or a column 'topic' is needed")
    for column in schema.fields:
        if column.name in IGNORED:
            continue
        if column.name not in WRITABLE:
            raise SchemaRefused(
                f"column {column.name!r} cannot be written; leave it out, or put it into the map "
                f"'properties'. There are: {', '.join(WRITABLE)}"
            )
        kinds, text = WRITABLE[column.name]
        if not isinstance(column.dataType, kinds) or not _holds_texts(column.dataType):
            raise SchemaRefused(
                f"column {column.name!r} must be {text}, it is {column.dataType.simpleString()}"
            )


def written_columns(schema: StructType) -> pa.Schema:
    """The columns of a schema that are written, for Arrow.

    Spark's own way to say it has other parameters in every version.
    """
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    kinds: Mapping[type[DataType], pa.DataType] = {
        BinaryType: pa.binary(),
        StringType: pa.string(),
        ByteType: pa.int8(),
        ShortType: pa.int16(),
        IntegerType: pa.int32(),
        LongType: pa.int64(),
        TimestampType: pa.timestamp("us", "UTC"),
        ArrayType: pa.list_(pa.string()),
        MapType: pa.map_(pa.string(), pa.string()),
    }
    written = [column for column in schema.fields if column.name in WRITABLE]
    return pa.schema([(column.name, kinds[type(column.dataType)]) for column in written])


def _holds_texts(kind: DataType) -> bool:
    match kind:
        case MapType():
            return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
        case ArrayType():
            return isinstance(kind.elementType, StringType)
        case _:
            return True
