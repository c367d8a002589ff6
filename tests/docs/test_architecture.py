"""The architecture page: its graph of packages and its walks are those of the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import house

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
#: What the walks are called on the page, and how many files of ours one of them may cross. What
#: runs beside it (heartbeats, rebalancing, saving) may be in the trace, except in that of a send.
WALKS = {
    "send": ("Send", 15),
    "submit": ("Submit to result", 25),
    "store": ("Store and answer", 40),
    "pull": ("Pull to handler", 35),
    "failure": ("Failure to dead letter", 90),
    "batch": ("A Spark micro-batch", 90),
}
MOST_STEPS = 15


def steps(title: str) -> list[tuple[str, str]]:
    section = re.search(rf"^### {title}.*?\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE)
    assert section, title
    return re.findall(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", section[1], re.MULTILINE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_is_that_of_a_traced_run(walk):
    title, most_files = WALKS[walk]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.docs.walks", walk],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    called = [tuple(call) for call in json.loads(ran.stdout)]

    walked = steps(title)

    assert 5 <= len(walked) <= MOST_STEPS
    assert [step for step in walked if step not in called] == []
    assert walked == sorted(walked, key=called.index)
    assert len({file for file, _ in called}) <= most_files


def test_the_graph_of_packages_is_that_of_the_code():
    shown = {
        (importer, imported)
        for importer, all_imported in re.findall(r"^    (\w+) --> ([\w &]+)$", PAGE, re.MULTILINE)
        for imported in all_imported.split(" & ")
    }
    nodes = {node for edge in shown for node in edge}

    found = {edge for edge in house.package_imports() if set(edge) <= nodes}

    assert shown <= found
    # What is not drawn follows from what is.
    assert found <= closure(shown)


def closure(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    while True:
        more = {(a, d) for a, b in edges for c, d in edges if b == c} | edges
        if more == edges:
            return edges
        edges = more
