"""Clusters whose old log files are archived and deleted, for tests that read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from orbitmq.archive import Entries, Location
from orbitmq.broker.settings import ArchiveSettings, BrokerSettings
from orbitmq.store.archive import archive_log_file, closed_log_files
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import forget_old
from tests.support.sparking import until
from tests.support.store import write_log

KIB = 1024


def write_archive(folder: Path) -> None:
    """An archive of a broker that does not run, with the topic `orders`."""
    data, entries = folder.with_name("archived-data"), Entries(Location(str(folder)))
    write_log(data)
    for file in closed_log_files(data):
        for _ in archive_log_file(file, entries, "broker-a", writer="test"):
            pass


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
