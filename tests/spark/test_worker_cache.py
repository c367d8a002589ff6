"""What a worker keeps, when it was forked from another one."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import pytest

from orbitmq.spark.consuming import worker


class Thing:
    """A worker, or a returner, that notes what is done with it."""

    def __init__(self, *_: object) -> None:
        self.done: list[str] = []

    def start(self) -> None:
        self.done.append("start")

    def stop(self) -> None:
        self.done.append("stop")


class Packed:
    """A pipeline's definition on its way."""

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def unpack(self) -> None:
        """Not needed here."""


def test_what_is_left_of_a_parent_is_forgotten_and_not_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its threads and sockets are those of another process: to stop it would wait for nobody.
    parent, own = Thing(), Thing()
    access: Any = object()
    workers: Any = OrderedDict({(os.getpid() + 1, "p"): parent, (os.getpid(), "own"): own})
    returned, mine = Thing(), Thing()
    returners: Any = OrderedDict(
        {(os.getpid() + 1, access, "p", None): returned, (os.getpid(), access, "m", None): mine}
    )
    monkeypatch.setattr(worker, "_workers", workers)
    monkeypatch.setattr(worker, "_send_back_clients", returners)
    monkeypatch.setattr(worker, "Worker", Thing)
    monkeypatch.setattr(worker, "SendBackClient", Thing)

    for number in range(4):
        packed: Any = Packed(str(number))
        worker.worker_for(packed)
        worker.send_back_client(access, str(number), None)

    assert (parent.done, returned.done) == ([], [])
    assert (own.done, mine.done) == (["stop"], ["stop"])
    assert len(workers) == len(returners) == 4
