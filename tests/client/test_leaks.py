"""Nothing is left of lost connections and stopped consumers.

What a process holds is counted in one of its own: here, other tests have caches of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNTED = "tests/soak/client_leaks.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("left_of", ["connections_that_were_lost", "consumers_that_were_stopped"])
def test_nothing_is_left_of(left_of, tmp_path):
    alone = {name: text for name, text in os.environ.items() if "XDIST" not in name}
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", f"{COUNTED}::test_nothing_is_left_of_{left_of}"),
            *("--basetemp", str(tmp_path / "counted"), "-p", "no:xdist"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=alone,
        timeout=280,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout
