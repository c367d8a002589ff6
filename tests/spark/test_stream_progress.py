"""The progress of streams by topic, as Spark reports it and as a stream is measured."""

from __future__ import annotations

import json

import pytest

from orbitmq.errors import SettingError
from orbitmq.spark import ProgressListener, StreamProgress, measured, progress
from tests.support.filling import Sent, fill, make_topic
from tests.support.sparking import DEADLINE, read, stream, until


@pytest.fixture
def reports(spark):
    """Every report about a stream of the session, by topic."""
    found: list[StreamProgress] = []
    listener = ProgressListener(found.append)
    spark.streams.addListener(listener)
    yield found
    spark.streams.removeListener(listener)


def run(frame, folder, reports, rows):
    """Run a stream to its end, of which `rows` are reported."""
    query = (
        frame.writeStream.format("noop")
        .queryName("counted")
        .option("checkpointLocation", str(folder))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(DEADLINE)
    until(lambda: sum(each.num_input_rows for each in reports) >= rows, "all rows are reported")
    return query


def total(reports, topic, name):
    return sum(
        getattr(each, name) or 0
        for report in reports
        for each in report.topics
        if each.topic == topic
    )


@pytest.mark.feature("T9")
def test_each_topic_has_its_rows_bytes_lag_and_rates(spark, cluster, tmp_path, reports):
    make_topic(cluster, "progress-a", 30, queues=2)
    make_topic(cluster, "progress-b", 10, queues=1)
    frame = stream(
        spark,
        cluster,
        "progress-a,progress-b",
        startingOffsets="earliest",
        maxOffsetsPerTrigger="20",
    )

    query = run(measured(frame, ["progress-a", "progress-b"]), tmp_path, reports, 40)

    bodies = [len(row.body) for row in read(spark, cluster, "progress-a").collect()]
    assert total(reports, "progress-a", "num_input_rows") == 30
    assert total(reports, "progress-b", "num_input_rows") == 10
    assert total(reports, "progress-a", "num_input_bytes") == sum(bodies)
    with_rows = [each for each in reports if each.num_input_rows]
    first, final = with_rows[0], with_rows[-1]
    assert sum(each.lag for each in first.topics) == 20 == sum(first.queues.values())
    assert all(each.lag_seconds >= 0 for each in first.topics)
    assert all((each.lag, each.lag_seconds) == (0, 0.0) for each in final.topics)
    for each in first.topics:
        assert each.processed_rows_per_second > 0
    assert sum(each.processed_rows_per_second for each in first.topics) == pytest.approx(
        first.processed_rows_per_second, rel=0.2
    )

    last = progress(query)
    assert last is not None
    assert (last.name, last.run_id) == ("counted", str(query.runId))
    shown = json.loads(last.json)
    assert shown["runId"] == str(query.runId)
    assert {each["topic"]: each["lag"] for each in shown["topics"]} == {
        "progress-a": 0,
        "progress-b": 0,
    }


@pytest.mark.feature("T9")
def test_what_spark_does_not_count_is_not_known_unless_it_is_measured(
    spark, cluster, tmp_path, reports
):
    for topic in ("filtered-a", "filtered-b"):
        cluster.create_topic(topic, queues=1)
        tags = ["odd"] * 6 + ["even"] * 4
        fill(cluster.broker_addresses[0], topic, [Sent(b"x", 0, {"TAGS": tag}) for tag in tags])
    options = {"startingOffsets": "earliest", "subExpression": "odd"}
    frame = stream(spark, cluster, "filtered-a,filtered-b", **options)

    run(frame, tmp_path / "plain", reports, 12)
    (plain,) = [each for each in reports if each.num_input_rows]
    reports.clear()
    run(measured(frame, ["filtered-a", "filtered-b"]), tmp_path / "measured", reports, 12)
    (known,) = [each for each in reports if each.num_input_rows]

    assert [each.num_input_rows for each in plain.topics] == [None, None]
    assert [each.num_input_bytes for each in plain.topics] == [None, None]
    assert [each.num_input_rows for each in known.topics] == [6, 6]
    assert [each.lag for each in plain.topics] == [each.lag for each in known.topics] == [0, 0]


def test_a_stream_without_topics_cannot_be_measured(spark, cluster, topic):
    rows = stream(spark, cluster, topic).select("body")

    with pytest.raises(SettingError, match="the column topic"):
        measured(rows, topic)


def test_streams_of_other_sources_are_not_reported(spark, tmp_path, reports):
    query = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", "5")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        until(lambda: query.lastProgress is not None, "a batch has ended")
        last = progress(query)
        assert last is not None
        assert last.topics == ()
    finally:
        query.stop()
    assert reports == []
