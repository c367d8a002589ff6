"""Pipelines and the journal of their handlers."""

from __future__ import annotations

import pytest

from orbitmq.spark import ConsumePipeline, consume
from tests.support.sparkconsuming import QUICK, SOON, Journal


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal")


@pytest.fixture
def pipeline(spark, orbit_cluster):
    """Makes pipelines that are stopped with the test."""
    made: list[ConsumePipeline] = []

    def make(group="billing", **options):
        given = {"consume_from": "first", "batch": QUICK, "rebalance": SOON} | options
        given.setdefault("name_server", orbit_cluster.name_server)
        made.append(consume(spark, group, **given))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for run in made:
        run.stop()
