"""Somebody who reads pages beside a cluster, which was started as the tutorial says."""

from __future__ import annotations

import pytest

from tests.support.walkthrough import ROOT, Reader, blocks

#: For one command; Spark needs seconds, on a crowded machine minutes.
PATIENCE = 300.0


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    with Reader(tmp_path_factory.mktemp("reader"), patience=PATIENCE) as somebody:
        for block in blocks(ROOT / "docs" / "tutorial.md"):
            if block.runs_on:
                somebody.follow(block)
        yield somebody
        somebody.stop()
