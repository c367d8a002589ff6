"""Decoded bodies in a real Spark session: batch reads, streams and writes."""

from __future__ import annotations

import json

import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from orbitmq.message.formats import avro_schema, avro_writer
from tests.support.bodyformats import DESCRIPTOR
from tests.support.filling import fill
from tests.support.sparking import into_topic, read, run_over, stream

DDL = "id BIGINT, name STRING, items ARRAY<STRUCT<sku: STRING, count: INT>>, at TIMESTAMP"
ORDERS = [
    {"id": n, "name": f"n{n}", "items": [{"sku": "a", "count": n}], "at": "2026-11-18T09:00:00Z"}
    for n in range(20)
]
AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "labels", "type": {"type": "map", "values": "string"}},
        ],
    }
)


@pytest.fixture
def orders(cluster, topic):
    """Twenty orders in JSON, and one body that is none."""
    bodies = [json.dumps(each).encode() for each in ORDERS]
    fill(cluster.broker_addresses[0], topic, [*bodies, b"\xffbad"])
    return topic


@pytest.mark.feature("T1")
def test_json_is_the_column_value_as_from_json_makes_it(spark, cluster, orders):
    found = read(spark, cluster, orders, bodyFormat="json", bodySchema=DDL)
    spelled = read(spark, cluster, orders).selectExpr(
        f"from_json(CAST(body AS STRING), '{DDL}') AS value", "queueOffset"
    )

    assert "body" not in found.columns
    ours = found.where("_corrupt IS NULL").select("value.*").orderBy("id")
    theirs = spelled.where("queueOffset < 20").select("value.*").orderBy("id")
    assert ours.schema == theirs.schema
    assert ours.collect() == theirs.collect()
    assert ours.count() == 20
    (bad,) = found.where("_corrupt IS NOT NULL").collect()
    assert (bad.value, bad.queueOffset) == (None, 20)
    assert bad["_corrupt"].reason == "is no text in UTF-8"
    assert bytes(bad["_corrupt"].body) == b"\xffbad"


def test_bad_bodies_can_be_null_or_end_the_query(spark, cluster, orders):
    options = {"bodyFormat": "json", "bodySchema": DDL}

    nulls = read(spark, cluster, orders, badBodies="null", includeBody="true", **options)

    assert "_corrupt" not in nulls.columns
    assert [bytes(row.body) for row in nulls.where("value IS NULL").collect()] == [b"\xffbad"]
    with pytest.raises(PySparkException, match=rf"the body of {orders}@broker-a:0 at offset 20 is"):
        read(spark, cluster, orders, badBodies="fail", **options).count()
    # What a wanted column does not need is not decoded.
    plain = (
        spark.read.format("rocketmq")
        .schema("queueOffset BIGINT")
        .options(nameServer=cluster.name_server, subscribe=orders, badBodies="fail", **options)
    )
    assert plain.load().count() == 21


def test_a_schema_of_spark_and_one_of_the_reader_do_as_well(spark, cluster, orders):
    schema = spark.sql("SELECT 1L AS id, 'x' AS name").schema.json()
    given = "value STRUCT<name: STRING>, queueOffset BIGINT"

    of_json = read(spark, cluster, orders, bodyFormat="json", bodySchema=nullable(schema))
    of_reader = (
        spark.read.format("rocketmq")
        .schema(given)
        .options(nameServer=cluster.name_server, subscribe=orders, bodyFormat="json")
        .load()
    )

    assert of_json.where("value.id = 7").select("value.name").collect() == [("n7",)]
    assert of_reader.where("queueOffset = 7").select("value.name").collect() == [("n7",)]
    with pytest.raises(PySparkException, match="'bodySchema' must be the fields of the bodies as"):
        read(spark, cluster, orders, bodyFormat="json")
    with pytest.raises(PySparkException, match="BIGINNT"):
        read(spark, cluster, orders, bodyFormat="json", bodySchema="id BIGINNT")


def nullable(schema: str) -> str:
    return schema.replace('"nullable":false', '"nullable":true')


