"""Spark Declarative Pipelines with Spark's own command: a topic as streaming table and as sink."""

from __future__ import annotations

import pytest

from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.declarative import DEADLINE, example_in, run_pipeline


def sent_on(cluster: EmbeddedCluster) -> list[int]:
    return sorted(int(each.body) for each in cluster.messages("paid"))


@pytest.mark.timeout(DEADLINE + 60)
def test_a_topic_is_a_streaming_table_and_another_one_the_sink(orbit_cluster, tmp_path):
    folder = example_in(tmp_path)
    for topic in ("orders", "paid"):
        orbit_cluster.create_topic(topic, queues=2)
    orbit_cluster.send("orders", *[b"%d" % number for number in range(10)], tags="paid")
    orbit_cluster.send("orders", b"10", tags="open")

    run_pipeline(folder, orbit_cluster)

    assert sent_on(orbit_cluster) == list(range(10))
    assert sum(orbit_cluster.progress("orders-pipeline", "orders").values()) == 11
