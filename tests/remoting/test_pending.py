"""Requests that wait for an answer, as objects."""

from __future__ import annotations

import asyncio
import gc
import weakref

from orbitmq.remoting.connection import PendingRequests
from orbitmq.remoting.settings import Address, RemotingError
from orbitmq.wire.command import Command


class _Asker:
    """Is called with the answer, and keeps what it asked by: a cycle."""

    def __init__(self, pending: PendingRequests) -> None:
        self.pending = pending

    def answered(self, _: Command | RemotingError) -> None: ...


async def test_requests_that_are_forgotten_with_their_connection_are_collected():
    pending = PendingRequests(asyncio.get_running_loop(), Address("127.0.0.1", 1), 10)
    asker = _Asker(pending)
    pending.add(1, 11, 60.0, asker.answered)
    assert pending._timer is not None
    pending._timer.cancel()  # the loop knows it until then
    pending._timer = None
    gone = weakref.ref(asker)

    del pending, asker
    gc.collect()

    assert gone() is None
