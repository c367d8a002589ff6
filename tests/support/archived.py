"""Clusters whose old log files are archived and deleted, for tests that read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from orbitmq.broker.settings import ArchiveSettings, BrokerSettings
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import forget_old
from tests.support.sparking import until

KIB = 1024


@contextlib.contextmanager
def archiving_cluster(
    folder: Path, *, brokers: int = 1, data: Path | None = None
) -> Iterator[EmbeddedCluster]:
    """Brokers that archive log files of 1 MiB; what is old goes when `expire` says so."""

    def adjust(settings: BrokerSettings) -> BrokerSettings:
        store = replace(
            settings.store,
            file_size=1024 * KIB,
            queue_file_entries=100,
            retention=replace(settings.store.retention, max_bytes=1024 * KIB, files_per_run=1000),
        )
        archive = ArchiveSettings(folder=str(folder), interval=0.05, share=1.0)
        return replace(settings, store=store, archive=archive, clean_interval=3600.0)

    with EmbeddedCluster(brokers=brokers, folder=data, adjust=adjust) as cluster:
        yield cluster


def expire(cluster: EmbeddedCluster, topic: str, least: int) -> int:
    """Have the first broker delete what is archived, at least so much of queue 0; its start."""
    until(lambda: forget_old(cluster, topic) >= least, "old log files are deleted")
    return forget_old(cluster, topic)
