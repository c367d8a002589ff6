"""A cluster for the frameworks: its broker delivers a failed message again after half a second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orbitmq.testing import EmbeddedCluster


def quick_retries(settings):
    levels = (0.5,) * len(settings.store.delay_levels)
    return replace(settings, store=replace(settings.store, delay_levels=levels))


@pytest.fixture(scope="package")
def orbit_shared_cluster():
    with EmbeddedCluster(adjust=quick_retries) as cluster:
        yield cluster
