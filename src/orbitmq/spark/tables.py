"""Topics as tables: `CREATE TABLE ... USING rocketmq`, and tables for all topics of a cluster.

Spark does not pass the options of a table to a source in Python, neither for reads nor for writes.
It asks the source for the columns when the table is created, and gives them back, with their
metadata, whenever the table is used. So the options are kept in the metadata of the column
`topic`. A table that declares columns has no place for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from orbitmq.errors import SettingError
from orbitmq.spark.options import (
    ACCESS_OPTIONS,
    BATCH_OPTIONS,
    READ_OPTIONS,
    STREAM_OPTIONS,
    WRITE_OPTIONS,
    OptionRefused,
    SourceError,
    batch_options,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from orbitmq.client.ranges.connections import ClientTls, Credentials, RangeAccess

#: The column that every message has, and the key of its metadata.
_COLUMN: Final = "topic"
_KEY: Final = "rocketmq"
#: Properties that Spark gives a table of its own. What stands in OPTIONS comes once more with this
#: prefix, and the first is only in a table's properties.
_PROVIDER: Final = "provider"
_OF_SPARK: Final = frozenset(
    {_PROVIDER, "owner", "location", "comment", "external", "is_managed_location", "collation"}
)
_PREFIX: Final = "option."
_SECRETS: Final = ("accessKey", "secretKey", "securityToken", "tls.keyPassword")
#: Options of a table that a query's own options replace together.
_FAMILIES: Final = ("starting", "ending")

FOR_BATCHES: Final = frozenset(map(str.lower, {**ACCESS_OPTIONS, **READ_OPTIONS, **BATCH_OPTIONS}))
FOR_STREAMS: Final = frozenset(map(str.lower, {**ACCESS_OPTIONS, **READ_OPTIONS, **STREAM_OPTIONS}))
FOR_WRITES: Final = frozenset(map(str.lower, {**ACCESS_OPTIONS, **WRITE_OPTIONS}))
#: Those that a batch read would refuse or warn of.
_NOT_FOR_BATCHES: Final = (FOR_STREAMS | FOR_WRITES) - FOR_BATCHES
#: A query that names one of these is about another topic than the table that its columns are of.
_OWN_PLACE: Final = ("nameserver", "topic", "subscribe", "subscribepattern", "assign")


def with_options(schema: StructType | str, options: Mapping[str, str]) -> StructType:
    """The columns of a new table, with its options. Raises `OptionRefused`."""
    if isinstance(schema, str):
        raise OptionRefused(
            "bodyFormat",
            options.get("bodyformat"),
            "text, avro or protobuf in a table: Spark asks a source for the columns of others in "
            "a form that cannot have options; create a temporary view instead",
        )
    for secret in _SECRETS:
        if secret.lower() in options:
            raise OptionRefused(
                secret, None, "left out of a table, which would store it: set the variable instead"
            )
    batch_options({name: text for name, text in options.items() if name not in _NOT_FOR_BATCHES})
    from pyspark.sql.types import StructField, StructType  # noqa: PLC0415  # see `source`

    return StructType(
        [
            StructField(
                field.name,
                field.dataType,
                field.nullable,
                {**field.metadata, _KEY: json.dumps(options)}
                if field.name == _COLUMN
                else field.metadata,
            )
            for field in schema.fields
        ]
    )


def options_of_new_table(properties: Mapping[str, str]) -> dict[str, str] | None:
    """The options of a table that is being created; None if Spark asks for something else."""
    if _PROVIDER not in properties:
        return None
    lowered = {name.lower(): text for name, text in properties.items()}
    options = {
        name.removeprefix(_PREFIX): text
        for name, text in lowered.items()
        if name.startswith(_PREFIX)
    }
    return options or {name: text for name, text in lowered.items() if name not in _OF_SPARK}


def options_for(
    schema: StructType, given: Mapping[str, str], purpose: frozenset[str]
) -> Mapping[str, str]:
    """The options of a query: those of its table, unless it names another place, and its own."""
    options = {name.lower(): text for name, text in given.items()}
    kept = _kept(schema)
    if not kept or any(name in options for name in _OWN_PLACE):
        return given
    for family in _FAMILIES:
        if any(name.startswith(family) for name in options):
            kept = {name: text for name, text in kept.items() if not name.startswith(family)}
    return {name: text for name, text in kept.items() if name in purpose} | options


def _kept(schema: StructType) -> dict[str, str]:
    for field in schema.fields:
        if field.name == _COLUMN and _KEY in field.metadata:
            found: dict[str, str] = json.loads(field.metadata[_KEY])
            return found
    return {}


def rows_for_table(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows. Raises `TopicsMixed` for rows that were read from a topic.

    Spark gives rows of `INSERT INTO b SELECT * FROM a` with the columns, and so the options, of
    `a`. Those of an `INSERT` that names its columns without `topic` have the options of `b`.
    """
    for batch in batches:
        place = batch.schema.get_field_index(_COLUMN)
        if place >= 0 and batch.column(place).null_count < batch.num_rows:
            raise TopicsMixed
        yield batch


