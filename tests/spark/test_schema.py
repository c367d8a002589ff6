"""Schemas: what can be read, and how a wrong one is refused."""

from __future__ import annotations

import pytest
from pyspark.sql.types import IntegerType, LongType, MapType, StringType, StructField, StructType

from orbitmq.message.arrow import MESSAGE_SCHEMA
from orbitmq.spark.options import SchemaRefused
from orbitmq.spark.source import COLUMNS, arrow_schema, check_schema, full_schema


def test_the_columns_are_those_of_the_decoder():
    """Spark compares names, order and types exactly."""
    from pyspark.sql.pandas.types import to_arrow_schema

    assert arrow_schema(full_schema()) == MESSAGE_SCHEMA
    assert to_arrow_schema(full_schema(), timezone="UTC") == MESSAGE_SCHEMA
    assert list(COLUMNS) == MESSAGE_SCHEMA.names


def test_properties_can_be_left_out_of_the_full_schema():
    assert full_schema(include_properties=False).names == MESSAGE_SCHEMA.names[:-1]


def test_any_columns_in_any_order_are_fine():
    given = StructType([StructField("queueOffset", LongType()), StructField("topic", StringType())])

    check_schema(given)

    assert arrow_schema(given).names == ["queueOffset", "topic"]


def test_columns_that_are_never_null_may_say_so():
    from pyspark.sql.pandas.types import to_arrow_schema

    given = StructType(
        [
            StructField("queueId", IntegerType(), nullable=False),
            StructField("properties", MapType(StringType(), StringType(), False), nullable=False),
        ]
    )

    check_schema(given)

    assert arrow_schema(given) == to_arrow_schema(given, timezone="UTC")


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (StructField("offset", LongType()), "there is no column 'offset'; there are: topic string"),
        (
            StructField("queueid", IntegerType()),
            "but 'queueId': names are compared with their case",
        ),
        (StructField("queueId", LongType()), "'queueId' is int, the schema says bigint; cast it"),
        (StructField("body", StringType()), "'body' is binary, the schema says string"),
        (
            StructField("properties", MapType(StringType(), LongType())),
            "'properties' is map<string,string>, the schema says map<string,bigint>",
        ),
        (StructField("tags", StringType(), nullable=False), "'tags' is null in some messages"),
    ],
)
def test_a_column_that_cannot_be_read_is_named(column, words):
    with pytest.raises(SchemaRefused, match=words):
        check_schema(StructType([column]))


def test_a_column_can_be_asked_for_once():
    with pytest.raises(SchemaRefused, match="'topic' is in the schema twice"):
        check_schema(StructType([StructField("topic", StringType())] * 2))
