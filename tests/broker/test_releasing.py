"""Batches of parked messages on their way into the store."""

from __future__ import annotations

from typing import Any

import pytest

from orbitmq.broker.errors import PutResult, PutStatus
from orbitmq.broker.scheduled import Release
from orbitmq.broker.writes import Done, Draft


class HandTurns:
    """Turns whose puts are told by hand."""

    def __init__(self) -> None:
        self.told: list[Done] = []

    def put(self, _: Draft, done: Done, *, transform: bool) -> None:
        assert not transform
        self.told.append(done)


def test_a_batch_is_done_also_if_what_follows_a_put_fails():
    """Whoever waits for it would wait for ever, and nothing parked be delivered any more."""
    outcomes: list[int | None] = []
    release = Release(outcomes.append)
    writes: Any = HandTurns()
    draft = Draft("T", 0, b"", b"", 0, b"")

    def fail(_):
        raise RuntimeError("a bug")

    release.put(writes, draft, 7, fail)
    release.close()
    with pytest.raises(RuntimeError, match="a bug"):
        writes.told[0](PutResult(PutStatus.PUT_OK, 0, 0))

    assert outcomes == [None]