class TopicsMixed(SourceError):
    """Rows for a table have a topic of their own."""

    def __init__(self) -> None:
        super().__init__(
            "rows for a table have a column topic, so that Spark does not tell which table they "
            "are for; name the other columns, as in INSERT INTO copies (body, tags, keys) SELECT "
            "body, tags, keys FROM orders"
        )


# All topics of a cluster

#: Names of tables that Spark's own catalog allows.
_NOT_IN_NAMES: Final = re.compile(r"\W", re.ASCII)


def register_tables(
    spark: SparkSession,
    *,
    name_server: str | Iterable[str] | None = None,
    topics: Iterable[str] | None = None,
    database: str = "rocketmq",
    options: Mapping[str, str] | None = None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
) -> dict[str, str]:
    """Make a table of each topic, by default of all; returns the topics by the table's name.

    Characters that Spark allows in no name become `_`. May be repeated: new topics get tables, and
    tables of this function get the present options. `credentials` are used to list topics alone;
    queries take theirs from the environment. Raises `SettingError` if a name is taken.
    """
    from orbitmq.spark.consuming.pipeline import (  # noqa: PLC0415  # needs Spark
        resolve_access,
        source_options,
    )

    access = resolve_access(name_server, credentials, tls)
    names = _topics(access) if topics is None else list(topics)
    tables: dict[str, str] = {}
    for topic in sorted(names):
        table = _NOT_IN_NAMES.sub("_", topic)
        if (other := tables.get(table.lower())) is not None:
            raise SettingError(
                f"topics {other!r} and {topic!r} have the same table {table!r}; name the topics, "
                "and use another database for one of them"
            )
        tables[table.lower()] = topic
    spark.sql(f"CREATE DATABASE IF NOT EXISTS {_quoted(database)}")
    public = {name: text for name, text in source_options(access).items() if name not in _SECRETS}
    given = {**public, **(options or {})}
    for table, topic in tables.items():
        place = f"{_quoted(database)}.{_quoted(table)}"
        if spark.catalog.tableExists(place):
            if not _kept(spark.table(place).schema):
                raise SettingError(f"{place} is a table of something else; give another database")
            spark.sql(f"DROP TABLE {place}")
        texts = ", ".join(
            f"{_text(name)} {_text(text)}" for name, text in {**given, "topic": topic}.items()
        )
        spark.sql(f"CREATE TABLE {place} USING rocketmq OPTIONS ({texts})")
    return tables


def _topics(access: RangeAccess) -> list[str]:
    from orbitmq.client.admin.admin import Admin  # noqa: PLC0415  # queries need none
    from orbitmq.client.admin.topics import NOT_LISTED  # noqa: PLC0415

    with Admin(client=access.settings()) as admin:
        return [topic.name for topic in admin.topics.list() if topic.kind not in NOT_LISTED]


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
