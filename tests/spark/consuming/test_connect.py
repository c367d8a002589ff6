"""The same in a Connect session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.filling import make_topic
from tests.support.sparkconsuming import Journal, progress_of

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(180)
def test_a_connect_session_runs_a_group_like_any_other(orbit_cluster, tmp_path):
    make_topic(orbit_cluster, "orders", 100, queues=2)
    journal = Journal(tmp_path / "journal")

    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.sparkconnect"),
            *(orbit_cluster.name_server, "billing", "orders", str(journal.path)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == [
        "True 99 1 ('orders', 'no such customer')",
        "99 1 RowsRefused",
    ]
    assert sorted(map(int, journal.bodies())) == list(range(100))
    assert progress_of(orbit_cluster, "billing", "orders") == {0: 50, 1: 50}
