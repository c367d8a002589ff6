"""The sockets of a Python worker of Spark, kept between its tasks.

A worker is reused for tasks of many batches and queries; nothing but module state outlives a task
in it. So this is the one place of the package that has some. It is keyed by the process, because
workers are forked, and by how the cluster is reached, because queries of several clusters and
users share a worker.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from orbitmq.client.rangeaccess import RangeAccess
from orbitmq.client.rangelinks import RangeLinks

if TYPE_CHECKING:
    from orbitmq.client.rangewriting import RangeWriter, WritingSettings

_links: dict[tuple[int, RangeAccess], RangeLinks] = {}
_writers: dict[tuple[int, RangeAccess, str, WritingSettings], RangeWriter] = {}


def links_to(access: RangeAccess) -> RangeLinks:
    """The connections of this process to a cluster."""
    key = os.getpid(), access
    if key not in _links:
        _links[key] = RangeLinks(access)
    return _links[key]


def writer_to(access: RangeAccess, group: str, settings: WritingSettings) -> RangeWriter:
    """The producer of this process for a cluster."""
    from orbitmq.client.rangewriting import RangeWriter  # noqa: PLC0415  # readers need none

    key = os.getpid(), access, group, settings
    if key not in _writers:
        writer = RangeWriter(access, group, settings)
        writer.start()
        _writers[key] = writer
    return _writers[key]
