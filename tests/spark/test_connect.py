"""The source through Spark Connect: the client plans nothing, the server finds the source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.filling import fill, numbered
from tests.support.sparking import in_files

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_reads_streams_and_writes_through_a_connect_session(
    orbit_cluster, orbit_topic, orbit_broker, tmp_path
):
    fill(orbit_broker, orbit_topic, numbered(500, queues=4))
    orbit_cluster.create_topic("copies", queues=2)

    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.sparkconnectsource"),
            *(orbit_cluster.name_server, orbit_topic, "copies", str(tmp_path)),
        ],
        cwd=tmp_path,  # tables of SQL are folders there
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {
        "kind": "pyspark.sql.connect.session",
        "rows": 500,
        "in_view": 500,
        "told": [True, True, True],
    }
    assert in_files(tmp_path) == list(range(500))
    copies = sorted(int(each.body) for each in orbit_cluster.messages("copies"))
    assert copies == list(range(500))
    # A function for batches has read the topic beside its batch, which is empty: the first one.
    assert [path.name for path in tmp_path.glob("together-*")] == ["together-500"]
    assert sum(orbit_cluster.progress("connected", orbit_topic).values()) == 500
