"""Topics as tables: CREATE TABLE, queries of all kinds, and tables for a whole cluster."""

# ruff: noqa: S608  # names are those of the tests
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from pyspark.errors import AnalysisException, PythonException

from orbitmq.errors import SettingError
from orbitmq.spark import register_tables
from tests.support.filling import fill, make_topic, numbered
from tests.support.sparking import DEADLINE, numbers, read


@contextlib.contextmanager
def table(spark, cluster, topic, **options) -> Iterator[str]:
    """A table of a topic, with its name."""
    name = topic.replace("-", "_")
    given = {"nameServer": cluster.name_server, "topic": topic, **options}
    texts = ", ".join(f"'{key}' '{text}'" for key, text in given.items())
    spark.sql(f"CREATE TABLE {name} USING rocketmq OPTIONS ({texts})")
    try:
        yield name
    finally:
        spark.sql(f"DROP TABLE {name}")


@pytest.fixture
def database(spark) -> Iterator[str]:
    yield "topics"
    spark.sql("DROP DATABASE IF EXISTS topics CASCADE")


@pytest.mark.feature("T6")
def test_a_table_is_its_topic_in_every_kind_of_query(spark, cluster, tmp_path):
    make_topic(cluster, "table-a", 20, queues=2)
    make_topic(cluster, "table-b", 0, queues=2)
    with table(spark, cluster, "table-a") as a, table(spark, cluster, "table-b") as b:
        assert spark.table(a).count() == 20
        fill(cluster.broker_addresses[0], "table-a", numbered(10, queues=2, first=20))
        assert numbers(spark.table(a)) == list(range(30))  # no snapshot

        spark.sql(f"INSERT INTO {b} (body, keys) VALUES (CAST('100' AS BINARY), 'k')")
        spark.sql(f"INSERT INTO {b} (body) SELECT body FROM {a} WHERE queueOffset < 2")
        assert numbers(spark.table(b)) == [0, 1, 2, 3, 100]
        # The place that a query names counts, not that of the table that its rows are from.
        rows = spark.table(b).write.format("rocketmq").option("nameServer", cluster.name_server)
        make_topic(cluster, "table-c", 0)
        rows.option("topic", "table-c").mode("append").save()
        assert read(spark, cluster, "table-c").count() == 5

        query = (
            spark.readStream.option("startingOffsets", "earliest")
            .table(a)
            .writeStream.format("rocketmq")
            .option("nameServer", cluster.name_server)
            .option("topic", "table-b")
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(DEADLINE)
        assert spark.table(b).count() == 35
    assert read(spark, cluster, "table-a").count() == 30  # the topic stays


@pytest.mark.feature("T6")
def test_rows_of_one_table_never_go_to_it_when_they_are_for_another(spark, cluster):
    """Spark hands the columns of the first on, with their options."""
    for topic, count in (("mixed-a", 4), ("mixed-b", 0)):
        make_topic(cluster, topic, count)
    with table(spark, cluster, "mixed-a") as a, table(spark, cluster, "mixed-b") as b:
        for insert in (
            lambda: spark.sql(f"INSERT INTO {b} SELECT * FROM {a}"),
            lambda: spark.table(a).writeTo(b).append(),
            lambda: spark.table(a).write.insertInto(b),
            lambda: spark.sql(f"INSERT INTO {b} (topic, body) SELECT topic, body FROM {a}"),
        ):
            with pytest.raises(PythonException, match="name the other columns"):
                insert()
        assert (spark.table(a).count(), spark.table(b).count()) == (4, 0)


@pytest.mark.feature("T6")
@pytest.mark.parametrize(
    ("of_table", "of_query", "expected"),
    [
        ({}, "", list(range(10))),
        ({"startingOffsets": "6"}, "", [6, 7, 8, 9]),
        ({}, "WITH (startingOffsets = '2', endingOffsets = '5')", [2, 3, 4]),
        # A query has another start than its table, said in another way.
        ({"startingTimestamp": "4102444800000"}, "WITH (startingOffsets = '8')", [8, 9]),
        ({}, "WITH (endingTimestamp = '1000')", []),
        # For writes and streams alone, so without effect on a read.
        ({"badRows": "skip", "maxOffsetsPerTrigger": "1"}, "", list(range(10))),
    ],
)
def test_a_table_and_a_query_have_options(spark, cluster, topic, of_table, of_query, expected):
    fill(cluster.broker_addresses[0], topic, numbered(10))

    with table(spark, cluster, topic, **of_table) as name:
        assert numbers(spark.sql(f"SELECT body FROM {name} {of_query}")) == expected


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ("", "topic 'a', topik 'b'", "unknown option 'topik'; did you mean topic"),
        ("", "topic 'a', accessKey 'a', secretKey 'b'", "left out of a table"),
        ("", "startingOffsets '1'", "say which topics to read"),
        ("(body STRING)", "topic 'a'", "without columns"),
    ],
)
def test_a_table_that_cannot_work_is_refused(spark, cluster, columns, options, said):
    at = f"OPTIONS (nameServer '{cluster.name_server}', {options})"

    def use() -> None:
        spark.sql(f"CREATE TABLE refused {columns} USING rocketmq {at}")
        spark.sql("SELECT * FROM refused").collect()

    try:
        with pytest.raises(AnalysisException, match=said):
            use()
    finally:
        spark.sql("DROP TABLE IF EXISTS refused")


def test_a_table_cannot_be_overwritten(spark, cluster, topic):
    with (
        table(spark, cluster, topic) as name,
        pytest.raises(AnalysisException, match="messages cannot be overwritten"),
    ):
        spark.sql(f"INSERT OVERWRITE {name} SELECT * FROM {name}")


@pytest.mark.feature("T6")
def test_every_topic_of_a_cluster_gets_a_table(spark, cluster, database):
    make_topic(cluster, "every-one", 3)
    make_topic(cluster, "every_two", 2)

    tables = register_tables(spark, name_server=cluster.name_server, database=database)
    names = {row.tableName for row in spark.sql(f"SHOW TABLES IN {database}").collect()}

    assert tables["every_one"] == "every-one"
    assert names == set(tables)
    assert not any(topic.startswith(("%", "rmq_sys")) for topic in tables.values())
    assert spark.table(f"{database}.every_one").count() == 3

    make_topic(cluster, "every-three", 1)
    options = {"startingOffsets": "1"}
    again = register_tables(
        spark, name_server=cluster.name_server, database=database, options=options
    )
    assert "every_three" in again
    assert spark.table(f"{database}.every_one").count() == 2


def test_tables_of_others_and_equal_names_are_refused(spark, cluster, database):
    spark.sql(f"CREATE DATABASE {database}")
    spark.sql(f"CREATE TABLE {database}.taken USING parquet AS SELECT 1 AS one")

    with pytest.raises(SettingError, match="a table of something else"):
        register_tables(spark, name_server=cluster.name_server, topics=["taken"], database=database)
    assert spark.table(f"{database}.taken").count() == 1
    with pytest.raises(SettingError, match="have the same table 'a_b'"):
        register_tables(
            spark, name_server=cluster.name_server, topics=["a-b", "a_b"], database=database
        )
