"""The sockets of a Python worker of Spark, and its memory for answers, kept between its tasks.

A worker is reused for tasks of many batches and queries; nothing but module state outlives a task
in it. So this is the one place of the package that has some. It is keyed by the process, because
workers are forked, and by how the cluster is reached, because queries of several clusters and
users share a worker. A session that lives long may see many of them: what was used least recently
is closed when there are more than a few. A task that still has it, as only another thread of the
same process could, would connect again to read, and fail to write.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from orbitmq.client.rangeaccess import RangeAccess
from orbitmq.client.rangelinks import RangeLinks
from orbitmq.client.rangememory import AnswerMemory

if TYPE_CHECKING:
    from orbitmq.client.rangewriting import RangeWriter, WritingSettings

#: Clusters that a worker keeps connections to, and producers that it keeps; one is usual.
KEPT: Final = 4

_links: OrderedDict[tuple[int, RangeAccess], RangeLinks] = OrderedDict()
_writers: OrderedDict[tuple[int, RangeAccess, str, WritingSettings], RangeWriter] = OrderedDict()
#: At most one, and none while it is in use.
_memories: list[AnswerMemory] = []


@contextmanager
def answer_memory(size: int) -> Iterator[AnswerMemory]:
    """Memory to receive into, the same for one task after the other: to map it anew costs time."""
    memory = _memories.pop() if _memories else AnswerMemory(size)
    if memory.size < size:
        memory = AnswerMemory(size)
    yield memory
    # Not after an error: then somebody may still have a piece of it.
    if memory.is_unused and not _memories:
        _memories.append(memory)


def links_to(access: RangeAccess) -> RangeLinks:
    """The connections of this process to a cluster."""
    key = os.getpid(), access
    links = _links.get(key)
    if links is None:
        links = _links[key] = RangeLinks(access)
        while len(_links) > KEPT:
            (process, _), old = _links.popitem(last=False)
            if process == key[0]:  # those of the process that this one was forked from are not ours
                old.close()
    _links.move_to_end(key)
    return links


def writer_to(access: RangeAccess, group: str, settings: WritingSettings) -> RangeWriter:
    """The producer of this process for a cluster."""
    from orbitmq.client.rangewriting import RangeWriter  # noqa: PLC0415  # readers need none

    key = os.getpid(), access, group, settings
    writer = _writers.get(key)
    if writer is None:
        writer = RangeWriter(access, group, settings)
        writer.start()
        _writers[key] = writer
        while len(_writers) > KEPT:
            (process, *_), old = _writers.popitem(last=False)
            if process == key[0]:
                old.stop()
    _writers.move_to_end(key)
    return writer
