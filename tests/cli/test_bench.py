"""`orbitmq bench`: a load, and what is said about it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.cli.bench import Times

TIMES = ("mean_seconds", "p50_seconds", "p95_seconds", "p99_seconds", "p999_seconds", "max_seconds")


def test_produce_makes_the_topic_and_counts_what_brokers_acknowledged(cluster, cli):
    words = ("bench", "produce", "load", "--limit", "300", "--size", "200", "--queues", "2")

    *_, result = cli.records(*words)

    stored = cluster.messages("load")
    assert len(stored) == 300
    assert {len(each.body) for each in stored} == {200}
    assert (result["event"], result["kind"]) == ("result", "produce")
    assert (result["messages"], result["bytes"], result["failed"]) == (300, 60_000, 0)
    assert result["messages_per_second"] == pytest.approx(300 / result["seconds"])
    values = [result[name] for name in TIMES[1:]]
    assert values == sorted(values)
    assert values[0] > 0


def test_consume_reads_all_that_is_there_and_changes_nobodys_progress(cluster, cli):
    cluster.create_topic("read", queues=3)
    cluster.send("read", *[b"x" * 50] * 120)

    *_, result = cli.records("bench", "consume", "read")
    table = cli.text("bench", "consume", "read", "--limit", "10")

    assert (result["messages"], result["bytes"]) == (120, 6000)
    assert result["max_seconds"] > 0
    assert "messages" in table
    groups = {each["group"] for each in cli.records("group", "list")}
    assert not any("bench" in group for group in groups)


def test_an_embedded_broker_is_measured_without_any_cluster(cli):
    ran = cli.run(
        *("bench", "produce", "load", "--embedded", "--limit", "50", "--json"),
        env={"ORBITMQ_NAME_SERVER": "127.0.0.1:1"},
    )

    assert ran.returncode == 0, ran.stderr
    assert '"messages":50,' in ran.stdout.splitlines()[-1]


@given(st.lists(st.floats(1e-7, 100.0), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_percentile_is_at_most_a_little_above_the_truth(values, share):
    times = Times()
    halves = Times()
    for place, value in enumerate(values):
        (times if place % 2 else halves).add(value)
    times.merge(halves)

    truth = sorted(values)[math.ceil(len(values) * share) - 1]
    found = times.percentile(share)

    assert found is not None
    assert max(truth, 1e-6) * 0.9999 <= max(found, 1e-6) <= max(truth, 1e-6) * 1.017
    assert times.count == len(values)
