"""The columns that rows of messages must have, said before any task runs.

Tasks make messages out of values. A column of another type would fail the first of them, far from
the line that made the column, with an error of whatever first met the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orbitmq.spark.consuming.errors import RowsRefused

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def check_columns(frame: DataFrame, wanted: Sequence[str], *, optional: Sequence[str] = ()) -> None:
    """Refuse a DataFrame that lacks columns, or has them of other types.

    Raises `RowsRefused`. Columns that are neither wanted nor optional are not looked at.
    """
    if missing := [name for name in wanted if name not in frame.columns]:
        raise RowsRefused(
            f"the DataFrame has no column {', '.join(missing)}; it must have those of the "
            f"rocketmq source: {', '.join(wanted)}"
        )
    kinds = _kinds()
    for column in frame.schema.fields:
        if column.name not in wanted and column.name not in optional:
            continue
        allowed, text = kinds.get(column.name, (object, ""))
        if not isinstance(column.dataType, allowed) or not _holds_texts(column.dataType):
            raise RowsRefused(
                f"column {column.name} must be {text}, it is {column.dataType.simpleString()}; "
                "keep what the rocketmq source gave, and put what is made of it into another column"
            )


def _kinds() -> Mapping[str, tuple[Any, str]]:
    """What each column may be, and how that is said to a person.

    Times are not in it: where they are no times, messages have none.
    """
    from pyspark.sql import types  # noqa: PLC0415  # only where Spark is

    whole = (types.IntegerType, types.LongType, types.ShortType, types.ByteType)
    texts = ("topic", "brokerName", "msgId", "tags", "keys", "outcome")
    return {
        **dict.fromkeys(texts, (types.StringType, "string")),
        **dict.fromkeys(("queueId", "flag", "reconsumeTimes"), (whole, "int")),
        "queueOffset": (whole, "bigint"),
        "body": (types.BinaryType, "binary"),
        "properties": (types.MapType, "map<string,string>"),
    }


def _holds_texts(kind: Any) -> bool:
    from pyspark.sql import types  # noqa: PLC0415

    if not isinstance(kind, types.MapType):
        return True
    return isinstance(kind.keyType, types.StringType) and isinstance(
        kind.valueType, types.StringType
    )