@pytest.mark.feature("T1")
def test_text_and_variants_are_columns(spark, cluster, orders):
    text = read(spark, cluster, orders, bodyFormat="text")
    variant = read(spark, cluster, orders, bodyFormat="variant")

    assert text.where("value LIKE '%n7%'").count() == 1
    assert text.where("_corrupt IS NOT NULL").count() == 1
    found = variant.selectExpr("variant_get(value, '$.items[0].count', 'INT') AS n", "_corrupt")
    assert [row.n for row in found.where("_corrupt IS NULL").orderBy("n").collect()] == [*range(20)]


@pytest.mark.feature("T1")
def test_a_stream_decodes_avro_and_writes_protobuf(spark, cluster, topic, tmp_path):
    write = avro_writer(avro_schema(AVRO))
    fill(
        cluster.broker_addresses[0],
        topic,
        [write({"id": n, "labels": {"a": str(n)}}) for n in range(10)],
    )
    target = f"{topic}-out"
    cluster.create_topic(target, queues=1)
    (tmp_path / "orders.desc").write_bytes(DESCRIPTOR)
    protobuf = {"bodyFormat": "protobuf", "bodySchema": f"{tmp_path}/orders.desc#shop.Order"}
    source = stream(
        spark, cluster, topic, startingOffsets="earliest", bodyFormat="avro", bodySchema=AVRO
    )
    rows = source.selectExpr("value.id AS id", "TIMESTAMP '2026-11-18 09:00:00Z' AS at", "'k' keys")

    into_topic(rows, cluster, tmp_path / "checkpoint", topic=target, **protobuf)

    found = read(spark, cluster, target, **protobuf).where("_corrupt IS NULL")
    assert [r.id for r in found.select("value.id").orderBy("id").collect()] == [*range(10)]
    assert found.where("value.at = TIMESTAMP '2026-11-18 09:00:00Z' AND keys = 'k'").count() == 10


@pytest.mark.feature("T1")
@pytest.mark.parametrize("form", ["json", "avro", "text", "variant"])
def test_what_is_written_with_a_format_is_read_with_it(spark, cluster, topic, form):
    values = {
        "json": "named_struct('id', id, 'labels', map('a', CAST(id AS STRING)))",
        "avro": "named_struct('id', id, 'labels', map('a', CAST(id AS STRING)))",
        "text": "CONCAT('n', id)",
        "variant": "parse_json(CONCAT('{\"id\":', id, '}'))",
    }
    schema = {"json": {"bodySchema": "id BIGINT, labels MAP<STRING, STRING>"}}
    options = {"bodyFormat": form} | schema.get(form, {})
    if form == "avro":
        options["bodySchema"] = AVRO
    frame = spark.range(5).selectExpr(f"{values[form]} AS value", "'k' AS keys")

    (
        frame.write.format("rocketmq")
        .options(nameServer=cluster.name_server, topic=topic, **options)
        .mode("append")
        .save()
    )

    shown = "to_json(value)" if form != "text" else "value"
    found = read(spark, cluster, topic, **options).selectExpr(f"{shown} AS v", "keys")
    assert sorted(found.collect()) == sorted(frame.selectExpr(f"{shown} AS v", "keys").collect())


def test_a_row_that_does_not_fit_its_format_is_a_bad_row(spark, cluster, topic):
    frame = spark.range(5).selectExpr("IF(id = 3, NULL, CAST(id AS STRING)) AS value")
    options = {"nameServer": cluster.name_server, "topic": topic, "bodyFormat": "text"}

    with pytest.raises(PySparkException, match="cannot be written: its value is null"):
        frame.coalesce(1).write.format("rocketmq").options(**options).mode("append").save()
    skipping = frame.write.format("rocketmq").options(badRows="skip", **options)
    skipping.mode("append").save()

    assert {each.body for each in cluster.messages(topic)} == {b"0", b"1", b"2", b"4"}


def test_a_stream_that_fails_at_a_bad_body_says_which(spark, cluster, orders, tmp_path):
    options = {"startingOffsets": "earliest", "bodyFormat": "json", "bodySchema": DDL}

    with pytest.raises(StreamingQueryException, match="at offset 20 is not json as bodySchema"):
        run_over(stream(spark, cluster, orders, badBodies="fail", **options), tmp_path)
