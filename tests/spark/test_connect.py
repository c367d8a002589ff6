"""The source through Spark Connect: the client plans nothing, the server finds the source."""

from __future__ import annotations

import json

import pytest

from tests.support.archived import write_archive
from tests.support.filling import fill, make_topic, numbered
from tests.support.sparkconsuming import Journal, progress_of
from tests.support.sparking import in_files, run_module


@pytest.mark.timeout(240)
@pytest.mark.feature("T6")
@pytest.mark.feature("T7")
@pytest.mark.feature("T9")
def test_reads_streams_and_writes_through_a_connect_session(
    orbit_cluster, orbit_topic, orbit_broker, tmp_path
):
    fill(orbit_broker, orbit_topic, numbered(500, queues=4))
    orbit_cluster.create_topic("copies", queues=2)

    write_archive(tmp_path / "archive")

    words = (orbit_cluster.name_server, orbit_topic, "copies", str(tmp_path))
    done = run_module("sparkconnectsource", *words, cwd=tmp_path)

    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {
        "kind": "pyspark.sql.connect.session",
        "rows": 500,
        "reported": 500,
        "last": [[orbit_topic, 0]],
        "in_view": 500,
        "told": [True, True],
        "in_table": [500, 501, 501],
        "archived": 20,
    }
    assert in_files(tmp_path) == list(range(500))
    copies = sorted(int(each.body) for each in orbit_cluster.messages("copies"))
    assert copies == list(range(500))
    # A function for batches has read the topic beside its batch, which is empty: the first one.
    assert [path.name for path in tmp_path.glob("together-*")] == ["together-500"]
    assert sum(orbit_cluster.progress("connected", orbit_topic).values()) == 500


@pytest.mark.timeout(180)
def test_a_connect_session_runs_a_group_like_any_other(orbit_cluster, tmp_path):
    make_topic(orbit_cluster, "orders", 100, queues=2)
    journal = Journal(tmp_path / "journal")

    words = (orbit_cluster.name_server, "billing", "orders", str(journal.path))
    done = run_module("sparkconnect", *words)

    assert done.stdout.splitlines()[-2:] == [
        "True 99 1 ('orders', 'no such customer')",
        "99 1 RowsRefused",
    ]
    assert sorted(map(int, journal.bodies())) == list(range(100))
    assert progress_of(orbit_cluster, "billing", "orders") == {0: 50, 1: 50}
