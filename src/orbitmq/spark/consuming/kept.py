"""What a Python worker of Spark keeps between its tasks, for consuming.

A worker is used for tasks of many batches. Connections, threads and the handlers themselves are
kept between them, so that what a handler made once (a client of a database, say) is there the next
time. As in `orbitmq.spark.connections`, this takes state of the module, keyed by the process.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from orbitmq.spark.consuming.returner import Returner
from orbitmq.spark.consuming.worker import Worker

if TYPE_CHECKING:
    from orbitmq.client.rangeaccess import RangeAccess
    from orbitmq.spark.consuming.definition import PackedDefinition

#: Pipelines, or groups, that a worker keeps things for; more than one is rare.
_KEPT: Final = 4

_workers: OrderedDict[tuple[int, str], Worker] = OrderedDict()
_returners: OrderedDict[tuple[int, RangeAccess, str, int | None], Returner] = OrderedDict()


def worker_for(packed: PackedDefinition) -> Worker:
    """What this process has for a pipeline; made for the first task of it."""
    key = os.getpid(), packed.digest
    worker = _workers.get(key)
    if worker is None:
        worker = Worker(packed.unpack())
        worker.start()
        _workers[key] = worker
        while len(_workers) > _KEPT:
            (process, _), old = _workers.popitem(last=False)
            if process == key[0]:  # those of the process that this one was forked from are not ours
                old.stop()
    _workers.move_to_end(key)
    return worker


def returner_for(access: RangeAccess, group: str, max_retries: int | None) -> Returner:
    """What this process has to send failed messages of a group back."""
    key = os.getpid(), access, group, max_retries
    returner = _returners.get(key)
    if returner is None:
        returner = Returner(access, group, max_retries)
        returner.start()
        _returners[key] = returner
        while len(_returners) > _KEPT:
            (process, *_), given_up = _returners.popitem(last=False)
            if process == key[0]:
                given_up.stop()
    _returners.move_to_end(key)
    return returner
