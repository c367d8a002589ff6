"""A declarative pipeline that is run again takes only what is new."""

from __future__ import annotations

import pytest

from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.declarative import DEADLINE, example_in, run_pipeline


def sent_on(cluster: EmbeddedCluster) -> list[int]:
    return sorted(int(each.body) for each in cluster.messages("paid"))


@pytest.mark.timeout(2 * DEADLINE + 60)
def test_the_next_run_goes_on_where_the_one_before_ended(orbit_cluster, tmp_path):
    folder = example_in(tmp_path)
    for topic in ("orders", "paid"):
        orbit_cluster.create_topic(topic, queues=2)
    orbit_cluster.send("orders", *[b"%d" % number for number in range(10)], tags="paid")
    orbit_cluster.send("orders", b"10", tags="open")

    run_pipeline(folder, orbit_cluster)
    after_first = sent_on(orbit_cluster)
    orbit_cluster.send("orders", b"11", b"12", tags="paid")
    run_pipeline(folder, orbit_cluster)

    assert after_first == list(range(10))
    assert sent_on(orbit_cluster) == [*range(10), 11, 12]
    assert sum(orbit_cluster.progress("orders-pipeline", "orders").values()) == 13
